"""What an operation does to a sharded tensor: one table, of those that run on shards as they are.

    operation          sharded along                 each operand                        result
    elementwise        any axis of the result        sharded alike; whole if broadcast   sharded alike
    layer, RMS norm    an axis not normalised        weight and bias whole               sharded alike
    softmax            an axis not summed                                                sharded alike
    mean, sum          an axis not summed                                                sharded alike
    view, unflatten    features or heads             heads must divide (`through_view`)  along the heads
    transpose          any axis                                                          the axis, moved
    expand             an axis not expanded                                              sharded alike
    select, slice,     another axis, or whole                                            sharded alike, or
    split, chunk       blocks of the sharded one                                         with fewer blocks
    cat                another axis                  sharded alike                       sharded alike
    attention, matmul  heads or batch                sharded alike; mask whole           sharded alike

What is not in the table needs whole operands. Linear layers and embeddings, which have parameters to shard,
are in `sharding_sites`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from panther_compile.partition.shards.placements import (
    Placement,
    Replicate,
    Shard,
    through_range,
    through_view,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """An operation on shards.

    Attributes:
        out: placement of the result.
        needs: of each operand.
    """

    out: Shard
    needs: dict[fx.Node, Placement]


Derive = Callable[[fx.Node, fx.Node, Shard, int], Rule | None]
Localize = Callable[[fx.Node, Shard, int], tuple[Any, ...]]


def derive_rule(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    """How a node runs on shards if one of its operands has a placement; None if it does not.

    Args:
        node: of the graph.
        source: one of its operands.
        shard: of the operand.
        tp: number of devices.
    """
    entry = _TABLE.get(_packet(node))
    if entry is None or any(
        not has_shape(operand) for operand in node.all_input_nodes if operand is not source
    ):
        return None
    rule = entry[0](node, source, shard, tp)
    if rule is None:
        return None
    fits = all(
        need.fits(shape(operand), tp)
        for operand, need in rule.needs.items()
        if isinstance(need, Shard) and has_shape(operand)
    )
    return rule if fits and (not has_shape(node) or rule.out.fits(shape(node), tp)) else None


class KnownRules:
    """The rules of a graph that does not change, each derived once."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, fx.Node, Shard, int], Rule | None] = {}

    def derive(self, node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
        """See `derive_rule`."""
        key = node, source, shard, tp
        if key not in self._known:
            self._known[key] = derive_rule(node, source, shard, tp)
        return self._known[key]


def local_arguments(node: fx.Node, out: Shard, tp: int) -> tuple[Any, ...]:
    """The node's arguments with sizes and offsets as one device needs them, for such a result."""
    return _TABLE[_packet(node)][1](node, out, tp)


def has_shape(node: fx.Node) -> bool:
    """Whether a node is a tensor."""
    return isinstance(node.meta.get("tensor"), Tensor)


def shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    return tuple(node.meta["tensor"].shape)


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", node.target)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument, however it was passed."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _same_arguments(node: fx.Node, out: Shard, tp: int) -> tuple[Any, ...]:
    return node.args


def _dims(value: Any, count: int) -> set[int]:
    values = value if isinstance(value, Sequence) else [value]
    return {int(dim) % count for dim in values}


def aligned(operand: fx.Node, out: Shard, count: int) -> Placement:
    """What is needed of an operand that is broadcast to `count` axes: shards, or all of it if too small."""
    sizes = shape(operand)
    dim = out.dim - (count - len(sizes))
    return Replicate.PARTIAL_GRADIENT if dim < 0 or sizes[dim] == 1 else out.moved(dim)


def _elementwise(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    sizes = shape(node)
    out = shard.moved(shard.dim + len(sizes) - len(shape(source)))
    if sizes[out.dim] != shape(source)[shard.dim]:
        return None
    return Rule(out, {operand: aligned(operand, out, len(sizes)) for operand in node.all_input_nodes})


def _layer_norm(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    x, normalized = node.args[0], argument(node, 1, "normalized_shape")
    if source is not x or shard.dim >= len(shape(source)) - len(normalized):
        return None
    return Rule(
        shard,
        {operand: shard if operand is x else Replicate.PARTIAL_GRADIENT for operand in node.all_input_nodes},
    )


def _softmax(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    count = len(shape(source))
    return None if shard.dim in _dims(argument(node, 1, "dim"), count) else Rule(shard, {source: shard})


def _reduce(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    count, dims = len(shape(source)), argument(node, 1, "dim")
    if not dims:
        return None
    gone = _dims(dims, count)
    if shard.dim in gone:
        return None
    kept = len(shape(node)) == count
    dim = shard.dim if kept else shard.dim - sum(other < shard.dim for other in gone)
    return Rule(shard.moved(dim), {source: shard})


def _view(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    out = through_view(shard, shape(source), shape(node), tp)
    is_bits = node.target is aten.view.dtype
    return None if out is None or is_bits else Rule(out, {source: shard})


def _squeeze(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    # A shard of size 1 would be squeezed where the whole axis is not.
    return None if shape(source)[shard.dim] == tp else _view(node, source, shard, tp)


def _view_arguments(node: fx.Node, out: Shard, tp: int) -> tuple[Any, ...]:
    sizes = list(argument(node, 1, "size"))
    if sizes[out.dim] != -1:
        sizes[out.dim] //= tp
    return (node.args[0], sizes)


def _unflatten_arguments(node: fx.Node, out: Shard, tp: int) -> tuple[Any, ...]:
    x, dim, sizes = node.args[0], argument(node, 1, "dim"), list(argument(node, 2, "sizes"))
    assert isinstance(x, fx.Node)
    place = out.dim - dim % len(shape(x))
    if 0 <= place < len(sizes) and sizes[place] != -1:
        sizes[place] //= tp
    return (x, dim, sizes)


def _transpose(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    order = list(range(len(shape(source))))
    first, second = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    order[first], order[second] = order[second], order[first]
    return Rule(shard.moved(order.index(shard.dim)), {source: shard})


def _permute(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    count = len(shape(source))
    order = [dim % count for dim in argument(node, 1, "dims")]
    return Rule(shard.moved(order.index(shard.dim)), {source: shard})


def _expand(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    dim = shard.dim + len(shape(node)) - len(shape(source))
    same = shape(node)[dim] == shape(source)[shard.dim]
    return Rule(shard.moved(dim), {source: shard}) if same else None


def _select(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    dim = argument(node, 1, "dim", 0) % len(shape(source))
    if dim == shard.dim:
        return None
    return Rule(shard.moved(shard.dim - (dim < shard.dim)), {source: shard})


def slice_bounds(node: fx.Node) -> tuple[int, int, int]:
    """Axis, start and stop of an aten slice, counted from the front."""
    sizes = shape(node.args[0])  # type: ignore[arg-type]
    dim = argument(node, 1, "dim", 0) % len(sizes)
    start, stop = argument(node, 2, "start"), argument(node, 3, "end")
    first, last, _ = slice(start, stop).indices(sizes[dim])
    return dim, first, last


def _slice(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    dim, start, stop = slice_bounds(node)
    if dim != shard.dim:
        return Rule(shard, {source: shard})
    if argument(node, 4, "step", 1) != 1:
        return None
    out = through_range(shard, shape(source)[dim], start, stop, tp)
    return None if out is None else Rule(out, {source: shard})


def _slice_arguments(node: fx.Node, out: Shard, tp: int) -> tuple[Any, ...]:
    dim, start, stop = slice_bounds(node)
    if dim != out.dim:
        return node.args
    return (node.args[0], dim, start // tp, stop // tp)


def piece_ranges(node: fx.Node) -> tuple[int, list[tuple[int, int]]]:
    """Axis and ranges of what split, split_with_sizes or chunk gives."""
    sizes = shape(node.args[0])  # type: ignore[arg-type]
    dim = argument(node, 2, "dim", 0) % len(sizes)
    size, asked = sizes[dim], node.args[1]
    if _packet(node) is aten.chunk:
        asked = -(-size // int(asked))  # type: ignore[arg-type]
    if not isinstance(asked, Sequence):
        step = int(asked)  # type: ignore[arg-type]
        return dim, [(start, min(size, start + step)) for start in range(0, size, step)]
    ranges, start = [], 0
    for length in asked:
        ranges.append((start, start + int(length)))  # type: ignore[arg-type]
        start += int(length)  # type: ignore[arg-type]
    return dim, ranges


def _pieces(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    """A rule for a split as a whole: the placement of its operand, if every piece has one."""
    dim, ranges = piece_ranges(node)
    size = shape(source)[dim]
    if dim == shard.dim and any(through_range(shard, size, *ends, tp) is None for ends in ranges):
        return None
    pieces = all(user.target is getitem for user in node.users)
    return Rule(shard, {source: shard}) if pieces else None


def _split_arguments(node: fx.Node, out: Shard, tp: int) -> tuple[Any, ...]:
    dim, _ = piece_ranges(node)
    if dim != out.dim:
        return node.args
    asked = node.args[1]
    sizes = [int(one) // tp for one in asked] if isinstance(asked, Sequence) else int(asked) // tp  # type: ignore[arg-type]
    return (node.args[0], sizes, dim)


def _piece(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    """One piece of a split."""
    if has_shape(source) or _packet(source) not in (aten.split, aten.split_with_sizes, aten.chunk):
        return None
    dim, ranges = piece_ranges(source)
    out: Shard | None = shard
    if dim == shard.dim:
        whole = shape(source.args[0])[dim]  # type: ignore[arg-type]
        out = through_range(shard, whole, *ranges[node.args[1]], tp)  # type: ignore[index]
    return None if out is None else Rule(out, {source: shard})


def _cat(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    if argument(node, 1, "dim", 0) % len(shape(node)) == shard.dim:
        return None
    return Rule(shard, dict.fromkeys(node.all_input_nodes, shard))


def _attention(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    count, queries = len(shape(node)), node.args[:3]
    if source not in queries or shard.dim >= count - 2:
        return None
    operands = node.all_input_nodes
    needs = {one: shard if one in queries else aligned(one, shard, count) for one in operands}
    return Rule(shard, needs)


def _matmul(node: fx.Node, source: fx.Node, shard: Shard, tp: int) -> Rule | None:
    count = len(shape(node))
    if any(len(shape(operand)) < 2 for operand in node.all_input_nodes):
        return None  # a vector has no axis of matrices, and so places shift
    out = shard.moved(shard.dim + count - len(shape(source)))
    if shard.dim >= len(shape(source)) - 2 or shape(node)[out.dim] != shape(source)[shard.dim]:
        return None
    return Rule(out, {operand: aligned(operand, out, count) for operand in node.all_input_nodes})


_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "neg", "abs", "pow", "exp", "log", "sqrt", "rsqrt", "reciprocal"),
    *("relu", "gelu", "silu", "elu", "leaky_relu", "hardtanh", "hardswish", "mish", "softplus", "relu6"),
    *("tanh", "sigmoid", "erf", "sin", "cos", "clamp", "maximum", "minimum", "dropout", "square"),
    *("where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and"),
    *("to", "type_as", "clone", "contiguous", "alias", "detach", "addcmul"),
)
_TABLE: dict[object, tuple[Derive, Localize]] = {
    **{getattr(aten, name): (_elementwise, _same_arguments) for name in _ELEMENTWISE},
    aten.layer_norm: (_layer_norm, _same_arguments),
    aten.rms_norm: (_layer_norm, _same_arguments),
    aten.softmax: (_softmax, _same_arguments),
    aten.log_softmax: (_softmax, _same_arguments),
    aten.mean: (_reduce, _same_arguments),
    aten.sum: (_reduce, _same_arguments),
    aten.view: (_view, _view_arguments),
    aten.reshape: (_view, _view_arguments),
    aten._unsafe_view: (_view, _view_arguments),
    aten.unflatten: (_view, _unflatten_arguments),
    aten.flatten: (_view, _same_arguments),
    aten.squeeze: (_squeeze, _same_arguments),
    aten.unsqueeze: (_view, _same_arguments),
    aten.transpose: (_transpose, _same_arguments),
    aten.permute: (_permute, _same_arguments),
    aten.expand: (_expand, _view_arguments),
    aten.select: (_select, _same_arguments),
    aten.slice: (_slice, _slice_arguments),
    aten.split: (_pieces, _split_arguments),
    aten.split_with_sizes: (_pieces, _split_arguments),
    aten.chunk: (_pieces, _same_arguments),
    getitem: (_piece, _same_arguments),
    aten.cat: (_cat, _same_arguments),
    aten.scaled_dot_product_attention: (_attention, _same_arguments),
    aten.matmul: (_matmul, _same_arguments),
    aten.bmm: (_matmul, _same_arguments),
}
