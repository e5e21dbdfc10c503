"""Weights that a file stores in a half type and casts: sketched, and stored so again."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import (
    OPTIONS,
    assert_same_outputs,
    far,
    kernel,
    kinds,
    low_rank,
    make,
    node,
    random,
    reasons,
    run,
    sketch,
)

import panther_compile as pc
from panther_compile.errors import NoTargetError

TYPES = {np.float16: TensorProto.FLOAT16, ml_dtypes.bfloat16: TensorProto.BFLOAT16}
MLP = [
    node("Cast", ["w"], ["w32"], to=1),
    node("MatMul", ["x", "w32"], ["m"]),
    node("Cast", ["b"], ["b32"], to=1),
    node("Add", ["m", "b32"], ["a"]),
    node("Relu", ["a"], ["r"]),
    node("Transpose", ["v"], ["vt"], perm=[1, 0]),
    node("Cast", ["vt"], ["v32"], to=1),
    node("MatMul", ["r", "v32"], ["y"]),
]


def mlp(path, dtype=np.float16, *, rank=6, v=(40, 64), **parts):
    weights = {"w": low_rank(48, 64, rank), "b": random(64), "v": low_rank(*v, rank)}
    return make(path, MLP, {name: one.astype(dtype) for name, one in weights.items()}, y=("n", 40), **parts)


def types(path):
    return {one.name: one.data_type for one in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("dtype", TYPES)
def test_factors_are_stored_as_the_weight_was(tmp_path, dtype):
    """Behind a Cast, and one behind a Transpose."""
    source = mlp(tmp_path / "in.onnx", dtype)
    report, target = sketch(source, include=["w", "v"])
    assert len(report.fitted) == 2
    x = random(9, 48)
    (one,), (other,) = run(source, x), run(target, x)
    assert far(other, one) < (2e-3 if dtype is np.float16 else 2e-2)
    found = types(target)
    assert {found[name] for name in found if name.startswith(("w.", "v."))} == {TYPES[dtype]}
    assert kinds(target)["Cast"] == 5  # two pairs and a bias
    again = tmp_path / "again.onnx"
    with pytest.raises(NoTargetError, match="already factored"):
        pc.sketch_onnx(target, again, 0.5, **OPTIONS)


def test_what_stays_dense_stays_as_it_is(tmp_path):
    """To the bit."""
    source = mlp(tmp_path / "in.onnx", rank=40)
    report, target = sketch(source, exclude="v")
    assert set(report.fitted) == {"w"}
    before, after = (
        {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
        for path in (source, target)
    )
    np.testing.assert_array_equal(before["v"], after["v"])
    np.testing.assert_array_equal(before["b"], after["b"])


def test_kernels_and_data(tmp_path):
    """Torch runs such a graph, and biases in a half type make up for the means."""
    nodes = [
        node("Cast", ["w"], ["w32"], to=1),
        node("Cast", ["b"], ["b32"], to=1),
        node("Conv", ["x", "w32", "b32"], ["y"], kernel_shape=[3, 3], pads=[1] * 4),
    ]
    weights = {"w": kernel(32, 16, 3).astype(np.float16), "b": random(32).astype(np.float16)}
    size = (2, 16, 8, 8)
    source = make(tmp_path / "in.onnx", nodes, weights, x=size, y=(2, 32, 8, 8))
    data = [random(*size) for _ in range(4)]
    report, target = sketch(source, data=data)
    assert report.plan.route == "ONNX graph, run by torch"
    (one,), (other,) = run(source, data[0]), run(target, data[0])
    assert far(other, one) < 2e-3
    assert {kind for name, kind in types(target).items() if name.startswith("w.")} == {TensorProto.FLOAT16}


def test_numbers_that_a_half_type_does_not_hold(tmp_path):
    """A factor of tiny numbers would be nothing in float16: it stays in float32."""
    source = mlp(tmp_path / "in.onnx")
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.name in ("w", "b"):
            tiny = (numpy_helper.to_array(tensor).astype(np.float32) * 4e-6).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(tiny, tensor.name))
    onnx.save(model, source)
    _, target = sketch(source, 0.9)
    (one,), (other,) = run(source, x := random(9, 48)), run(target, x)
    assert far(other, one) < 0.2  # the weight itself is of a high rank: it is rounded
    assert types(target)["w.up"] == TensorProto.FLOAT


def test_int8(tmp_path):
    source = mlp(tmp_path / "in.onnx")
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.5, then="int8", **OPTIONS)
    assert set(report.fitted) == {"w"}
    assert kinds(tmp_path / "out.onnx")["MatMulInteger"] == 3
    (one,), (other,) = run(source, x := random(9, 48)), run(tmp_path / "out.onnx", x)
    assert far(other, one) < 0.05


def test_a_weight_that_is_read_in_halves_too(tmp_path):
    """It cannot be taken away; the report says that a Cast makes the other one."""
    nodes = [
        node("Cast", ["w"], ["w32"], to=1),
        node("MatMul", ["x", "w32"], ["m"]),
        node("MatMul", ["m", "v"], ["z"]),
        node("ReduceSum", ["w"], ["s"], keepdims=0),
        node("Cast", ["s"], ["s32"], to=1),
        node("Add", ["z", "s32"], ["y"]),
    ]
    weights = {"w": low_rank(48, 64).astype(np.float16), "v": low_rank(64, 48)}
    source = make(tmp_path / "in.onnx", nodes, weights, y=("n", 48))
    report, target = sketch(source)
    assert set(report.fitted) == {"v"}
    assert "its weight is made by Cast" in reasons(report).values()
    assert_same_outputs(source, target, random(9, 48))


def test_branches_that_use_one_name(tmp_path):
    """The weight of the other branch stays in float32."""

    def branch(dtype, width):
        weight = numpy_helper.from_array(low_rank(48, width).astype(dtype), "w")
        wide = [node("Cast", ["w"], ["v"], to=1)] if dtype is np.float16 else [node("Identity", ["w"], ["v"])]
        read = [*wide, node("MatMul", ["x", "v"], ["h"]), node("Relu", ["h"], ["z"])]
        outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, ("n", width))]
        return helper.make_graph(read, "branch", [], outputs, [weight])

    nodes = [
        node("ReduceMax", ["x"], ["most"], keepdims=0),
        node("Greater", ["most", "three"], ["is"]),
        node("If", ["is"], ["h"], then_branch=branch(np.float32, 96), else_branch=branch(np.float16, 96)),
        node("MatMul", ["h", "u"], ["y"]),
    ]
    weights = {"three": np.float32(3), "u": low_rank(96, 96)}
    source = make(tmp_path / "in.onnx", nodes, weights, y=("n", 96))
    _, target = sketch(source, exclude="w*")
    assert_same_outputs(source, target, np.full((4, 48), 4, np.float32))


def test_pivoted_kernels(tmp_path):
    """They read their input whole, beside an identity, and are seen to be factored once written."""
    nodes = [node("Cast", ["w"], ["w32"], to=1), node("Conv", ["x", "w32"], ["y"], kernel_shape=[1, 1])]
    size = (2, 48, 5, 5)
    weights = {"w": kernel(64, 48, 1).astype(np.float16)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=size, y=(2, 64, 5, 5))
    report, target = sketch(source)
    assert [line.choice.scheme for line in report.plan.sketched] == ["pivoted"]
    assert kinds(target)["EyeLike"] == 1
    (one,), (other,) = run(source, x := random(*size)), run(target, x)
    assert far(other, one) < 2e-3
    assert {kind for name, kind in types(target).items() if name.startswith("w.")} == {TensorProto.FLOAT16}
    with pytest.raises(NoTargetError, match="already factored"):
        pc.sketch_onnx(target, tmp_path / "again.onnx", 0.5, **OPTIONS)
