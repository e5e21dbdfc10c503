"""What could be sharded over the tp axis in a graph, and what it costs: the problem that `label` solves."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx, nn

from panther_compile.partition.capture import Captured, attribute
from panther_compile.partition.flow import Work
from panther_compile.partition.flow_graph import Costs, held_bytes, weigh
from panther_compile.partition.hardware import Link
from panther_compile.partition.layout_rules import KnownRules, Rule, has_shape, shape
from panther_compile.partition.layouts import Layout
from panther_compile.partition.observe import Observed
from panther_compile.partition.sequence import Positions, find_positions
from panther_compile.partition.sharding_sites import Site, find_sites

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
_MOST_BLOCKS = 8


@dataclass(frozen=True)
class Ring:
    """The devices of one stage, and what their collectives take.

    Attributes:
        tp: their number.
        link: between them.
    """

    tp: int
    link: Link

    def seconds(self, kind: str, size: int) -> float:
        """Of a collective on a tensor of so many bytes: rounds in which each device sends a piece."""
        return self.rounds(kind) * self.link.seconds(size / self.tp)

    def rounds(self, kind: str) -> int:
        """Messages that each device sends, one after the other."""
        return (self.tp - 1) * (2 if kind == ALL_REDUCE else 1)

    def joined_seconds(self, size: int) -> float:
        """What so many bytes add to an all-reduce of others."""
        return self.rounds(ALL_REDUCE) * size / self.tp / self.link.bytes_per_second


@dataclass(frozen=True, slots=True)
class Prices:
    """What memory costs, where it is short.

    Attributes:
        kept: seconds for a byte that is kept for the backward.
        held: seconds for a byte of parameters, their gradients and optimizer states.
    """

    kept: float = 0.0
    held: float = 0.0


@dataclass(frozen=True)
class Problem:
    """The choices in a graph and their costs.

    Attributes:
        graph_module: that is labelled.
        whole: nodes whose results must be whole.
        stage_of: stage of each node that belongs to one, and of "output".
        sent: nodes whose results other stages use; these get them whole.
        sites: layers, by their last node.
        inner: the other nodes of layers that are more than one.
        rules: of other nodes that can run on shards.
        positions: the axis of a sequence, and nodes that can run on shards along it; none if not wanted.
        blocks: of the features that each layer gives, and of those that it takes.
        whole_work: of each node if every device does all of it.
        shared_work: of each node if the devices divide it.
        held_bytes: of each parameter with its gradient and optimizer states, by name.
        ring: the devices.
        training: whether there is a backward.
        prices: of memory.
        known: rules of the graph.
    """

    graph_module: fx.GraphModule
    whole: frozenset[fx.Node]
    stage_of: Mapping[str, int]
    sent: frozenset[fx.Node]
    sites: dict[fx.Node, Site]
    inner: frozenset[fx.Node]
    rules: dict[fx.Node, Rule]
    positions: Positions
    blocks: dict[fx.Node, tuple[int, int]]
    whole_work: dict[fx.Node, Work]
    shared_work: dict[fx.Node, Work]
    held_bytes: dict[str, int]
    ring: Ring
    training: bool
    prices: Prices
    known: KnownRules

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node reads a parameter."""
        return node.op == "get_attr" and isinstance(
            attribute(self.graph_module, str(node.target)), nn.Parameter
        )

    def is_trained(self, node: fx.Node) -> bool:
        """Whether a gradient of a node's result is computed."""
        return self.training and bool(node.meta["tensor"].requires_grad)

    def comes_from_another(self, node: fx.Node, stage: int) -> bool:
        """Whether a node's result comes to a stage from another one."""
        return self.stage_of.get(node.name, stage) != stage

    def layout_of(self, node: fx.Node) -> Layout | None:
        """The layout that a node's result would have in shards."""
        if node in self.whole:
            return None
        if node in self.sites:
            column = self.sites[node].column(self.blocks[node][0], self.ring.tp)
            return column[0] if column else None
        return self.rules[node].out if node in self.rules else None

    def sequence_of(self, node: fx.Node) -> Layout | None:
        """The layout that a node's result would have in shards of a sequence, if it can be made in them."""
        if node in self.whole:
            return None
        if node in self.sites:
            by_rows = self.sites[node].row(self.blocks[node][1], self.ring.tp)
            return self.positions.axes.get(node) if by_rows is not None else None
        return self.positions.rules[node].out if node in self.positions.rules else None

    def price(self, node: fx.Node, *, shared: bool) -> float:
        """Seconds of a node, and its memory in seconds."""
        work = (self.shared_work if shared else self.whole_work)[node]
        return work.seconds + work.saved_bytes * self.prices.kept


def tensor_key(node: fx.Node) -> str:
    """What all reads of one parameter have in common."""
    return str(node.target) if node.op == "get_attr" else node.name


def tensor_bytes(node: fx.Node) -> int:
    """Of the whole tensor."""
    tensor = node.meta["tensor"]
    return int(tensor.numel() * tensor.element_size())


def pose(
    captured: Captured,
    notes: Mapping[fx.Node, Observed],
    costs: Costs,
    ring: Ring,
    constants: Collection[fx.Node] = (),
    stage_of: Mapping[str, int] | None = None,
    *,
    sequence: bool = False,
    prices: Prices | None = None,
    known: KnownRules | None = None,
) -> Problem:
    """Find what could be sharded, and what it costs.

    Args:
        captured: the model.
        notes: of `observe`.
        costs: how seconds are counted.
        ring: the devices that share a stage.
        constants: nodes that are the same whatever the inputs, and stay whole.
        stage_of: stage of each node that belongs to one, by name; one stage if None.
        sequence: whether tensors may be sharded along a sequence.
        prices: of memory; it costs nothing if None.
        known: rules of the graph, of earlier calls.
    """
    known = known or KnownRules()
    graph_module, tp = captured.graph_module, ring.tp
    written = {key for note in notes.values() for key in note.writes}
    nodes = graph_module.graph.nodes
    frozen = frozenset(node for node in nodes if notes[node].touches & written).union(constants)
    stages = dict.fromkeys((node.name for node in nodes), 0) if stage_of is None else dict(stage_of)
    stages["output"] = max(stages.values(), default=0)
    sent = frozenset(
        operand
        for node in nodes
        if node.name in stages
        for operand in node.all_input_nodes
        if stages.get(operand.name, stages[node.name]) != stages[node.name]
    )
    sites = {
        node: site
        for node, site in find_sites(graph_module, frozen | sent).items()
        if frozen.isdisjoint(site.members)
    }
    inner = frozenset(member for site in sites.values() for member in site.members[:-1])
    positions = (
        find_positions(graph_module.graph, sites, inner, frozen, tp, known) if sequence else Positions()
    )
    problem = Problem(
        graph_module,
        frozen,
        stages,
        sent,
        sites,
        inner,
        {},
        positions,
        {},
        {node: weigh(node, notes[node], costs) for node in notes},
        {node: weigh(node, notes[node], costs, tp) for node in notes},
        {
            name: sum(held_bytes(parameter, costs))
            for name, parameter in graph_module.named_parameters(remove_duplicate=False)
        },
        ring,
        costs.training,
        prices or Prices(),
        known,
    )
    for node in nodes:
        if node in sites:
            problem.blocks[node] = _choose_blocks(problem, node)
        elif node.op == "call_function" and node not in problem.inner and node not in frozen:
            layouts = ((source, problem.layout_of(source)) for source in node.all_input_nodes)
            found = (known.derive(node, source, layout, tp) for source, layout in layouts if layout)
            rule = next((rule for rule in found if rule is not None), None)
            if rule is not None:
                problem.rules[node] = rule
    for node, rule in list(positions.rules.items()):
        if node in frozen or (node in problem.rules and problem.rules[node].out == rule.out):
            del positions.rules[node]
    _keep_splits_together(problem.rules)
    _keep_splits_together(positions.rules)
    return problem


def _keep_splits_together(rules: dict[fx.Node, Rule]) -> None:
    """The pieces of a split lie in shards if the split does, so all of them must be able to."""
    splits = {one for node in rules for one in (node, *node.all_input_nodes) if not has_shape(one)}
    for split in splits:
        if split not in rules or not all(user in rules for user in split.users):
            for dropped in (split, *split.users):
                rules.pop(dropped, None)


def _choose_blocks(problem: Problem, node: fx.Node) -> tuple[int, int]:
    """Blocks of a layer's outputs, by how far shards reach with them; and of its inputs, as they come."""
    site = problem.sites[node]
    source = problem.layout_of(site.x)
    along_features = source is not None and source.dim == len(shape(site.x)) - 1
    inputs = source.blocks if source is not None and along_features else 1
    reached = {}
    for blocks in range(1, _MOST_BLOCKS + 1):
        column = site.column(blocks, problem.ring.tp)
        if column is not None and node not in problem.whole:
            reached[blocks] = _reach(problem, node, column[0])
    best = max(reached.values(), default=0)
    return next((blocks for blocks, reach in reached.items() if reach == best), 1), inputs


def _reach(problem: Problem, start: fx.Node, layout: Layout) -> int:
    """Nodes behind a layer that run on shards of its result, layers by rows included."""
    known = {start: layout}
    queue = deque([start])
    while queue:
        source = queue.popleft()
        for user in source.users:
            if user in known or user in problem.whole or user.op != "call_function":
                continue
            if user in problem.sites or user in problem.inner:
                if known[source].dim == len(shape(source)) - 1:
                    known[user] = known[source]
                continue
            rule = problem.known.derive(user, source, known[source], problem.ring.tp)
            if rule is not None:
                known[user] = rule.out
                queue.append(user)
    return len(known)
