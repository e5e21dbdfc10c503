"""int8 and fp8 weights of torchao on the factors of a sketched model."""

import copy
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
    """A copy with every linear layer in it, factors included, quantised as docs/calibration.md says."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_fp8_products(small, rows):
    """Scales for each row, for both operands: torch._scaled_mm."""
    configuration = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    small, x = copy.deepcopy(small).cuda(), torch.randn(rows, 256, device="cuda").bfloat16()
    with torch.no_grad():
        assert 0 < error(quantized(small, configuration)(x), small(x)) < 0.15
