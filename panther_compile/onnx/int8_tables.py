"""Tables of embeddings in int8, with a scale for each row.

Before:
    Gather(table, ids)                                          table (V, D) in float32
After:
    Mul(Cast(Gather(numbers, ids)), Gather(scales, ids))        numbers (V, D) in int8, scales (V, 1)

After, where an output head, say, multiplies by the same numbers, which are stored for it as (D, V):
    Mul(Cast(Transpose(Gather(numbers, ids, axis=1))), Gather(scales, ids))

A row is rounded to 127 steps on each side of 0, its own largest number being the last one. A look-up moves
few numbers: what is gained are three quarters of the table's bytes, half of a small encoder's file.
Tables of few columns are no embeddings, but boxes or coordinates, whose steps would be pixels.
"""

import onnx_ir as ir
import torch
from torch import Tensor

from panther_compile.onnx.branches import graph_of
from panther_compile.onnx.lowering import GraphWriter, turn_look_up_into
from panther_compile.onnx.pair_range import scale_of
from panther_compile.onnx.patterns import is_onnx, remove_unread
from panther_compile.onnx.sites import OnnxWeight, constant_weights, to_torch

_LEAST = 1 << 16  # numbers; what is smaller is not worth three more nodes
_LEAST_COLUMNS = 16
_STEPS = 127
_AS_NEAR = 2.0  # times its own rounding, what a product has made of a table may be off it


def round_tables(model: ir.Model) -> None:
    """Round the tables of a model that are only looked up in, in place; its products are in int8 already."""
    found = [one for one in constant_weights(model) if _is_rounded(one)]
    writer = GraphWriter(model)
    for weight in found:
        _round(weight, writer)


def _is_rounded(weight: OnnxWeight) -> bool:
    value, nodes = weight.value, {use.node for use in weight.uses}
    return (
        all(use.is_table for use in weight.uses)
        and weight.tensor.dtype == ir.DataType.FLOAT
        and weight.tensor.size >= _LEAST
        and int(weight.tensor.shape[1]) >= _LEAST_COLUMNS  # type: ignore[arg-type]
        and nodes.issuperset(value.consumers())
        and not value.is_graph_input()
        and not value.is_graph_output()
    )


def _round(weight: OnnxWeight, writer: GraphWriter) -> None:
    table = to_torch(weight.tensor)
    nodes = [use.node for use in weight.uses]
    numbers, steps = rounded_rows(table)
    most = _AS_NEAR * float((numbers * steps - table).norm())
    ranks = [_rank(node.inputs[1]) for node in nodes]
    shared = None if None in ranks else _of_product(table, weight, most)
    if shared is None:
        held = writer.weight_beside(weight.value, f"{weight.name}.int8", numbers)
    else:
        held, steps = shared
    scales = writer.weight_beside(weight.value, f"{weight.name}.scale", steps)
    for node, rank in zip(nodes, ranks, strict=True):
        ids = node.inputs[1]
        (rows,) = writer.node(node, "Gather", (held, ids), axis=0 if shared is None else 1)
        if shared is not None:
            assert rank is not None
            (rows,) = writer.node(node, "Transpose", (rows,), perm=[*range(1, rank + 1), 0])
        (wide,) = writer.node(node, "Cast", (rows,), to=ir.DataType.FLOAT.value)
        (sizes,) = writer.node(node, "Gather", (scales, ids), axis=0)
        turn_look_up_into(node, "Mul", wide, sizes)
    remove_unread(weight.value)


def _rank(value: ir.Value | None) -> int | None:
    """How many axes a value has; None where its shape is not known."""
    return None if value is None or value.shape is None else len(value.shape)


def rounded_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 numbers of a table (V, D), and the steps (V, 1) that they count."""
    steps = table.abs().amax(1, keepdim=True) / _STEPS
    return (table / steps.clamp_min(torch.finfo(table.dtype).tiny)).round().to(torch.int8), steps


def _of_product(table: Tensor, weight: OnnxWeight, most: float) -> tuple[ir.Value, Tensor] | None:
    """The int8 numbers (D, V) of a product by the same matrix, and their steps (V, 1), if no farther from it.

    They are coarser where pairs of them would overflow (`pair_range.py`), and those of another matrix where
    the inputs of the product are scaled (`smooth.py`).
    """
    graph = graph_of(weight.value)
    assert isinstance(graph, ir.Graph)
    for value in graph.initializers.values():
        scale = scale_of(graph, value)
        stored, scales = value.const_value, None if scale is None else scale.const_value
        if (
            stored is not None
            and stored.dtype == ir.DataType.INT8
            and tuple(stored.shape) == table.T.shape
            and scales is not None
            and scales.size == len(table)
            and any(place == 1 and is_onnx(node, "MatMulInteger") for node, place in value.uses())
        ):
            steps = to_torch(scales).reshape(-1, 1)
            if float((to_torch(stored).T * steps - table).norm()) <= most:
                return value, steps
    return None
