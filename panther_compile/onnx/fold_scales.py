"""Scales and shifts by constants, batch norms among them, go into the convolutions beside them.

Before:
    y = Conv(x, W, b);  z = Mul(y, s);  u = Add(z, t);  a = Relu(u)
    p = Mul(a, q);      v = Add(p, r);  c = Conv(v, V, d)
After:
    u = Conv(x, s W, s b + t);          a = Relu(u)
    c = Conv(a, q V, d + V r)                       without padding
    v = Add(a, r / q);  c = Conv(v, q V, d)         with it: beside v is 0, beside a is not

The same function, up to rounding. ONNX Runtime folds constants of one number for each channel behind a
convolution by itself, but none of shape (1,), as Paddle writes its learnable affine blocks, and none ahead of
one; for each of them it turns memory around, twice. Weights in half types are left alone, and those that are
read elsewhere, and so is the 0.5 of a GELU, without which ONNX Runtime does not see that it is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch

from panther_compile.onnx.forms import ends_gelu
from panther_compile.onnx.lowering import GraphWriter
from panther_compile.onnx.patterns import fixed_tensor, is_onnx, is_read_once, put_in_place_of, remove_unread

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_UNPADDED = ("NOTSET", "VALID")


def fold_scales(model: ir.Model) -> int:
    """Fold them in place, in subgraphs too; counts the nodes that are gone."""
    writer = GraphWriter(model)
    behind = sum(_fold_behind_one(node, writer) for node in list(model.graph.all_nodes()))
    return behind + sum(_fold_ahead_of_all(node, writer) for node in list(model.graph.all_nodes()))


@dataclass(frozen=True, slots=True)
class _Affine:
    """`scale * value + shift`, of float64 constants.

    Attributes:
        value: no constant.
        scale: is broadcast to it.
        shift: likewise.
        last: the node that gives the result.
        nodes: how many do it, 1 or 2.
    """

    value: ir.Value
    scale: np.ndarray
    shift: np.ndarray
    last: ir.Node
    nodes: int = 1

    @property
    def output(self) -> ir.Value:
        """The result."""
        return self.last.outputs[0]

    def with_next(self) -> "_Affine":
        """It and the node behind it as one, where that alone reads it and is another such."""
        other = _affine(self.output.consumers()[0]) if is_read_once(self.output) else None
        if other is None:
            return self
        scale, shift = self.scale * other.scale, self.shift * other.scale + other.shift
        return _Affine(self.value, scale, shift, other.last, 2)


@dataclass(frozen=True, slots=True)
class _Conv:
    """A convolution that alone reads its weight.

    Attributes:
        node: the convolution.
        value: that its weight is.
        weight: `(O, I / G, ...)`, float64.
        bias: `(O,)`, likewise.
        groups: G.
    """

    node: ir.Node
    value: ir.Value
    weight: np.ndarray
    bias: np.ndarray
    groups: int

    @property
    def inputs(self) -> int:
        """I."""
        return self.weight.shape[1] * self.groups

    @property
    def dtype(self) -> np.dtype:
        """The type that it computes in."""
        tensor = fixed_tensor(self.value)
        assert tensor is not None
        return tensor.dtype.numpy()

    @property
    def is_padded(self) -> bool:
        """Whether it reads zeros beside its input."""
        pads = self.node.attributes.get_ints("pads", ())
        return self.node.attributes.get_string("auto_pad", "NOTSET") not in _UNPADDED or any(pads)

    def times(self, numbers: np.ndarray, *, outputs: bool = False) -> np.ndarray:
        """The weight times numbers of its inputs `(I,)` or outputs `(O,)`."""
        rows = numbers[:, None]
        if not outputs:
            rows = numbers.reshape(self.groups, -1).repeat(len(self.weight) // self.groups, axis=0)
        return self.weight * rows.reshape(*rows.shape, *(1,) * (self.weight.ndim - 2))

    def channels(self, constant: np.ndarray, count: int) -> np.ndarray | None:
        """A constant as one number for each of so many channels; None if it is another."""
        dims = self.weight.ndim
        shape = (1,) * (dims - constant.ndim) + constant.shape
        fits = len(shape) == dims and shape[1] in (1, count) and constant.size == shape[1]
        return np.broadcast_to(constant.reshape(-1), count) if fits else None

    def takes(self, affine: _Affine) -> bool:
        """Whether it may read the value itself: where constants give it neither axes nor channels."""
        constants, shape = (affine.scale, affine.shift), affine.value.shape
        if all(one.size == 1 and one.ndim < self.weight.ndim for one in constants):
            return True
        return shape is not None and len(shape) == self.weight.ndim and shape[1] == self.inputs


def _fold_behind_one(node: ir.Node, writer: GraphWriter) -> int:
    affine = _affine(node)
    maker = None if affine is None else affine.value.producer()
    conv = None if maker is None or maker.graph is not node.graph else _conv(maker)
    if affine is None or conv is None or not is_read_once(affine.value) or affine.output.is_graph_output():
        return 0
    scale, shift = (conv.channels(one, len(conv.weight)) for one in (affine.scale, affine.shift))
    if scale is None or shift is None:
        return 0
    folded = replace(conv, weight=conv.times(scale, outputs=True), bias=scale * conv.bias + shift)
    if not _store([folded], writer):
        return 0
    put_in_place_of(affine.output, affine.value)
    return 1


def _fold_ahead_of_all(node: ir.Node, writer: GraphWriter) -> int:
    affine = _affine(node)
    if affine is None or ends_gelu(node):
        return 0
    affine = affine.with_next()
    readers = affine.output.consumers()
    convs = [conv for one in readers if one.graph is node.graph and (conv := _conv(one)) is not None]
    if not convs or len(convs) < len(readers) or affine.output.is_graph_output():
        return 0
    stays = bool(affine.shift.any()) and any(conv.is_padded for conv in convs)
    with np.errstate(all="ignore"):
        left = affine.shift / affine.scale
    if stays and (affine.nodes == 1 or not np.isfinite(left).all()):
        return 0
    folded = []
    for conv in convs:
        scale, shift = (conv.channels(one, conv.inputs) for one in (affine.scale, affine.shift))
        if scale is None or shift is None or not conv.takes(affine):
            return 0
        moved = 0.0 if stays else conv.times(shift).reshape(len(conv.weight), -1).sum(1)
        folded.append(replace(conv, weight=conv.times(scale), bias=conv.bias + moved))
    if not _store(folded, writer):
        return 0
    value = _shifted(affine, left, folded[0], writer) if stays else affine.value
    put_in_place_of(affine.output, value)
    return affine.nodes - stays


def _affine(node: ir.Node) -> _Affine | None:
    """What a node does to a value that is no constant, if it scales or shifts it by one."""
    if node.graph is None:
        return None
    if is_onnx(node, "BatchNormalization"):
        return _norm(node)
    if not is_onnx(node, "Mul", "Div", "Add", "Sub"):
        return None
    for index in (1, 0) if is_onnx(node, "Mul", "Add") else (1,):
        value, constant = node.inputs[1 - index], _constant(node.inputs[index])
        if value is None or constant is None or fixed_tensor(value) is not None:
            continue
        if is_onnx(node, "Add", "Sub"):
            return _Affine(value, np.ones(()), -constant if node.op_type == "Sub" else constant, node)
        with np.errstate(all="ignore"):
            return _Affine(value, 1 / constant if node.op_type == "Div" else constant, np.zeros(()), node)
    return None


def _norm(node: ir.Node) -> _Affine | None:
    """The same of a batch norm, whose statistics are constants."""
    value, constants = node.inputs[0], [_constant(one) for one in node.inputs[1:]]
    trains = node.attributes.get_int("training_mode", 0) == 1 or len(node.outputs) > 1
    axes = None if value is None else _rank(value)
    if value is None or axes is None or trains:
        return None
    known = [one for one in constants if one is not None]
    if len(known) < len(constants):
        return None
    weight, bias, mean, variance = known
    scale = weight / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    scale, shift = (one.reshape(-1, *(1,) * (axes - 2)) for one in (scale, bias - mean * scale))
    return _Affine(value, scale, shift, node)


def _rank(value: ir.Value) -> int | None:
    """How many axes a value has; None where that is not known."""
    maker = value.producer()
    if maker is not None and is_onnx(maker, "Conv") and (weight := maker.inputs[1]) is not None:
        value = weight
    return None if value.shape is None else len(value.shape)


def _conv(node: ir.Node) -> _Conv | None:
    """The convolution that a node is, if its weight is its own and its bias a constant."""
    if not is_onnx(node, "Conv"):
        return None
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    array, added = _constant(weight), _constant(bias)
    if weight is None or array is None or not is_read_once(weight) or (bias is not None and added is None):
        return None
    added = np.zeros(len(array)) if added is None else added
    return _Conv(node, weight, array, added, node.attributes.get_int("group", 1))


def _constant(value: ir.Value | None) -> np.ndarray | None:
    """A constant in float64; None if it is no constant, or none of these types."""
    tensor = fixed_tensor(value)
    return None if tensor is None or tensor.dtype not in _WIDE else tensor.numpy().astype(np.float64)


def _store(convs: Sequence[_Conv], writer: GraphWriter) -> bool:
    """Give convolutions their weights and biases: all, or none where one is not finite in its type."""
    with np.errstate(all="ignore"):
        arrays = [[one.astype(conv.dtype) for one in (conv.weight, conv.bias)] for conv in convs]
    if not all(np.isfinite(one).all() for pair in arrays for one in pair):
        return False
    for conv, (array, bias) in zip(convs, arrays, strict=True):
        tensor, maker = ir.tensor(array, name=conv.value.name), conv.value.producer()
        if maker is None:
            conv.value.const_value = tensor
        else:
            maker.attributes["value"] = ir.AttrTensor("value", tensor)
        before = conv.node.inputs[2:]
        conv.node.resize_inputs(3)
        added = writer.weight_beside(conv.value, f"{conv.value.name}.bias", torch.from_numpy(bias))
        conv.node.replace_input_with(2, added)
        for value in before:
            if value is not None:
                remove_unread(value)
    return True


def _shifted(affine: _Affine, left: np.ndarray, conv: _Conv, writer: GraphWriter) -> ir.Value:
    """The value and what is left of the shift, in the type of the convolution."""
    name = f"{affine.last.name or 'shift'}.left"
    constant = writer.weight_beside(affine.output, name, torch.from_numpy(left.astype(conv.dtype)))
    (value,) = writer.node(affine.last, "Add", (affine.value, constant))
    return value
