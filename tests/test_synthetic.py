"""Inputs that are made up where no data is given: what they look like, and what they are good for."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from zoo import ZOO

import panther_compile as pc
from panther_compile.calibration import inputs
from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigTypeError, DataError, SketchQualityWarning
from panther_compile.models.batches import Call, interleaved, judged_of, record_calls, spread_out
from panther_compile.models.natural import match_batch_norms, natural_images
from panther_compile.models.own_text import beginnings, own_texts, text_logits
from panther_compile.models.synthetic import BEGUN, Synthetic, make_inputs, own_tokens, texts_beside
from panther_compile.planning.sites import find_sites
from panther_compile.planning.trace import read_graph

VOCABULARY, CONTEXT = 12, 24
OPTIONS = {"min_params": 256, "allow_slower": True, "progress": False}


class Chain(nn.Module):
    """Knows which token follows which: `after`, nearly always."""

    def __init__(self, after, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.rows = []
        with torch.no_grad():
            directions = torch.linalg.qr(torch.randn(width, width))[0][:VOCABULARY]
            self.embed.weight.copy_(directions)
            self.head.weight.copy_(12 * directions[torch.tensor(after).argsort()])
            self.head.bias.zero_()
            for layer in (self.up, self.down):
                layer.weight.mul_(0.2)

    def forward(self, ids):
        self.rows.append(tuple(ids.shape))
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def chain():
    torch.manual_seed(0)
    order = torch.randperm(VOCABULARY).tolist()
    return Chain(order), order


def made(model, batches=2, sample=True):
    return make_inputs(model, batches, seed=0, sample=sample, progress=False)


def first_of(call):
    return call.args[0] if call.args else next(iter(call.kwargs.values()))


def test_a_causal_model_samples_its_own_text():
    model, after = chain()
    found = made(model, sample=True)
    assert found.telling
    texts = torch.cat([first_of(call) for call in found.calls])
    follows = texts[:, 1:] == torch.tensor(after)[texts[:, :-1]]
    assert follows.float().mean() > 0.8
    assert len(texts[:, 0].unique()) > 4  # each starts with a token at random
    drawn = torch.cat([first_of(call) for call in made(model, sample=False).calls])
    assert (drawn[:, 1:] == torch.tensor(after)[drawn[:, :-1]]).float().mean() < 0.3


def test_texts_are_the_same_for_a_seed_and_leave_the_model_alone():
    model, _ = chain()
    model.train()
    one, other = made(model), made(model)
    assert all(torch.equal(first_of(a), first_of(b)) for a, b in zip(one.calls, other.calls, strict=True))
    assert model.rows == []
    assert model.training


def test_a_model_that_wants_texts_of_full_length_samples_too():
    model, after = chain()
    model.rows = None

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Chain(after)
            self.place = nn.Parameter(torch.zeros(1, CONTEXT, 96))

        def forward(self, ids):
            return self.inner(ids) + 0 * self.place.sum() * self.place.expand(len(ids), -1, -1)[
                :, : ids.shape[1], :VOCABULARY
            ].reshape(len(ids), CONTEXT, VOCABULARY)

    texts = torch.cat([first_of(call) for call in made(Fixed(), 1).calls])
    assert texts.shape == (8, CONTEXT)
    assert (texts[:, 1:] == torch.tensor(after)[texts[:, :-1]]).float().mean() > 0.5


def test_bidirectional_models_are_not_taken_for_language_models():
    bert, ids = ZOO["bert"].build(), torch.randint(0, 100, (2, 16))
    found = made(bert)
    assert not found.telling
    assert "tokens at random" in found.what
    assert text_logits(bert, lambda x: Call((x,), {}), ids) is None


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_hugging_face_decoders_sample_by_generate(name):
    found = made(ZOO[name].build(), 1)
    assert found.telling
    assert first_of(found.calls[0]).shape[0] == 8
    assert first_of(found.calls[0]).shape[1] > 8


@pytest.mark.parametrize(
    "name",
    [
        *("roberta", "t5", "whisper", "wav2vec2", "clip", "swin", "unet", "lstm"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("odd_convnet", "segformer")),
    ],
)
def test_every_kind_of_model_is_given_something_it_runs_on(name):
    model = ZOO[name].build()
    found = made(model, 1, sample=False)
    with torch.no_grad():
        assert found.calls[0].run(model) is not None


def test_spectrograms_of_either_order_are_made_up():
    from transformers import ASTConfig, ASTModel, Wav2Vec2BertConfig, Wav2Vec2BertModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    models = (
        ASTModel(ASTConfig(max_length=64, num_mel_bins=32, **small)),
        Wav2Vec2BertModel(Wav2Vec2BertConfig(output_hidden_size=32, **small)),
    )
    shapes = [tuple(first_of(made(model.eval(), 1, sample=False).calls[0]).shape) for model in models]
    assert shapes == [(8, 64, 32), (8, 256, 160)]


class FramesFirst(nn.Module):
    """A pitch estimator's network, which is given frames and swaps them with the bins."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(40, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.last = nn.Linear(32, 20)

    def forward(self, x_BTF):
        return self.last(self.norm(self.first(x_BTF.transpose(1, 2))).transpose(1, 2)).sigmoid()


def test_frames_are_made_up_for_a_model_that_swaps_them_with_the_bins_itself():
    torch.manual_seed(0)
    model = FramesFirst().eval()
    (call,) = made(model, 1, sample=False).calls
    assert tuple(first_of(call).shape) == (8, 256, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = pc.sketchify(model, 0.9, **OPTIONS)
    assert "on made-up inputs (sounds at random)" in str(pc.sketch_report(small))


@pytest.mark.parametrize("size", [112, 48, 24])
def test_images_of_the_sizes_that_faces_are_cut_out_at_are_made_up(size):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.PReLU(8), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(2 * size**2, 16)).eval()
    (call,) = made(model, 1, sample=False).calls
    assert tuple(first_of(call).shape) == (8, 3, size, size)


def test_videos_series_and_sounds_with_channels_of_hugging_face():
    from transformers import (
        EncodecConfig,
        EncodecModel,
        PatchTSTConfig,
        PatchTSTModel,
        VivitConfig,
        VivitModel,
    )

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    series = {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
    cases = {
        "videos at random": (
            VivitModel(VivitConfig(num_frames=4, image_size=32, **small)),
            (1, 4, 3, 32, 32),
        ),
        "vectors at random": (
            PatchTSTModel(PatchTSTConfig(num_input_channels=3, context_length=24, **series)),
            (8, 24, 3),
        ),
        "sounds of harmonics and pink noise": (
            EncodecModel(EncodecConfig(num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=32)),
            (8, 1, 16000),
        ),
    }
    for what, (model, shape) in cases.items():
        found = make_inputs(model.eval(), 1, seed=0, sample=False, progress=False)
        assert found.what == f"made-up inputs ({what})"
        assert found.calls[0].kwargs[model.main_input_name].shape == shape


def test_a_configuration_may_keep_the_vocabulary_of_its_decoder_elsewhere():
    from transformers import DiaConfig, DiaModel

    layers = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    encoder = {**layers, "num_key_value_heads": 2, "head_dim": 16}
    decoder = {**encoder, "cross_hidden_size": 32, "cross_num_attention_heads": 2, "cross_head_dim": 16}
    model = DiaModel(DiaConfig(encoder_config=encoder, decoder_config=decoder)).eval()
    with pytest.raises(DataError, match="DiaModel cannot be made up: it ran on none that were tried"):
        made(model, 1, sample=False)  # of several codes for each place


@pytest.mark.parametrize("positions", [4, 65])
def test_tokens_are_those_of_the_table_that_a_model_reads_them_with(positions):
    transformers = pytest.importorskip("transformers")

    class Listens(transformers.LlamaForCausalLM):
        """Has positions of its encoder of sounds before the language model, as Granite Speech."""

        def __init__(self, config):
            super().__init__(config)
            self._modules = {"positions": nn.Embedding(positions, 8)} | self._modules

    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    seen = torch.cat([first_of(call).flatten() for call in made(Listens(config), sample=False).calls])
    assert 50 <= int(seen.max()) < 60


@pytest.mark.parametrize("padding", [0, 1])
def test_texts_fit_a_table_of_positions_that_does_not_count_padding(padding):
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
        pad_token_id=padding,
    )
    model = transformers.RobertaForMaskedLM(config).eval()
    longest = first_of(made(model, 1, sample=False).calls[0]).shape[1]
    assert longest + padding + 1 <= 40
    pc.sketchify(model, ratio=0.5, min_params=256, allow_slower=True)  # an IndexError, where one was tried


def test_images_may_be_no_squares_and_of_a_part_with_a_configuration_of_its_own():
    from transformers import (
        GPT2Config,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
        ViTModel,
        VitPoseBackboneConfig,
        VitPoseConfig,
        VitPoseForPoseEstimation,
    )

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"image_size": [48, 32], "patch_size": [8, 8]}
    poses = VitPoseConfig(backbone_config=VitPoseBackboneConfig(**small, **sizes, out_features=["stage1"]))
    reader = GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, add_cross_attention=True)
    seen = ViTConfig(**small, **sizes)
    texts = VisionEncoderDecoderConfig.from_encoder_decoder_configs(seen, reader, decoder_start_token_id=1)
    for model in (ViTModel(seen), VitPoseForPoseEstimation(poses), VisionEncoderDecoderModel(texts)):
        (call,) = made(model.eval(), 1, sample=False).calls
        assert call.kwargs["pixel_values"].shape == (8, 3, 48, 32)


@pytest.mark.parametrize(("side", "said"), [(256, None), (240, 240)])
def test_images_may_be_of_one_size_alone(side, said):
    class Fixed(nn.Sequential):
        pretrained_cfg = {"input_size": (3, said, said)} if said else None  # as timm's models have it

        def forward(self, x):
            assert x.shape[-1] == side
            return super().forward(x)

    model = Fixed(nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3)).eval()
    assert first_of(made(model, 1, sample=False).calls[0]).shape == (8, 3, side, side)


def test_images_are_of_natural_spectra():
    images = natural_images(32, 3, 64, torch.Generator().manual_seed(0))
    assert images.shape == (32, 3, 64, 64)
    assert images.mean((0, 2, 3)).abs().max() < 1e-4
    power = torch.fft.rfft2(images).abs().square().mean((0, 1))[:, 0][1:32]
    frequency = torch.arange(1, 32).float()
    slope = torch.linalg.lstsq(
        torch.stack([frequency.log(), torch.ones(31)], 1), power.log()[:, None]
    ).solution[0]
    assert -3.0 < float(slope) < -1.2  # of white noise it is 0, of photographs near -2
    neighbours = torch.corrcoef(torch.stack([images[..., 1:].flatten(), images[..., :-1].flatten()]))[0, 1]
    assert neighbours > 0.7


def test_images_get_the_colours_that_batch_norms_know():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 3)).train()
    wanted = torch.tensor([3.0, -1.0, 0.5])[:, None, None]
    images = natural_images(16, 3, 16, torch.Generator().manual_seed(1))
    for _ in range(60):
        model(0.4 * images + wanted)
    images = natural_images(32, 3, 16, torch.Generator().manual_seed(2))
    found, telling = match_batch_norms(model.eval(), lambda x: Call((x,), {}), images)
    assert telling
    assert (found.mean((0, 2, 3)) - wanted.flatten()).abs().max() < 0.5
    assert 0.2 < float(found.std((0, 2, 3)).mean()) < 0.8


def test_colours_that_a_model_evens_out_are_left_as_they_are():
    torch.manual_seed(0)
    evened = nn.InstanceNorm2d(3)
    model = nn.Sequential(evened, nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.Conv2d(24, 8, 3)).eval()
    model[2].running_mean += 1.0
    images, runs = natural_images(16, 3, 16, torch.Generator().manual_seed(2)), []
    evened.register_forward_hook(lambda *_: runs.append(0))
    found, telling = match_batch_norms(model, lambda x: Call((x,), {}), images)
    assert telling
    assert torch.equal(found, images)
    assert len(runs) == 11


def test_data_of_the_model_s_own_making_is_fitted_to():
    model, _ = chain()
    small = pc.sketchify(model, 0.5, data="model", **OPTIONS)
    report = pc.sketch_report(small)
    assert {row.method for row in report.sketched} == {"calibrated"}
    assert "texts that the model sampled" in str(report).splitlines()[0]
    plain = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    ids = torch.randint(0, VOCABULARY, (64, 2))

    def divergence(candidate):
        p, q = (one(ids)[:, -1].log_softmax(-1) for one in (model, candidate))
        return (p.exp() * (p - q)).sum(-1).mean().item()

    assert divergence(small) <= divergence(plain)


def test_without_data_larger_models_fit_to_their_own_text(monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    model, _ = chain()
    first = str(pc.sketch_report(pc.sketchify(model, 0.5, **OPTIONS))).splitlines()[0]
    assert "texts that the model sampled" in first
    alone = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    assert {row.method for row in pc.sketch_report(alone).sketched} == {"svd"}
    assert "synthetic=False" in str(pc.sketch_report(alone)).splitlines()[0]


def test_a_language_model_fitted_to_data_keeps_what_data_does_not_show(monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    model, _ = chain()
    some = list(range(4))  # data has these tokens alone
    data = [torch.tensor(some)[torch.randint(0, 4, (8, 12))] for _ in range(8)]
    others = torch.arange(4, VOCABULARY)[:, None].expand(-1, 2)

    def distance(candidate):
        return float((candidate(others) - model(others)).detach().norm())

    beside = pc.sketchify(model, 0.3, data=data, **OPTIONS)
    alone = pc.sketchify(model, 0.3, data=data, synthetic=False, **OPTIONS)
    first = str(pc.sketch_report(beside)).splitlines()[0]
    assert (
        "on the data it was fitted to, beside 192 texts that the model sampled behind pieces of it, 8 batches"
        in first
    )
    assert "sampled" not in str(pc.sketch_report(alone)).splitlines()[0]
    assert distance(beside) < 0.5 * distance(alone)
    again = pc.sketchify(model, 0.3, data=data, **OPTIONS)
    assert torch.equal(again(others), beside(others))


def test_own_texts_stand_evenly_between_data(monkeypatch):
    monkeypatch.setattr(inputs, "SMALLEST", 1)
    model, _ = chain()
    found = find_sites(model, SketchConfig(min_params=1), read_graph(model))
    calls = [Call((torch.zeros(64, 24, dtype=torch.long),), {})]
    mixed, said = inputs.with_texts_beside(model, found, calls, SketchConfig())
    of_data = [first_of(call).shape[1] == 24 for call in mixed]
    assert of_data.count(True) == 5  # parts, of which some is held out
    held_out = [first_of(call).shape[1] == 24 for call in judged_of(spread_out(mixed))]
    assert {True, False} == set(held_out)
    tokens = [first_of(call).numel() for call in mixed]
    assert sum(tokens) == (1 + 3) * 64 * 24  # three times as many beside few
    assert f"{3 * 64 * 24 // VOCABULARY} texts" in said
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    found = find_sites(images, SketchConfig(min_params=1), read_graph(images))
    calls = [Call((torch.randn(2, 3, 8, 8),), {})]
    assert inputs.with_texts_beside(images, found, calls, SketchConfig()) == (calls, "")

    class Marked(Chain):
        def forward(self, ids, marks):
            return super().forward(ids + marks)

    marked = Marked(list(range(VOCABULARY)))
    calls = [Call((torch.zeros(2, 8, dtype=torch.long),) * 2, {})]
    found = find_sites(marked, SketchConfig(), read_graph(marked))
    mixed, said = inputs.with_texts_beside(marked, found, calls, SketchConfig())
    assert mixed == calls
    assert said.startswith(", no texts beside: inputs of Marked cannot be made up")
    steps = [Call((torch.zeros(8, dtype=torch.long),) * 2, {})]
    assert inputs.with_texts_beside(marked, found, steps, SketchConfig()) == (steps, "")


@pytest.mark.parametrize(("smallest", "largest"), [(100_000, 1_000_000), (1_000, 10_000)])
def test_models_of_other_sizes_are_left_to_their_weights_and_compared(monkeypatch, smallest, largest):
    monkeypatch.setattr(inputs, "SMALLEST", smallest)
    monkeypatch.setattr(inputs, "LARGEST", largest)
    model, _ = chain()
    report = pc.sketch_report(pc.sketchify(model, 0.5, **OPTIONS))
    assert model.rows == []  # a copy ran
    assert "on made-up inputs (tokens at random)" in str(report).splitlines()[0]
    assert "calibrated" not in str(report)


def test_the_fit_that_nobody_asked_for_is_taken_only_if_it_is_closer(monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    model, _ = chain()
    plain = pc.sketchify(model, 0.9, synthetic=False, **OPTIONS)
    monkeypatch.setattr("panther_compile.sketching.fit_model", None)  # not reached below

    def untelling(model, batches, **options):
        found = make_inputs(model, batches, **options)
        return Synthetic(found.calls, found.what, False)

    monkeypatch.setattr("panther_compile.calibration.inputs.make_inputs", untelling)
    small = pc.sketchify(model, 0.9, **OPTIONS)
    ids = torch.randint(0, VOCABULARY, (8, 8))
    assert torch.equal(small(ids), plain(ids))
    assert pc.sketch_report(small).closeness.grade  # but it was compared


def test_layers_of_image_models_are_fitted_to_images_with_batch_norms_or_without():
    plain = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)
    )
    normed = nn.Sequential(plain[0], nn.BatchNorm2d(16), *plain[1:])
    for model, said in ((plain, False), (normed, True)):
        found = made(model.eval(), 1)
        assert found.telling
        assert ("statistics of its batch norms" in found.what) == said
        assert not made(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), 1).telling


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x, y):
        return self.b(self.a(x) + y)


def test_what_cannot_be_made_up_is_said():
    with pytest.raises(DataError, match=r"Two cannot be made up: what its forward takes is not known"):
        pc.sketchify(Two(), 0.5, data="model", **OPTIONS)

    class Picky(nn.Sequential):
        def forward(self, x):
            raise RuntimeError("never")

    with pytest.raises(DataError, match=r"ran on none that were tried \(RuntimeError: never"):
        pc.sketchify(Picky(nn.Linear(64, 64), nn.Linear(64, 32)), 0.5, data="model", **OPTIONS)


def test_what_a_model_warns_of_on_inputs_that_are_tried_is_not_shown():
    class Keyed(nn.Sequential):
        def forward(self, batch):
            if isinstance(batch, torch.Tensor):
                warnings.warn("a tensor is no dictionary", stacklevel=2)
            return super().forward(batch["x"])

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pc.sketchify(Keyed(nn.Linear(64, 64), nn.Linear(64, 32)), 0.5, **OPTIONS)
    assert [one.category for one in seen] == [pc.SketchQualityWarning]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 96)),
        nn.Sequential(nn.Conv2d(48, 96, 1), nn.ReLU(), nn.Conv2d(96, 96, 1)),
        nn.Sequential(nn.Conv1d(48, 96, 1), nn.ReLU(), nn.Conv1d(96, 96, 1)),
    ],
    ids=lambda model: type(model[0]).__name__,
)
def test_inputs_of_a_sketched_model_are_those_of_the_dense_one(model):
    """What a factor takes is no input of the model."""
    small = pc.sketchify(model, 0.5, exclude="2", synthetic=False, **OPTIONS)
    assert type(small[0]) is not type(model[0])
    wanted, found = made(model, 1), made(small, 1)
    assert found.what == wanted.what
    assert torch.equal(first_of(found.calls[0]), first_of(wanted.calls[0]))


def test_inputs_are_made_up_where_the_model_is():
    class There(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8, device="meta")

        def forward(self, x):
            assert x.device == self.layer.weight.device
            return torch.ones(len(x), 8)

    assert {call.args[0].device.type for call in made(There()).calls} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["whisper", "wav2vec2", "convnext", "clip"])
def test_inputs_are_of_the_type_of_the_model(name, dtype):
    model = ZOO[name].build().to(dtype)
    (call,) = made(model, 1, sample=False).calls
    floats = [x for x in call.kwargs.values() if torch.is_tensor(x)]
    assert {x.dtype for x in floats if x.is_floating_point()} == {dtype}


def test_images_of_a_half_type_give_the_statistics_of_its_batch_norms():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    nn.init.normal_(model[1].running_mean)
    found = made(model.bfloat16(), 1)
    assert "statistics of its batch norms" in found.what
    assert found.calls[0].args[0].dtype == torch.bfloat16


def test_what_was_not_compared_is_warned_of():
    with pytest.warns(SketchQualityWarning, match=r"nothing says how close the sketch is.*give data"):
        small = pc.sketchify(Two(), 0.5, **OPTIONS)
    assert pc.sketch_report(small).closeness.grade == ""


class Gated(nn.Module):
    """Reads vectors, and calls one of its layers for nothing that can be made up."""

    def __init__(self):
        super().__init__()
        self.first, self.unseen, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, *, image=None):
        x = self.first(x)
        return self.last(x if image is None else x + self.unseen(image))


def test_layers_that_made_up_inputs_never_reach_are_warned_of():
    """As the vision tower of a model that reads texts beside images."""
    with pytest.warns(SketchQualityWarning, match=r"nothing says how close .* in unseen: .* of 3 layers"):
        small = pc.sketchify(Gated(), 0.9, **OPTIONS)
    assert "that never reach 1 of 3 layers" in str(pc.sketch_report(small)).splitlines()[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no data was given")
        small = pc.sketchify(Gated(), 0.9, exclude="unseen", **OPTIONS)
    assert "never reach" not in str(pc.sketch_report(small)).splitlines()[0]


def test_option_is_checked():
    with pytest.raises(ConfigTypeError, match="synthetic"):
        pc.sketchify(nn.Linear(64, 64), 0.5, synthetic="yes")


@pytest.mark.parametrize(("data", "own"), [(5, 15), (32, 10), (5, 40), (64, 200), (1, 9)])
def test_of_each_kind_some_is_held_out(data, own):
    calls = [Call((torch.tensor(place),), {}) for place in range(data + own)]
    mixed = interleaved(calls[:data], calls[data:])
    assert {int(call.tensors[0]) for call in mixed} == set(range(data + own))
    assert {bool(call.tensors[0] < data) for call in judged_of(spread_out(mixed))} == {True, False}


@pytest.mark.parametrize(
    ("data", "own"),
    [(1, 3), (64 * 128, 192 * 128), (20_000, 12_768), (22_528, 10_240), (32_768, 10_240), (10**6, 10_240)],
)
def test_few_data_get_more_texts_beside_than_many(data, own):
    assert own_tokens(data) == own


@pytest.mark.parametrize("given", [1, 3])
def test_own_texts_start_as_asked(given):
    model, _ = chain()
    starts = torch.randint(0, VOCABULARY, (20, 6))
    texts = own_texts(model, lambda x: Call((x,), {}), starts, given=given, seed=0, progress=False)
    assert torch.equal(texts[:, :given], starts[:, :given])
    assert not torch.equal(texts, starts)
    assert texts.shape == starts.shape


@pytest.mark.parametrize("case", ["raises", "return_dict_in_generate", "num_return_sequences"])
def test_own_texts_of_decoders_whose_generate_does_otherwise(case, monkeypatch):
    model = ZOO["gpt2"].build().eval()
    if case == "raises":
        monkeypatch.setattr(model, "generate", lambda *_, **__: {}["a cache of another version"])
    else:
        setattr(model.generation_config, case, 2)
    starts = torch.randint(0, 60, (5, 6))
    said = {
        "raises": pytest.warns(UserWarning, match="as its generate ends in KeyError: 'a cache of another")
    }
    with said.get(case, nullcontext()):
        texts = own_texts(model, lambda x: Call((x,), {}), starts, given=2, seed=0, progress=False)
    assert texts.shape == starts.shape
    assert torch.equal(texts[:, :2], starts[:, :2])


def test_hugging_face_decoders_go_on_from_pieces_of_the_data():
    model = ZOO["gpt2"].build()
    data = [{"attention_mask": torch.ones(4, 40).long(), "input_ids": torch.arange(160).view(4, 40) % 60}]
    found = texts_beside(model, record_calls(model, data), 200, seed=0, progress=False)
    assert "behind pieces of it" in found.what
    for call in found.calls:
        rows = first_of(call)[:, :BEGUN]
        assert torch.equal((rows[:, 1:] - rows[:, :-1]) % 60, torch.ones_like(rows[:, 1:]))


def test_pieces_are_of_what_is_no_padding_and_of_any_place():
    class Reads(nn.Module):
        def forward(self, mask, ids, attention_mask=None):
            return ids

    class ReadsOne(nn.Module):
        def forward(self, features):
            return features["input_ids"]

    ids = torch.arange(1, 41).view(2, 20).clone()
    kept = torch.ones(2, 20, dtype=torch.long)
    ids[0, 12:], kept[0, 12:] = 0, 0
    calls = [Call((torch.ones(2, 20), ids), {"attention_mask": kept}), Call((None, ids[:, :3]), {})]
    found = beginnings(Reads(), calls, 400, 5, torch.Generator().manual_seed(0))
    assert found.shape == (400, 5)
    assert (found[:, 1:] - found[:, :-1] == 1).all()
    assert set(found[:, 0].tolist()) == {*range(1, 9), *range(21, 37)}
    assert beginnings(Reads(), calls, 4, 21, torch.Generator()) is None
    features = {"attention_mask": kept, "input_ids": ids}
    held = beginnings(ReadsOne(), [Call((features,), {})], 50, 5, torch.Generator().manual_seed(0))
    assert (held[:, 1:] - held[:, :-1] == 1).all()
    no_tokens = [Call((torch.ones(2, 20), torch.ones(2, 20)), {})]
    assert beginnings(Reads(), no_tokens, 4, 5, torch.Generator()) is None


@pytest.mark.parametrize(("strides", "side"), [(3, 32), (4, 64), (5, 128)])
def test_images_are_large_enough_for_the_last_convolution(strides, side):
    """On a map of one pixel all images are alike, and layers behind it would be fitted to nothing."""
    torch.manual_seed(0)
    blocks = [nn.Conv2d(3 if i == 0 else 8, 8, 3, stride=2, padding=1) for i in range(strides)]
    last = nn.Conv2d(8, 8, 3, padding=1)
    pooled = nn.Conv2d(8, 8, 1)  # reads one pixel whatever the size
    model = nn.Sequential(*blocks, last, nn.AdaptiveAvgPool2d(1), pooled, nn.Flatten(), nn.Linear(8, 5))
    made = make_inputs(model.eval(), 1, seed=0, sample=False, progress=False)
    assert made.calls[0].args[0].shape == (8, 3, side, side)


def test_images_of_the_only_size_that_a_model_takes_are_taken():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=4), nn.Conv2d(4, 4, 3, stride=4), nn.Flatten(), nn.Linear(16, 3)
    )
    made = make_inputs(model.eval(), 1, seed=0, sample=False, progress=False)
    assert model(made.calls[0].args[0]).shape == (8, 3)


@pytest.mark.parametrize("strength", [pytest.param(0.0, marks=pytest.mark.slow), 3.0])
def test_layers_are_not_fitted_to_images_that_batch_norms_do_not_know(strength, monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    monkeypatch.setattr("panther_compile.calibration.inputs._FIT", 6)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3))
    images = natural_images(16, 3, 32, torch.Generator().manual_seed(1))
    with torch.no_grad():  # from images as they are made up, but for what no colours give
        for _ in range(100):
            model[:2](images)
        model[1].running_mean += strength * torch.randn(32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)
        small = pc.sketchify(model.eval(), 0.5, **OPTIONS)
    report = pc.sketch_report(small)
    assert ("too far to fit layers to" in report.closeness.inputs) == bool(strength)


def test_videos_move_and_are_fitted_to():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 16, 3), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 16, 3)).eval()
    found = make_inputs(model, 2, seed=0, sample=True, progress=False)
    assert found.telling
    assert found.what == (
        "made-up inputs (images of natural spectra that move, of the colours that its batch norms know)"
    )
    video = found.calls[0].args[0]
    assert video.shape == (1, 3, 16, 32, 32)
    first, second = video[0, :, 0], video[0, :, 1]
    moves = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]
    assert any(torch.equal(first.roll(move, (-2, -1)), second) for move in moves)


class CutsPatches(nn.Module):
    """A vision transformer that cuts its patches itself, as those of einops do."""

    def __init__(self, channels, *, convolution, side=8):
        super().__init__()
        self.cut, features = nn.PixelUnshuffle(side), channels * side**2
        self.patches = nn.Conv2d(features, 64, 1) if convolution else nn.Linear(features, 64)
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 12)

    def forward(self, images):
        x = self.cut(images)
        if isinstance(self.patches, nn.Conv2d):
            x = self.patches(x).flatten(2).mT
        else:
            x = self.patches(x.flatten(2).mT)
        return self.head(torch.relu(self.body(x)).mean(1))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("convolution", [False, True])
def test_images_for_a_model_that_cuts_its_patches_itself(channels, convolution):
    found = made(CutsPatches(channels, convolution=convolution))
    assert found.what == "made-up inputs (images of natural spectra)"
    assert found.telling
    assert first_of(found.calls[0]).shape == (8, channels, 32, 32)


class Cube(nn.Module):
    """Reads volumes of one size alone, as those of medicine do."""

    def __init__(self, side):
        super().__init__()
        self.cut = nn.Conv3d(1, 32, 16, stride=16)
        self.place = nn.Parameter(torch.randn((side // 16) ** 3, 32))

    def forward(self, volumes):
        return self.cut(volumes).flatten(2).mT + self.place


@pytest.mark.parametrize("side", [32, 96])
def test_volumes_of_equal_sides(side):
    assert first_of(made(Cube(side)).calls[0]).shape == (1, 1, side, side, side)


class ChainWithImages(Chain):
    """Reads images too, where there are any."""

    def __init__(self, after):
        super().__init__(after)
        self.eyes = nn.Linear(48, 48)

    def forward(self, ids, images=None):
        return super().forward(ids) + (0 if images is None else self.eyes(images))


def test_made_up_inputs_that_do_not_reach_a_layer_are_not_called_data():
    says = "made-up inputs never reached eyes: sketched from the weights alone"
    with pytest.warns(UserWarning, match=says):
        pc.sketchify(ChainWithImages(chain()[1]).eval(), 0.5, data="model", **OPTIONS)
