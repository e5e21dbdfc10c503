"""Pivoted convolutions that read their input whole, where that is faster than to split it.

Before:
    x₁, x₂ = Split(x);  y = Conv(Add(Conv(x₂, down), x₁), up)
After:
    y = Conv(Conv(x, Concat(identity, down)), up)

ONNX Runtime keeps channels in blocks from one convolution to the next on a CPU, but for what is split: that
it turns around, copies and turns back, which costs more than the identity does where the rank is low. The
file stores what it did: ONNX Runtime makes the identity as it reads it.
"""

from dataclasses import dataclass

import onnx_ir as ir

from panther_compile.onnx.lowering import GraphWriter
from panther_compile.onnx.patterns import fixed_tensor, is_onnx, remove_unread

_WORTH = 45
"""Products of two numbers that take the time of moving one around (ONNX Runtime 1.32, x86 with AVX-512)."""


@dataclass(frozen=True, slots=True)
class _Pivoted:
    """The nodes of a pivoted convolution.

    Attributes:
        whole: what it reads, (N, C, ..).
        down: convolves the channels that are no pivots.
        added: adds the pivots, and makes the latent.
        first: whether the pivots are the first channels, not the last.
        rank: how many there are.
    """

    whole: ir.Value
    down: ir.Node
    added: ir.Node
    first: bool
    rank: int


def read_whole(model: ir.Model) -> int:
    """Have them read it whole, in subgraphs too; counts them. Those of other types than float32 stay."""
    writer, count = GraphWriter(model), 0
    for node in list(model.graph.all_nodes()):
        found = _pivoted(node)
        if found is not None:
            _widen(found, writer)
            count += 1
    return count


def _pivoted(node: ir.Node) -> _Pivoted | None:
    """The convolution whose pivots a node adds; None if there is none, or it is faster as it is."""
    if not is_onnx(node, "Add") or node.outputs[0].is_graph_output():
        return None
    for pivots, product in (node.inputs, node.inputs[::-1]):
        down = None if product is None else product.producer()
        others = down.inputs[0] if down is not None and is_onnx(down, "Conv") else None
        if down is None or pivots is None or others is None or len(down.outputs[0].uses()) > 1:
            continue
        kernel, places = fixed_tensor(down.inputs[1]), _places(pivots, others)
        if kernel is None or places is None or kernel.dtype != ir.DataType.FLOAT or len(down.inputs) > 2:
            continue
        rank, width, *sizes = (int(size) for size in kernel.shape)  # type: ignore[arg-type]
        whole, first = places
        if set(sizes) == {1} and rank * rank <= _WORTH * (rank + width):
            return _Pivoted(whole, down, node, first, rank)
    return None


def _places(pivots: ir.Value, others: ir.Value) -> tuple[ir.Value, bool] | None:
    """What two values are all the channels of, and whether the first of them are the first ones."""
    one, other = pivots.producer(), others.producer()
    whole = None if one is None else one.inputs[0]
    if one is None or other is None or whole is None or whole is not other.inputs[0]:
        return None
    if one is other:
        is_split = is_onnx(one, "Split") and one.attributes.get_int("axis", 0) == 1
        return (whole, pivots is one.outputs[0]) if is_split and len(one.outputs) == 2 else None
    if not is_onnx(one, "Slice") or not is_onnx(other, "Slice"):
        return None
    own, rest = _channels(one), _channels(other)
    if own is None or rest is None:
        return None
    (first, middle), (same, _) = sorted((own, rest))
    return (whole, own < rest) if first == 0 and middle == same else None


def _channels(node: ir.Node) -> tuple[int, int] | None:
    """Where the channels that a Slice takes begin and end; None if it takes anything else."""
    tensors = [fixed_tensor(value) for value in node.inputs[1:]]
    shape = node.outputs[0].shape
    if len(tensors) < 3 or shape is None or any(one is None or one.size != 1 for one in tensors):
        return None
    start, _, axis, *step = (int(one.numpy().reshape(())) for one in tensors if one is not None)
    size = shape[1] if len(shape) > 1 else None
    if axis not in (1, 1 - len(shape)) or step not in ([], [1]) or start < 0 or not isinstance(size, int):
        return None
    return start, start + size


def _widen(found: _Pivoted, writer: GraphWriter) -> None:
    node, kernel = found.down, found.down.inputs[1]
    tensor = fixed_tensor(kernel)
    assert tensor is not None
    square = writer.integers(node, [found.rank, found.rank])
    zero = ir.tensor([0.0], dtype=ir.DataType.FLOAT)
    (zeros,) = writer.node(node, "ConstantOfShape", (square,), value=zero)
    (ones,) = writer.node(node, "EyeLike", (zeros,))
    shape = writer.integers(node, [found.rank, found.rank, *[1] * (len(tensor.shape) - 2)])
    (identity,) = writer.node(node, "Reshape", (ones, shape))
    both = (identity, kernel) if found.first else (kernel, identity)
    (wide,) = writer.node(node, "Concat", both, axis=1)
    parts = [value for value in found.added.inputs if value is not node.outputs[0]]
    ir.convenience.replace_all_uses_with(found.added.outputs[0], node.outputs[0])
    others = node.inputs[0]
    node.replace_input_with(0, found.whole)
    node.replace_input_with(1, wide)
    remove_unread(found.added.outputs[0])
    for value in (*parts, others):
        if value is not None:
            remove_unread(value)
