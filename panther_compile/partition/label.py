"""Which tensors and layers are sharded over the tp axis: a labelling of least cost, by minimum cuts.

Every tensor that could lie on the devices in shards gets a label: whole, sharded along its features (or
heads), or along a sequence. The input side of every layer with a weight is whole or sharded. Layers want
their two sides to differ, everything else wants them alike, and where labels disagree a collective is paid:

    layer, both sides whole           work that tp devices all do, instead of a share each
    layer, both sides sharded         never
    layer by rows                     all-reduce of its result, forward
        into a sequence               reduce-scatter, forward, and all-gather of the gradient, backward
    whole, used by column layers      all-reduce of its gradient, backward, once for all of them
    sharded, used whole               all-gather, forward, once
    sequence, used by column layers   all-gather, forward, and reduce-scatter of the gradient, once
    whole, used sharded               all-gather of its gradient, backward, once
    other operation, whole            work that tp devices all do
    parameters used on a sequence     all-reduce of their gradients, backward, in one message

Seconds of collectives are those of rings. Where memory is short, its bytes have a price, and what is kept or
held whole costs more. Whole and sharded alone are minimised exactly by one cut wherever
all paths from a tensor to another pass the same number of layers, modulo two, as in transformers and residual
networks of pairs. With the third label the best labelling is found by elimination where the graph is narrow,
as those of models are (`elimination`); elsewhere it comes in by moves from there (`expansion`), so that it
never costs more.

No layer runs on a sequence: its weight would be whole on all devices and its gradient summed in every
microbatch, which the dp axis does once a step.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from panther_compile.partition.elimination import LARGEST, eliminate
from panther_compile.partition.energy import Minimum
from panther_compile.partition.expansion import NO, YES, Labels, Statement, deny
from panther_compile.partition.layout_rules import Rule, has_shape
from panther_compile.partition.layouts import Layout, State, Whole
from panther_compile.partition.sharding_problem import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Problem,
    tensor_bytes,
    tensor_key,
)
from panther_compile.partition.sharding_sites import COLUMN, ROW, VOCABULARY, Site

WHOLE, SHARDED, SEQUENCE = "whole", "sharded", "sequence"
_UNITS_PER_SECOND = 10**12
# Cuts of one move where one is not enough.
_CUTS_OF_A_MOVE = 2


@dataclass(frozen=True)
class Step:
    """A node that runs on shards.

    Attributes:
        kind: "column", "row", "vocabulary", or for what is no layer with a weight "sharded" or "sequence".
        out: layout of its result; None if that is whole.
        needs: of each operand, by the name of its node.
        site: the layer, if it is one.
    """

    kind: str
    out: Layout | None
    needs: Mapping[str, State]
    site: Site | None = None

    @property
    def on_sequence(self) -> bool:
        """Whether its result lies in shards of a sequence."""
        return self.kind == SEQUENCE or (self.kind in (ROW, VOCABULARY) and self.out is not None)


@dataclass(frozen=True)
class Demand:
    """A node reads a tensor in a state if a statement holds."""

    state: State
    reader: Statement | bool


@dataclass(frozen=True)
class Labelling:
    """How a graph is sharded.

    Attributes:
        tp: number of devices.
        steps: of nodes that run on shards, by name.
        parameters: layouts of those that are stored in shards.
        absorbed: nodes that have become part of another's step.
        gap: share of the cost by which a better labelling is not ruled out; None if there is no bound, as
            where sequences were tried in a wide graph.
        seconds: the cost.
    """

    tp: int
    steps: Mapping[str, Step]
    parameters: Mapping[str, Layout]
    absorbed: frozenset[str]
    gap: float | None
    seconds: float

    def lies_on_sequence(self, node: fx.Node) -> bool:
        """Whether the result of a node lies in shards of a sequence."""
        step = self.steps.get(node.name)
        return step is not None and step.on_sequence


def find_labelling(problem: Problem, limit: int = 64, largest: int = LARGEST) -> Labelling:
    """The labelling of least cost; with sequences in a wide graph, the best that moves find.

    Args:
        problem: of `pose`.
        limit: on the number of cuts, where one is not enough for whole and sharded.
        largest: number of entries that the tables of `eliminate` may have.
    """
    builder = Builder(problem)
    has_sequence = any(SEQUENCE in options for options in builder.labels.options)
    best = eliminate(builder.labels, largest) if has_sequence else None
    if best is not None:
        return builder.labelling(best, 0.0)
    labels, minimum = builder.solve(SHARDED, builder.labels.first(), limit, free=False)
    if not has_sequence:
        return builder.labelling(labels, minimum.gap)
    turns, failed = itertools.cycle((SEQUENCE, WHOLE, SHARDED)), 0
    while failed < 3:
        moved, _ = builder.solve(next(turns), labels, _CUTS_OF_A_MOVE)
        if builder.labels.cost(moved) < builder.labels.cost(labels):
            labels, failed = moved, 0
        elif SEQUENCE in labels:
            failed += 1
        else:
            break
    return builder.labelling(labels, None)


class Builder:
    """The labels of a problem and their cost, and steps from them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.labels = problem, Labels()
        self._made: dict[str, int] = {}
        self._by_rows: dict[fx.Node, int] = {}
        self._demands: dict[tuple[str, int], list[Demand]] = {}
        self._reads: dict[str, fx.Node] = {}
        self._stored: dict[str, Layout] = {}
        readers: dict[str, set[fx.Node]] = {}
        graph = problem.graph_module.graph
        self._parameters = {node for node in graph.nodes if problem.is_parameter(node)}
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                readers.setdefault(tensor_key(operand), set()).add(node)
        self._single = {key for key, nodes in readers.items() if len(nodes) == 1}
        for node in graph.nodes:
            if node in problem.sites:
                self._site(problem.sites[node])
            elif node not in problem.inner and node.op != "placeholder" and node.op != "get_attr":
                self._other(node)
            if node in problem.sent:
                self._demand(node, node, Whole.SAME, True)
        self._store()
        self._tensors()

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

    def labelling(self, labels: Sequence[str], gap: float | None) -> Labelling:
        """What labels mean."""
        problem = self.problem
        steps: dict[fx.Node, Step] = {}
        for node in problem.graph_module.graph.nodes:
            label = labels[self._made[node.name]] if node.name in self._made else WHOLE
            if node in problem.sites:
                is_row = node in self._by_rows and labels[self._by_rows[node]] == YES
                if label != WHOLE or is_row:
                    steps[node] = site_step(problem, problem.sites[node], label)
            elif label != WHOLE:
                rule = self._rules(node)[label]
                steps[node] = Step(label, rule.out, {one.name: need for one, need in rule.needs.items()})
        parameters = {key: layout for key, layout in self._stored.items() if labels[self._made[key]] != WHOLE}
        nodes = {node.name: node for node in problem.graph_module.graph.nodes}
        for name, need in (item for step in steps.values() for item in step.needs.items()):
            key = tensor_key(nodes[name])
            if isinstance(need, Layout) and key in self._single and problem.is_parameter(nodes[name]):
                parameters[key] = need
        return Labelling(
            tp=problem.ring.tp,
            steps={node.name: step for node, step in steps.items()},
            parameters=parameters,
            absorbed=frozenset(
                member.name for step in steps.values() if step.site for member in step.site.members[:-1]
            ),
            gap=gap,
            seconds=self.labels.cost(labels) / _UNITS_PER_SECOND,
        )

    def _pay(self, seconds: float, *statements: Statement) -> None:
        self.labels.pay(round(seconds * _UNITS_PER_SECOND), *statements)

    def _demand(self, node: fx.Node, operand: fx.Node, state: State, reader: Statement | bool) -> None:
        """A node, in its stage, reads a tensor."""
        if has_shape(operand):
            stage = self.problem.stage_of.get(node.name, 0)
            self._reads.setdefault(tensor_key(operand), operand)
            self._demands.setdefault((tensor_key(operand), stage), []).append(Demand(state, reader))

    def _rules(self, node: fx.Node) -> dict[str, Rule]:
        """The ways of a node that is no layer to run on shards."""
        tables = {SHARDED: self.problem.rules, SEQUENCE: self.problem.positions.rules}
        return {label: _joined(self.problem, table[node]) for label, table in tables.items() if node in table}

    def _site(self, site: Site) -> None:
        problem, ring = self.problem, self.problem.ring
        outputs, inputs = problem.blocks[site.node]
        column, row = site.column(outputs, ring.tp), site.row(inputs, ring.tp)
        if problem.layout_of(site.node) is None:
            column = None
        along = problem.sequence_of(site.node)
        whole = sum(problem.price(member, shared=False) for member in site.members)
        shared = sum(problem.price(member, shared=True) for member in site.members)
        self._pay(shared)
        not_column: Statement | bool = True
        not_row: Statement | bool = True
        is_whole: Statement | bool = True
        if column is not None or along is not None:
            options = (WHOLE, *[SHARDED] * (column is not None), *[SEQUENCE] * (along is not None))
            out = self._made[site.node.name] = self.labels.variable(*options)
            is_whole = out, WHOLE, True
        if column is not None:
            not_column = out, SHARDED, False
            for operand, state in column[1].items():
                self._demand(site.node, operand, state, (out, SHARDED, True))
        if row is not None:
            rows = self._by_rows[site.node] = self.labels.variable(NO, YES)
            not_row, is_row = (rows, NO, True), (rows, YES, True)
            self._row(site, row, is_row)
            if column is not None:
                self.labels.forbid((out, SHARDED, True), is_row)
        work = [one for one in (not_column, not_row) if not isinstance(one, bool)]
        self._pay(max(0.0, whole - shared), *work)
        # A column layer and a whole one both read all of x; a row layer and a whole one, all of a bias.
        self._demand(site.node, site.x, Whole.SAME, not_row if site.form != "embedding" else True)
        self._demand(site.node, site.weight, Whole.SAME, not_row if site.form == "embedding" else not_column)
        if site.bias is not None:
            self._demand(site.node, site.bias, Whole.SAME, is_whole)

    def _row(self, site: Site, needs: Mapping[fx.Node, State], is_row: Statement) -> None:
        """A layer by rows, and where its result goes."""
        problem, ring, size = self.problem, self.problem.ring, tensor_bytes(site.node)
        for operand, state in needs.items():
            if state is not Whole.SAME:
                self._demand(site.node, operand, state, is_row)
        if problem.sequence_of(site.node) is None:
            self._pay(ring.seconds(ALL_REDUCE, size), is_row)
            return
        on_sequence = self._made[site.node.name], SEQUENCE, True
        self.labels.forbid(on_sequence, deny(is_row))
        self._pay(ring.seconds(ALL_REDUCE, size), is_row, deny(on_sequence))
        self._pay(ring.seconds(REDUCE_SCATTER, size), on_sequence)
        if problem.is_trained(site.node):
            self._pay(ring.seconds(ALL_GATHER, size), on_sequence)
        if site.bias is not None:
            self._demand(site.node, site.bias, _joined_state(problem, site.bias), on_sequence)

    def _other(self, node: fx.Node) -> None:
        problem, rules = self.problem, self._rules(node)
        whole, shared = (problem.price(node, shared=way) for way in (False, True))
        if not rules:
            self._pay(whole)
            for operand in node.all_input_nodes:
                self._demand(node, operand, Whole.SAME, True)
            return
        split = next((one for one in node.all_input_nodes if not has_shape(one)), None)
        if split is None:
            self._made[node.name] = self.labels.variable(WHOLE, *rules)
        else:
            self._made[node.name] = self._made[split.name]
        variable = self._made[node.name]
        self._pay(shared)
        self._pay(max(0.0, whole - shared), (variable, WHOLE, True))
        for operand in node.all_input_nodes:
            layouts = [label for label in rules if isinstance(rules[label].needs[operand], Layout)]
            for label, rule in rules.items():
                if rule.needs[operand] is not Whole.SAME:
                    self._demand(node, operand, rule.needs[operand], (variable, label, True))
            reader: Statement | bool = (variable, WHOLE, True) if len(layouts) > 1 else True
            if len(layouts) == 1:
                reader = variable, layouts[0], False
            self._demand(node, operand, Whole.SAME, reader)

    def _store(self) -> None:
        """How parameters are held, the same in all stages, and what their memory costs."""
        problem = self.problem
        in_shards: dict[str, dict[Statement, Layout]] = {}
        for (key, _), demands in self._demands.items():
            for one in demands if self._reads[key] in self._parameters else ():
                if isinstance(one.state, Layout) and not isinstance(one.reader, bool):
                    in_shards.setdefault(key, {})[one.reader] = one.state
        for key, layouts in in_shards.items():
            divided = list(layouts)
            if key not in self._single:
                self._stored[key] = layouts[divided[0]]
                self._made[key] = self.labels.variable(WHOLE, SHARDED)
                divided = [(self._made[key], SHARDED, True)]
            repeated = problem.held_bytes[key] * (1 - 1 / problem.ring.tp)
            self._pay(repeated * problem.prices.held, *map(deny, divided))

    def _tensors(self) -> None:
        """Collectives between those who make tensors and those who read them."""
        problem, ring = self.problem, self.problem.ring
        joined: dict[int, list[Statement]] = {}
        for (key, stage), demands in self._demands.items():
            node = self._reads[key]
            size = tensor_bytes(node)
            lies = {SHARDED: problem.layout_of(node), SEQUENCE: problem.sequence_of(node)}
            lies[SHARDED] = self._stored.get(key, lies[SHARDED])
            if node in self._parameters and key in self._single:
                demands = [one for one in demands if one.state in (Whole.SUMMED, Whole.JOINED)]
            made: dict[str, tuple[Layout, Statement]] = {}
            if key in self._made and not problem.comes_from_another(node, stage):
                variable = self._made[key]
                made = {
                    label: (layout, (variable, label, True))
                    for label, layout in lies.items()
                    if layout is not None and label in self.labels.options[variable]
                }
            by_state: dict[State, list[Statement]] = {}
            for demand in demands:
                if not isinstance(demand.reader, bool):
                    by_state.setdefault(demand.state, []).append(demand.reader)
            always = any(demand.reader is True and demand.state is Whole.SAME for demand in demands)
            for own, is_own in made.values():
                # What is read as a sum is demanded whole as well.
                gathers = [
                    reader
                    for state, readers in by_state.items()
                    if state not in (own, Whole.SUMMED, Whole.JOINED)
                    for reader in readers
                ]
                if always:
                    self._pay(ring.seconds(ALL_GATHER, size), is_own)
                elif gathers:
                    self._pay(ring.seconds(ALL_GATHER, size), is_own, self.labels.follower(gathers))
            if problem.is_trained(node):
                joined.setdefault(stage, []).extend(self._gradients(size, made, by_state))
        for readers in joined.values():
            if readers:
                seconds = ring.rounds(ALL_REDUCE) * ring.link.latency_seconds
                self._pay(seconds, self.labels.follower(readers))

    def _gradients(
        self,
        size: int,
        made: Mapping[str, tuple[Layout, Statement]],
        by_state: Mapping[State, Sequence[Statement]],
    ) -> Iterator[Statement]:
        """Collectives on the gradient of a tensor; those who want it summed with others.

        Args:
            size: bytes of the tensor.
            made: by each label that it may be made in, the layout and the statement that it is.
            by_state: who reads it in each state.
        """
        ring = self.problem.ring
        of_layout = dict(made.values())
        for state, readers in by_state.items():
            if state is Whole.SAME:
                continue
            reader = self.labels.follower(readers)
            if state is Whole.JOINED:
                self._pay(ring.joined_seconds(size), reader)
                yield reader
            elif isinstance(state, Layout):
                others = [deny(of_layout[state])] if state in of_layout else []
                self._pay(ring.seconds(ALL_GATHER, size), reader, *others)
            elif SEQUENCE in made:
                on_sequence = made[SEQUENCE][1]
                self._pay(ring.seconds(ALL_REDUCE, size), reader, deny(on_sequence))
                self._pay(ring.seconds(REDUCE_SCATTER, size), reader, on_sequence)
            else:
                self._pay(ring.seconds(ALL_REDUCE, size), reader)


def _joined(problem: Problem, rule: Rule) -> Rule:
    """A rule in which gradients of parameters are summed together."""
    needs = {
        operand: _joined_state(problem, operand) if state is Whole.SUMMED else state
        for operand, state in rule.needs.items()
    }
    return Rule(rule.out, needs)


def _joined_state(problem: Problem, operand: fx.Node) -> State:
    if not problem.is_parameter(operand):
        return Whole.SUMMED
    return Whole.JOINED if operand.meta["tensor"].requires_grad else Whole.SAME


def site_step(problem: Problem, site: Site, label: str) -> Step:
    """A layer by columns or rows.

    Args:
        problem: it is part of.
        site: the layer.
        label: of its result.
    """
    outputs, inputs = problem.blocks[site.node]
    if label == SHARDED:
        column = site.column(outputs, problem.ring.tp)
        assert column is not None
        out, needs = column
        return Step(COLUMN, out, {node.name: state for node, state in needs.items()}, site)
    row = site.row(inputs, problem.ring.tp)
    assert row is not None
    along = problem.sequence_of(site.node) if label == SEQUENCE else None
    if along is not None and site.bias is not None:
        row[site.bias] = _joined_state(problem, site.bias)
    kind = VOCABULARY if site.form == "embedding" else ROW
    return Step(kind, along, {node.name: state for node, state in row.items()}, site)
