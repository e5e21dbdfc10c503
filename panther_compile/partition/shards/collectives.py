"""The collectives of a sharding plan: which tensors are summed or gathered, where in the graph.

A tensor is brought from the way it lies to each placement that it is read in once for every stage. What goes
to another stage is whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from panther_compile.partition.records import Collective
from panther_compile.partition.shards.layers import ROW, VOCABULARY
from panther_compile.partition.shards.placements import Placement, Replicate, Shard
from panther_compile.partition.shards.problem import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Problem,
    tensor_key,
    tensor_name,
)
from panther_compile.partition.shards.rules import has_shape
from panther_compile.partition.shards.sharding_plan import ShardingPlan, Step

# The tensor of the collective that sums the gradients of all parameters which a stage uses on a sequence.
BUCKETED_GRADIENTS = "parameters used on the sequence"


@dataclass(frozen=True)
class Placed:
    """A collective and the node that it comes before, or after."""

    collective: Collective
    node: fx.Node


def place_collectives(problem: Problem, plan: ShardingPlan) -> list[Placed]:
    """Every collective of one microbatch, in the order of the graph.

    A tensor is brought from the way it lies to each state that it is read in once for every stage. What goes
    to another stage is whole.

    Args:
        problem: that was labelled.
        plan: of it.
    """
    made: dict[tuple[int, str], set[Placement]] = {}
    bucketed: dict[tuple[int, torch.dtype], dict[str, int]] = {}
    first: dict[tuple[int, torch.dtype], fx.Node] = {}
    placed: list[Placed] = []

    def place(stage: int, node: fx.Node, tensor: fx.Node, kind: str, phase: str) -> None:
        if phase == "forward" or problem.is_trained(tensor):
            size = problem.tensor_bytes(tensor)
            placed.append(Placed(Collective(stage, tensor_name(tensor), kind, phase, size), node))

    for node in problem.graph_module.graph.nodes:
        if node.name in plan.absorbed or node.op in ("placeholder", "get_attr"):
            continue
        stage = problem.stages.stage_of.get(node.name)
        if stage is None or (node.op == "output" and problem.costs.parallel_loss):
            continue  # a loss that is divided takes shards
        step = plan.steps.get(node.name)
        for operand, state in operand_placements(node, step):
            known = made.setdefault((stage, tensor_key(operand)), set())
            if state is Replicate.BUCKETED_GRADIENT and problem.costs.training:
                message = stage, operand.meta["tensor"].dtype
                bucketed.setdefault(message, {})[tensor_key(operand)] = problem.tensor_bytes(operand)
                first.setdefault(message, node)
            lies, on_sequence = plan.shard_of(operand), plan.lies_on_sequence(operand)
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
        if node in problem.stages.sent and plan.shard_of(node) is not None:
            made.setdefault((stage, tensor_key(node)), set()).add(Replicate.PLAIN)
            place(stage, node, node, ALL_GATHER, "forward")
    for message, sizes in bucketed.items():
        summed = Collective(message[0], BUCKETED_GRADIENTS, ALL_REDUCE, "backward", sum(sizes.values()))
        placed.append(Placed(summed, first[message]))
    return placed


def operand_placements(node: fx.Node, step: Step | None) -> Iterator[tuple[fx.Node, Placement]]:
    """Tensors that a node reads, and the state it needs each in."""
    if step is not None and step.layer is not None:
        operands = [operand for member in step.layer.members for operand in member.all_input_nodes]
    else:
        operands = node.all_input_nodes
    for operand in dict.fromkeys(operands):
        if step is None:
            if has_shape(operand):
                yield operand, Replicate.PLAIN
        elif operand.name in step.needs and has_shape(operand):
            yield operand, step.needs[operand.name]


def _ways(lies: Shard | None, state: Placement, *, on_sequence: bool) -> Iterator[tuple[str, str, Placement]]:
    """The collectives that bring a tensor to a state: (kind, phase, state reached)."""
    if state == lies:
        return
    if lies is not None:
        yield ALL_GATHER, "forward", Replicate.PLAIN
    if state is Replicate.PARTIAL_GRADIENT:
        yield REDUCE_SCATTER if on_sequence else ALL_REDUCE, "backward", state
    elif isinstance(state, Shard):
        yield ALL_GATHER, "backward", state
