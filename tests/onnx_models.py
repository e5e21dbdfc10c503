"""Small ONNX models whose weights have a low rank, and what holds for every sketch of one."""

from collections import Counter
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import panther_compile as pc

OPTIONS = {"min_params": 300, "allow_slower": True, "progress": False}
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


def kinds(path):
    """How often each operator comes up."""
    return Counter(one.op_type for one in onnx.load(path).graph.node)


def far(found, wanted):
    """Relative error."""
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


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


def reseed():
    """Draw the same numbers again."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def random(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


node = helper.make_node


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
    return make(path, nodes, weights, x=("n", widths[0]), y=("n", widths[-1]), **options)
