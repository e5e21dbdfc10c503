"""Sketched ONNX files compute what the dense ones do where the weights allow it; bad files are refused."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from zoo import ZOO, call, names, tensors

import panther_compile as pc
from panther_compile import onnx_file
from panther_compile.cli import main
from panther_compile.errors import (
    ConfigTypeError,
    NoTargetError,
    OnnxExternalDataError,
    OnnxFileError,
    OnnxInvalidError,
    SelectorError,
    WeightError,
)

AUTO = torch.export.Dim.AUTO
OPTIONS = {"min_params": 300, "allow_slower": True, "progress": False}
FAST = ("distilbert", "gpt2", "resnet", "odd_convnet", "tied_autoencoder")
RNG = np.random.default_rng(0)


def low_rank(rows, columns, rank=6, dtype=np.float32):
    """A matrix that a sketch at half the numbers holds exactly."""
    left, right = RNG.standard_normal((rows, rank)), RNG.standard_normal((rank, columns))
    return (left @ right / np.sqrt(rank * rows)).astype(dtype)


def kernel(outputs, inputs, size, rank=4):
    return low_rank(outputs, inputs * size * size, rank).reshape(outputs, inputs, size, size)


def make(path, nodes, weights, x=("n", 48), y=None, *, opset=13, ir_version=8, **parts):
    """Write a model of one input x and one output y."""
    functions, dtype = parts.pop("functions", []), parts.pop("dtype", TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, x), *parts.pop("inputs", [])],
        [helper.make_tensor_value_info("y", dtype, y), *parts.pop("outputs", [])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), *parts.pop("domains", [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version, functions=functions)
    model = onnx.shape_inference.infer_shapes(model)  # shapes of the outputs
    del model.graph.value_info[:]
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def run(path, x):
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = x if isinstance(x, list) else [x]
    return session.run(None, {one.name: v for one, v in zip(session.get_inputs(), inputs, strict=True)})


def sketch(source, ratio=0.5, **options):
    """Sketch, and check what holds for every result: same interface, unique names, less of it."""
    target = source.with_name("out.onnx")
    report = pc.sketch_onnx(source, target, ratio, **(OPTIONS | options))
    before, after = (onnx.load(path) for path in (source, target))
    assert (after.ir_version, list(after.opset_import)) == (before.ir_version, list(before.opset_import))
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)
    nodes = [node.name for node in after.graph.node if node.name]
    values = [name for node in after.graph.node for name in node.output] + [
        tensor.name for tensor in after.graph.initializer
    ]
    assert len(set(nodes)) == len(nodes)
    assert len(set(values)) == len(values)
    assert 0 < report.achieved_ratio <= ratio
    assert report.sketched_bytes == target.stat().st_size
    return report, target


def assert_same_outputs(source, target, x):
    for one, other in zip(run(source, x), run(target, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(one).max())


def reasons(report):
    return {line.name: line.reason for line in report.plan.layers if line.choice is None}


def random(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


node = helper.make_node
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


def mlp(path, widths=(48, 96, 64, 3), **options):
    """What converters make of a pipeline: scaling, dense layers with biases, class probabilities."""
    weights = {"mean": random(widths[0]), "scale": np.abs(random(widths[0]))}
    nodes = [node("Sub", ["x", "mean"], ["s"]), node("Mul", ["s", "scale"], ["h0"])]
    for i, (before, after) in enumerate(pairwise(widths)):
        weights |= {f"coef{i}": low_rank(before, after), f"bias{i}": random(after)}
        nodes += [
            node("MatMul", [f"h{i}", f"coef{i}"], [f"m{i}"], name=f"layer{i}"),
            node("Add", [f"m{i}", f"bias{i}"], [f"a{i}"]),
            node("Relu" if i < len(widths) - 2 else "Softmax", [f"a{i}"], [f"h{i + 1}"]),
        ]
    nodes[-1].output[0] = "y"
    return make(path, nodes, weights, y=("n", widths[-1]), **options)


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
        ({"include": "*", "min_params": 1, "ratio": 0.9}, ["coef0", "coef1", "coef2"]),
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
    _, target = sketch(source)
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
    dense = pc.densify(pc.sketchify(entry.build(), 0.3, **OPTIONS))
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
    with pytest.raises(NoTargetError, match=r"already factored|output head|small"):
        pc.sketch_onnx(target, tmp_path / "again.onnx", 0.9, **OPTIONS)


# ------------------------------------------------------------------------------ files, good and bad


def beside(path, location="weights.bin"):
    """The model again, with its weights in another file."""
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def test_external_data_stays_external_and_in_the_folder(tmp_path):
    source = mlp(tmp_path / "in.onnx")
    (tmp_path / "there").mkdir()
    x = random(3, 48)
    wanted = run(source, x)[0]
    beside(source)
    target = tmp_path / "there" / "out.onnx"
    report = pc.sketch_onnx(source, target, **OPTIONS)
    files = sorted(file.name for file in target.parent.iterdir())
    assert len(files) == 2
    assert files[1].startswith("out.onnx-")
    assert report.sketched_bytes == sum((target.parent / name).stat().st_size for name in files)
    np.testing.assert_allclose(run(target, x)[0], wanted, atol=1e-5)


def test_a_file_can_be_sketched_in_place(tmp_path):
    source, x = beside(mlp(tmp_path / "m.onnx")), random(3, 48)
    wanted = run(source, x)[0]
    pc.sketch_onnx(source, source, 0.5, **(OPTIONS | {"include": "coef0"}))
    pc.sketch_onnx(source, source, 0.5, **(OPTIONS | {"include": "coef1"}))
    np.testing.assert_allclose(run(source, x)[0], wanted, atol=1e-5)
    assert len(list(tmp_path.glob("m.onnx-*.data"))) == 1


def relocate(path, location):
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("how", ["parent", "absolute", "link", "missing", "short"])
def test_external_data_that_cannot_be_trusted_is_refused(how, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    source = beside(mlp(folder / "in.onnx"))
    data = folder / "weights.bin"
    wanted = "outside the model's folder"
    if how in ("parent", "absolute", "link"):
        outside = tmp_path / "weights.bin"
        data.rename(outside)
        if how == "link":
            data.symlink_to(outside)
        else:
            relocate(source, "../weights.bin" if how == "parent" else str(outside))
    elif how == "missing":
        data.unlink()
        wanted = "which is missing"
    else:
        os.truncate(data, 100)
        wanted = "cut short: 100 bytes"
    with pytest.raises(OnnxExternalDataError, match=wanted):
        pc.sketch_onnx(source, folder / "out.onnx", **OPTIONS)
    assert not (folder / "out.onnx").exists()


def broken(path, change):
    model = onnx.load(mlp(path))
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def swap(model):
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))


def close_circle(model):
    model.graph.node[0].input[0] = model.graph.node[-2].output[0]


def dangle(model):
    model.graph.node[3].input[1] = "nobody"


def set_opset(version):
    def change(model):
        model.opset_import[0].version = version

    return change


def add_training(model):
    model.training_info.add()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "not a sound ONNX model: .*topologically sorted"),
        (close_circle, "not a sound ONNX model"),
        (dangle, "not a sound ONNX model: .*nobody"),
        (set_opset(10), "opset 10, wanted 11 to"),
        (set_opset(1000), "opset 1000, wanted 11 to"),
        (lambda model: model.graph.ClearField("node"), "holds no graph"),
        (add_training, "training_info"),
    ],
)
def test_unsound_models_are_refused(change, message, tmp_path):
    source = broken(tmp_path / "in.onnx", change)
    with pytest.raises(OnnxInvalidError, match=message):
        pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["in.onnx"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_files_are_refused(share, tmp_path):
    source = mlp(tmp_path / "in.onnx")
    source.write_bytes(source.read_bytes()[: int(share * source.stat().st_size)])
    with pytest.raises(OnnxInvalidError, match="truncated"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)


def test_bad_requests_are_told(tmp_path):
    source, target = mlp(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    with pytest.raises(OnnxFileError, match="cannot read"):
        pc.sketch_onnx(tmp_path / "none.onnx", target)
    with pytest.raises(OnnxFileError, match="cannot write"):
        pc.sketch_onnx(source, tmp_path / "none" / "out.onnx", **OPTIONS)
    with pytest.raises(SelectorError, match=r"include: 'encoder\.\*' matches none of the 3 weights"):
        pc.sketch_onnx(source, target, include="encoder.*")
    with pytest.raises(ConfigTypeError, match=r"unknown option inplace \(of sketchify alone\)"):
        pc.sketch_onnx(source, target, inplace=True)
    weight = low_rank(48, 64)
    weight[3, 3] = np.nan
    make(source, [node("MatMul", ["x", "w"], ["y"])], {"w": weight})
    with pytest.raises(WeightError, match="w holds 1 NaN or Inf"):
        pc.sketch_onnx(source, target)
    assert [file.name for file in tmp_path.iterdir()] == ["in.onnx"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    source, target = mlp(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    target.write_text("old")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(onnx_file.os, "replace", fail)
    with pytest.raises(OnnxFileError, match="no space left"):
        pc.sketch_onnx(source, target, **OPTIONS)
    assert target.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_documents_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs/onnx.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S)), {})
    assert "1 of 2 layers to be sketched" in capsys.readouterr().out


def test_command_line(tmp_path, capsys):
    source, target = mlp(tmp_path / "in.onnx", (64, 512, 512, 3)), tmp_path / "out.onnx"
    arguments = ["sketch-onnx", str(source), str(target), "--ratio", "0.4", "--min-params", "100"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["achieved_ratio"] <= 0.4
    assert document["sketched_bytes"] == target.stat().st_size
    assert main(arguments) == 0
    assert "saved to" in capsys.readouterr().out
    assert main(["sketch-onnx", str(tmp_path / "none.onnx"), str(target)]) == 2
    assert "OnnxFileError: cannot read" in capsys.readouterr().err
