"""A labelling becomes numbers: the collectives of each stage, records of its shards, and lighter stages."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from panther_compile.partition.flow import FlowGraph, Work
from panther_compile.partition.flow_graph import add_work
from panther_compile.partition.label import SEQUENCE, Labelling, Step
from panther_compile.partition.layout_rules import aten, has_shape
from panther_compile.partition.layouts import Layout, State, Whole
from panther_compile.partition.records import Collective, Shard
from panther_compile.partition.sharding_problem import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Problem,
    tensor_bytes,
    tensor_key,
)
from panther_compile.partition.sharding_sites import ROW, VOCABULARY, uneven_reason

# The tensor of the collective that sums the gradients of all parameters which a stage uses on a sequence.
JOINED_GRADIENTS = "parameters used on the sequence"
_UNSHARDED_LAYERS = (aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose2d, aten.lstm, aten.gru)


@dataclass(frozen=True)
class Sharding:
    """How the stages of a partition are divided over the tp axis.

    Attributes:
        labelling: of the whole graph.
        shards: layers that are divided.
        whole: other layers, and why.
        collectives: of all stages.
        sequence: nodes whose results lie in shards of a sequence.
        sequence_fits: whether any could.
    """

    labelling: Labelling
    shards: tuple[Shard, ...]
    whole: tuple[tuple[str, str], ...]
    collectives: tuple[Collective, ...]
    sequence: tuple[str, ...]
    sequence_fits: bool


@dataclass(frozen=True)
class Placed:
    """A collective and the node that it comes before, or after."""

    collective: Collective
    node: fx.Node


def place_collectives(problem: Problem, labelling: Labelling) -> list[Placed]:
    """Every collective of one microbatch, in the order of the graph.

    A tensor is brought from the way it lies to each state that it is read in once for every stage. What goes
    to another stage is whole.

    Args:
        problem: that was labelled.
        labelling: of it.
    """
    made: dict[tuple[int, str], set[State]] = {}
    joined: dict[tuple[int, torch.dtype], dict[str, int]] = {}
    first: dict[tuple[int, torch.dtype], fx.Node] = {}
    placed: list[Placed] = []

    def place(stage: int, node: fx.Node, tensor: fx.Node, kind: str, phase: str) -> None:
        if phase == "forward" or problem.is_trained(tensor):
            size = tensor_bytes(tensor)
            placed.append(Placed(Collective(stage, tensor_key(tensor), kind, phase, size), node))

    for node in problem.graph_module.graph.nodes:
        if node.name in labelling.absorbed or node.op in ("placeholder", "get_attr"):
            continue
        stage = problem.stage_of.get(node.name)
        if stage is None:
            continue
        step = labelling.steps.get(node.name)
        for operand, state in operand_states(node, step):
            known = made.setdefault((stage, tensor_key(operand)), set())
            if state is Whole.JOINED and problem.training:
                message = stage, operand.meta["tensor"].dtype
                joined.setdefault(message, {})[tensor_key(operand)] = tensor_bytes(operand)
                first.setdefault(message, node)
            lies, on_sequence = layout_of(labelling, operand), labelling.lies_on_sequence(operand)
            if problem.comes_from_another(operand, stage):
                lies, on_sequence = None, False
            for kind, phase, reached in _ways(lies, state, on_sequence=on_sequence):
                if reached not in known:
                    known.add(reached)
                    place(stage, node, operand, kind, phase)
        if step is not None and step.kind in (ROW, VOCABULARY):
            place(stage, node, node, REDUCE_SCATTER if step.on_sequence else ALL_REDUCE, "forward")
            if step.on_sequence:
                place(stage, node, node, ALL_GATHER, "backward")
        if node in problem.sent and layout_of(labelling, node) is not None:
            made.setdefault((stage, tensor_key(node)), set()).add(Whole.SAME)
            place(stage, node, node, ALL_GATHER, "forward")
    for message, sizes in joined.items():
        summed = Collective(message[0], JOINED_GRADIENTS, ALL_REDUCE, "backward", sum(sizes.values()))
        placed.append(Placed(summed, first[message]))
    return placed


def operand_states(node: fx.Node, step: Step | None) -> Iterator[tuple[fx.Node, State]]:
    """Tensors that a node reads, and the state it needs each in."""
    if step is not None and step.site is not None:
        operands = [operand for member in step.site.members for operand in member.all_input_nodes]
    else:
        operands = node.all_input_nodes
    for operand in dict.fromkeys(operands):
        if step is None:
            if has_shape(operand):
                yield operand, Whole.SAME
        elif operand.name in step.needs and has_shape(operand):
            yield operand, step.needs[operand.name]


def layout_of(labelling: Labelling, node: fx.Node) -> Layout | None:
    """How the result of a node lies; None if whole."""
    if node.op == "get_attr":
        return labelling.parameters.get(str(node.target))
    step = labelling.steps.get(node.name)
    return step.out if step is not None else None


def _ways(lies: Layout | None, state: State, *, on_sequence: bool) -> Iterator[tuple[str, str, State]]:
    """The collectives that bring a tensor to a state: (kind, phase, state reached)."""
    if state == lies:
        return
    if lies is not None:
        yield ALL_GATHER, "forward", Whole.SAME
    if state is Whole.SUMMED:
        yield REDUCE_SCATTER if on_sequence else ALL_REDUCE, "backward", state
    elif isinstance(state, Layout):
        yield ALL_GATHER, "backward", state


def lighten(problem: Problem, labelling: Labelling, flow: FlowGraph, placed: list[Placed]) -> FlowGraph:
    """The flow graph of one device: sharded work is divided, and collectives take time."""
    nodes = {node.name: node for node in problem.graph_module.graph.nodes}
    spent: dict[str, Work] = {}
    for one in placed:
        seconds = problem.ring.seconds(one.collective.kind, one.collective.bytes)
        is_forward = one.collective.phase == "forward"
        work = Work(seconds * is_forward, seconds * (not is_forward))
        spent[one.node.name] = add_work(spent.get(one.node.name, Work()), work)
    work_of = {}
    for vertex, names in flow.members.items():
        total = Work()
        for name in names:
            shared = name in labelling.steps or name in labelling.absorbed
            own = (problem.shared_work if shared else problem.whole_work)[nodes[name]]
            total = add_work(add_work(total, own), spent.get(name, Work()))
        work_of[vertex] = total
    holdings = tuple(
        replace(
            held,
            bytes=held.bytes // labelling.tp,
            trained_bytes=held.trained_bytes // labelling.tp,
            gradient_bytes=held.gradient_bytes // labelling.tp,
        )
        if held.name in labelling.parameters
        else held
        for held in flow.holdings
    )
    return replace(flow, work=work_of, holdings=holdings)


def describe_shards(problem: Problem, labelling: Labelling, placed: list[Placed]) -> tuple[Shard, ...]:
    """A record for each layer that is sharded, for other parameters that are, and for those on a sequence."""
    found, told = [], set[str]()
    for node in problem.graph_module.graph.nodes:
        step = labelling.steps.get(node.name)
        if step is None:
            continue
        reads = [operand for operand, _ in operand_states(node, step) if problem.is_parameter(operand)]
        names = [tensor_key(operand) for operand in reads]
        on_sequence = step.kind == SEQUENCE and names
        if step.site is None and not on_sequence and not any(name in labelling.parameters for name in names):
            continue
        name = step.site.name if step.site else names[0].removesuffix(".weight")
        told.update(names)
        layouts = [labelling.parameters.get(one) for one in names]
        found.append(
            Shard(
                name=name,
                kind=step.kind,
                node=node.name,
                parameters={
                    one: layout.dim if layout else None for one, layout in zip(names, layouts, strict=True)
                },
                blocks=max((layout.blocks for layout in layouts if layout), default=1),
                collectives=tuple(one.collective for one in placed if one.node is node),
            )
        )
    return tuple(found)


def explain_whole(problem: Problem, labelling: Labelling) -> tuple[tuple[str, str], ...]:
    """Layers that stay whole, and why."""
    found, tp = [], problem.ring.tp
    for node in problem.graph_module.graph.nodes:
        if node in problem.sites and node.name not in labelling.steps:
            site = problem.sites[node]
            uneven = uneven_reason(site, tp)
            if uneven and " and " not in uneven and site.form != "embedding":
                uneven += "; the other way costs more than it saves"
            found.append((site.name, uneven or "its collectives take longer than the work they divide"))
        elif getattr(node.target, "overloadpacket", None) in _UNSHARDED_LAYERS:
            found.append((_layer_name(problem, node), f"{node.target} is not divided"))
        elif node in problem.positions.uneven and node.name not in labelling.steps:
            sizes = " and ".join(map(str, problem.positions.uneven[node]))
            found.append((_layer_name(problem, node), f"its axes of {sizes} do not divide by {tp}"))
        elif node.op == "call_module":
            found.append((str(node.target), "a module kept whole shows no operations to divide"))
    return tuple(dict.fromkeys(found))


def _layer_name(problem: Problem, node: fx.Node) -> str:
    """That of its first parameter, without the last part if this is `weight`."""
    weights = [one for one in node.all_input_nodes if problem.is_parameter(one)]
    return tensor_key(weights[0]).removesuffix(".weight") if weights else node.name
