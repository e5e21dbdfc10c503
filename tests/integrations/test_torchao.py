"""int8, int4 and fp8 weights of torchao on the factors of a sketched model."""

import copy
import importlib.util
import io
import warnings

import pytest
import torch
from torch import nn

import panther_compile as pc

quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.integrations

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}
# A configuration, and how far its result may be from that of bfloat16 factors.
CONFIGURATIONS = {
    "int8 weights": (quantization.Int8WeightOnlyConfig, 0.05),
    "int8": (quantization.Int8DynamicActivationInt8WeightConfig, 0.05),
    "fp8 weights": (quantization.Float8WeightOnlyConfig, 0.15),
}


@pytest.fixture(scope="module")
def model():
    """Two layers whose ranks are multiples of 32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()


@pytest.fixture(scope="module")
def small(model):
    return pc.sketchify(model, 0.5, round_rank_to=32, exclude="2", **OPTIONS).bfloat16()


def quantized(model, configuration):
    """A copy with every linear layer in it, factors included, quantised as docs/quantize.md says."""
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(
            model,
            configuration,
            filter_fn=lambda one, name: isinstance(one, nn.Linear) and type(one.weight) is nn.Parameter,
        )
    return model


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_factors(small, name, rows):
    configuration, most = CONFIGURATIONS[name]
    x = torch.randn(rows, 256).bfloat16()
    low = quantized(small, configuration())
    layer = low[0]
    assert type(layer) is pc.SketchedLinear
    assert all(type(factor.weight) is not nn.Parameter for factor in (layer.down, layer.up))
    with torch.no_grad():
        assert 0 < error(low(x), small(x)) < most


@pytest.mark.parametrize("backend", ["aot_eager", "panther", "inductor"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_compiled(small, name, backend, fresh_dynamo):
    x = torch.randn(32, 256).bfloat16()
    low = quantized(small, CONFIGURATIONS[name][0]())
    options = {"options": {"inner": "aot_eager"}} if backend == "panther" else {}
    with torch.no_grad():
        assert error(torch.compile(low, backend=backend, **options)(x), low(x)) < 0.04


def int4():
    """Four bits in groups of 32, which torchao keeps a byte each where it has no packed kernel."""
    return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))


@pytest.mark.parametrize("configuration", [quantization.Int8WeightOnlyConfig, int4])
def test_saved_loaded_and_counted_in_bytes(small, configuration):
    """The state dict goes into a sketch of the same model; bytes are those of the file, but for its names."""
    low = quantized(small, configuration())
    file = io.BytesIO()
    torch.save(low.state_dict(), file)
    size = len(file.getvalue())
    file.seek(0)
    again = copy.deepcopy(small)
    again.load_state_dict(torch.load(file, weights_only=True), assign=True)
    x = torch.randn(4, 256).bfloat16()
    assert torch.equal(again(x), low(x))
    report = pc.sketch_report(low)
    assert report.stored_bytes == pc.sketch_report(again).stored_bytes
    assert 0 < size - report.stored_bytes < 8000
    assert report.stored_numbers < report.stored_bytes < 0.6 * pc.sketch_report(small).stored_bytes


@pytest.mark.parametrize("configuration", [quantization.Int8WeightOnlyConfig, int4])
def test_branches_beside_quantized_weights(model, configuration):
    """Closer than without, saved and loaded, and quantized themselves."""
    low = quantized(model, configuration())
    data = [torch.randn(64, 256) for _ in range(10)]
    x = torch.randn(64, 256)
    better = pc.add_residual(low, model, rank=32, data=data)
    again = pc.load_residual(low, better.state_dict())
    rounded = quantized(better, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        without = error(low(x), model(x))
        assert error(better(x), model(x)) < 0.97 * without
        assert torch.equal(again(x), better(x))
        assert error(rounded(x), model(x)) < 0.98 * without
    assert type(rounded[0].up.weight) is not nn.Parameter


def test_packed_int4_is_refused_by_torchao_without_its_kernels(small):
    if importlib.util.find_spec("mslk") is not None:
        pytest.skip("mslk is there")
    with pytest.raises(ImportError, match="mslk"):
        quantized(small, quantization.Int4WeightOnlyConfig(group_size=32))


def test_other_folders_refuse_quantized_factors_by_name(small, tmp_path):
    low = quantized(small, quantization.Int8WeightOnlyConfig())
    with pytest.raises(pc.PantherError, match=r"0\.down\.weight is a Int8Tensor"):
        pc.save_sketched(low, tmp_path / "small")


def test_with_transformers(tmp_path):
    """Loaded, then quantized; a quantized one is refused by name, and so is a second quantizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    llama = pc.sketchify(transformers.LlamaForCausalLM(config).eval(), 0.5, synthetic=False, **OPTIONS)
    llama.save_pretrained(tmp_path / "small")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    low = quantized(again, quantization.Int8WeightOnlyConfig())
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert 0 < error(low(ids).logits, llama(ids).logits) < 0.05
    with pytest.raises(pc.PantherError, match="save the model before it is quantized"):
        low.save_pretrained(tmp_path / "low")
    torchao_config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="SketchedModelConfig"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "small", quantization_config=torchao_config
        )


def test_a_latent_cache_of_quantized_factors():
    """What int8 factors write lies in their span too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    llama = pc.sketchify(transformers.LlamaForCausalLM(config).eval(), 0.4, synthetic=False, **OPTIONS)
    low = quantized(llama, quantization.Int8WeightOnlyConfig())
    ids, options = torch.arange(16)[None], {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    cache = pc.LatentCache(low)
    assert torch.equal(low.generate(ids, past_key_values=cache, **options), low.generate(ids, **options))
    assert all(line.keys.startswith("latent") for line in cache.report().layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        packed = torch.ao.quantization.quantize_dynamic(llama, {nn.Linear})
    with pytest.raises(pc.PantherError, match=r"no attention .* packed by a quantizer"):
        pc.LatentCache(packed)


def test_what_needs_the_numbers_of_quantized_factors_is_refused(model, small):
    peft = pytest.importorskip("peft")
    adapters = pytest.importorskip("panther_compile.integrations.adapters")
    low = quantized(small, quantization.Int8WeightOnlyConfig())
    with pytest.raises(pc.PantherError, match=r"project a state dict onto the model before it is quantized"):
        pc.project_state_dict(low, model.state_dict())
    tuned = peft.get_peft_model(low, peft.LoraConfig(r=4, target_modules=["0"]))
    with pytest.raises(pc.PantherError, match=r"start adapters from .* before it is quantized"):
        adapters.init_lora_from_dense(tuned, model)
    with pytest.raises(pc.PantherError, match="merge adapters into the model before it is quantized"):
        tuned.merge_and_unload()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_fp8_products(small, rows):
    """Scales for each row, for both operands: torch._scaled_mm."""
    configuration = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    small, x = copy.deepcopy(small).cuda(), torch.randn(rows, 256, device="cuda").bfloat16()
    with torch.no_grad():
        assert 0 < error(quantized(small, configuration)(x), small(x)) < 0.15
