"""A node of ONNX in torch, held against ONNX Runtime."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from panther_compile.onnx.as_torch import OnnxModule, as_tensors
from panther_compile.onnx.data import Feed

RNG = np.random.default_rng(0)
TYPES = {
    "float32": TensorProto.FLOAT,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def write(path, operator, inputs, attributes, outputs, opset, domain=""):
    """Write a graph of one node, and give its inputs; `outputs` are a number of them, or their places."""
    given = [(f"x{place}", one) for place, one in enumerate(inputs) if one is not None]
    names = ["" if one is None else f"x{place}" for place, one in enumerate(inputs)]
    places = range(outputs) if isinstance(outputs, int) else outputs
    results = [f"y{place}" if place in places else "" for place in range(max(places) + 1)]
    graph = helper.make_graph(
        [helper.make_node(operator, names, results, domain=domain, **attributes)],
        "g",
        [helper.make_tensor_value_info(name, TYPES[str(one.dtype)], one.shape) for name, one in given],
        [helper.make_empty_tensor_value_info(name) for name in results if name],
    )
    opsets = [helper.make_opsetid(*one) for one in (("", opset), ("com.microsoft", 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path.write_bytes(model.SerializeToString())
    return Feed({name: np.asarray(one) for name, one in given})


def compare(path, feed):
    """Hold what torch makes of a file against ONNX Runtime."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = session.run(None, dict(feed))
    module = OnnxModule(ir.load(path), [])
    found = module(**as_tensors(feed))
    for value, other in zip(module._program.graph.outputs, wanted, strict=True):
        one = found[value.name]
        assert tuple(one.shape) == other.shape
        shown = module.as_logits(value, torch.from_numpy(np.asarray(other)))
        torch.testing.assert_close(one, shown, rtol=1e-4, atol=1e-5)
