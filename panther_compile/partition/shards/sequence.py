"""Places of a sequence's positions in each tensor, and operations that run on shards of them.

Layers and norms end in features; the axis before the features is one of positions, and where that does not
divide by the devices, the one before it. From there it is followed through the graph:

    position-wise operations    run on shards along it, by the table of `layout_rules`
    layers with a weight        carry it from input to result
    attention, matmul           carry it from the queries to the result, and need all positions

    embedding ──► norm ──► [q k v] ──► attention ──► [out] ──► add ──► norm
     (B, S, d)   (B, S, d)  (B, S, d)   (B, h, S, e)  (B, S, d)        S is the axis, seen through all views
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from panther_compile.partition.shards.layers import ShardableLayer
from panther_compile.partition.shards.placements import Shard
from panther_compile.partition.shards.rules import KnownRules, Rule, aten, has_shape, shape

_NORMS = (aten.layer_norm, aten.rms_norm)
_CARRIERS = (aten.scaled_dot_product_attention, aten.matmul, aten.bmm)


@dataclass
class Positions:
    """The axis of positions in a graph.

    Attributes:
        axes: where it lies in the result of each node that has one.
        rules: of operations that run on shards along it.
        uneven: norms none of whose axes before the features divides, and the sizes of these.
    """

    axes: dict[fx.Node, Shard] = field(default_factory=dict)
    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    uneven: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)


def find_positions(
    graph: fx.Graph,
    layers: Mapping[fx.Node, ShardableLayer],
    inner: Collection[fx.Node],
    constants: Collection[fx.Node],
    tp: int,
    known: KnownRules,
) -> Positions:
    """Follow the positions through a graph.

    Args:
        graph: of a captured model.
        layers: its layers with weights, by their last nodes.
        inner: the other nodes of layers that are more than one.
        constants: nodes that have nothing to do with the inputs.
        tp: number of devices.
        known: rules of the graph.
    """
    found = Positions()
    for node in graph.nodes:
        if node in inner or node in constants or node.op not in ("placeholder", "call_function"):
            continue
        if node not in layers and node.op == "call_function":
            _follow(found, node, tp, known)
            continue
        if not has_shape(node) or not node.meta["tensor"].is_floating_point():
            continue
        axis = found.axes.get(layers[node].x) if node in layers else None
        if axis is None or axis.dim == len(shape(node)) - 1:
            axis = _innermost(node, tp)
        if axis is not None:
            found.axes[node] = axis
    return found


def _follow(found: Positions, node: fx.Node, tp: int, known: KnownRules) -> None:
    """Follow positions from operands to a result; a norm may be where positions are seen first."""
    sources = [operand for operand in node.all_input_nodes if operand in found.axes]
    packet = getattr(node.target, "overloadpacket", None)
    if not sources and packet in _NORMS:
        x = node.all_input_nodes[0]
        placement = _innermost(x, tp)
        if placement is None:
            found.uneven[node] = shape(node)[:-1]
        else:
            found.axes[x] = placement
            sources = [x]
    for source in sources:
        rule = known.derive(node, source, found.axes[source], tp)
        if rule is not None:
            found.rules[node], found.axes[node] = rule, rule.out
            return
    if packet in _CARRIERS and node.args[0] in sources:
        queries = found.axes[node.args[0]]  # type: ignore[index]
        if queries.dim == len(shape(node)) - 2:
            found.axes[node] = queries


def _innermost(node: fx.Node, tp: int) -> Shard | None:
    """Along the last axis before the features that divides."""
    sizes = shape(node)
    placements = (Shard(dim) for dim in reversed(range(len(sizes) - 1)))
    return next((placement for placement in placements if placement.fits(sizes, tp)), None)
