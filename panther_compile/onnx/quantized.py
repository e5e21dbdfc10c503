"""The products of an ONNX file by quantized weights, whoever quantized it, and the dense ones they stand for.

    MatMulNBits                                             weights of a few bits in blocks, as ONNX Runtime's
    DequantizeLinear ─► MatMul or Gemm                      QDQ, of weights alone or of activations too
    DynamicQuantizeLinear ─► MatMulInteger ─► Cast ─► Mul   as `quantize_dynamic` writes

What matrix a product multiplies by is not decoded: ONNX Runtime is asked what it makes of the unit vectors.
"""

# I in_features, O out_features
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from panther_compile.onnx.files import saved_copy
from panther_compile.onnx.patterns import is_onnx, makers_of
from panther_compile.onnx.sites import constant_weights, to_torch
from panther_compile.onnx.verify import load_session

_LIKE = 0.5  # of the dense weight's size: a quantized weight is no further off
_GIVEN = "unit vectors"
_PROBE = 64  # rows and columns at most that are compared first


@dataclass(frozen=True, slots=True)
class Product:
    """A product by one matrix.

    Attributes:
        name: of its node.
        x: what it multiplies: behind a QuantizeLinear, whose range may be all that is left of an activation;
            ahead of a DynamicQuantizeLinear, whose range holds all that it is given.
        y: what it makes.
        matrix: `(I, O)`, float32.
        dtype: that it computes in; values in a file need not have one.
    """

    name: str
    x: ir.Value
    y: ir.Value
    matrix: Tensor
    dtype: ir.DataType

    @property
    def branch_dtype(self) -> torch.dtype:
        """The dtype of the factors beside it."""
        return torch.float16 if self.dtype == ir.DataType.FLOAT16 else torch.float32


def quantized_products(model: ir.Model, folder: Path) -> list[Product]:
    """The quantized products of a graph, subgraphs left out, in its order.

    Args:
        model: is left as it is.
        folder: where small models are written for a moment.

    Raises:
        OnnxMismatchError: ONNX Runtime cannot run one of them.
    """
    found = []
    for node in model.graph:
        ends = _ends(node)
        if ends is None:
            continue
        x, y, features = ends
        dtype = _dtype_of(node)
        matrix = _matrix(_part(model, x, y, dtype), features, folder)
        found.append(Product(node.name or str(y.name), x, y, matrix, dtype))
    return found


def dense_products(model: ir.Model) -> list[Product]:
    """The products by a constant matrix of a dense graph, in its order."""
    found = {}
    for weight in constant_weights(model):
        if weight.uses[0].is_conv or len(weight.tensor.shape) != 2:
            continue
        for use in weight.uses:
            x, y = use.node.inputs[0], use.node.outputs[0]
            if use.index == 1 and x is not None and use.node.graph is model.graph:
                matrix = to_torch(weight.tensor).float()
                matrix = matrix.t() if use.transposed else matrix
                alpha = use.node.attributes.get_float("alpha", 1.0)
                dtype = ir.DataType(weight.tensor.dtype)
                found[use.node] = Product(use.node.name or str(y.name), x, y, alpha * matrix, dtype)
    return [found[node] for node in model.graph if node in found]


def twins_of(quantized: Sequence[Product], dense: Sequence[Product]) -> dict[int, Product]:
    """The dense product that each quantized one stands for, by place: that of the closest weight.

    Of several that are as close, the first that is not taken. Those without a weight like theirs are missing.
    """
    left, found = list(dense), {}
    for place, product in enumerate(quantized):
        alike = [one for one in left if one.matrix.shape == product.matrix.shape]
        if not alike:
            continue
        best = min(alike, key=lambda one: _distance(product.matrix, one.matrix, probe=True))
        if _distance(product.matrix, best.matrix) < _LIKE:
            found[place] = best
            left.remove(best)
    return found


def _distance(one: Tensor, other: Tensor, *, probe: bool = False) -> float:
    """How far one matrix is from another, relative to the other; a probe compares some rows and columns."""
    if probe:
        rows, columns = (slice(None, None, max(1, size // _PROBE)) for size in one.shape)
        one, other = one[rows, columns], other[rows, columns]
    return float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))


def _ends(node: ir.Node) -> tuple[ir.Value, ir.Value, int] | None:
    """What a quantized product reads, its result, and I; None of other nodes."""
    x = node.inputs[0] if node.inputs else None
    if x is None:
        return None
    if node.op_type == "MatMulNBits":
        return x, node.outputs[0], node.attributes["K"].as_int()
    if is_onnx(node, "MatMul", "Gemm"):
        shape = _dequantized_shape(node)
        if shape is None or node.attributes.get_int("transA", False):
            return None
        features = shape[1] if node.attributes.get_int("transB", 0) else shape[0]
        return x, node.outputs[0], features
    if is_onnx(node, "MatMulInteger"):
        maker, y = x.producer(), node.outputs[0]
        tensor = None if node.inputs[1] is None else ir.convenience.get_const_tensor(node.inputs[1])
        for wanted in ("Cast", "Mul"):
            readers = y.consumers()
            if len(readers) != 1 or not is_onnx(readers[0], wanted):
                return None
            y = readers[0].outputs[0]
        if maker is None or tensor is None or not is_onnx(maker, "DynamicQuantizeLinear"):
            return None
        source = maker.inputs[0]
        if source is None or len(tensor.shape) != 2:
            return None
        return source, y, tensor.shape.numpy()[0]
    return None


def _dequantized_shape(node: ir.Node) -> tuple[int, int] | None:
    """The shape of a product's matrix if DequantizeLinear makes it of a constant, transposed or not."""
    maker, turned = _maker_of_matrix(node)
    if maker is None or not is_onnx(maker, "DequantizeLinear") or maker.inputs[0] is None:
        return None
    tensor = ir.convenience.get_const_tensor(maker.inputs[0])
    if tensor is None or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape.numpy()
    return (columns, rows) if turned else (rows, columns)


def _maker_of_matrix(node: ir.Node) -> tuple[ir.Node | None, bool]:
    """What makes a product's matrix, and whether it is transposed behind that."""
    value = node.inputs[1]
    maker = None if value is None else value.producer()
    if maker is not None and is_onnx(maker, "Transpose") and maker.inputs[0] is not None:
        return maker.inputs[0].producer(), True
    return maker, False


def _dtype_of(node: ir.Node) -> ir.DataType:
    """What a quantized product computes in: the type of its scales."""
    scale = node.inputs[2] if node.op_type == "MatMulNBits" else None
    if is_onnx(node, "MatMul", "Gemm"):
        maker, _ = _maker_of_matrix(node)
        scale = None if maker is None else maker.inputs[1]
    tensor = None if scale is None else ir.convenience.get_const_tensor(scale)
    return ir.DataType.FLOAT if tensor is None else ir.DataType(tensor.dtype)


def _matrix(part: ir.Model, features: int, folder: Path) -> Tensor:
    """What a product makes of the unit vectors, less what it makes of zeros (I, O)."""
    with saved_copy(part, folder) as path:
        session = load_session(path, "a quantized product")
        dtype = np.float16 if "float16" in session.get_inputs()[0].type else np.float32
        units, zeros = np.eye(features, dtype=dtype), np.zeros((1, features), dtype=dtype)
        one, none = (session.run(None, {_GIVEN: rows})[0] for rows in (units, zeros))
    return torch.from_numpy(one.astype(np.float32) - none.astype(np.float32))


def _part(model: ir.Model, x: ir.Value, y: ir.Value, dtype: ir.DataType) -> ir.Model:
    """A model of the nodes that make y of x, and of constants."""
    needed = set(makers_of(y, {x}))
    given = ir.Value(name=_GIVEN, type=x.type or ir.TensorType(dtype))
    new: dict[ir.Value, ir.Value] = {x: given}
    weights: list[ir.Value] = []

    def copied(value: ir.Value | None) -> ir.Value | None:
        if value is None or value in new:
            return None if value is None else new[value]
        new[value] = ir.Value(
            name=value.name, type=value.type, shape=value.shape, const_value=value.const_value
        )
        weights.append(new[value])
        return new[value]

    nodes = [node for node in model.graph if node in needed]
    made = []
    for node in nodes:
        one = ir.Node(
            node.domain,
            node.op_type,
            [copied(value) for value in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=node.name,
        )
        for old, fresh in zip(node.outputs, one.outputs, strict=True):
            fresh.name, fresh.type = old.name, old.type
            new[old] = fresh
        made.append(one)
    end = new[y]
    end.type = end.type or given.type
    opsets: Mapping[str, int] = model.opset_imports
    graph = ir.Graph(
        [given], [end], nodes=made, initializers=weights, opset_imports=dict(opsets), name="product"
    )
    return ir.Model(graph, ir_version=model.ir_version)
