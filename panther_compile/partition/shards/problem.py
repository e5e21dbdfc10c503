"""What could be sharded over the tp axis in a graph, and what it costs: the problem that `label` solves."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from panther_compile.names import is_parameter
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.flow import Work
from panther_compile.partition.graph.flow_graph import (
    Costs,
    add_work,
    held_bytes,
    loss_bytes,
    weigh,
)
from panther_compile.partition.graph.hardware import Link
from panther_compile.partition.graph.observe import Observed, tensor_size
from panther_compile.partition.shards.layers import ShardableLayer, find_shardable_layers
from panther_compile.partition.shards.placements import Shard
from panther_compile.partition.shards.rules import KnownRules, Rule, has_shape, shape
from panther_compile.partition.shards.sequence import Positions, find_positions

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
_MOST_BLOCKS = 8
# Nodes that shards of a layer's result reach, as bits.
Reached = dict[fx.Node, dict[Shard, int]]


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
        """Seconds of a collective on a tensor of so many bytes: rounds in which each device sends a piece."""
        return self.rounds(kind) * self.link.seconds(size / self.tp)

    def rounds(self, kind: str) -> int:
        """Messages that each device sends, one after the other."""
        return (self.tp - 1) * (2 if kind == ALL_REDUCE else 1)

    def bucketed_seconds(self, size: int) -> float:
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
class StageMap:
    """The pipeline stage of each node.

    Attributes:
        stage_of: stage of each node that belongs to one, by name, and of "output".
        sent: nodes whose results other stages use; these get them whole.
    """

    stage_of: Mapping[str, int]
    sent: frozenset[fx.Node]


@dataclass(frozen=True)
class NodeCosts:
    """What nodes and parameters take.

    Attributes:
        replicated_work: of each node if every device does all of it.
        divided_work: of each node if the devices divide it.
        held_bytes: of each parameter with its gradient and optimizer states, by name.
        prices: of memory.
        training: whether there is a backward.
        parallel_loss: whether the loss takes the model's results in shards.
    """

    replicated_work: Mapping[fx.Node, Work]
    divided_work: Mapping[fx.Node, Work]
    held_bytes: Mapping[str, int]
    prices: Prices
    training: bool
    parallel_loss: bool = False

    def seconds(self, node: fx.Node, *, divided: bool) -> float:
        """Seconds of a node, and its memory in seconds."""
        work = (self.divided_work if divided else self.replicated_work)[node]
        return work.seconds + work.saved_bytes * self.prices.kept


@dataclass(frozen=True)
class Problem:
    """The choices in a graph and their costs.

    Attributes:
        graph_module: that is labelled.
        ring: the devices that share a stage.
        known: rules of the graph, each derived once.
        fixed: nodes whose results must be whole.
        stages: the pipeline's.
        layers: that can be sharded, by their last node.
        inner: the other nodes of layers that are more than one.
        positions: the axis of a sequence, and nodes that can run on shards along it; none if not wanted.
        costs: of nodes and parameters.
        blocks: of the features that each layer gives, and of those that it takes.
        rules: of other nodes that can run on shards.
        shares: of nodes whose results other devices (cp) divide along a sequence, the number of these.
    """

    graph_module: fx.GraphModule
    ring: Ring
    known: KnownRules
    fixed: frozenset[fx.Node]
    stages: StageMap
    layers: dict[fx.Node, ShardableLayer]
    inner: frozenset[fx.Node]
    positions: Positions
    costs: NodeCosts
    blocks: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    shares: Mapping[fx.Node, int] = field(default_factory=dict)

    def tensor_bytes(self, node: fx.Node) -> int:
        """Bytes of a node's whole result, of the part of the sequences that is here."""
        return tensor_size(node.meta["tensor"]) // self.shares.get(node, 1)

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node reads a parameter."""
        return node.op == "get_attr" and is_parameter(self.graph_module, str(node.target))

    def is_trained(self, node: fx.Node) -> bool:
        """Whether a gradient of a node's result is computed."""
        return self.costs.training and bool(node.meta["tensor"].requires_grad)

    def comes_from_another(self, node: fx.Node, stage: int) -> bool:
        """Whether a node's result comes to a stage from another one."""
        return self.stages.stage_of.get(node.name, stage) != stage

    def feature_shard(self, node: fx.Node) -> Shard | None:
        """The shards along features, or heads, that a node's result can be made in, if any."""
        if node in self.fixed:
            return None
        if node in self.layers:
            column = self.layers[node].column(self.blocks[node][0], self.ring.tp)
            return column[0] if column else None
        return self.rules[node].out if node in self.rules else None

    def sequence_shard(self, node: fx.Node) -> Shard | None:
        """The shards of a sequence that a node's result can be made in, if any."""
        if node in self.fixed:
            return None
        if node in self.layers:
            by_rows = self.layers[node].row(self.blocks[node][1], self.ring.tp)
            return self.positions.axes.get(node) if by_rows is not None else None
        return self.positions.rules[node].out if node in self.positions.rules else None


def tensor_key(node: fx.Node) -> str:
    """What all reads of one parameter have in common; a result may have the name of a parameter."""
    return str(node.target) if node.op == "get_attr" else f"%{node.name}"


def tensor_name(node: fx.Node) -> str:
    """The name of a tensor in records: a parameter's own, or a node's."""
    return str(node.target) if node.op == "get_attr" else node.name


def build_problem(
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
    graph_module, nodes = captured.graph_module, captured.graph_module.graph.nodes
    written = {key for note in notes.values() for key in note.writes}
    fixed = frozenset(node for node in nodes if notes[node].touches & written).union(constants)
    stages = _map_stages(nodes, stage_of)
    layers = {
        node: layer
        for node, layer in find_shardable_layers(graph_module, fixed | stages.sent).items()
        if fixed.isdisjoint(layer.members)
    }
    inner = frozenset(member for layer in layers.values() for member in layer.members[:-1])
    positions = Positions()
    if sequence:
        positions = find_positions(graph_module.graph, layers, inner, fixed, ring.tp, known)
    problem = Problem(
        graph_module=graph_module,
        ring=ring,
        known=known,
        fixed=fixed,
        stages=stages,
        layers=layers,
        inner=inner,
        positions=positions,
        costs=_count_costs(captured, notes, costs, ring.tp, prices or Prices()),
        shares={node: note.result_share for node, note in notes.items() if note.result_share > 1},
    )
    _follow_features(problem)
    _drop_repeated_rules(problem)
    _keep_splits_together(problem.rules)
    _keep_splits_together(positions.rules)
    return problem


def _map_stages(nodes: Iterable[fx.Node], stage_of: Mapping[str, int] | None) -> StageMap:
    """The stage of each node, all of one stage if None, and what stages send one another."""
    stages = dict.fromkeys((node.name for node in nodes), 0) if stage_of is None else dict(stage_of)
    stages["output"] = max(stages.values(), default=0)
    sent = frozenset(
        operand
        for node in nodes
        if node.name in stages
        for operand in node.all_input_nodes
        if stages.get(operand.name, stages[node.name]) != stages[node.name]
    )
    return StageMap(stages, sent)


def _count_costs(
    captured: Captured, notes: Mapping[fx.Node, Observed], costs: Costs, tp: int, prices: Prices
) -> NodeCosts:
    parameters = captured.graph_module.named_parameters(remove_duplicate=False)
    replicated = {node: weigh(node, notes[node], costs) for node in notes}
    divided = {node: weigh(node, notes[node], costs, tp) for node in notes}
    for node, size in loss_bytes(captured, notes, costs).items():
        size = size // tp if costs.parallel_loss else size
        kept = Work(saved_bytes=size, loss_bytes=size)
        for work in (replicated, divided):
            work[node] = add_work(work[node], kept)
    return NodeCosts(
        replicated_work=replicated,
        divided_work=divided,
        held_bytes={name: sum(held_bytes(parameter, costs)) for name, parameter in parameters},
        prices=prices,
        training=costs.training,
        parallel_loss=costs.parallel_loss,
    )


def _follow_features(problem: Problem) -> None:
    """Follow features from layer to layer: the blocks of each, and how the nodes between run on shards."""
    reached = _reach(problem)
    for node in problem.graph_module.graph.nodes:
        if node in problem.layers:
            problem.blocks[node] = _choose_blocks(problem, node, reached)
        elif node.op == "call_function" and node not in problem.inner and node not in problem.fixed:
            shards = ((source, problem.feature_shard(source)) for source in node.all_input_nodes)
            found = (
                problem.known.derive(node, source, shard, problem.ring.tp)
                for source, shard in shards
                if shard
            )
            rule = next((rule for rule in found if rule is not None), None)
            if rule is not None:
                problem.rules[node] = rule


def _drop_repeated_rules(problem: Problem) -> None:
    """Keep one way of a node whose features lie where the sequence would."""
    rules = problem.positions.rules
    for node, rule in list(rules.items()):
        if node in problem.fixed or (node in problem.rules and problem.rules[node].out == rule.out):
            del rules[node]


def _keep_splits_together(rules: dict[fx.Node, Rule]) -> None:
    """The pieces of a split lie in shards if the split does, so all of them must be able to."""
    splits = {one for node in rules for one in (node, *node.all_input_nodes) if not has_shape(one)}
    for split in splits:
        if split not in rules or not all(user in rules for user in split.users):
            for dropped in (split, *split.users):
                rules.pop(dropped, None)


def _choose_blocks(problem: Problem, node: fx.Node, reached: Reached) -> tuple[int, int]:
    """Blocks of a layer's outputs, by how far shards reach with them; and of its inputs, as they come."""
    layer = problem.layers[node]
    source = problem.feature_shard(layer.x)
    along_features = source is not None and source.dim == len(shape(layer.x)) - 1
    inputs = source.blocks if source is not None and along_features else 1
    counts = {shard.blocks: nodes.bit_count() for shard, nodes in reached.get(node, {}).items()}
    best = max(counts.values(), default=0)
    return next((blocks for blocks, count in counts.items() if count == best), 1), inputs


def _reach(problem: Problem) -> Reached:
    """Nodes behind each layer that run on shards of its result, layers by rows included, for any blocks.

    What shards of a node's result reach is found once for all layers before it.
    """
    starts = _column_shards(problem)
    steps: dict[tuple[fx.Node, Shard], list[tuple[fx.Node, Shard | None]]] = {}
    arrive: dict[fx.Node, dict[Shard, None]] = {
        node: dict.fromkeys(shards) for node, shards in starts.items()
    }
    nodes = list(problem.graph_module.graph.nodes)
    for node in nodes:
        for shard in arrive.get(node, ()):
            ways = steps[node, shard] = []
            for user in node.users:
                if user in problem.fixed or user.op != "call_function":
                    continue
                if user in problem.layers or user in problem.inner:
                    if shard.dim == len(shape(node)) - 1:
                        ways.append((user, None))
                    continue
                rule = problem.known.derive(user, node, shard, problem.ring.tp)
                if rule is not None:
                    ways.append((user, rule.out))
                    arrive.setdefault(user, {})[rule.out] = None
    bit = {node: 1 << number for number, node in enumerate(nodes)}
    reached: Reached = {}
    for node in reversed(nodes):
        for shard in arrive.get(node, ()):
            found = bit[node]
            for user, out in steps[node, shard]:
                found |= bit[user] if out is None else reached[user][out]
            reached.setdefault(node, {})[shard] = found
    return {node: {shard: reached[node][shard] for shard in shards} for node, shards in starts.items()}


def _column_shards(problem: Problem) -> dict[fx.Node, list[Shard]]:
    """What each layer by columns may give, in up to so many blocks."""
    tp = problem.ring.tp
    found: dict[fx.Node, list[Shard]] = {}
    for node, layer in problem.layers.items():
        if node not in problem.fixed:
            columns = (layer.column(blocks, tp) for blocks in range(1, _MOST_BLOCKS + 1))
            found[node] = [column[0] for column in columns if column is not None]
    return found
