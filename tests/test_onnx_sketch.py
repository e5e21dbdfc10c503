"""What of an ONNX model is sketched, what is left alone and why, and what the options change."""

from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPTIONS, assert_same_outputs, low_rank, make, mlp, node, random, reasons, run, sketch
from zoo import ZOO, call, names, tensors

import panther_compile as pc
from panther_compile.errors import (
    NoTargetError,
)

AUTO = torch.export.Dim.AUTO
FAST = ("tied_autoencoder",)


def test_pipeline_keeps_its_head(tmp_path):
    source = mlp(tmp_path / "in.onnx")
    report, target = sketch(source, min_params=100)
    assert [line.name for line in report.plan.sketched] == ["coef0", "coef1"]
    assert reasons(report) == {"coef2": "output head: left alone unless included"}
    assert_same_outputs(source, target, random(9, 48))
    assert "2 of 3 layers" in str(report)
    assert "bytes" in str(report)


@pytest.mark.parametrize(
    ("options", "sketched"),
    [
        ({"include": "coef0"}, ["coef0"]),
        ({"include": "layer1"}, ["coef1"]),
        ({"exclude": ["coef1"]}, ["coef0"]),
        ({"include": torch.nn.Linear, "min_params": 6145}, []),
        ({"ratio": {"coef0": 0.5}}, ["coef0"]),
        ({"include": "coef2", "min_params": 1, "ratio": 0.5}, ["coef2"]),
    ],
)
def test_options_mean_what_they_mean_for_modules(options, sketched, tmp_path):
    source = mlp(tmp_path / "in.onnx")
    if not sketched:
        with pytest.raises(NoTargetError, match="small: 4,608 numbers"):
            sketch(source, **options)
        return
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", **(OPTIONS | options))
    assert [line.name for line in report.plan.sketched] == sketched


def test_ranks_are_rounded_and_seeds_repeat(tmp_path):
    source = make(tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 64)})
    found = []
    for _ in range(2):
        report, target = sketch(source, method="randomized", round_rank_to=5, seed=3)
        assert report.plan.sketched[0].choice.ranks[0] % 5 == 0
        found.append(target.read_bytes())
    assert found[0] == found[1]


def test_shared_weight_gets_shared_factors(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["r"]), node("MatMul", ["r", "w"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": low_rank(48, 48)})
    report, target = sketch(source, include="*")
    assert len(report.plan.sketched) == 1
    assert_same_outputs(source, target, random(4, 48))
    sizes = [np.prod(tensor.dims) for tensor in onnx.load(target).graph.initializer]
    assert sum(size for size in sizes if size > 10) == report.plan.stored_numbers


W = {"w": low_rank(48, 48), "v": low_rank(48, 64)}
OTHER = [node("MatMul", ["x", "v"], ["vx"]), node("Exp", ["vx"], ["z"])]
LEFT_ALONE = {
    "graph output": (
        [node("MatMul", ["x", "w"], ["y"])],
        {"outputs": [("w", (48, 48))]},
        "is a graph output",
    ),
    "graph input": ([node("MatMul", ["x", "w"], ["y"])], {"inputs": [("w", (48, 48))]}, "is a graph input"),
    "another reader": (
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "w"], ["y"], name="adds")],
        {"x": (48, 48)},
        "also read by Add adds",
    ),
    "both ways round": (
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Relu", ["h"], ["r"]),
            node("Gemm", ["r", "w"], ["y"], transB=1),
        ],
        {},
        "used in several ways",
    ),
    "a batch of matrices": (
        [node("Unsqueeze", ["w", "axes"], ["u"]), node("MatMul", ["x", "u"], ["y"])],
        {},
        "made by Unsqueeze",
    ),
    "quantized": (
        [node("DequantizeLinear", ["q", "s"], ["d"]), node("MatMul", ["x", "d"], ["y"])],
        {},
        "quantized: DequantizeLinear",
    ),
    "quantized in each run": (
        [
            node("QuantizeLinear", ["w", "s"], ["i"]),
            node("DequantizeLinear", ["i", "s"], ["d"]),
            node("Transpose", ["d"], ["t"]),
            node("Gemm", ["x", "t"], ["y"], transB=1),
        ],
        {},
        "quantized: DequantizeLinear",
    ),
    "cast twice": (
        [
            node("Cast", ["w"], ["half"], to=TensorProto.FLOAT16),
            node("Cast", ["half"], ["c"], to=TensorProto.FLOAT),
            node("MatMul", ["x", "c"], ["y"]),
        ],
        {},
        "made by Cast",
    ),
    "quantized operator": (
        [
            node("Cast", ["x"], ["c"], to=TensorProto.INT8),
            node("MatMulInteger", ["c", "q"], ["i"], name="mmi"),
            node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
        ],
        {},
        "quantized",
    ),
    "already factored": (
        [node("MatMul", ["x", "down"], ["h"]), node("MatMul", ["h", "up"], ["y"])],
        {},
        "already factored",
    ),
    "already factored 1-D convolution": (
        [
            node("Unsqueeze", ["x", "last"], ["u"]),
            node("Conv", ["u", "conv down"], ["h"]),
            node("Conv", ["h", "conv up"], ["c"]),
            node("Squeeze", ["c", "last"], ["y"]),
        ],
        {},
        "already factored",
    ),
    "already factored transposed convolution": (
        [
            node("Unsqueeze", ["x", "last"], ["u"]),
            node("Conv", ["u", "conv down"], ["h"]),
            node("ConvTranspose", ["h", "transposed up"], ["c"]),
            node("Squeeze", ["c", "last"], ["y"]),
        ],
        {},
        "already factored",
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_alone_has_a_reason(case, tmp_path):
    nodes, parts, reason = LEFT_ALONE[case]
    parts = {
        key: [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in value]
        if key in ("inputs", "outputs")
        else value
        for key, value in parts.items()
    }
    weights = W | {
        "axes": np.array([0]),
        "q": (W["w"] * 20).astype(np.int8),
        "s": np.array(0.05, np.float32),
        "last": np.array([2]),
        "conv down": random(16, 48, 1),
        "conv up": random(48, 16, 1),
        "transposed up": random(16, 48, 1),
        "down": random(48, 16),
        "up": random(16, 48),
    }
    outputs = [*parts.pop("outputs", []), helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    source = make(tmp_path / "in.onnx", [*nodes, *OTHER], weights, outputs=outputs, **parts)
    report, _ = sketch(source)
    assert [line.name for line in report.plan.sketched] == ["v"]
    assert any(reason in found for found in reasons(report).values()), reasons(report)


def test_branches_are_visited(tmp_path):
    branch = [
        helper.make_graph(
            [node("MatMul", ["x", "w"], [f"{name}_m"]), node(op, [f"{name}_m", "own"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(low_rank(48, 48), "own")],
        )
        for name, op in (("then", "MatMul"), ("else", "Gemm"))
    ]
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Less", ["sum", "zero"], ["negative"]),
        node("If", ["negative"], ["y"], then_branch=branch[0], else_branch=branch[1]),
    ]
    weights = {"w": low_rank(48, 48), "zero": np.array(0, np.float32)}
    source = make(tmp_path / "in.onnx", nodes, weights)
    report, target = sketch(source, include="*")
    assert [line.name for line in report.plan.sketched] == ["w", "own", "own_2"]
    x = np.abs(random(4, 48))
    assert_same_outputs(source, target, x)
    assert_same_outputs(source, target, -x)


def test_functions_are_left_alone(tmp_path):
    body = [node("MatMul", ["a", "b"], ["c"], name="inner")]
    function = helper.make_function("own", "Dense", ["a", "b"], ["c"], body, [helper.make_opsetid("", 13)])
    nodes = [node("Dense", ["x", "w"], ["h"], domain="own"), node("MatMul", ["h", "v"], ["y"])]
    source = make(
        tmp_path / "in.onnx", nodes, W, functions=[function], domains=[helper.make_opsetid("own", 1)]
    )
    report, target = sketch(source)
    assert "inside the function Dense" in reasons(report)["Dense/inner"]
    assert_same_outputs(source, target, random(4, 48))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floating_dtypes(dtype, tmp_path):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": low_rank(48, 64, dtype=dtype)}, dtype=kind)
    _, target = sketch(source)
    x = random(5, 48).astype(dtype)
    (one,), (other,) = run(source, x), run(target, x)
    assert other.dtype == dtype
    assert np.abs(one - other).max() <= (2e-2 if dtype is np.float16 else 1e-7) * np.abs(one).max()


def test_bfloat16(tmp_path):
    import ml_dtypes

    weight = low_rank(48, 64).astype(ml_dtypes.bfloat16)
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": weight}, dtype=TensorProto.BFLOAT16)
    _, target = sketch(source, verify=False)  # ONNX Runtime has no such product on a CPU
    kinds = {tensor.data_type for tensor in onnx.load(target).graph.initializer if np.prod(tensor.dims) > 10}
    assert kinds == {TensorProto.BFLOAT16}


# ---------------------------------------------------------------------------------------- the zoo


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names()]
)
def test_zoo_model_is_sketched(name, tmp_path):
    if name == "early_exit":
        pytest.skip("torch cannot export it")
    entry = ZOO[name]
    # Of weights that have a low rank, a larger sketch is exact.
    others = {"exclude": "*experts"} if name == "mixtral" else {}  # which are not sketched in files
    dense = pc.densify(pc.sketchify(entry.build(), 0.3, **OPTIONS, **others))
    inputs = entry.inputs()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    source = tmp_path / "in.onnx"
    pc.export_onnx(dense, args, source, kwargs=kwargs, verify=False)
    report, target = sketch(source, 0.6)
    with torch.no_grad():
        wanted = tensors(call(dense, inputs))
    found = run(target, [value.numpy() for value in (*args, *kwargs.values())])
    found = [torch.from_numpy(array) for array in found if array.dtype == np.float32]
    for one, other in zip(found, wanted, strict=False):
        assert (one - other).norm() <= 1e-2 * other.norm()
    # Names are those of the modules, also where the exporter folded a transposed copy.
    assert not any(line.name.startswith("val_") for line in report.plan.sketched)
    again = partial(pc.sketch_onnx, target, tmp_path / "again.onnx", 0.9, **OPTIONS)
    if whole := {line.name for line in report.plan.whole}:  # what is sketched stays as it is
        assert {line.name for line in again().plan.sketched} <= whole
    else:
        with pytest.raises(NoTargetError, match=r"already factored|output head|small"):
            again()
