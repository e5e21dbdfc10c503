"""`save_pretrained` and `from_pretrained` give a sketched model back, error 0."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DacConfig,
    DacModel,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2ForPreTraining,
    initialization,
    pipeline,
)
from transformers.quantizers import auto
from zoo import ZOO, call, generate, tensors

import panther_compile as pc
from panther_compile.integrations.pretrained import METHOD

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True, "synthetic": False}
PRETRAINED = sorted(name for name, entry in ZOO.items() if "transformers" in type(entry.build()).__module__)
WIDTHS = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
IDS = torch.arange(20).reshape(2, 10)


def llama(layers=2, **options):
    widths = WIDTHS | {"num_hidden_layers": layers}
    config = LlamaConfig(**widths, num_key_value_heads=2, initializer_range=0.1, **options)
    return LlamaForCausalLM(config).eval()


def gpt2(layers=2):
    config = GPT2Config(vocab_size=99, n_embd=64, n_layer=layers, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config).eval()


def sketch(model, ratio=0.5, **options):
    return pc.sketchify(model, ratio, **OPTIONS, **options)


def assert_same(found, wanted, inputs):
    """Bit for bit the same tensors, and results that differ by no more than where they lie in memory."""
    state, others = wanted.state_dict(), found.state_dict()
    assert list(state) == list(others)
    assert all(torch.equal(value, others[name]) for name, value in state.items())
    with torch.no_grad():
        pairs = zip(tensors(call(found, inputs)), tensors(call(wanted, inputs)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_factors_are_not_merged_as_dense_weights_are(tmp_path):
    """Files of GTE hold queries, keys and values in one tensor; a sketch of queries alone cannot."""
    pytest.importorskip("transformers.models.gte")
    widths = WIDTHS | {"num_key_value_heads": 4, "max_position_embeddings": 64}
    AutoModel.from_config(AutoConfig.for_model("gte", **widths)).save_pretrained(tmp_path / "dense")
    assert "qkv_proj" in "".join(load_file(tmp_path / "dense/model.safetensors"))
    model = AutoModel.from_pretrained(tmp_path / "dense").eval()
    small = sketch(model, include="*.q_proj")
    small.save_pretrained(tmp_path / "small")
    loaded = AutoModel.from_pretrained(tmp_path / "small").eval()
    assert_same(loaded, small, {"input_ids": IDS})
    dense = pc.densify(small)
    dense.save_pretrained(tmp_path / "dense again")
    assert_same(AutoModel.from_pretrained(tmp_path / "dense again").eval(), dense, {"input_ids": IDS})


def test_a_class_that_takes_biases_for_granted(tmp_path):
    """DAC writes initial values into the bias of each convolution; the first factor of a sketch has none."""
    sizes = dict(encoder_hidden_size=16, decoder_hidden_size=32, hidden_size=32, codebook_size=16)
    config = DacConfig(downsampling_ratios=[4, 2], upsampling_ratios=[2, 4], n_codebooks=2, **sizes)
    small = sketch(DacModel(config).eval())
    assert "SketchedConv1d" in types(small).values()
    small.save_pretrained(tmp_path)
    assert_same(AutoModel.from_pretrained(tmp_path).eval(), small, (torch.randn(1, 1, 320),))


def test_a_class_that_writes_into_biases_of_all_layers_below(tmp_path):
    """MaskFormer's and OneFormer's heads of masks do so."""

    class Head(nn.Sequential):
        pass

    class Writes(PreTrainedModel):
        config_class = BertConfig
        base_model_prefix = "model"

        def __init__(self, config):
            super().__init__(config)
            self.head = Head(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
            self.post_init()

        def _init_weights(self, module):
            if isinstance(module, Head):
                for below in module.modules():
                    if isinstance(below, nn.Linear):
                        initialization.constant_(below.bias, 0)

        def forward(self, x):
            return self.head(x)

    small = sketch(Writes(BertConfig()).eval())
    small.save_pretrained(tmp_path)
    loaded = Writes.from_pretrained(tmp_path).eval()
    assert_same(loaded, small, (torch.randn(3, 32),))
    assert "_init_weights" not in vars(loaded)
    assert "head.0.down.bias" not in loaded.state_dict()


WAVES = dict(
    **dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=20),
    **dict(conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8], num_feat_extract_layers=2),
    **dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0),
)


def test_a_class_whose_tie_weights_ties_nothing(tmp_path):
    """Wav2Vec2ForCTC's loads adapters: factors that layers share came back as newly made ones."""
    small = sketch(Wav2Vec2ForCTC(Wav2Vec2Config(**WAVES)).eval())
    attention = small.wav2vec2.encoder.layers[0].attention
    attention.q_proj.down = attention.k_proj.down
    small.save_pretrained(tmp_path)
    loaded = Wav2Vec2ForCTC.from_pretrained(tmp_path).eval()
    assert_same(loaded, small, (torch.randn(2, 800),))
    attention = loaded.wav2vec2.encoder.layers[0].attention
    assert attention.q_proj.down.weight is attention.k_proj.down.weight
    assert "tie_weights" not in vars(loaded)


def test_a_class_that_resets_layers(tmp_path):
    """Wav2Vec2ForPreTraining calls reset_parameters of two layers, which a sketched one has not."""
    small = sketch(Wav2Vec2ForPreTraining(Wav2Vec2Config(**WAVES)).eval())
    assert isinstance(small.project_hid, pc.SketchedLinear)
    small.save_pretrained(tmp_path)
    loaded = Wav2Vec2ForPreTraining.from_pretrained(tmp_path).eval()
    assert_same(loaded, small, (torch.randn(2, 800),))


def types(model):
    return {name: type(module).__name__ for name, module in model.named_modules()}


# Each is made of layers as another is.
SELDOM = (
    *("bart", "clip", "distilbert", "efficientnet", "mistral"),
    *("mobilenet_v2", "roberta", "segformer", "swin", "wav2vec2"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in PRETRAINED]
)
def test_a_model_comes_back(name, tmp_path):
    entry = ZOO[name]
    small = sketch(entry.build(), 0.6)
    small.save_pretrained(tmp_path)
    again, loading = type(small).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    assert types(again) == types(small)
    assert_same(again, small, entry.inputs())
    assert pc.sketch_report(again) == pc.sketch_report(small)
    if entry.generate is not None:
        assert torch.equal(generate(again, entry), generate(small, entry))


def test_it_comes_back_from_shards_in_another_dtype(tmp_path):
    small = sketch(llama())
    small.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = small.bfloat16().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in half.state_dict().items())


@pytest.mark.parametrize("build", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_narrow_layers_come_back(build, tmp_path):
    small = sketch(build(layers=1), data=[torch.randint(0, 99, (4, 16)) for _ in range(4)])
    assert any("Narrow" in kind for kind in types(small).values())
    small.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), small, (IDS,))


def test_linear_layers_whose_class_is_read_come_back(tmp_path):
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    small = sketch(FalconForCausalLM(FalconConfig(**sizes)).eval())
    small.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), small, (IDS,))


@pytest.mark.parametrize("build", [llama, gpt2])
def test_shared_factors_come_back(build, tmp_path):
    small = sketch(build())
    layers = [m for m in small.modules() if isinstance(m, pc.SketchedLinear)]
    by_shape = {}
    for layer in layers:
        layer.down = by_shape.setdefault(layer.down.weight.shape, layer).down
    assert len(by_shape) < len(layers) - 2
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(again, small, (IDS,))
    assert len(list(again.parameters())) == len(list(small.parameters()))  # one parameter where it was one
    again.save_pretrained(tmp_path / "once more")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "once more"), small, (IDS,))


@pytest.mark.parametrize("tie", [True, False])
def test_embeddings_and_a_tied_head_come_back(tie, tmp_path):
    small = sketch(llama(tie_word_embeddings=tie), include="*")
    assert isinstance(small.get_input_embeddings(), pc.SketchedEmbedding)
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(again, small, (IDS,))
    tied = again.lm_head.up.weight is again.model.embed_tokens.codes.weight
    assert tied is tie
    again.tie_weights()
    small.tie_weights()
    assert_same(again, small, (IDS,))


def test_a_body_comes_back_from_a_model_with_a_head_and_a_head_is_put_on_a_body(tmp_path):
    config = BertConfig(**WIDTHS, max_position_embeddings=64)
    small = sketch(BertForMaskedLM(config).eval())
    small.save_pretrained(tmp_path / "masked")
    small.bert.save_pretrained(tmp_path / "body")
    body = AutoModel.from_pretrained(tmp_path / "masked", add_pooling_layer=False)
    assert_same(body, small.bert, (IDS,))
    for source in ("masked", "body"):
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / source, num_labels=3)
        found, wanted = classifier.bert(IDS)[0], small.bert(IDS)[0]
        assert torch.equal(found, wanted)


class OwnConfig(PretrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    """A model of the user's, with an attention of torch and convolutions."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)
        self.post_init()

    def forward(self, pixel_values):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.layer(x).relu().mean(1))


@pytest.mark.parametrize("attention", ["exact", "favor"])
def test_convolutions_and_attention_of_torch_come_back(attention, tmp_path):
    small = sketch(OwnModel(OwnConfig()).eval(), attention=attention)
    assert {"SketchedMultiheadAttention", "SketchedConv2d"} <= set(types(small).values())
    small.save_pretrained(tmp_path)
    assert_same(OwnModel.from_pretrained(tmp_path), small, (torch.randn(2, 3, 16, 16),))


def test_a_model_that_was_loaded_is_an_ordinary_one(tmp_path):
    sketch(llama()).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.train()(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in again.parameters())
    copy.deepcopy(again).half().float()  # transformers refuses both of a quantised model
    again.resize_token_embeddings(120)
    again.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), again.eval(), (IDS,))
    dense = again.dequantize()
    assert "SketchedLinear" not in types(dense).values()
    torch.testing.assert_close(
        dense(IDS).logits, AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, rtol=1e-4, atol=1e-5
    )


def test_a_densified_model_is_saved_as_a_dense_one(tmp_path):
    small = sketch(llama())
    small.save_pretrained(tmp_path)
    dense = pc.densify(small)
    dense.save_pretrained(tmp_path)
    assert "panther_compile" not in (tmp_path / "config.json").read_text()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), dense, (IDS,))


def test_a_model_loaded_by_load_sketched_is_saved_too(tmp_path):
    small = sketch(llama())
    pc.save_sketched(small, tmp_path / "ours")
    pc.load_sketched(llama(), tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs"), small, (IDS,))


def test_a_pipeline_takes_the_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(99)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    small = sketch(llama())
    for part in (small, tokenizer):
        part.save_pretrained(tmp_path)
    texts = [
        pipeline("text-generation", model=model, tokenizer=tokenizer)(
            "w5 w6 w7", max_new_tokens=5, do_sample=False
        )
        for model in (str(tmp_path), small)
    ]
    assert texts[0] == texts[1]


REFUSED = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except RuntimeError:
    print("refused")
import panther_compile
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("loaded")
"""


def test_where_nothing_is_registered_it_is_refused_by_name(tmp_path, monkeypatch, caplog):
    """As without the import, which takes a process of its own."""
    sketch(llama()).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
            patch.delitem(known, METHOD)
        patch.setattr(logging.getLogger("transformers"), "propagate", True)
        with pytest.raises(RuntimeError):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "got panther_compile" in caplog.text  # the name to import
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_without_the_import_it_is_refused_by_name(tmp_path):
    sketch(llama()).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.split() == ["refused", "loaded"], done.stderr
    assert "got panther_compile" in done.stderr  # the name to import


def test_a_folder_of_another_size_is_refused(tmp_path):
    sketch(llama()).save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    config.intermediate_size = 80
    with pytest.raises(pc.PantherError, match=r"mlp.gate_proj.*another size|another size.*mlp.gate_proj"):
        LlamaForCausalLM.from_pretrained(tmp_path, config=config)


def test_a_newer_format_is_refused(tmp_path):
    sketch(llama()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(pc.PantherError, match="upgrade it"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_weights_file_loads_by_hand(tmp_path):
    model = gpt2()
    sketch(model).save_pretrained(tmp_path)
    missing, unexpected = sketch(model).load_state_dict(
        load_file(tmp_path / "model.safetensors"), strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
