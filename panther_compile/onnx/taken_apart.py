"""Operators of ONNX Runtime's own as those that they were fused of, where they hold a weight or a bias.

    FusedMatMul(x, W)             ──►  MatMul(x, W), a Transpose ahead of it, a Mul behind it
    FusedGemm, FusedConv          ──►  Gemm, Conv, an Add of what is added, the activation
    Attention(x, W, b)            ──►  MultiHeadAttention(x Wq + bq, x Wk + bk, x Wv + bv)
    MultiHeadAttention(.., b)     ──►  the same of three Adds
    EmbedLayerNormalization       ──►  LayerNormalization of the sum of three Gather
    BiasGelu, FastGelu(x, b)      ──►  Gelu, FastGelu of Add(x, b)
    SkipLayerNormalization(.., b) ──►  the same of Add(x, b)

So files that ONNX Runtime's optimizer wrote are sketched as those it was given. As it reads a file it fuses
most of this again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from panther_compile.onnx.lowering import GraphWriter
from panther_compile.onnx.patterns import RUNTIME, fixed_tensor, is_onnx, remove_unread
from panther_compile.onnx.sites import to_torch

_Step = tuple[str, Sequence[ir.Value | None], Mapping[str, Any]]
_PARTS = ("query", "key", "value")
_ACTIVATION = "activation"
_PARAMETERS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}
_BIAS_AT = {"BiasGelu": 1, "FastGelu": 1, "SkipLayerNormalization": 4, "SkipSimplifiedLayerNormalization": 3}
_WITHOUT = {"BiasGelu": "Gelu"}
_UNUSUAL = ("do_rotary", "past_present_share_buffer")
_LENGTHS = ("EmbedLayerNormalization", "ReduceSum")
_USUAL_EPSILON = 1e-12


def take_apart(model: ir.Model) -> None:
    """Take them apart, in place, in subgraphs too; uses that are not plain stay as they are."""
    writer = GraphWriter(model)
    parts: dict[ir.Value, list[ir.Value]] = {}
    for node in list(model.graph.all_nodes()):
        if node.domain != RUNTIME:
            continue
        if node.op_type == "FusedMatMul":
            _product(node, writer)
        elif node.op_type in ("FusedGemm", "FusedConv"):
            _activated(node, writer)
        elif node.op_type == "Attention":
            _attention(node, writer, parts)
        elif node.op_type == "EmbedLayerNormalization":
            _embedding(node, writer)
        elif node.op_type == "MultiHeadAttention":
            _biased_heads(node, writer, parts)
        elif (place := _BIAS_AT.get(node.op_type)) is not None and _given(node, place) is not None:
            (added,) = writer.node(node, "Add", (node.inputs[0], node.inputs[place]))
            node.op_type = _WITHOUT.get(node.op_type, node.op_type)
            node.replace_input_with(0, added)
            _leave_out(node, place)


def _given(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _leave_out(node: ir.Node, place: int) -> None:
    """Have a node read nothing at a place; the last inputs are left out whole."""
    node.replace_input_with(place, None)
    while node.inputs[-1] is None:
        node.resize_inputs(len(node.inputs) - 1)


def _become(node: ir.Node, writer: GraphWriter, x: ir.Value | None, steps: Sequence[_Step]) -> None:
    """Make a node the last of some steps from x, each of which reads what the one before made."""
    *ahead, (op_type, others, attributes) = steps
    for step, given, options in ahead:
        (x,) = writer.node(node, step, (x, *given), **options)
    node.domain, node.op_type = "", op_type
    node.resize_inputs(1 + len(others))
    for place, value in enumerate((x, *others)):
        node.replace_input_with(place, value)
    node.attributes.clear()
    for attribute in ir.convenience.convert_attributes(dict(attributes)):
        node.attributes[attribute.name] = attribute


def _product(node: ir.Node, writer: GraphWriter) -> None:
    """A FusedMatMul, if one operand is a constant matrix, and what it transposes has two axes."""
    options = {name: one.value for name, one in node.attributes.items()}
    tensors = [fixed_tensor(one) for one in node.inputs]
    if options.get("transBatchA", 0) or options.get("transBatchB", 0):
        return
    if sum(one is not None and len(one.shape) == 2 for one in tensors) != 1:
        return
    flips = [bool(options.get(name, 0)) for name in ("transA", "transB")]
    ranks = [_rank(one) for one in node.inputs]
    if any(flip and rank is None for flip, rank in zip(flips, ranks, strict=True)):
        return
    operands: list[ir.Value | None] = list(node.inputs)
    for place, (flip, rank) in enumerate(zip(flips, ranks, strict=True)):
        if flip and rank is not None:
            turned = [*range(rank - 2), rank - 1, rank - 2]
            (operands[place],) = writer.node(node, "Transpose", (operands[place],), perm=turned)
    left, right = operands
    steps: list[_Step] = [("MatMul", (right,), {})]
    alpha = float(options.get("alpha", 1.0))
    if alpha != 1.0:
        tensor = next(one for one in tensors if one is not None)
        scale = torch.tensor(alpha, dtype=ir.tensor_adapters.to_torch_dtype(ir.DataType(tensor.dtype)))
        assert isinstance(node.graph, ir.Graph)
        steps.append(("Mul", (writer.weight(node.graph, f"{node.name or 'product'}.alpha", scale),), {}))
    _become(node, writer, left, steps)


def _activated(node: ir.Node, writer: GraphWriter) -> None:
    """A FusedGemm or FusedConv, of any activation of ONNX."""
    options = {name: one.value for name, one in node.attributes.items()}
    own = {name: value for name, value in options.items() if not name.startswith(_ACTIVATION)}
    x, *others = node.inputs
    added = others.pop() if node.op_type == "FusedConv" and len(others) == 3 else None
    steps: list[_Step] = [(node.op_type.removeprefix("Fused"), others, own)]
    if added is not None:
        steps.append(("Add", (added,), {}))
    activation = options.get(_ACTIVATION)
    given = list(options.get("activation_params", ()))
    if activation == "Clip":
        assert isinstance(node.graph, ir.Graph)
        ends = [writer.weight(node.graph, f"{node.name or 'conv'}.end", torch.tensor(one)) for one in given]
        steps.append(("Clip", ends, {}))
    elif activation:
        attributes = dict(zip(_PARAMETERS.get(activation, ()), given, strict=False))
        prefix = f"{_ACTIVATION}_"
        attributes |= {
            name.removeprefix(prefix): value
            for name, value in options.items()
            if name.startswith(prefix) and name != "activation_params"
        }
        steps.append((activation, (), attributes))
    _become(node, writer, x, steps)


def _attention(node: ir.Node, writer: GraphWriter, parts: dict[ir.Value, list[ir.Value]]) -> None:
    """An Attention without a cache, whose weights are a constant matrix of queries, keys and values."""
    options = {name: one.value for name, one in node.attributes.items()}
    x, weights, bias, mask, past, logits, length = [*node.inputs, *[None] * 5][:7]
    tensor, shift = fixed_tensor(weights), fixed_tensor(bias)
    cached = [*(one for one in node.outputs[1:] if one.uses() or one.is_graph_output()), past, length]
    if any(one is not None for one in cached) or any(options.get(name, 0) for name in _UNUSUAL):
        return
    if weights is None or tensor is None or (bias is not None and shift is None) or not _is_plain(mask):
        return
    sizes = [int(one) for one in options.get("qkv_hidden_sizes", [])] or [int(tensor.shape[1]) // 3] * 3  # type: ignore[arg-type]
    matrices = _divided(weights, sizes, parts, writer)
    made = [writer.node(node, "MatMul", (x, matrix))[0] for matrix in matrices]
    if bias is not None:
        shifts = _divided(bias, sizes, parts, writer)
        made = [writer.node(node, "Add", pair)[0] for pair in zip(made, shifts, strict=True)]
    node.op_type = "MultiHeadAttention"
    node.attributes.pop("qkv_hidden_sizes", None)
    given = [*made, None, mask, logits]
    node.resize_inputs(len(given))
    for place, value in enumerate(given):
        node.replace_input_with(place, value)
    _leave_out(node, 3)
    for value in (weights, bias):
        if value is not None:
            remove_unread(value)


def _embedding(node: ir.Node, writer: GraphWriter) -> None:
    """An EmbedLayerNormalization; if lengths of texts are read, one that is given a mask."""
    ids, segments, words, places, kinds, scale, shift, mask, order = [*node.inputs, None, None][:9]
    others = [*node.outputs[1:], None, None][:2]
    lengths, total = (one if one is not None and one.uses() else None for one in others)
    if any(one.is_graph_output() for one in node.outputs[1:]) or (lengths is not None and mask is None):
        return
    if order is None:  # from the first place on
        (size,) = writer.node(node, "Shape", (ids,))
        (count,) = writer.node(node, "Gather", (size, writer.integers(node, [1])))
        first = writer.integers(node, [0])
        (found,) = writer.node(node, "Slice", (places, first, count, first))
    else:
        (found,) = writer.node(node, "Gather", (places, order))
    (summed,) = writer.node(node, "Add", (writer.node(node, "Gather", (words, ids))[0], found))
    if segments is not None:
        (found,) = writer.node(node, "Gather", (kinds, segments))
        (summed,) = writer.node(node, "Add", (summed, found))
    if lengths is not None:
        ir.convenience.replace_all_uses_with(lengths, writer.total(node, mask, 1))
    if total is not None:
        ir.convenience.replace_all_uses_with(total, summed)
    node.resize_outputs(1)
    epsilon = node.attributes.get_float("epsilon", _USUAL_EPSILON)
    _become(node, writer, summed, [("LayerNormalization", (scale, shift), {"epsilon": epsilon})])


def _biased_heads(node: ir.Node, writer: GraphWriter, parts: dict[ir.Value, list[ir.Value]]) -> None:
    """A MultiHeadAttention that adds a constant to what three products make."""
    bias = _given(node, 3)
    tensor, makers = fixed_tensor(bias), [None if one is None else one.producer() for one in node.inputs[:3]]
    if bias is None or tensor is None:
        return
    widths = [_width(maker) for maker in makers]
    sizes = [width for width in widths if width is not None]
    if len(sizes) < 3 or sum(sizes) != tensor.size:
        return
    for place, shift in enumerate(_divided(bias, sizes, parts, writer)):
        (added,) = writer.node(node, "Add", (node.inputs[place], shift))
        node.replace_input_with(place, added)
    _leave_out(node, 3)
    remove_unread(bias)


def _width(maker: ir.Node | None) -> int | None:
    """How many numbers a product by a constant matrix makes of each position."""
    tensor = fixed_tensor(maker.inputs[1]) if maker is not None and is_onnx(maker, "MatMul") else None
    return None if tensor is None or len(tensor.shape) != 2 else int(tensor.shape[1])  # type: ignore[arg-type]


def _divided(
    value: ir.Value, sizes: Sequence[int], parts: dict[ir.Value, list[ir.Value]], writer: GraphWriter
) -> list[ir.Value]:
    """A constant in parts along its last axis, made once for all that read it."""
    if value not in parts:
        tensor = fixed_tensor(value)
        assert tensor is not None
        divided: Sequence[Tensor] = to_torch(tensor).split(list(sizes), -1)
        names = (f"{value.name}.{part}" for part in _PARTS)
        parts[value] = [
            writer.weight_beside(value, name, one) for name, one in zip(names, divided, strict=True)
        ]
    return parts[value]


def _is_plain(mask: ir.Value | None) -> bool:
    """Whether a MultiHeadAttention takes what an Attention does: a row, a table or a length of each text."""
    rank = None if mask is None else _rank(mask)
    if mask is None or rank in (2, 3):
        return True
    maker = mask.producer()
    return maker is not None and maker.op_type in _LENGTHS and rank in (1, None)


def _rank(value: ir.Value | None) -> int | None:
    """How many axes a value has, if that is known."""
    while value is not None and value.shape is None:
        maker = value.producer()
        value = maker.inputs[0] if maker is not None and is_onnx(maker, "Cast", "Identity") else None
    return None if value is None or value.shape is None else len(value.shape)
