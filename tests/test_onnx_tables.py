"""Tables of embeddings in ONNX files, whose rows Gather nodes look up."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import far, kinds, node, reasons

import panther_compile as pc
from panther_compile.onnx.int8_tables import round_tables, rounded_rows

V, D = 300, 24
OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False}
INCLUDE = {"include": ["table"]}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def texts(count, seed=1, dtype=np.int64):
    rng, chances = np.random.default_rng(seed), 1.0 / np.arange(1, V + 1)
    return [rng.choice(V, (8, 8), p=chances / chances.sum()).astype(dtype) for _ in range(count)]


def written(path, nodes, weights, *, ids=("n", "t"), dtype=TensorProto.INT64, opset=17):
    weights = {"table": drawn(V, D), **weights}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", dtype, ids)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def reader(path, gather=(), **options):
    """A table, a product, and what reads it."""
    nodes = [
        node("Gather", ["table", "ids"], ["h"], **dict(gather)),
        node("MatMul", ["h", "w"], ["m"]),
        node("Tanh", ["m"], ["a"]),
        node("MatMul", ["a", "v"], ["y"]),
    ]
    return written(path, nodes, {"w": drawn(D, D, seed=1) / 5, "v": drawn(D, 5, seed=2) / 5}, **options)


def run(path, data):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"ids": ids})[0].reshape(-1, 5) for ids in data])


def sketched(source, ratio=0.4, name="out.onnx", **options):
    target = source.with_name(name)
    report = pc.sketch_onnx(source, target, ratio, **OPTIONS | INCLUDE | options)
    onnx.checker.check_model(target)
    return report, target


def feeds(batches):
    return [{"ids": ids} for ids in batches]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("gather", [(), (("axis", 0),), (("axis", -2),)])
def test_rows_are_fitted_to_how_often_they_are_looked_up(tmp_path, dtype, gather):
    kind = TensorProto.INT64 if dtype is np.int64 else TensorProto.INT32
    source = reader(tmp_path / "in.onnx", gather, dtype=kind)
    data, others = texts(24, dtype=dtype), texts(8, seed=9, dtype=dtype)
    report, fitted = sketched(source, data=feeds(data))
    _, plain = sketched(source, name="plain.onnx")
    assert report.plan.route == "ONNX graph, run by torch"
    assert {name: one.method for name, one in report.fitted.items()} == {"table": "calibrated"}
    assert kinds(fitted) == kinds(source) + Counter(MatMul=1)
    assert fitted.stat().st_size < 0.6 * source.stat().st_size
    wanted = run(source, others)
    assert far(run(fitted, others), wanted) < 0.5 * far(run(plain, others), wanted)


def test_one_budget_with_the_products_and_int8_behind_it(tmp_path):
    source = reader(tmp_path / "in.onnx")
    options = {"data": feeds(texts(24)), "include": ["table", "w"]}
    report, both = sketched(source, **options)
    assert "table" in report.fitted
    assert report.achieved_ratio <= 0.4
    _, rounded = sketched(source, name="int8.onnx", then="int8", **options)
    others = texts(8, seed=9)
    assert far(run(both, others), run(source, others)) < 0.3
    assert far(run(rounded, others), run(source, others)) < 0.3
    assert rounded.stat().st_size < both.stat().st_size


@pytest.mark.parametrize("ids", [(), (3,), (2, 3, 4)])
def test_whatever_shape_is_looked_up(tmp_path, ids):
    nodes = [node("Gather", ["table", "ids"], ["y"])]
    source = written(tmp_path / "in.onnx", nodes, {}, ids=ids)
    _, target = sketched(source)
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).integers(0, V, ids)
    (found,) = session.run(None, {"ids": rows})
    held = {one.name: numpy_helper.to_array(one) for one in onnx.load(target).graph.initializer}
    wanted = (held["table.codes"] @ held["table.basis"])[rows]
    assert found.shape == (*ids, D)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("runtime_alone")
def test_what_torch_does_not_run_is_cut_by_its_weights(tmp_path):
    source = reader(tmp_path / "in.onnx")
    report, target = sketched(source, data=feeds(texts(8)), include=["table", "w"], ratio=0.6)
    assert report.fitted["table"].method == "svd"
    assert run(target, texts(2)).shape == (128, 5)


def test_left_alone_unless_included(tmp_path):
    source = reader(tmp_path / "in.onnx")
    report, _ = sketched(source, include=None, ratio=0.6)
    assert reasons(report)["table"] == "embedding: left alone unless included"


def test_a_table_that_is_a_head_too_stays(tmp_path):
    nodes = [
        node("Gather", ["table", "ids"], ["h"]),
        node("MatMul", ["h", "w"], ["m"]),
        node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        node("MatMul", ["m", "turned"], ["y"]),
    ]
    source = written(tmp_path / "in.onnx", nodes, {"w": drawn(D, D) / 5})
    report, _ = sketched(source, include=["table", "w"], ratio=0.6)
    assert reasons(report)["table"] == "its weight is also read by Gather"


def test_what_is_no_look_up_of_rows_is_none(tmp_path):
    nodes = [
        node("Gather", ["table", "ids"], ["h"]),
        node("Gather", ["columns", "ids"], ["c"], axis=1),
        node("Gather", ["numbers", "ids"], ["i"]),
        node("Gather", ["fixed", "rows"], ["f"]),
        node("Cast", ["i"], ["k"], to=TensorProto.FLOAT),
        node("ReduceSum", ["c"], ["s"], keepdims=0),
        node("ReduceSum", ["k"], ["r"], keepdims=0),
        node("ReduceSum", ["f"], ["q"], keepdims=0),
        *(node("Add", pair, [name]) for name, pair in (("a", ["h", "s"]), ("b", ["a", "r"]))),
        node("Add", ["b", "q"], ["y"]),
    ]
    weights = {"columns": drawn(D, V), "numbers": np.ones((V, D), np.int64), "fixed": drawn(V, D)}
    source = written(tmp_path / "in.onnx", nodes, {**weights, "rows": np.array([1, 2])})
    report, _ = sketched(source, include=["table"])
    assert [one.name for one in report.plan.layers] == ["table"]


def test_in_int8_rows_have_scales_of_their_own(tmp_path):
    table = drawn(3000, D) * np.logspace(-2, 1, 3000, dtype=np.float32)[:, None]
    table[7] = 0.0
    nodes = [
        node("Gather", ["table", "ids"], ["h"]),
        node("Gather", ["small", "ids"], ["p"]),
        node("Gather", ["boxes", "ids"], ["b"]),
        node("ReduceMean", ["b"], ["r"], axes=[-1]),
        *(node("Add", pair, [name]) for name, pair in (("q", ["h", "p"]), ("s", ["q", "r"]))),
        node("MatMul", ["s", "w"], ["y"]),
    ]
    weights = {
        "table": table,
        "small": drawn(3000, 1),
        "boxes": drawn(20000, 4),
        "w": drawn(D, 200, seed=1) / 5,
    }
    source = written(tmp_path / "in.onnx", nodes, weights)
    _, target = sketched(source, 1.0, then="int8", include=None)
    held = {one.name: numpy_helper.to_array(one) for one in onnx.load(target).graph.initializer}
    assert "table" not in held
    assert held["small"].dtype == np.float32  # too small to gain
    assert held["boxes"].dtype == np.float32  # too narrow to be words
    assert held["table.int8"].dtype == np.int8
    rounded = held["table.int8"] * held["table.scale"]
    assert not rounded[7].any()
    assert (np.abs(rounded - table) <= np.abs(table).max(1, keepdims=True) / 254 * 1.001).all()
    ids = np.random.default_rng(0).integers(0, 3000, (4, 8))
    pair = [
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"ids": ids})[0]
        for path in (target, source)
    ]
    assert far(*pair) < 0.02
    assert source.stat().st_size - target.stat().st_size > 0.7 * table.nbytes


@pytest.mark.parametrize(("known", "scales", "copies"), [(True, 3000, 0), (False, 3000, 1), (True, 1, 1)])
def test_a_table_is_one_with_a_product_of_known_ids_and_a_scale_for_each_row(tmp_path, known, scales, copies):
    table = drawn(3000, D)
    table /= np.abs(table).max(1, keepdims=True)
    numbers, steps = rounded_rows(torch.from_numpy(table))
    nodes = [
        node("Abs", ["ids"], ["computed"]),
        node("Gather", ["table", "computed"], ["y"]),
        node("DynamicQuantizeLinear", ["y"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "head_quantized", "zero"], ["z"]),
    ]
    weights = {"table": table, "head_quantized": numbers.T.numpy(), "head_scale": steps[:scales, 0].numpy()}
    source = written(tmp_path / "in.onnx", nodes, weights)
    model = ir.load(source)
    if not known:
        model.graph[0].outputs[0].shape = None
    round_tables(model)
    assert sum(name == "table.int8" for name in model.graph.initializers) == copies
    ir.save(model, tmp_path / "out.onnx")
    given = np.random.default_rng(0).integers(0, 3000, (4, 8))
    found, wanted = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], {"ids": given})[0]
        for path in (tmp_path / "out.onnx", source)
    )
    assert far(found, wanted) < 0.01


@pytest.mark.parametrize(("scaled", "copies"), [(1.0, 0), (np.linspace(0.2, 5, D, dtype=np.float32), 1)])
def test_in_int8_a_table_and_an_output_head_are_one(tmp_path, scaled, copies):
    """Unless the head multiplies by something else."""
    table = drawn(3000, D)
    nodes = [
        node("Gather", ["table", "ids"], ["h"]),
        node("MatMul", ["h", "w"], ["z"]),
        node("MatMul", ["z", "head"], ["y"]),
    ]
    weights = {"table": table, "w": drawn(D, D, seed=1) / 5, "head": np.ascontiguousarray((table * scaled).T)}
    source = written(tmp_path / "in.onnx", nodes, weights)
    _, target = sketched(source, 1.0, then="int8", include=None)
    held = {one.name: numpy_helper.to_array(one) for one in onnx.load(target).graph.initializer}
    assert [held[name].shape for name in held if name == "table.int8"] == [(3000, D)] * copies
    assert sum(one.size for one in held.values() if one.dtype == np.int8) < (1.1 + copies) * table.size
    ids = np.random.default_rng(0).integers(0, 3000, (4, 8))
    pair = [
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"ids": ids})[0]
        for path in (target, source)
    ]
    assert far(*pair) < 0.02
