"""Put sketched layers into an ONNX graph: nodes ahead of the dense one, which becomes the last stage itself.

    MatMul(x, W)        MatMul(MatMul(x, down), up)
    pivoted             x₁, x₂ = Split(x);  MatMul(Add(MatMul(x₂, down), x₁), up)
    Gemm(x, W, b)       the same, and the last product is the Gemm, with its bias, alpha and beta
    Conv(x, W, b)       Conv(Conv(x, down), up), or three; see layers/conv2d.py
    basis               Conv(Reshape(Conv(Reshape(x), down)), up), or Conv(x, Reshape(MatMul(up, down)))
    ConvTranspose       ConvTranspose(Conv(x, down), up)
    Gather(W, ids)      MatMul(Gather(codes, ids), basis)

A dense node keeps its name, its output and its bias; what is new gets names that nothing else has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.convolution import SketchedConvolution
from panther_compile.onnx.branches import graph_of
from panther_compile.onnx.files import WEIGHTS_APART
from panther_compile.onnx.patterns import fixed_tensor, is_onnx, is_read_once, remove_unread
from panther_compile.onnx.sites import OnnxWeight, Use, to_torch, unique_name

# From this opset on, Split takes the sizes as an input, and ReduceSum the axes.
_TAKES_INPUT = 13
STORED_AS = "panther_compile.stored_as"
"""The type that the file stores a weight in, and what is made of it, among what is known of the value."""


@dataclass(frozen=True, slots=True)
class Bias:
    """A constant (O,), or (1, O), that is added to what a product makes.

    Attributes:
        node: that adds it: the product itself, or an Add behind it.
        index: which of the node's inputs it is.
        scale: of the product's matrix, over that of the bias: alpha / beta of a Gemm.
    """

    node: ir.Node
    index: int
    scale: float

    @property
    def value(self) -> ir.Value:
        """The constant."""
        value = self.node.inputs[self.index]
        assert value is not None
        return value


def bias_of(use: Use, outputs: int) -> Bias | None:
    """The bias of a product that reads a weight; None if there is none that is a constant of one row.

    Args:
        use: the product.
        outputs: O.
    """
    node = use.node
    if node.op_type == "MatMul":
        return None if use.index == 0 else added_bias(node.outputs[0], outputs)
    index = 2
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = fixed_tensor(value)
    if tensor is None or (use.index == 0 and not use.is_conv):
        return None
    if not _is_row(tensor, outputs):
        return None
    scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    return Bias(node, index, scales[0] / scales[1]) if scales[1] else None


def added_bias(value: ir.Value, outputs: int) -> Bias | None:
    """The bias that is added to a value by the one node that reads it; None if there is none.

    Args:
        value: made by a product.
        outputs: O.
    """
    reader = value.consumers()[0] if is_read_once(value) else None
    if reader is None or not is_onnx(reader, "Add"):
        return None
    index = 1 if reader.inputs[0] is value else 0
    tensor = fixed_tensor(reader.inputs[index])
    return Bias(reader, index, 1.0) if tensor is not None and _is_row(tensor, outputs) else None


def _is_row(tensor: ir.TensorProtocol, outputs: int) -> bool:
    shape = [int(size) for size in tensor.shape]  # type: ignore[arg-type]
    return tensor.size == outputs and bool(shape) and shape[-1] == outputs


class GraphWriter:
    """Makes nodes and weights of unique names in one model.

    Args:
        model: the model that is changed.
    """

    def __init__(self, model: ir.Model) -> None:
        self._opset = model.opset_imports[""] if "" in model.opset_imports else model.opset_imports["ai.onnx"]
        self._has_weights_apart = model.ir_version >= WEIGHTS_APART
        self._node_names = {node.name or "" for node in model.graph.all_nodes()}
        self._names = {value.name or "" for node in model.graph.all_nodes() for value in node.outputs}
        for graph in model.graphs():
            self._names.update(value.name or "" for value in (*graph.inputs, *graph.initializers.values()))

    def weight(self, graph: ir.Graph, name: str, tensor: Tensor) -> ir.Value:
        """A new initializer; a Constant node where initializers have to be inputs of the graph."""
        name = unique_name(name, self._names)
        stored = TorchTensor(tensor.detach().cpu().contiguous(), name)
        if not self._has_weights_apart:
            made = ir.node("Constant", [], {"value": stored}, name=unique_name(name, self._node_names))
            made.outputs[0].name = name
            graph.insert_before(graph[0], made)
            return made.outputs[0]
        value = ir.Value(
            name=name, type=ir.TensorType(stored.dtype), shape=ir.Shape(stored.shape), const_value=stored
        )
        graph.register_initializer(value)
        return value

    def weight_beside(self, value: ir.Value, name: str, tensor: Tensor) -> ir.Value:
        """A new weight in the graph that has a value."""
        graph = graph_of(value)
        assert isinstance(graph, ir.Graph)
        made = self.weight(graph, name, tensor)
        if STORED_AS in value.meta:
            made.meta[STORED_AS] = value.meta[STORED_AS]
        return made

    def store_as(self, value: ir.Value, tensor: Tensor) -> None:
        """Store an initializer as a tensor of another type, by the same name, and cast it to what it was."""
        graph, name = value.graph, str(value.name)
        assert isinstance(graph, ir.Graph)
        del graph.initializers[name]
        self._names.discard(name)
        stored = self.weight(graph, name, tensor)
        label = unique_name(f"{name}/Cast", self._node_names)
        assert value.dtype is not None
        cast = ir.node("Cast", [stored], {"to": int(value.dtype)}, name=label)
        cast.outputs[0].name = unique_name(label, self._names)
        cast.outputs[0].type, cast.outputs[0].shape = value.type, value.shape
        graph.insert_before(graph[0], cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])

    def node(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int = 1,
        *,
        after: bool = False,
        **attributes: object,
    ) -> Sequence[ir.Value]:
        """The outputs of a new node, placed before another one, or right after it, and named after it."""
        # Not "_MatMul": so ONNX Runtime's quantizer calls what it makes of a Gemm, also where that is taken.
        name = unique_name(f"{before.name or before.outputs[0].name}/{op_type}", self._node_names)
        made = ir.node(op_type, inputs, attributes, num_outputs=outputs, name=name)  # type: ignore[arg-type]
        for output in made.outputs:
            output.name = unique_name(name, self._names)
        assert before.graph is not None
        (before.graph.insert_after if after else before.graph.insert_before)(before, made)
        return made.outputs

    def split(self, before: ir.Node, x: ir.Value | None, sizes: list[int], axis: int) -> Sequence[ir.Value]:
        """The two parts of a value along an axis."""
        if self._opset < _TAKES_INPUT:
            return self.node(before, "Split", (x,), 2, axis=axis, split=sizes)
        return self.node(before, "Split", (x, self.integers(before, sizes)), 2, axis=axis)

    def total(self, before: ir.Node, x: ir.Value | None, axis: int) -> ir.Value:
        """The sum of a value along an axis, which goes."""
        if self._opset < _TAKES_INPUT:
            return self.node(before, "ReduceSum", (x,), axes=[axis], keepdims=0)[0]
        return self.node(before, "ReduceSum", (x, self.integers(before, [axis])), keepdims=0)[0]

    def integers(self, before: ir.Node, numbers: list[int]) -> ir.Value:
        """A constant list of integers."""
        assert isinstance(before.graph, ir.Graph)
        return self.weight(before.graph, f"{before.name or 'node'}_constant", torch.tensor(numbers))


def lower(weight: OnnxWeight, layer: SketchedLayer, writer: GraphWriter) -> None:
    """Rewrite every node that reads a weight, then take the weight away."""
    stored = _stored_factors(weight.uses[0], layer)
    factors = [
        writer.weight_beside(weight.value, f"{weight.name}.{name}", tensor) for name, tensor in stored.items()
    ]
    for use in weight.uses:
        if use.is_table:
            _lower_table(use.node, factors, writer)
        elif use.is_conv:
            _lower_conv(use.node, layer, factors, writer)
        else:
            _lower_matrix(use, layer, factors, writer)
    _remove_weight(weight.value)


def shift_bias(use: Use, shift: Tensor, writer: GraphWriter) -> None:
    """Add to what a product makes (O,), by its bias."""
    bias = bias_of(use, len(shift))
    assert bias is not None
    shift_constant(bias, shift, writer)


def shift_constant(bias: Bias, shift: Tensor, writer: GraphWriter) -> None:
    """Add to a bias (O,)."""
    old = bias.value
    tensor = to_torch(old.const_value or ir.convenience.get_const_tensor(old))  # type: ignore[arg-type]
    moved = (tensor.double() + bias.scale * shift.double().reshape(tensor.shape)).to(tensor.dtype)
    shifted = writer.weight_beside(old, f"{old.name or 'bias'}.shifted", moved)
    bias.node.replace_input_with(bias.index, shifted)
    _remove_weight(old)


def _stored_factors(use: Use, layer: SketchedLayer) -> dict[str, Tensor]:
    """The weights of the stages, the way round that the nodes read them."""
    weights = {name: layer.get_parameter(f"{name}.weight") for name in layer.stages}
    if use.is_table:
        return dict(weights)
    if layer.multiplies_out:
        filters, mixing = weights.values()
        return {"down": filters.flatten(1), "up": mixing.reshape(-1, len(filters))}
    right = not use.is_conv and use.index == 1
    return {name: weight.t() if right else weight for name, weight in weights.items()}


def _lower_matrix(use: Use, layer: SketchedLayer, factors: list[ir.Value], writer: GraphWriter) -> None:
    node, data = use.node, 1 - use.index
    down, up = factors
    x = node.inputs[data]
    if node.op_type == "Gemm":
        flag = "transB" if data else "transA"
        if node.attributes.get_int(flag, 0):
            (x,) = writer.node(node, "Transpose", (x,), perm=[1, 0])
        node.attributes["transA"] = ir.AttrInt64("transA", 0)
        node.attributes["transB"] = ir.AttrInt64("transB", 0)

    def product(value: ir.Value | None) -> ir.Value:
        return writer.node(node, "MatMul", (value, down) if use.index else (down, value))[0]

    if layer.scheme == "pair":
        latent = product(x)
    else:
        pivots, others = _split_pivots(node, x, layer, -1 if use.index else -2, writer)
        (latent,) = writer.node(node, "Add", (product(others), pivots))
    node.replace_input_with(data, latent)
    node.replace_input_with(use.index, up)


def turn_look_up_into(node: ir.Node, op_type: str, first: ir.Value, second: ir.Value) -> None:
    """Make a Gather a node of another operator with two inputs; its name and its output stay."""
    node.op_type = op_type
    node.attributes.pop("axis", None)
    node.replace_input_with(0, first)
    node.replace_input_with(1, second)


def _lower_table(node: ir.Node, factors: list[ir.Value], writer: GraphWriter) -> None:
    codes, basis = factors
    (found,) = writer.node(node, "Gather", (codes, node.inputs[1]), axis=0)
    turn_look_up_into(node, "MatMul", found, basis)


def _lower_conv(node: ir.Node, layer: SketchedLayer, factors: list[ir.Value], writer: GraphWriter) -> None:
    assert isinstance(layer, SketchedConvolution)
    x = node.inputs[0]
    if layer.multiplies_out:  # of constants: ONNX Runtime does it once, as it reads the file
        (product,) = writer.node(node, "MatMul", factors[::-1])
        shape = writer.integers(node, list(layer.weight.shape))  # type: ignore[arg-type]
        node.replace_input_with(1, writer.node(node, "Reshape", (product, shape))[0])
        return
    attributes = dict(node.attributes)
    if layer.scheme == "pivoted":
        stride = list(layer.stride)
        axes = len(stride)
        if node.op_type == "Conv" and set(stride) != {1}:
            bounds = ([0] * axes, [2**62] * axes, list(range(2, 2 + axes)), stride)
            (x,) = writer.node(node, "Slice", (x, *(writer.integers(node, numbers) for numbers in bounds)))
        pivots, others = _split_pivots(node, x, layer, 1, writer)
        (latent,) = writer.node(node, "Conv", (others, factors[0]))
        (x,) = writer.node(node, "Add", (latent, pivots))
    stages = layer.stages
    for stage, factor in zip(stages[:-1], factors[:-1], strict=True):
        if layer.scheme != "pivoted":
            x = _regrouped(node, x, layer, stage, writer)
            (x,) = writer.node(node, "Conv", (x, factor))
            made = x.producer()
            assert made is not None
            _set_geometry(made, layer, stage, attributes)
    x = _regrouped(node, x, layer, stages[-1], writer)
    node.replace_input_with(0, x)
    node.replace_input_with(1, factors[-1])
    if node.op_type == "Conv":  # a transposed one keeps its own
        _set_geometry(node, layer, stages[-1], attributes)


def _regrouped(
    node: ir.Node, x: ir.Value | None, layer: SketchedLayer, name: str, writer: GraphWriter
) -> ir.Value | None:
    """The input of a stage: of a basis with as many channels as it reads, one for the filters."""
    if layer.scheme != "basis":
        return x
    stage: Any = layer.get_submodule(name)
    shape = [-1, stage.in_channels, *(0 for _ in stage.kernel_size)]  # 0: as it is
    return writer.node(node, "Reshape", (x, writer.integers(node, shape)))[0]


def _split_pivots(
    node: ir.Node, x: ir.Value | None, layer: SketchedLayer, axis: int, writer: GraphWriter
) -> Sequence[ir.Value]:
    """The pivots of the input, and the rest of it."""
    down, start = layer.get_submodule("down"), layer.sketch_spec()["start"]
    assert isinstance(down.weight, Tensor)
    rank, width = layer.ranks[0], down.weight.shape[1]
    if start == 0:
        return writer.split(node, x, [rank, width], axis)
    return writer.split(node, x, [width, rank], axis)[::-1]


def _set_geometry(node: ir.Node, layer: SketchedLayer, name: str, dense: dict[str, ir.Attr]) -> None:
    """Give a stage its part of the dense node's attributes: pads along the axes of the dense kernel."""
    stage: Any = layer.get_submodule(name)
    axes = layer.kernel_axes(name)  # type: ignore[operator]
    marks = [int(axis in axes) for axis in range(len(stage.kernel_size))]
    for name, numbers in (
        ("kernel_shape", stage.kernel_size),
        ("strides", stage.stride),
        ("dilations", stage.dilation),
    ):
        node.attributes[name] = ir.AttrInt64s(name, numbers)
    node.attributes["group"] = ir.AttrInt64("group", stage.groups)
    if "auto_pad" in dense:
        node.attributes["auto_pad"] = dense["auto_pad"]
    if "pads" in dense:
        pads = [mark * size for mark, size in zip(marks * 2, dense["pads"].as_ints(), strict=True)]
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)


def _remove_weight(value: ir.Value) -> None:
    """Take a weight away, and the Transpose nodes that nothing reads any more."""
    for node in set(value.consumers()):
        if node.op_type == "Transpose":
            _remove_weight(node.outputs[0])
    remove_unread(value)
