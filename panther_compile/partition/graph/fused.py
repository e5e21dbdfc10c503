"""A graph as a compiler runs it: what lies between products becomes a few kernels.

Elementwise operations and reductions that follow one another, with no product between them, are one kernel,
as `torch.compile` makes them:

    linear ──► float ──► pow ──► mean ──► rsqrt ──► mul ──► to ──► mul ──► linear_1
               └───────────── reads its input, writes its result ─────────┘

A kernel reads every tensor from outside once, and writes what is used outside or kept. Its backward reads
as much and the gradient, and writes gradients. What products and attention read is kept for the backward.
The rest of a kernel is computed again from what it has read, or from anything in it that is kept: the fewest
bytes are, found by a minimum cut of each kernel between what it reads and what its backward needs. So does
AOTAutograd's partitioner for the whole graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
from torch import Tensor, fx

from panther_compile.factorization.cost import Product
from panther_compile.models.outputs import tensors_in
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.fp8 import number_widths
from panther_compile.partition.graph.narrowing import storage
from panther_compile.partition.graph.observe import Observed, Operation

# Reductions and copies that compilers fuse with what is elementwise.
_FUSED = frozenset(
    {
        *("mean", "sum", "amax", "amin", "layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax"),
        *("clone", "contiguous", "to", "_to_copy", "reshape", "flatten", "cat", "stack", "dropout"),
    }
)
_FREE = ("pointwise", "random", "view")
_SOURCE, _SINK = "(read)", "(needed)"


def fuse(captured: Captured, notes: Mapping[fx.Node, Observed]) -> dict[fx.Node, Observed]:
    """Notes with what each node moves and keeps once it is fused.

    Args:
        captured: the model.
        notes: of `observe`; left as they are.
    """
    flow = _trace(captured, notes)
    kept = _keep_least(flow, notes)
    saved: dict[fx.Node, int] = {}
    for maker, size in (*kept.items(), *_copies(flow, notes).items()):
        keeper = next(iter(flow.users.get(maker, ())), maker)
        saved[keeper] = saved.get(keeper, 0) + size
    read: set[tuple[int, fx.Node]] = set()
    found = {}
    for node, note in notes.items():
        size = saved.get(node, 0)
        if node not in flow.kernels:
            inside = sum(size for key, size in note.saves.items() if key not in flow.makers)
            found[node] = replace(note, saved_bytes=size + inside)
            continue
        kernel, inputs, weights = flow.kernels[node], 0, 0
        for maker, moved in flow.reads[node].items():
            if flow.kernels.get(maker) != kernel and (kernel, maker) not in read:
                read.add((kernel, maker))
                inputs += moved * (maker.op != "get_attr")
                weights += moved * (maker.op == "get_attr")
        used_outside = any(flow.kernels.get(user) != kernel for user in flow.users.get(node, ()))
        output = _bytes(note.value) * (used_outside or node in kept)
        found[node] = replace(
            note,
            products=_listed(Product(0.0, inputs + output, weights)),
            operations=[Operation("pointwise", 0.0, inputs + output + weights)],
            backward=[Operation("pointwise", 0.0, 2 * inputs + output)] * (note.gradients > 0),
            saved_bytes=size,
        )
    return found


def _listed(product: Product) -> list[Product]:
    return [product] if product.activations or product.weights else []


@dataclass
class _Flow:
    """Tensors on their way through the graph; views are what they are views of.

    Attributes:
        makers: of each storage, the node that made it.
        reads: of each node, the makers of what it reads -> bytes.
        users: of each maker, the nodes that read it.
        kernels: of nodes that are fused, the number of their kernel.
    """

    makers: dict[int, fx.Node] = field(default_factory=dict)
    reads: dict[fx.Node, dict[fx.Node, int]] = field(default_factory=dict)
    users: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    kernels: dict[fx.Node, int] = field(default_factory=dict)


def _trace(captured: Captured, notes: Mapping[fx.Node, Observed]) -> _Flow:
    flow, links = _Flow(), nx.Graph()
    written = {key for note in notes.values() for key in note.writes}
    level: dict[fx.Node, int] = {}  # products on the longest way to a tensor
    for node in captured.graph_module.graph.nodes:
        note = notes[node]
        keys = [storage(one) for one in tensors_in(note.value)]
        is_view = bool(keys) and all(key in flow.makers for key in keys) and not note.writes
        if is_view and node.op != "output":
            continue
        reads: dict[fx.Node, int] = {}
        for other in node.all_input_nodes:
            for one in tensors_in(notes[other].value):
                if storage(one) in flow.makers:
                    maker = flow.makers[storage(one)]
                    reads[maker] = max(reads.get(maker, 0), _bytes(one))
        flow.reads[node] = reads
        for maker in reads:
            flow.users.setdefault(maker, []).append(node)
        level[node] = max(
            (level[maker] + (maker.op.startswith("call") and maker not in links) for maker in reads),
            default=0,
        )
        for key in keys:
            flow.makers.setdefault(key, node)
        if len(keys) == 1 and _is_fused(node, note) and not note.touches & written:
            links.add_node(node)
            links.add_edges_from(
                (node, maker) for maker in reads if maker in links and level[maker] == level[node]
            )
    kernels = sorted(nx.connected_components(links), key=lambda members: level[next(iter(members))])
    for number, members in enumerate(kernels):
        flow.kernels |= dict.fromkeys(members, number)
    return flow


def _is_fused(node: fx.Node, note: Observed) -> bool:
    """Whether a compiler makes no kernel of its own of a node."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return node.op == "call_function" and (
        name in _FUSED or all(one.kind in _FREE for one in note.operations)
    )


def _keep_least(flow: _Flow, notes: Mapping[fx.Node, Observed]) -> dict[fx.Node, int]:
    """Nodes whose results are kept for the backward -> bytes."""
    kept: dict[fx.Node, int] = {}
    needed: dict[int, set[fx.Node]] = {}
    for node, note in notes.items():
        for key, size in note.saves.items():
            maker = flow.makers.get(key)
            if maker is None or note.keeps_fp8:
                continue
            if maker in flow.kernels and node in flow.kernels:
                needed.setdefault(flow.kernels[maker], set()).add(maker)
            else:
                kept[maker] = max(kept.get(maker, 0), size)
    members: dict[int, list[fx.Node]] = {}
    for node, kernel in flow.kernels.items():
        members.setdefault(kernel, []).append(node)
    for kernel in sorted(needed):
        for node in _cut(flow, notes, members[kernel], needed[kernel], kept):
            kept[node] = _size(notes[node])
    return kept


def _copies(flow: _Flow, notes: Mapping[fx.Node, Observed]) -> dict[fx.Node, int]:
    """Nodes of whose results products keep a copy of one byte a number -> bytes."""
    widths = number_widths(notes)
    return {
        flow.makers[key]: size // widths.get(key, 1)
        for note in notes.values()
        if note.keeps_fp8
        for key, size in note.saves.items()
        if key in flow.makers
    }


def _cut(
    flow: _Flow,
    notes: Mapping[fx.Node, Observed],
    members: Sequence[fx.Node],
    needed: set[fx.Node],
    kept: Mapping[fx.Node, int],
) -> Iterator[fx.Node]:
    """What to keep besides, so that a kernel can make all that is needed of it."""
    inside, network = set(members), nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for node in members:
        for maker in flow.reads[node]:
            if maker not in inside and maker.op == "get_attr":
                continue  # held in any case
            if maker not in inside:
                network.add_edge(_SOURCE, (maker, "in"))
                network.add_edge((maker, "in"), maker, capacity=0 if maker in kept else _size(notes[maker]))
            network.add_edge(maker, (node, "in"))
        network.add_edge((node, "in"), node, capacity=0 if node in kept else _size(notes[node]))
        if node in needed:
            network.add_edge(node, _SINK)
    _, (before, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    for one in before:
        if isinstance(one, tuple) and one[0] not in before and one[0] not in kept:
            yield one[0]


def _size(note: Observed) -> int:
    return sum(map(_bytes, tensors_in(note.value)))


def _bytes(tensor: Tensor) -> int:
    """The bytes of a tensor; of an expanded view, those of what it shows."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
