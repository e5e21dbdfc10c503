"""Layers whose parameters can be sharded: where they are in a graph, and the ways to shard each.

    column       x whole            weight sharded along its outputs    y sharded along its features
    row          x sharded          weight sharded along its inputs     y summed over the devices (all-reduce)
    vocabulary   indices whole      table sharded along its rows        y summed over the devices

    whole ──► [column] ── sharded ──► [row] ──sum──► whole              Megatron-LM (Shoeybi et al. 2019)

A sketched layer is two such layers, cut at its bottleneck: its rank is what is summed. In the pivoted form
the first is z = x1 + C x2 with x1 and x2 slices of x, which is one layer here. By rows, each device uses the
part of either slice that it has: z is the sum of

    pad(x1 of the device) + C[:, columns of the device] (x2 of the device)

The columns of a device are uneven, so C is held whole and its gradient is summed.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from panther_compile.names import is_parameter
from panther_compile.partition.shards.placements import Placement, Replicate, Shard
from panther_compile.partition.shards.rules import argument, aten, has_shape, shape, slice_bounds

COLUMN, ROW, VOCABULARY = "column", "row", "vocabulary"


@dataclass(frozen=True)
class ShardableLayer:
    """A layer with a weight to shard.

    Attributes:
        node: that gives its result.
        form: "linear", "embedding" or "pivoted".
        x: its input.
        weight: read of its weight.
        bias: read of its bias, if it has one.
        out_dim: axis of the weight along the outputs; rows of an embedding's table.
        in_dim: axis of the weight along the inputs.
        members: its nodes; the last is `node`.
        pivots: first and last but one feature of x1, in the pivoted form.
    """

    node: fx.Node
    form: str
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    out_dim: int
    in_dim: int
    members: tuple[fx.Node, ...]
    pivots: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """The name of the layer: that of its weight, without the last part if this is `weight`."""
        return str(self.weight.target).removesuffix(".weight")

    def column(self, blocks: int, tp: int) -> tuple[Shard, dict[fx.Node, Placement]] | None:
        """Shard of the result and what is needed, by columns; None if the sizes do not divide."""
        out = Shard(len(shape(self.node)) - 1, blocks)
        if self.form == "embedding" or not out.fits(shape(self.node), tp):
            return None
        if self.form == "pivoted" and blocks > 1:
            return None
        needs: dict[fx.Node, Placement] = {
            self.x: Replicate.PARTIAL_GRADIENT,
            self.weight: Shard(self.out_dim, blocks),
        }
        if self.bias is not None:
            needs[self.bias] = Shard(0, blocks)
        return out, needs

    def row(self, blocks: int, tp: int) -> dict[fx.Node, Placement] | None:
        """What is needed, by rows (an embedding: by its vocabulary); None if the sizes do not divide."""
        if self.form == "embedding":
            rows = Shard(0)
            return {self.x: Replicate.PLAIN, self.weight: rows} if rows.fits(shape(self.weight), tp) else None
        shard = Shard(len(shape(self.x)) - 1, blocks)
        if not shard.fits(shape(self.x), tp) or (self.form == "pivoted" and blocks > 1):
            return None
        weight = Replicate.PARTIAL_GRADIENT if self.form == "pivoted" else Shard(self.in_dim, blocks)
        needs: dict[fx.Node, Placement] = {self.x: shard, self.weight: weight}
        if self.bias is not None:
            needs[self.bias] = Replicate.PLAIN
        return needs

    def whole(self) -> dict[fx.Node, Placement]:
        """What is needed if every device computes all of it."""
        reads = [self.x, self.weight, *([] if self.bias is None else [self.bias])]
        return dict.fromkeys(reads, Replicate.PLAIN)


def find_shardable_layers(
    graph_module: fx.GraphModule, fixed: Collection[fx.Node]
) -> dict[fx.Node, ShardableLayer]:
    """The layers of a graph by their last node.

    Args:
        graph_module: a captured model, or a stage of one.
        fixed: nodes whose results must be whole.
    """
    found: dict[fx.Node, ShardableLayer] = {}
    for node in graph_module.graph.nodes:
        layer = _linear(graph_module, node) or _embedding(graph_module, node)
        if layer is not None:
            found[node] = layer
    for node in graph_module.graph.nodes:
        layer = _pivoted(node, found)
        if layer is not None and not any(member in fixed for member in layer.members[:-1]):
            del found[layer.members[-2]]
            found[node] = layer
    return found


def uneven_reason(layer: ShardableLayer, tp: int) -> str:
    """Why a layer cannot be sharded along its outputs, or its inputs, or both; empty if it can be both."""
    sizes = shape(layer.weight)
    if layer.form == "embedding":
        return f"{sizes[0]} rows do not divide by {tp}" if sizes[0] % tp else ""
    widths = [("outputs", shape(layer.node)[-1]), ("inputs", shape(layer.x)[-1])]
    return " and ".join(f"{size} {what} do not divide by {tp}" for what, size in widths if size % tp)


def _parameter(graph_module: fx.GraphModule, node: object, dims: int) -> bool:
    """Whether a node reads a parameter of so many axes."""
    if not isinstance(node, fx.Node) or node.op != "get_attr" or not has_shape(node):
        return False
    return len(shape(node)) == dims and is_parameter(graph_module, str(node.target))


def _linear(graph_module: fx.GraphModule, node: fx.Node) -> ShardableLayer | None:
    if node.target is aten.linear.default:
        x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
        transposed = False
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
        transposed = True
    elif node.target in (aten.mm.default, aten.matmul.default):
        (x, weight), bias, transposed = node.args, None, True
    else:
        return None
    if not _parameter(graph_module, weight, 2) or not isinstance(x, fx.Node) or not has_shape(x):
        return None
    if len(shape(x)) < 2 or x.op == "get_attr":
        return None
    if bias is not None and not _parameter(graph_module, bias, 1):
        return None
    assert isinstance(weight, fx.Node)
    return ShardableLayer(node, "linear", x, weight, bias, int(transposed), 1 - transposed, (node,))


def _embedding(graph_module: fx.GraphModule, node: fx.Node) -> ShardableLayer | None:
    if node.target is not aten.embedding.default or not _parameter(graph_module, node.args[0], 2):
        return None
    weight, x = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if argument(node, 3, "scale_grad_by_freq") or argument(node, 4, "sparse"):
        return None
    return ShardableLayer(node, "embedding", x, weight, None, 0, 1, (node,))


def _pivoted(node: fx.Node, layers: dict[fx.Node, ShardableLayer]) -> ShardableLayer | None:
    """`node` as x1 + C x2 where x1 and x2 are slices that make up x."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    for pivots, product in (node.all_input_nodes, node.all_input_nodes[::-1]):
        layer = layers.get(product)
        if layer is None or layer.form != "linear" or layer.bias is not None or layer.out_dim != 0:
            continue
        slices = (pivots, layer.x)
        if any(one.target is not aten.slice.Tensor or argument(one, 4, "step", 1) != 1 for one in slices):
            continue
        if pivots.args[0] is not layer.x.args[0] or any(len(one.users) != 1 for one in (*slices, product)):
            continue
        x = pivots.args[0]
        assert isinstance(x, fx.Node)
        (dim, start, stop), (other_dim, first, last) = map(slice_bounds, slices)
        size = len(shape(x)) - 1
        if dim != size or other_dim != size or shape(node) != shape(product):
            continue
        if (start, stop, first, last) not in _halves(start, stop, shape(x)[-1]):
            continue
        members = (*slices, product, node)
        return ShardableLayer(node, "pivoted", x, layer.weight, None, 0, 1, members, (start, stop))
    return None


def _halves(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Slices that complete one at either end."""
    if start == 0:
        yield start, stop, stop, size
    if stop == size:
        yield start, stop, 0, start


def local_pivots(pivots: tuple[int, int], size: int, tp: int, rank: int) -> tuple[slice, slice, slice, int]:
    """What a device uses of its features in the pivoted form by rows.

    Args:
        pivots: first and last but one feature of x1.
        size: features of x.
        tp: number of devices.
        rank: of the device.

    Returns:
        Its own features that belong to x1, those that belong to x2, the columns of C that belong to the
        latter, and the place in x1 where the former start.
    """
    start, stop = pivots
    others = (stop, size) if start == 0 else (0, start)
    first, last = size // tp * rank, size // tp * (rank + 1)

    def overlap(low: int, high: int) -> tuple[int, int]:
        begin = min(max(first, low), high)
        return begin, max(begin, min(last, high))

    near, far = overlap(start, stop), overlap(*others)
    own = [slice(a - first, b - first) if a < b else slice(0, 0) for a, b in (near, far)]
    return own[0], own[1], slice(far[0] - others[0], far[1] - others[0]), near[0] - start
