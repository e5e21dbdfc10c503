"""The choices in a sharding problem as labels of variables, and what they cost in seconds.

Every tensor that could lie on the devices in shards gets a label: replicated, sharded along its features (or
heads), or along a sequence. The input side of every layer with a weight is replicated or sharded. Layers want
their two sides to differ, everything else wants them alike, and where labels disagree a collective is paid:

    layer, both sides replicated      work that tp devices all do, instead of a share each
    layer, both sides sharded         never
    layer by rows                     all-reduce of its result, forward
        into a sequence               reduce-scatter, forward, and all-gather of the gradient, backward
    replicated, used by columns       all-reduce of its gradient, backward, once for all of them
    sharded, used replicated          all-gather, forward, once
    sequence, used by columns         all-gather, forward, and reduce-scatter of the gradient, once
    replicated, used sharded          all-gather of its gradient, backward, once
    other operation, replicated       work that tp devices all do
    parameters used on a sequence     all-reduce of their gradients, backward, in one message

Seconds of collectives are those of rings. Where memory is short, its bytes have a price, and what
every device keeps or holds whole costs more.

No layer runs on a sequence: its weight would be whole on all devices and its gradient summed in every
microbatch, which the dp axis does once a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from panther_compile.partition.shards.energy import Minimum
from panther_compile.partition.shards.expansion import NO, YES, Labels, Statement, deny
from panther_compile.partition.shards.layers import COLUMN, ROW, VOCABULARY, ShardableLayer
from panther_compile.partition.shards.placements import Placement, Replicate, Shard
from panther_compile.partition.shards.problem import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Problem,
    tensor_key,
)
from panther_compile.partition.shards.rules import Rule, has_shape
from panther_compile.partition.shards.sharding_plan import REPLICATED, SEQUENCE, SHARDED, ShardingPlan, Step

_UNITS_PER_SECOND = 10**12
_SUMMED = (Replicate.PARTIAL_GRADIENT, Replicate.BUCKETED_GRADIENT)


@dataclass(frozen=True)
class Demand:
    """A node reads a tensor in a placement if a statement holds."""

    placement: Placement
    reader: Statement | bool


class Choices:
    """The labels of a problem and their cost, and steps from them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.labels = problem, Labels()
        self._made: dict[str, int] = {}
        self._by_rows: dict[fx.Node, int] = {}
        self._demands: dict[tuple[str, int], list[Demand]] = {}
        self._reads: dict[str, fx.Node] = {}
        self._stored: dict[str, Shard] = {}  # how parameters of several readers are stored, if in shards,
        self._stored_as: dict[str, int] = {}  # and the variables that say whether they are
        readers: dict[str, set[fx.Node]] = {}
        graph = problem.graph_module.graph
        self._parameters = {node for node in graph.nodes if problem.is_parameter(node)}
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                readers.setdefault(tensor_key(operand), set()).add(node)
        self._single = {key for key, nodes in readers.items() if len(nodes) == 1}
        for node in graph.nodes:
            if node in problem.layers:
                self._layer(problem.layers[node])
            elif node not in problem.inner and node.op != "placeholder" and node.op != "get_attr":
                self._other(node)
            if node in problem.stages.sent:
                self._demand(node, node, Replicate.PLAIN, True)
        self._store_parameters()
        self._pay_for_collectives()

    def solve(
        self, label: str, labels: list[str], limit: int, *, free: bool = True
    ) -> tuple[list[str], Minimum]:
        """The best labels that one move leads to.

        Args:
            label: offered to every variable that may have it; input sides of layers may take any.
            labels: to begin with.
            limit: on the number of cuts.
            free: whether all other variables of two labels may take any, too.
        """
        offers: list[dict[int, str]] = []
        tied = set[int]()
        for node, rows in self._by_rows.items():
            out = self._made.get(node.name)
            if label == SEQUENCE and out is not None and SEQUENCE in self.labels.options[out]:
                tied |= {out, rows}
                if labels[out] != SEQUENCE:
                    offers.append({out: SEQUENCE, rows: YES})
        for variable, options in enumerate(self.labels.options):
            if variable in tied or variable in self.labels.followers:
                continue
            is_free = NO in options or (free and len(options) == 2)
            offers.extend(
                {variable: one} for one in options if one != labels[variable] and (is_free or one == label)
            )
        return self.labels.move(labels, offers, limit)

    def plan(self, labels: Sequence[str], gap: float | None) -> ShardingPlan:
        """What labels mean."""
        problem = self.problem
        steps: dict[fx.Node, Step] = {}
        for node in problem.graph_module.graph.nodes:
            label = labels[self._made[node.name]] if node.name in self._made else REPLICATED
            if node in problem.layers:
                is_row = node in self._by_rows and labels[self._by_rows[node]] == YES
                if label != REPLICATED or is_row:
                    steps[node] = layer_step(problem, problem.layers[node], label)
            elif label != REPLICATED:
                rule = self._rules(node)[label]
                steps[node] = Step(label, rule.out, {one.name: need for one, need in rule.needs.items()})
        parameters = {
            key: shard for key, shard in self._stored.items() if labels[self._stored_as[key]] != REPLICATED
        }
        nodes = {node.name: node for node in problem.graph_module.graph.nodes}
        for name, need in (item for step in steps.values() for item in step.needs.items()):
            key = tensor_key(nodes[name])
            if isinstance(need, Shard) and key in self._single and problem.is_parameter(nodes[name]):
                parameters[key] = need
        return ShardingPlan(
            tp=problem.ring.tp,
            steps={node.name: step for node, step in steps.items()},
            parameters=parameters,
            absorbed=frozenset(
                member.name for step in steps.values() if step.layer for member in step.layer.members[:-1]
            ),
            gap=gap,
            seconds=self.labels.cost(labels) / _UNITS_PER_SECOND,
        )

    def _pay(self, seconds: float, *statements: Statement) -> None:
        self.labels.pay(round(seconds * _UNITS_PER_SECOND), *statements)

    def _demand(
        self, node: fx.Node, operand: fx.Node, placement: Placement, reader: Statement | bool
    ) -> None:
        """Note that a node, in its stage, reads a tensor."""
        if has_shape(operand):
            stage = self.problem.stages.stage_of.get(node.name, 0)
            self._reads.setdefault(tensor_key(operand), operand)
            self._demands.setdefault((tensor_key(operand), stage), []).append(Demand(placement, reader))

    def _rules(self, node: fx.Node) -> dict[str, Rule]:
        """The ways of a node that is no layer to run on shards."""
        tables = {SHARDED: self.problem.rules, SEQUENCE: self.problem.positions.rules}
        return {
            label: _bucketed(self.problem, table[node]) for label, table in tables.items() if node in table
        }

    def _layer(self, layer: ShardableLayer) -> None:
        problem, ring = self.problem, self.problem.ring
        outputs, inputs = problem.blocks[layer.node]
        column, row = layer.column(outputs, ring.tp), layer.row(inputs, ring.tp)
        if problem.feature_shard(layer.node) is None:
            column = None
        along = problem.sequence_shard(layer.node)
        whole = sum(problem.costs.seconds(member, divided=False) for member in layer.members)
        shared = sum(problem.costs.seconds(member, divided=True) for member in layer.members)
        self._pay(shared)
        not_column: Statement | bool = True
        not_row: Statement | bool = True
        is_whole: Statement | bool = True
        if column is not None or along is not None:
            options = (REPLICATED, *[SHARDED] * (column is not None), *[SEQUENCE] * (along is not None))
            out = self._made[layer.node.name] = self.labels.variable(*options)
            is_whole = out, REPLICATED, True
        if column is not None:
            not_column = out, SHARDED, False
            for operand, state in column[1].items():
                self._demand(layer.node, operand, state, (out, SHARDED, True))
        if row is not None:
            rows = self._by_rows[layer.node] = self.labels.variable(NO, YES)
            not_row, is_row = (rows, NO, True), (rows, YES, True)
            self._row(layer, row, is_row)
            if column is not None:
                self.labels.forbid((out, SHARDED, True), is_row)
        work = [one for one in (not_column, not_row) if not isinstance(one, bool)]
        self._pay(max(0.0, whole - shared), *work)
        # A column layer and a whole one both read all of x; a row layer and a whole one, all of a bias.
        self._demand(layer.node, layer.x, Replicate.PLAIN, not_row if layer.form != "embedding" else True)
        self._demand(
            layer.node, layer.weight, Replicate.PLAIN, not_row if layer.form == "embedding" else not_column
        )
        if layer.bias is not None:
            self._demand(layer.node, layer.bias, Replicate.PLAIN, is_whole)

    def _row(self, layer: ShardableLayer, needs: Mapping[fx.Node, Placement], is_row: Statement) -> None:
        """A layer by rows, and where its result goes."""
        problem, ring, size = self.problem, self.problem.ring, self.problem.tensor_bytes(layer.node)
        for operand, state in needs.items():
            if state is not Replicate.PLAIN:
                self._demand(layer.node, operand, state, is_row)
        if problem.sequence_shard(layer.node) is None:
            self._pay(ring.seconds(ALL_REDUCE, size), is_row)
            return
        on_sequence = self._made[layer.node.name], SEQUENCE, True
        self.labels.forbid(on_sequence, deny(is_row))
        self._pay(ring.seconds(ALL_REDUCE, size), is_row, deny(on_sequence))
        self._pay(ring.seconds(REDUCE_SCATTER, size), on_sequence)
        if problem.is_trained(layer.node):
            self._pay(ring.seconds(ALL_GATHER, size), on_sequence)
        if layer.bias is not None:
            self._demand(layer.node, layer.bias, _bucketed_placement(problem, layer.bias), on_sequence)

    def _other(self, node: fx.Node) -> None:
        problem, rules = self.problem, self._rules(node)
        whole, shared = (problem.costs.seconds(node, divided=way) for way in (False, True))
        if not rules:
            self._pay(whole)
            for operand in node.all_input_nodes:
                self._demand(node, operand, Replicate.PLAIN, True)
            return
        split = next((one for one in node.all_input_nodes if not has_shape(one)), None)
        if split is None:
            self._made[node.name] = self.labels.variable(REPLICATED, *rules)
        else:
            self._made[node.name] = self._made[split.name]
        variable = self._made[node.name]
        self._pay(shared)
        self._pay(max(0.0, whole - shared), (variable, REPLICATED, True))
        for operand in node.all_input_nodes:
            placements = [label for label in rules if isinstance(rules[label].needs[operand], Shard)]
            for label, rule in rules.items():
                if rule.needs[operand] is not Replicate.PLAIN:
                    self._demand(node, operand, rule.needs[operand], (variable, label, True))
            reader: Statement | bool = (variable, REPLICATED, True) if len(placements) > 1 else True
            if len(placements) == 1:
                reader = variable, placements[0], False
            self._demand(node, operand, Replicate.PLAIN, reader)

    def _store_parameters(self) -> None:
        """How parameters are held, the same in all stages, and what their memory costs."""
        problem = self.problem
        in_shards: dict[str, dict[Statement, Shard]] = {}
        for (key, _), demands in self._demands.items():
            for one in demands if self._reads[key] in self._parameters else ():
                if isinstance(one.placement, Shard) and not isinstance(one.reader, bool):
                    in_shards.setdefault(key, {})[one.reader] = one.placement
        for key, placements in in_shards.items():
            divided = list(placements)
            if key not in self._single:
                self._stored[key] = placements[divided[0]]
                self._stored_as[key] = self.labels.variable(REPLICATED, SHARDED)
                divided = [(self._stored_as[key], SHARDED, True)]
            repeated = problem.costs.held_bytes[key] * (1 - 1 / problem.ring.tp)
            self._pay(repeated * problem.costs.prices.held, *map(deny, divided))

    def _pay_for_collectives(self) -> None:
        """What is paid between those who make tensors and those who read them."""
        bucketed: dict[int, list[Statement]] = {}
        for (key, stage), demands in self._demands.items():
            node = self._reads[key]
            if node in self._parameters and key in self._single:
                # Its only reader stores it as it reads it: what is left is its gradient.
                demands = [one for one in demands if one.placement in _SUMMED]
            made = self._ways_to_make(node, stage)
            readers: dict[Placement, list[Statement]] = {}
            for demand in demands:
                if not isinstance(demand.reader, bool):
                    readers.setdefault(demand.placement, []).append(demand.reader)
            always_whole = any(one.reader is True and one.placement is Replicate.PLAIN for one in demands)
            self._pay_to_gather(self.problem.tensor_bytes(node), made, readers, always_whole=always_whole)
            if self.problem.is_trained(node):
                sums = self._pay_for_gradients(self.problem.tensor_bytes(node), made, readers)
                bucketed.setdefault(stage, []).extend(sums)
        ring = self.problem.ring
        for statements in bucketed.values():
            if statements:
                seconds = ring.rounds(ALL_REDUCE) * ring.link.latency_seconds
                self._pay(seconds, self.labels.follower(statements))

    def _ways_to_make(self, node: fx.Node, stage: int) -> dict[str, tuple[Shard, Statement]]:
        """Shards in which a tensor may be made in a stage, and that it is, by label."""
        key = tensor_key(node)
        variable = self._stored_as.get(key) if node in self._parameters else self._made.get(node.name)
        if variable is None or self.problem.comes_from_another(node, stage):
            return {}
        shards = {
            SHARDED: self._stored.get(key, self.problem.feature_shard(node)),
            SEQUENCE: self.problem.sequence_shard(node),
        }
        return {
            label: (shard, (variable, label, True))
            for label, shard in shards.items()
            if shard is not None and label in self.labels.options[variable]
        }

    def _pay_to_gather(
        self,
        size: int,
        made: Mapping[str, tuple[Shard, Statement]],
        readers: Mapping[Placement, Sequence[Statement]],
        *,
        always_whole: bool,
    ) -> None:
        """An all-gather forward where a tensor is made in shards and read otherwise.

        Args:
            size: bytes of the tensor.
            made: of `_ways_to_make`.
            readers: who reads it in each placement.
            always_whole: whether someone reads all of it whatever is chosen.
        """
        seconds = self.problem.ring.seconds(ALL_GATHER, size)
        for own, is_own in made.values():
            # Whoever needs a sum of gradients demands the tensor whole as well.
            others = [
                reader
                for placement, statements in readers.items()
                if placement != own and placement not in _SUMMED
                for reader in statements
            ]
            if always_whole:
                self._pay(seconds, is_own)
            elif others:
                self._pay(seconds, is_own, self.labels.follower(others))

    def _pay_for_gradients(
        self,
        size: int,
        made: Mapping[str, tuple[Shard, Statement]],
        readers: Mapping[Placement, Sequence[Statement]],
    ) -> Iterator[Statement]:
        """Collectives on the gradient of a tensor; yields who wants it summed in a bucket with others.

        Args:
            size: bytes of the tensor.
            made: of `_ways_to_make`.
            readers: who reads it in each placement.
        """
        ring = self.problem.ring
        of_shard = dict(made.values())
        for placement, statements in readers.items():
            if placement is Replicate.PLAIN:
                continue
            reader = self.labels.follower(statements)
            if placement is Replicate.BUCKETED_GRADIENT:
                self._pay(ring.bucketed_seconds(size), reader)
                yield reader
            elif isinstance(placement, Shard):
                others = [deny(of_shard[placement])] if placement in of_shard else []
                self._pay(ring.seconds(ALL_GATHER, size), reader, *others)
            elif SEQUENCE in made:
                on_sequence = made[SEQUENCE][1]
                self._pay(ring.seconds(ALL_REDUCE, size), reader, deny(on_sequence))
                self._pay(ring.seconds(REDUCE_SCATTER, size), reader, on_sequence)
            else:
                self._pay(ring.seconds(ALL_REDUCE, size), reader)


def _bucketed(problem: Problem, rule: Rule) -> Rule:
    """A rule in which gradients of parameters are summed together."""
    needs = {
        operand: _bucketed_placement(problem, operand) if state is Replicate.PARTIAL_GRADIENT else state
        for operand, state in rule.needs.items()
    }
    return Rule(rule.out, needs)


def _bucketed_placement(problem: Problem, operand: fx.Node) -> Placement:
    if not problem.is_parameter(operand):
        return Replicate.PARTIAL_GRADIENT
    return Replicate.BUCKETED_GRADIENT if operand.meta["tensor"].requires_grad else Replicate.PLAIN


def layer_step(problem: Problem, layer: ShardableLayer, label: str) -> Step:
    """A layer by columns or rows.

    Args:
        problem: it is part of.
        layer: the layer.
        label: of its result.
    """
    outputs, inputs = problem.blocks[layer.node]
    if label == SHARDED:
        column = layer.column(outputs, problem.ring.tp)
        assert column is not None
        out, needs = column
        return Step(COLUMN, out, {node.name: state for node, state in needs.items()}, layer)
    row = layer.row(inputs, problem.ring.tp)
    assert row is not None
    along = problem.sequence_shard(layer.node) if label == SEQUENCE else None
    if along is not None and layer.bias is not None:
        row[layer.bias] = _bucketed_placement(problem, layer.bias)
    kind = VOCABULARY if layer.form == "embedding" else ROW
    return Step(kind, along, {node.name: state for node, state in row.items()}, layer)
