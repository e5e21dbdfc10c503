"""Units of a stage's graph: consecutive nodes, cut where few values are alive, of even bytes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import fx, nn

from panther_compile.names import attribute, is_persistent, leave_out_of_state
from panther_compile.parallel.units import SHARE
from panther_compile.parallel.writes import writes_of
from panther_compile.partition.graph.recomputed import recomputed_region
from panther_compile.partition.stages.split import copied_part

# What a cut costs, and each value alive there beyond the fewest: against 8 times the sum of squared shares.
_CUT, _ALIVE = 0.03, 0.01
_UNIT = re.compile(r"unit_\d+")


def divide_graph(graph_module: fx.GraphModule, *, divide: bool) -> tuple[fx.GraphModule, frozenset[str]]:
    """A stage as units that run one after the other.

    Before:  x ──► linear ──► relu ──► linear_1 ──► out
    After:   x ──► unit_0(linear, relu) ──► unit_1(linear_1) ──► out

    Args:
        graph_module: flat; left as it is.
        divide: into even units; if False, only into what the user's own `checkpoint` calls compute again,
            and what lies between.

    Returns:
        A graph of calls of `unit_0`, `unit_1`, ..., which holds what several of them read, and the names of
        the units that the user's own model computes again.
    """
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op.startswith("call")]
    forced, regions = _regions(calls)
    if not calls or not (divide or regions):
        return graph_module, frozenset()
    cuts = sorted({*forced, *(_choose_cuts(graph_module, nodes, calls, forced, regions) if divide else ())})
    ends = [*cuts, len(calls)]
    unit_of: dict[fx.Node, int] = {}
    for place, call in enumerate(calls):
        unit_of[call] = int(np.searchsorted(ends, place, side="right"))
    for call in _made_of_parameters(calls, unit_of):
        del unit_of[call]
    own = {number for number, first in enumerate([0, *cuts]) if first in regions}
    return _assemble(graph_module, nodes, unit_of, len(ends)), frozenset(f"unit_{number}" for number in own)


def _made_of_parameters(calls: Sequence[fx.Node], unit_of: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Calls that read parameters alone, and whose results another unit needs: views of what is freed by then.

    Args:
        calls: in their order.
        unit_of: unit of each.
    """
    alone: set[fx.Node] = set()
    for call in calls:
        given = call.all_input_nodes
        if given and all(other.op == "get_attr" or other in alone for other in given):
            alone.add(call)
    outside: set[fx.Node] = set()
    for call in reversed(calls):
        if call in alone and any(
            user in outside or unit_of.get(user, -1) != unit_of[call] for user in call.users
        ):
            outside.add(call)
    return outside


def _regions(calls: Sequence[fx.Node]) -> tuple[set[int], dict[int, int]]:
    """Ends of the parts that the user's model computes again, and first -> last but one place of each."""
    spans: dict[int, list[int]] = {}
    for place, node in enumerate(calls):
        number = recomputed_region(node)
        if number is not None:
            spans.setdefault(number, []).append(place)
    regions = {min(places): max(places) + 1 for places in spans.values()}
    return {end for span in regions.items() for end in span if 0 < end < len(calls)}, regions


def _choose_cuts(
    graph_module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    calls: Sequence[fx.Node],
    forced: set[int],
    regions: Mapping[int, int],
) -> list[int]:
    """Places before which a unit starts: few values alive, even bytes."""
    place_of = {call: place for place, call in enumerate(calls)}
    weight = _weights(graph_module, nodes, place_of)
    if not weight.sum():
        return []
    done = np.concatenate([[0.0], np.cumsum(weight / weight.sum())])
    alive = np.zeros(len(calls) + 1, dtype=int)
    for node in nodes:
        if node.op in ("get_attr", "output"):
            continue
        last = max((place_of.get(user, len(calls)) for user in node.users), default=-1)
        alive[place_of.get(node, -1) + 1 : last + 1] += 1
    open_ = np.ones(len(calls) + 1, dtype=bool)
    for first, end in regions.items():
        open_[first + 1 : end] = False
    for write in writes_of(calls):
        open_[write.base + 1 : write.place + 1] = False
    for first, last in _called_again(graph_module, nodes, place_of):
        open_[first + 1 : last + 1] = False
    heavy = np.flatnonzero(weight > 0)
    found = set(forced)
    for first, last in pairwise(heavy.tolist()):
        allowed = [place for place in range(first + 1, last + 1) if open_[place]]
        if allowed:
            found.add(min(allowed, key=lambda place: (alive[place], place)))
    places = [0, *sorted(found), len(calls)]
    return _cheapest(places, done, alive - alive[1:-1].min(initial=len(nodes)), forced)


def _called_again(
    graph_module: fx.GraphModule, nodes: Sequence[fx.Node], place_of: Mapping[fx.Node, int]
) -> Iterator[tuple[int, int]]:
    """First and last place of what reads a parameter of a module that is called as such.

    A unit holds such a module, and cannot be given its parameters: one has all its calls.
    """
    readers: dict[int, set[int]] = {}
    called: set[int] = set()
    for node in nodes:
        if node.op == "call_module":
            for parameter in graph_module.get_submodule(str(node.target)).parameters():
                called.add(id(parameter))
                readers.setdefault(id(parameter), set()).add(place_of[node])
        if node.op == "get_attr":
            places = {place_of[user] for user in node.users if user in place_of}
            readers.setdefault(id(attribute(graph_module, str(node.target))), set()).update(places)
    yield from ((min(readers[one]), max(readers[one])) for one in called)


def _weights(graph_module: fx.GraphModule, nodes: Sequence[fx.Node], place_of: Mapping[fx.Node, int]) -> Any:
    """Share of each call in the bytes of the parameters that it is the first to read, and alone."""
    weight = np.zeros(len(place_of))
    readers: dict[str, set[int]] = {}
    for node in nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), set()).update(
                place_of[user] for user in node.users if user in place_of
            )
        if node.op == "call_module":
            held = graph_module.get_submodule(str(node.target)).parameters()
            weight[place_of[node]] += sum(one.nbytes for one in held)
    for name, places in readers.items():
        tensor = attribute(graph_module, name)
        if isinstance(tensor, nn.Parameter) and places:
            weight[min(places)] += tensor.nbytes
    return weight


def _cheapest(places: Sequence[int], done: Any, alive: Any, forced: set[int]) -> list[int]:
    """The places at which squared shares of the units, and what is alive between them, add up to least."""
    shares = done[list(places)]
    best = np.zeros(len(places))
    before = np.zeros(len(places), dtype=int)
    start = 0
    for number in range(1, len(places)):
        costs = best[start:number] + (shares[number] - shares[start:number]) ** 2 / SHARE
        before[number] = start + int(np.argmin(costs))
        best[number] = costs.min() + _CUT + _ALIVE * alive[places[number]]
        if places[number] in forced:
            start = number  # no unit may reach across
    chosen, number = [], int(before[-1])
    while number:
        chosen.append(places[number])
        number = int(before[number])
    return chosen[::-1]


def _assemble(
    source: fx.GraphModule, nodes: Sequence[fx.Node], unit_of: Mapping[fx.Node, int], count: int
) -> fx.GraphModule:
    """A graph of calls of units."""
    output = next(node for node in reversed(nodes) if node.op == "output")
    users = {node: {unit_of.get(user, -1) for user in node.users} for node in nodes if node.op != "output"}
    outer = fx.Graph()
    made: dict[fx.Node, Any] = {}
    tensors: dict[str, Any] = {}
    several = _read_by_several(nodes, users)
    for node in nodes:
        if node.op == "placeholder":
            made[node] = outer.node_copy(node)
    for node in nodes:
        if node.op == "get_attr" and (str(node.target) in several or -1 in users[node]):
            made[node] = outer.node_copy(node)
            tensors[str(node.target)] = attribute(source, str(node.target))
    for node in nodes:
        if node.op.startswith("call") and node not in unit_of:
            made[node] = outer.node_copy(node, made.__getitem__)
    for number in range(count):
        own = [node for node in nodes if unit_of.get(node) == number]
        given = list(dict.fromkeys(other for node in own for other in node.all_input_nodes if other in made))
        returned = [node for node in own if users[node] - {number}]
        tensors[f"unit_{number}"] = _unit_module(source, own, given, returned, number)
        call = outer.call_module(f"unit_{number}", tuple(made[node] for node in given))
        for place, node in enumerate(returned):
            made[node] = outer.call_function(_take, (call, place))
    outer.output(fx.node.map_arg(output.args[0], made.__getitem__))
    return _module_of(source, tensors, outer, f"{type(source).__name__}Units")


def _read_by_several(nodes: Sequence[fx.Node], users: Mapping[fx.Node, set[int]]) -> set[str]:
    readers: dict[str, set[int]] = {}
    for node in nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), set()).update(users[node])
    return {name for name, units in readers.items() if len(units) > 1}


def _unit_module(
    source: fx.GraphModule,
    own: Sequence[fx.Node],
    given: Sequence[fx.Node],
    returned: Sequence[fx.Node],
    number: int,
) -> fx.GraphModule:
    needed = set(own) | {other for node in own for other in node.all_input_nodes if other.op == "get_attr"}
    graph, copies, tensors = copied_part(source, given, needed)
    graph.output(tuple(copies[node] for node in returned))
    return _module_of(source, tensors, graph, f"Unit{number}")


def _module_of(
    source: fx.GraphModule, tensors: Mapping[str, Any], graph: fx.Graph, name: str
) -> fx.GraphModule:
    graph.lint()
    module = fx.GraphModule(dict(tensors), graph, class_name=name)
    module.training = source.training
    for key, _ in module.named_buffers():
        if key in tensors and not is_persistent(source, key):
            leave_out_of_state(module, key)
    return module


def _take(results: Sequence[Any], place: int) -> Any:
    """One of the values that a unit gives."""
    return results[place]


def graphs_within(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The units of a divided graph, and what holds them; of another the graph itself."""
    for name in unit_names(graph_module):
        unit = graph_module.get_submodule(name)
        assert isinstance(unit, fx.GraphModule)
        yield unit
    yield graph_module


def unit_names(graph_module: fx.GraphModule) -> list[str]:
    """The units of a divided graph, in their order; none of another."""
    return [
        str(node.target)
        for node in graph_module.graph.nodes
        if node.op == "call_module" and _UNIT.fullmatch(str(node.target))
    ]
