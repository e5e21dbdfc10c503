"""Which tensors and layers are sharded over the tp axis: a labelling of least cost, by a minimum cut.

Every tensor that could lie on the devices in shards gets a label, whole or sharded, and so does the input
side of every layer with a weight. Layers want their two sides to differ (column: whole in, sharded out; row:
sharded in, whole out), everything else wants them alike, and where labels disagree a collective is paid:

    layer, both sides whole           work that tp devices all do, instead of a share each
    layer, both sides sharded         never
    layer by rows                     all-reduce of its result, forward
    whole, used by column layers      all-reduce of its gradient, backward, once for all of them
    sharded, used whole               all-gather, forward, once
    whole, used sharded               all-gather of its gradient, backward, once
    other operation, whole            work that tp devices all do

Seconds of collectives are those of rings. `energy` minimises the sum exactly in one cut wherever all paths
from a tensor to another pass the same number of layers, modulo two, as in transformers and residual networks
of pairs.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx, nn

from panther_compile.partition.capture import Captured, attribute
from panther_compile.partition.energy import Energy, Literal, Minimum, negate
from panther_compile.partition.flow import Work
from panther_compile.partition.flow_graph import Costs, weigh
from panther_compile.partition.hardware import Link
from panther_compile.partition.layout_rules import Rule, derive_rule, has_shape, shape
from panther_compile.partition.layouts import Layout, State, Whole
from panther_compile.partition.observe import Observed
from panther_compile.partition.sharding_sites import COLUMN, ROW, VOCABULARY, Site, find_sites

SHARDED = "sharded"
_UNITS_PER_SECOND = 10**12
_MOST_BLOCKS = 8


@dataclass(frozen=True)
class Step:
    """A node that runs on shards.

    Attributes:
        kind: "column", "row", "vocabulary", or "sharded" for what is no layer with a weight.
        out: layout of its result; None if that is whole.
        needs: of each operand, by the name of its node.
        site: the layer, unless "sharded".
    """

    kind: str
    out: Layout | None
    needs: Mapping[str, State]
    site: Site | None = None


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
        rounds = (self.tp - 1) * (2 if kind == "all_reduce" else 1)
        return rounds * self.link.seconds(size / self.tp)


@dataclass(frozen=True)
class Demand:
    """A node reads a tensor in a state if a literal holds."""

    state: State
    reader: Literal | bool


@dataclass(frozen=True)
class Labelling:
    """How a graph is sharded.

    Attributes:
        tp: number of devices.
        steps: of nodes that run on shards, by name.
        parameters: layouts of those that are stored in shards.
        absorbed: nodes that have become part of another's step.
        gap: share of the cost by which a better labelling is not ruled out.
        seconds: the cost.
    """

    tp: int
    steps: Mapping[str, Step]
    parameters: Mapping[str, Layout]
    absorbed: frozenset[str]
    gap: float
    seconds: float


@dataclass(frozen=True)
class Problem:
    """The choices in a graph and their costs.

    Attributes:
        graph_module: that is labelled.
        whole: nodes whose results must be whole.
        sites: layers, by their last node.
        inner: the other nodes of layers that are more than one.
        rules: of other nodes that can run on shards.
        blocks: of the features that each layer gives, and of those that it takes.
        whole_work: of each node if every device does all of it.
        shared_work: of each node if the devices divide it.
        ring: the devices.
        training: whether there is a backward.
    """

    graph_module: fx.GraphModule
    whole: frozenset[fx.Node]
    sites: dict[fx.Node, Site]
    inner: frozenset[fx.Node]
    rules: dict[fx.Node, Rule]
    blocks: dict[fx.Node, tuple[int, int]]
    whole_work: dict[fx.Node, Work]
    shared_work: dict[fx.Node, Work]
    ring: Ring
    training: bool

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node reads a parameter."""
        return node.op == "get_attr" and isinstance(
            attribute(self.graph_module, str(node.target)), nn.Parameter
        )

    def layout_of(self, node: fx.Node) -> Layout | None:
        """The layout that a node's result would have in shards."""
        if node in self.whole:
            return None
        if node in self.sites:
            column = self.sites[node].column(self.blocks[node][0], self.ring.tp)
            return column[0] if column else None
        return self.rules[node].out if node in self.rules else None


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
    whole: Collection[str] = (),
) -> Problem:
    """Find what could be sharded, and what it costs.

    Args:
        captured: the model.
        notes: of `observe`.
        costs: how seconds are counted.
        ring: the devices that share a stage.
        constants: nodes that are the same whatever the inputs, and stay whole.
        whole: names of nodes whose results must be whole, as those that other stages use.
    """
    graph_module, tp = captured.graph_module, ring.tp
    written = {key for note in notes.values() for key in note.writes}
    frozen = {node for node in graph_module.graph.nodes if notes[node].touches & written} | set(constants)
    fixed = frozenset(node for node in graph_module.graph.nodes if node.name in whole or node in frozen)
    sites = {
        node: site
        for node, site in find_sites(graph_module, fixed).items()
        if frozen.isdisjoint(site.members)
    }
    problem = Problem(
        graph_module,
        fixed,
        sites,
        frozenset(member for site in sites.values() for member in site.members[:-1]),
        {},
        {},
        {node: weigh(node, notes[node], costs) for node in notes},
        {node: weigh(node, notes[node], costs, tp) for node in notes},
        ring,
        costs.training,
    )
    for node in graph_module.graph.nodes:
        if node in sites:
            problem.blocks[node] = _choose_blocks(problem, node)
        elif node.op == "call_function" and node not in problem.inner and node not in fixed:
            layouts = ((source, problem.layout_of(source)) for source in node.all_input_nodes)
            found = (derive_rule(node, source, layout, tp) for source, layout in layouts if layout)
            rule = next((rule for rule in found if rule is not None), None)
            if rule is not None:
                problem.rules[node] = rule
    # The pieces of a split lie in shards if the split does, so all of them must be able to.
    for node in list(problem.rules):
        if not has_shape(node) and not all(user in problem.rules for user in node.users):
            for dropped in (node, *node.users):
                problem.rules.pop(dropped, None)
    return problem


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
            rule = derive_rule(user, source, known[source], problem.ring.tp)
            if rule is not None:
                known[user] = rule.out
                queue.append(user)
    return len(known)


def find_labelling(problem: Problem, limit: int = 64) -> Labelling:
    """The labelling of least cost.

    Args:
        problem: of `pose`.
        limit: on the number of cuts, where one is not enough.
    """
    builder = Builder(problem)
    minimum = builder.energy.minimize(limit)
    return builder.labelling(minimum)


class Builder:
    """The energy of a problem, and steps from its choices."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.energy = problem, Energy()
        self.sharded: dict[str, Literal] = {}
        self.by_rows: dict[fx.Node, Literal] = {}
        self._demands: dict[str, list[Demand]] = {}
        self._reads: dict[str, fx.Node] = {}
        readers: dict[str, set[fx.Node]] = {}
        graph = problem.graph_module.graph
        self._stored: dict[str, Layout] = {}
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                readers.setdefault(tensor_key(operand), set()).add(node)
        self._single = {key for key, nodes in readers.items() if len(nodes) == 1}
        for node in graph.nodes:
            if node in problem.sites:
                self._site(problem.sites[node])
            elif node not in problem.inner and node.op != "placeholder" and node.op != "get_attr":
                self._other(node)
        self._tensors()

    def _pay(self, seconds: float, *literals: Literal) -> None:
        self.energy.pay(round(seconds * _UNITS_PER_SECOND), *literals)

    def _demand(self, operand: fx.Node, state: State, reader: Literal | bool) -> None:
        if has_shape(operand):
            self._reads.setdefault(tensor_key(operand), operand)
            self._demands.setdefault(tensor_key(operand), []).append(Demand(state, reader))

    def _site(self, site: Site) -> None:
        problem, tp = self.problem, self.problem.ring.tp
        outputs, inputs = problem.blocks[site.node]
        column, row = site.column(outputs, tp), site.row(inputs, tp)
        if problem.layout_of(site.node) is None:
            column = None
        whole = sum(problem.whole_work[member].seconds for member in site.members)
        shared = sum(problem.shared_work[member].seconds for member in site.members)
        self._pay(shared)
        ways = []
        if column is not None:
            literal = self.sharded[site.node.name] = self.energy.choice()
            ways.append((literal, column[1]))
        if row is not None:
            literal = self.by_rows[site.node] = self.energy.choice()
            ways.append((literal, row))
            self._pay(problem.ring.seconds("all_reduce", tensor_bytes(site.node)), literal)
        if len(ways) == 2:
            self.energy.forbid(ways[0][0], ways[1][0])
        self._pay(max(0.0, whole - shared), *(negate(literal) for literal, _ in ways))
        for literal, needs in ways:
            for operand, state in needs.items():
                if not isinstance(state, Whole) or state is Whole.SUMMED:
                    self._demand(operand, state, literal)
        # A column layer and a whole one both read all of x; a row layer and a whole one, all of a bias.
        not_row = negate(self.by_rows[site.node]) if row is not None else True
        not_column = negate(self.sharded[site.node.name]) if column is not None else True
        self._demand(site.x, Whole.SAME, not_row if site.form != "embedding" else True)
        self._demand(site.weight, Whole.SAME, not_row if site.form == "embedding" else not_column)
        if site.bias is not None:
            self._demand(site.bias, Whole.SAME, not_column)

    def _other(self, node: fx.Node) -> None:
        problem = self.problem
        whole, shared = problem.whole_work[node], problem.shared_work[node]
        if node not in problem.rules:
            self._pay(whole.seconds)
            for operand in node.all_input_nodes:
                self._demand(operand, Whole.SAME, True)
            return
        split = next((one for one in node.all_input_nodes if not has_shape(one)), None)
        literal = self.sharded[split.name] if split is not None else self.energy.choice()
        self.sharded[node.name] = literal
        self._pay(shared.seconds)
        self._pay(max(0.0, whole.seconds - shared.seconds), negate(literal))
        for operand, state in problem.rules[node].needs.items():
            self._demand(operand, state, literal)
            self._demand(operand, Whole.SAME, True if isinstance(state, Whole) else negate(literal))

    def _tensors(self) -> None:
        """Collectives between those who make tensors and those who read them."""
        problem, ring, energy = self.problem, self.problem.ring, self.energy
        for key, demands in self._demands.items():
            node = self._reads[key]
            size = tensor_bytes(node)
            trained = problem.training and node.meta["tensor"].requires_grad
            own: Layout | None = problem.layout_of(node)
            made: Literal | None = self.sharded.get(key)
            if problem.is_parameter(node):
                if key in self._single:
                    demands = [demand for demand in demands if demand.state is Whole.SUMMED]
                else:
                    layouts = [demand.state for demand in demands if isinstance(demand.state, Layout)]
                    own = next(iter(layouts), None)
                    made = self.sharded[key] = energy.choice() if own else None  # type: ignore[assignment]
                    if own is not None:
                        self._stored[key] = own
            by_state: dict[State, list[Literal]] = {}
            for demand in demands:
                if demand.reader is not True:
                    by_state.setdefault(demand.state, []).append(demand.reader)  # type: ignore[arg-type]
            gathers = [
                reader
                for state, readers in by_state.items()
                if state is not Whole.SUMMED and state != own
                for reader in readers
            ]
            if made is not None:
                always = any(demand.reader is True and demand.state is Whole.SAME for demand in demands)
                gather = ring.seconds("all_gather", size)
                if always:
                    self._pay(gather, made)
                elif gathers:
                    self._pay(gather, made, energy.follower(gathers))
            if not trained:
                continue
            for state, readers in by_state.items():
                if state is Whole.SAME:
                    continue
                reader = energy.follower(readers)
                if state is Whole.SUMMED:
                    self._pay(ring.seconds("all_reduce", size), reader)
                elif state != own or made is None:
                    self._pay(ring.seconds("all_gather", size), reader)
                else:
                    self._pay(ring.seconds("all_gather", size), reader, negate(made))

    def labelling(self, minimum: Minimum) -> Labelling:
        """What the choices mean."""
        problem = self.problem

        def holds(literal: Literal | None) -> bool:
            return literal is not None and minimum.values[literal[0]] == literal[1]

        steps: dict[fx.Node, Step] = {}
        for node in problem.graph_module.graph.nodes:
            if node in problem.rules and holds(self.sharded[node.name]):
                rule = problem.rules[node]
                steps[node] = Step(SHARDED, rule.out, {one.name: need for one, need in rule.needs.items()})
            elif node in problem.sites and holds(self.sharded.get(node.name)):
                steps[node] = site_step(problem, problem.sites[node], COLUMN)
            elif node in problem.sites and holds(self.by_rows.get(node)):
                steps[node] = site_step(problem, problem.sites[node], ROW)
        parameters = {key: layout for key, layout in self._stored.items() if holds(self.sharded[key])}
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
            gap=minimum.gap,
            seconds=minimum.cost / _UNITS_PER_SECOND,
        )


def site_step(problem: Problem, site: Site, kind: str) -> Step:
    """A layer by columns or rows."""
    outputs, inputs = problem.blocks[site.node]
    if kind == COLUMN:
        column = site.column(outputs, problem.ring.tp)
        assert column is not None
        out, needs = column
        return Step(COLUMN, out, {node.name: state for node, state in needs.items()}, site)
    row = site.row(inputs, problem.ring.tp)
    assert row is not None
    kind = VOCABULARY if site.form == "embedding" else ROW
    return Step(kind, None, {node.name: state for node, state in row.items()}, site)
