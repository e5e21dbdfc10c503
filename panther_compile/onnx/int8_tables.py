"""Tables of embeddings in int8, with a scale for each row.

Before:
    Gather(table, ids)                                          table (V, D) in float32
After:
    Mul(Cast(Gather(numbers, ids)), Gather(scales, ids))        numbers (V, D) in int8, scales (V, 1)

A row is rounded to 127 steps on each side of 0, its own largest number being the last one. A look-up moves
few numbers: what is gained are three quarters of the table's bytes, half of a small encoder's file.
Tables of few columns are no embeddings, but boxes or coordinates, whose steps would be pixels.
"""

import onnx_ir as ir
import torch

from panther_compile.onnx.lowering import GraphWriter, turn_look_up_into
from panther_compile.onnx.patterns import remove_unread
from panther_compile.onnx.sites import OnnxWeight, constant_weights, to_torch

_LEAST = 1 << 16  # numbers; what is smaller is not worth three more nodes
_LEAST_COLUMNS = 16
_STEPS = 127


def round_tables(model: ir.Model) -> None:
    """Round the tables of a model that are only looked up in, in place."""
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
    steps = table.abs().amax(1, keepdim=True) / _STEPS
    numbers = (table / steps.clamp_min(torch.finfo(table.dtype).tiny)).round().to(torch.int8)
    named = {"int8": numbers, "scale": steps}
    held = [writer.weight_beside(weight.value, f"{weight.name}.{name}", one) for name, one in named.items()]
    for node in (use.node for use in weight.uses):
        rows, scales = (writer.node(node, "Gather", (one, node.inputs[1]), axis=0)[0] for one in held)
        (wide,) = writer.node(node, "Cast", (rows,), to=ir.DataType.FLOAT.value)
        turn_look_up_into(node, "Mul", wide, scales)
    remove_unread(weight.value)
