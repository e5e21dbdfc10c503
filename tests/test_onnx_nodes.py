"""Every way to write a matrix product or a convolution in ONNX is sketched, and computes the same."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_models import assert_same_outputs, kernel, kinds, low_rank, make, node, random, reasons, sketch

from panther_compile.errors import NoTargetError
from panther_compile.factorization.conv2d import is_multiplied_out

MATRIX = {
    "matmul": ([node("MatMul", ["x", "w"], ["y"])], (48, 64)),
    "matmul_transpose": ([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])], (64, 48)),
    "gemm": ([node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, beta=2.0)], (48, 64)),
    "gemm_transB": ([node("Gemm", ["x", "w", "b"], ["y"], transB=1)], (64, 48)),
    "gemm_transA": (
        [node("Transpose", ["x"], ["xt"]), node("Gemm", ["xt", "w", "b"], ["y"], transA=1)],
        (48, 64),
    ),
    "gemm_transpose_transB": (
        [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("Gemm", ["x", "t", "b"], ["y"], transB=1)],
        (48, 64),
    ),
    "twice_transposed": (
        [
            node("Transpose", ["w"], ["t"]),
            node("Transpose", ["t"], ["tt"], perm=[1, 0]),
            node("Gemm", ["x", "tt", "b"], ["y"]),
        ],
        (48, 64),
    ),
    "constant_node": (
        [
            node("Constant", [], ["w"], value=numpy_helper.from_array(low_rank(48, 64))),
            node("MatMul", ["x", "w"], ["y"]),
        ],
        None,
    ),
}


@pytest.mark.parametrize("opset", [11, 13, 21])
@pytest.mark.parametrize("case", MATRIX)
def test_every_way_to_write_a_matrix(case, opset, tmp_path):
    nodes, shape = MATRIX[case]
    weights = {"b": random(64)} | ({} if shape is None else {"w": low_rank(*shape)})
    source = make(tmp_path / "in.onnx", nodes, weights, y=("n", 64), opset=opset)
    report, target = sketch(source)
    assert len(report.plan.sketched) == 1
    assert_same_outputs(source, target, random(7, 48))
    assert "w" not in {tensor.name for tensor in onnx.load(target).graph.initializer}
    assert "Constant" not in {one.op_type for one in onnx.load(target).graph.node}


@pytest.mark.parametrize(("op", "flags"), [("MatMul", {}), ("Gemm", {"transA": 1}), ("Gemm", {"transB": 1})])
def test_weight_on_the_left(op, flags, tmp_path):
    shape, x = ((48, 64) if flags.get("transA") else (64, 48)), ((5, 48) if flags.get("transB") else (48, 5))
    source = make(tmp_path / "in.onnx", [node(op, ["w", "x"], ["y"], **flags)], {"w": low_rank(*shape)}, x=x)
    _, target = sketch(source)
    assert_same_outputs(source, target, random(*x))


def test_left_weight_on_what_may_be_a_vector_stays(tmp_path):
    source = make(tmp_path / "in.onnx", [node("MatMul", ["w", "x"], ["y"])], {"w": low_rank(64, 48)}, x=(48,))
    with pytest.raises(NoTargetError, match="may be a vector"):
        sketch(source)


def test_batches_of_every_rank(tmp_path):
    for x in ((48,), (3, 48), (2, 3, 48), (2, 2, 3, 48)):
        source = make(tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": low_rank(48, 64)}, x=x)
        _, target = sketch(source)
        assert_same_outputs(source, target, random(*x))


CONV = {
    "3x3": ((32, 16, 3), {"pads": [1, 1, 1, 1]}),
    "strided": ((32, 16, 3), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    "dilated": ((32, 16, 3), {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
    "grouped": ((32, 8, 3), {"group": 2}),
    "same_upper": ((32, 16, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same_lower": ((32, 16, 4), {"auto_pad": "SAME_LOWER"}),
    "valid": ((32, 16, 3), {"auto_pad": "VALID", "kernel_shape": [3, 3]}),
    "1x1": ((32, 16, 1), {}),
    "1x1_strided": ((32, 16, 1), {"strides": [2, 3], "kernel_shape": [1, 1]}),
    "1x1_grouped": ((32, 8, 1), {"group": 2}),
}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("case", CONV)
def test_every_kind_of_convolution(case, opset, tmp_path):
    shape, attributes = CONV[case]
    nodes = [node("Conv", ["x", "w", "b"], ["y"], **attributes)]
    weights = {"w": kernel(*shape), "b": random(32)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 9, 11), opset=opset)
    report, target = sketch(source, 0.9, min_params=100)
    assert [line.kind for line in report.plan.sketched] == ["Conv"]
    assert_same_outputs(source, target, random(2, 16, 9, 11))


def test_matrices_of_other_operators_are_named(tmp_path):
    """Of ONNX Runtime's own operators, and what has no factors in a file."""
    own = {"domain": "com.microsoft"}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Relu", ["h"], ["k"]),
        node("CDist", ["k", "v"], ["l"], name="far", metric="euclidean", **own),
        node("BiasGelu", ["l", "b"], ["m"], **own),
        node("Einsum", ["m", "u"], ["n"], name="sum", equation="ij,jk->ik"),
        node("Unsqueeze", ["n", "first"], ["o"]),
        node("LSTM", ["o", "W", "R"], ["", "p"], name="lstm", hidden_size=48),
        node("Squeeze", ["p", "first"], ["y"]),
    ]
    weights = {"w": low_rank(48, 64), "v": random(48, 64), "b": random(48), "u": random(48, 48)}
    weights |= {"first": np.int64([0]), "W": random(1, 192, 48), "R": random(1, 192, 48)}
    domains = [helper.make_opsetid("com.microsoft", 1)]
    report, _ = sketch(make(tmp_path / "in.onnx", nodes, weights, y=(None, 48), domains=domains))
    assert reasons(report) == {
        "far": "of an operator of com.microsoft, wanted those of ONNX: sketch the file it was made of",
        "sum": "of an Einsum, wanted MatMul, Gemm or Conv",
        "lstm": "recurrent: its node takes matrices whole; sketchify in torch with include=, then export",
    }


FEW_FILTERS = {
    "1-D": ((32, 16, 12), {"pads": [5, 2], "strides": [2]}),
    "1-D same": ((32, 16, 12), {"auto_pad": "SAME_UPPER", "strides": [3]}),
    "2-D": ((32, 16, 4, 5), {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}),
    "2-D grouped": ((32, 8, 4, 5), {"group": 2}),
}


@pytest.mark.parametrize("share", [0.2, 0.8])  # of as many filters as taps: they are run, or multiplied out
@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("case", FEW_FILTERS)
def test_kernels_that_mix_few_filters(case, opset, share, tmp_path):
    shape, attributes = FEW_FILTERS[case]
    taps = shape[2] if len(shape) == 3 else shape[2] * shape[3]
    weights = {"w": low_rank(shape[0] * shape[1], taps, round(share * taps)).reshape(shape), "b": random(32)}
    nodes = [node("Conv", ["x", "w", "b"], ["y"], **attributes)]
    sizes = (16, 30) if len(shape) == 3 else (16, 11, 14)
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", *sizes), opset=opset)
    report, target = sketch(source, 0.5 if share < 0.5 else 0.9, min_params=100)
    (choice,) = (line.choice for line in report.plan.sketched)
    assert choice.scheme == "basis"
    is_product = is_multiplied_out(choice.rank, taps, 32 // attributes.get("group", 1))
    assert ("MatMul" in kinds(target)) == is_product
    assert is_product or share < 0.5
    assert_same_outputs(source, target, random(2, *sizes))
    with pytest.raises(NoTargetError, match=r"already factored|nothing to sketch"):
        sketch(target, 0.9, min_params=10)
