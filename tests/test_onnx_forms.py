"""forms.py: what ONNX Runtime makes of GELU and of sums ahead of a LayerNorm."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx_models import make, node, random, run
from torch import nn

import panther_compile as pc
from panther_compile.onnx.files import read_model, write_model
from panther_compile.onnx.fold_scales import fold_scales
from panther_compile.onnx.forms import fuse_gelu, keep_sums_apart


def optimized(path):
    """The operators that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".run.onnx"))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(one.op_type for one in onnx.load(options.optimized_model_filepath).graph.node)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(48, 96), nn.Linear(96, 48), nn.LayerNorm(48)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


def test_an_exported_model_has_fused_gelu_and_in_int8_sums_apart(tmp_path):
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(4, 48)
    pc.export_onnx(model, x, tmp_path / "float.onnx")
    pc.export_onnx(model, x, tmp_path / "int8.onnx", then="int8")
    for name in ("float.onnx", "int8.onnx"):
        found = optimized(tmp_path / name)
        assert not found["Erf"], name
        assert found["Gelu"] + found["BiasGelu"] == 1, name
    assert not found["SkipLayerNormalization"]
    assert found["LayerNormalization"] == found["Sum"] == 1


HALF = np.float32([0.5])


def gelu(path, half=HALF, *, outputs=(), added="e"):
    weights = {"root": np.float32([2**0.5]), "one": np.float32([1]), "half": half}
    nodes = [
        node("Div", ["x", "root"], ["d"]),
        node("Erf", ["d"], ["e"]),
        node("Add", ["one", added], ["a"]),
        node("Mul", ["a", "half"], ["m"]),
        node("Mul", ["m", "x"], ["y"]),
    ]
    return make(path, nodes, weights, x=("n", 8), y=("n", 8), outputs=list(outputs))


def test_gelu_stays_what_it_is(tmp_path):
    source, x = gelu(tmp_path / "in.onnx"), random(5, 8)
    model = read_model(source)
    fuse_gelu(model)
    write_model(model, tmp_path / "out.onnx")
    assert optimized(source)["Erf"] == 1
    assert optimized(tmp_path / "out.onnx") == {"Gelu": 1}
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x)[0], run(source, x)[0], atol=1e-6)


@pytest.mark.parametrize("torchs", [False, True])
def test_a_gelu_ahead_of_a_convolution_keeps_its_half(tmp_path, torchs):
    weights = {"root": np.float32([2**0.5]), "one": np.float32([1]), "half": HALF}
    weights |= {name: random(8, 8, 1, 1) for name in "vw"}
    end = [("a", "half", "m"), ("m", "c", "g")] if torchs else [("c", "a", "m"), ("m", "half", "g")]
    nodes = [
        node("Conv", ["x", "v"], ["c"]),
        node("Div", ["c", "root"], ["d"]),
        node("Erf", ["d"], ["e"]),
        node("Add", ["e", "one"], ["a"]),
        *(node("Mul", [first, second], [made]) for first, second, made in end),
        node("Conv", ["g", "w"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 8, 4, 4), y=(None,) * 4)
    model = read_model(source)
    fuse_gelu(model)
    assert fold_scales(model) == 0
    write_model(model, tmp_path / "out.onnx")
    assert optimized(tmp_path / "out.onnx") == {"Conv": 2, "Gelu": 1}


@pytest.mark.parametrize("other", ["another factor", "read twice", "no erf"])
def test_what_is_no_gelu_stays(tmp_path, other):
    changes = {
        "another factor": {"half": np.float32([0.25])},
        "read twice": {"outputs": [onnx.helper.make_tensor_value_info("m", 1, ("n", 8))]},
        "no erf": {"added": "d"},
    }[other]
    source = gelu(tmp_path / "in.onnx", **changes)
    model = read_model(source)
    before = [(one.op_type, [i.name for i in one.inputs]) for one in model.graph]
    fuse_gelu(model)
    assert [(one.op_type, [i.name for i in one.inputs]) for one in model.graph] == before


class Gate(nn.Module):
    """Halves 1 + erf of one thing, and multiplies by another that is computed later, and has more rows."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(48, 96), nn.Linear(48, 96)

    def forward(self, x):
        gate = 0.5 * (1 + torch.erf(self.gate(x[:1])))
        return self.up(x) * gate


@pytest.mark.parametrize("then", ["none", "int8"])
def test_a_gate_by_erf_is_no_gelu(tmp_path, then):
    torch.manual_seed(0)
    pc.export_onnx(Gate().eval(), torch.randn(4, 48), tmp_path / "gate.onnx", then=then)
    assert optimized(tmp_path / "gate.onnx")["Erf"] == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_of_types_that_sum_takes(tmp_path, dtype):
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {"g": np.ones(8, dtype), "v": random(8).astype(dtype)}
    nodes = [node("Add", ["x", "v"], ["s"]), node("LayerNormalization", ["s", "g"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 8), y=("n", 8), opset=17, dtype=kind)
    model, x = read_model(source), random(5, 8).astype(dtype)
    keep_sums_apart(model)
    write_model(model, tmp_path / "out.onnx")
    kinds = [one.op_type for one in onnx.load(tmp_path / "out.onnx").graph.node]
    assert kinds[0] == ("Sum" if dtype == "float32" else "Add")
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x)[0], run(source, x)[0], atol=1e-6)
