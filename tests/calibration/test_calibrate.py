"""`sketchify(model, ratio, data=...)` as a whole."""

import copy

import pytest
import torch
from torch import fx, nn
from zoo import ZOO, call, names

import panther_compile as pc
from panther_compile.calibration import few_data
from panther_compile.errors import DataError
from panther_compile.models.outputs import distance

OPTIONS = {"min_params": 256, "allow_slower": True, "progress": False}


# Each is built like one that stays: gpt2, odd_convnet, lstm, early_exit.
ALIKE = (
    *("roberta", "distilbert", "mistral", "t5", "bart", "efficientnet", "clip", "swin", "segformer"),
    *("wav2vec2", "encoder_classifier", "mobilenet_v2", "nn_transformer"),
    *("whisper", "vit", "mixer", "unet", "convnext", "mixtral", "bert", "llama", "resnet"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in names()]
)
def test_data_keeps_every_model_of_the_zoo_closer_to_itself(name, monkeypatch):
    monkeypatch.setattr(few_data, "can_be_judged", lambda studied: False)  # one batch has to do
    entry = ZOO[name]
    dense = entry.build()
    data = [entry.inputs()]
    before = copy.deepcopy(dense.state_dict())
    modes = [module.training for module in dense.modules()]
    small = pc.sketchify(dense, 0.5, data=data, **OPTIONS)
    free = pc.sketchify(dense, 0.5, synthetic=False, **OPTIONS)
    with torch.no_grad():
        wanted = call(dense, entry.inputs())
        found, rough = (
            distance(wanted, call(model, entry.inputs()), None, logits=False) for model in (small, free)
        )
    if name != "tied_autoencoder":  # tied weights are not fitted to data
        assert found < 0.75 * rough
    report = pc.sketch_report(small)
    assert report.achieved_ratio <= 0.5
    assert sum(row.method == "calibrated" for row in report.sketched) >= len(report.sketched) - 2
    assert all(torch.equal(before[key], value) for key, value in dense.state_dict().items())
    assert [module.training for module in dense.modules()] == modes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.point = nn.Conv2d(32, 64, 1)
        self.spare = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.point(torch.relu(self.norm(self.conv(x))))
        return self.head(self.dropout(x.mean((2, 3))))


def images(count=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=generator)


def test_train_mode_is_calibrated_in_eval_mode_and_kept():
    torch.manual_seed(0)
    model = Net().train()
    mean = model.norm.running_mean.clone()
    torch.manual_seed(5)
    small = pc.sketchify(model, 0.5, data=[images()], **OPTIONS)
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert small.training
    assert torch.equal(model.norm.running_mean, mean)


@pytest.fixture(scope="module")
def sketched():
    """A model, and its sketch; neither is changed."""
    torch.manual_seed(0)
    model = Net()
    return model, pc.sketchify(model, 0.5, data=[images()], **OPTIONS)


def test_layer_that_no_data_reaches_is_sketched_without(sketched):
    report = pc.sketch_report(sketched[1])
    methods = {row.name: row.method for row in report.sketched}
    assert methods["point"] == "calibrated"
    assert methods["spare"] == "svd"


def test_nan_names_layer_and_batch():
    bad = images()
    bad[0, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match=r"batch 1 .*conv"):
        pc.sketchify(Net(), 0.5, data=[images(), bad, *[images()] * 8], **OPTIONS)


@pytest.mark.slow
def test_same_data_same_result():
    torch.manual_seed(0)
    model = Net()
    one, other = (pc.sketchify(model, 0.5, data=[images()], **OPTIONS).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_fewer_samples_than_inputs():
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    small = pc.sketchify(model, 0.5, data=[torch.randn(4, 128)], include="*", **OPTIONS)
    x = torch.randn(64, 128)
    with torch.no_grad():
        assert torch.isfinite(small(x)).all()
        assert (small(x) - model(x)).norm() < model(x).norm()


def test_graph_module_and_exported_program():
    torch.manual_seed(0)
    model = Net().eval()
    graph = fx.symbolic_trace(model)
    exported = torch.export.export(model, (images(),))
    with torch.no_grad():
        wanted = model(images())
        for given in (graph, exported):
            small = pc.sketchify(given, 0.5, data=[images()], **OPTIONS)
            assert "calibrated" in {row.method for row in pc.sketch_report(small).sketched}
            assert (small(images()) - wanted).norm() < 0.6 * wanted.norm()


@pytest.mark.slow
def test_inplace_gives_the_same_factors():
    torch.manual_seed(0)
    model = Net()
    copied = pc.sketchify(model, 0.5, data=[images()], **OPTIONS)
    changed = pc.sketchify(model, 0.5, data=[images()], inplace=True, **OPTIONS)
    assert changed is model
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), changed.parameters(), strict=True))


def test_checkpoint_keeps_the_calibrated_record(sketched, tmp_path):
    model, small = sketched
    pc.save_sketched(small, tmp_path / "small")
    loaded = pc.load_sketched(model, tmp_path / "small")
    assert str(pc.sketch_report(loaded)) == str(pc.sketch_report(small))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_other_dtypes(dtype):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(dtype)
    small = pc.sketchify(model, 0.5, data=[torch.randn(128, 64, dtype=dtype)], include="*", **OPTIONS)
    assert {p.dtype for p in small.parameters()} == {dtype}


def test_a_loss_counts_only_by_itself():
    x = torch.randn(4, 6)
    assert distance({"loss": x[0, 0], "hidden": x}, {"loss": x[0, 1], "hidden": x}, None) == 0
    assert distance({"loss": x[0, 0]}, {"loss": 2 * x[0, 0]}, None) == pytest.approx(1.0)


def test_distance_of_results_of_other_shapes_and_of_what_is_not_finite():
    x = torch.randn(4, 6)
    assert distance(x, x[:3], None) == 1.0
    hidden = x.masked_fill(torch.arange(6) == 2, -torch.inf)
    assert distance({"logits": hidden}, {"logits": hidden + 1.0}, None) == pytest.approx(0, abs=1e-5)
    assert distance({"logits": hidden}, {"logits": hidden * 2}, None) > 0.01
    assert distance((x[0, 0] * torch.nan, x), (x[0, 0], 2 * x), None) == pytest.approx(1.0)


def test_layers_that_the_fast_path_of_attention_leaves_out():
    """In eval mode torch computes a block by its weights alone: no layer of it was ever called."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    data = [torch.randn(8, 12, 32) for _ in range(8)]
    small = pc.sketchify(block, 0.5, data=data, include="linear1", min_params=64, allow_slower=True)
    (row,) = pc.sketch_report(small).sketched
    assert (row.name, row.note) == ("linear1", "")
    assert row.output_error is not None
    both = pc.sketchify(block, 0.5, data=data, include="linear*", min_params=64, allow_slower=True)
    plan = pc.sketch_report(both).plan
    assert {choice.scheme for choice in plan.choices.values()} == {"narrow"}
    again = pc.sketchify(block, plan=plan, data=data)
    torch.testing.assert_close(again(data[0]), both(data[0]))
