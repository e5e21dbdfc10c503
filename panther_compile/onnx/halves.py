"""Weights of an ONNX graph that are stored in a half type and cast: they are worked on as they are cast.

Before and after:
    w: float16;  wide = Cast(w);  y = MatMul(x, wide)
Between:
    w: float32;  y = MatMul(x, w)

What is sketched of such a weight is stored as the weight was, if a half type holds it: the file does not grow
by what it saves.
"""

from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor, to_torch_dtype

from panther_compile.onnx.files import WEIGHTS_APART
from panther_compile.onnx.lowering import STORED_AS, GraphWriter
from panther_compile.onnx.patterns import is_onnx, put_in_place_of
from panther_compile.onnx.sites import to_torch

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ROUNDING = {ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}  # of a number that is no tiny one


def widen_halves(model: ir.Model) -> None:
    """Store in float32, in place, each constant of a half type that nothing reads but casts to float32."""
    if model.ir_version < WEIGHTS_APART:
        return
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            tensor = None if value.is_graph_input() or value.is_graph_output() else value.const_value
            casts = None if tensor is None or tensor.dtype not in _HALVES else _casts_of(value)
            if tensor is None or not casts:
                continue
            value.meta[STORED_AS] = tensor.dtype
            value.const_value = TorchTensor(to_torch(tensor).float(), value.name)
            value.dtype = ir.DataType.FLOAT
            for cast in casts:
                (given,) = cast.inputs
                assert given is not None
                given.dtype = ir.DataType.FLOAT
                put_in_place_of(cast.outputs[0], given)


def _casts_of(value: ir.Value) -> list[ir.Node] | None:
    """All that read a constant, as it is or transposed: casts to float32; None if there is anything else."""
    found: list[ir.Node] = []
    for node in value.consumers():
        made = node.outputs[0]
        if made.is_graph_output():
            return None
        if is_onnx(node, "Cast") and node.attributes.get_int("to", 0) == ir.DataType.FLOAT:
            found.append(node)
        elif is_onnx(node, "Transpose") and (behind := _casts_of(made)):
            found += behind
        else:
            return None
    return found


def stored_halves(model: ir.Model) -> dict[str, ir.DataType]:
    """The type that widened constants, and what was made of them, are to be stored in, by their names."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    names = Counter(value.name for value in values)  # two branches of an If may use one
    alone = [one for one in values if STORED_AS in one.meta and names[one.name] == 1]
    return {str(one.name): one.meta[STORED_AS] for one in alone}


def narrow_halves(model: ir.Model, stored: Mapping[str, ir.DataType]) -> None:
    """Store them so again, in place, and cast them; those that a half type does not hold stay in float32."""
    writer = GraphWriter(model)
    for graph in model.graphs():
        for name in [name for name in graph.initializers if name in stored]:
            value, dtype = graph.initializers[name], stored[name]
            tensor = value.const_value
            assert tensor is not None
            if tensor.dtype != ir.DataType.FLOAT or not value.consumers():
                continue
            wide = to_torch(tensor)
            half = wide.to(to_torch_dtype(dtype))
            if float((half.float() - wide).norm()) <= _ROUNDING[dtype] * float(wide.norm()):
                writer.store_as(value, half)
