"""Cuts become records: what each stage holds, sends and takes, and one simulated step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from panther_compile.errors import CaptureError
from panther_compile.names import is_parameter
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.context import gathered_nodes
from panther_compile.partition.graph.flow import FlowGraph, Holding
from panther_compile.partition.graph.hardware import NO_LINK, Link
from panther_compile.partition.graph.observe import Observed
from panther_compile.partition.graphs import Graphs
from panther_compile.partition.options import PlanOptions, Strategy
from panther_compile.partition.records import (
    Collective,
    Mesh,
    SharedParameter,
    Stage,
    StageMemory,
    TensorSpec,
)
from panther_compile.partition.replicas import count_replica_seconds, find_replica_links
from panther_compile.partition.result import Partition
from panther_compile.partition.shards.describe import Sharding
from panther_compile.partition.shards.problem import ALL_GATHER, REDUCE_SCATTER
from panther_compile.partition.stages.chains import StageRequest
from panther_compile.partition.stages.ends import StageCuts
from panther_compile.partition.stages.schedule import Timeline, simulate
from panther_compile.partition.stages.split import crossing_names


def count_samples(example_inputs: Any) -> int:
    """Samples of a microbatch: the first dimension of the first input that has one.

    Args:
        example_inputs: of one microbatch: a tensor, a tuple, or a mapping of keywords.

    Raises:
        CaptureError: none of them holds a number, whose costs would all be next to nothing.
    """
    leaves = pytree.tree_leaves(example_inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise CaptureError(f"example_inputs are empty, {shapes}: wanted the inputs of one microbatch")
    return next((tensor.shape[0] for tensor in tensors if tensor.shape[0]), 1)


def _ring_seconds(size: int, members: int, link: Link) -> float:
    """A ring all-reduce: each member sends 2 (n - 1) / n of the bytes in 2 (n - 1) messages."""
    if members < 2 or not size:
        return 0.0
    return 2 * (members - 1) * link.seconds(size / members)


@dataclass(frozen=True)
class DevicePlan:
    """A flow graph as one device of a mesh sees it, before it is cut.

    Attributes:
        strategy: that was chosen.
        flow: with the work of one device, what is computed again included, and what it holds.
        request: for the stages.
        units: where units end.
        recomputed_bytes: of the largest unit that is computed again.
        gathered_bytes: of units whose parameters and gradients are whole for a while.
        whole_bytes: of both, at the peak.
    """

    strategy: Strategy
    flow: FlowGraph
    request: StageRequest
    units: tuple[int, ...]
    recomputed_bytes: int
    gathered_bytes: int
    whole_bytes: int


def assemble(
    graphs: Graphs,
    plan: DevicePlan,
    cuts: StageCuts,
    options: PlanOptions,
    mesh: Mesh,
    sharding: Sharding | None,
) -> Partition:
    """The records of chosen cuts, and a simulated step.

    Args:
        graphs: of the model, as a device sees it.
        plan: its flow graph, likewise.
        cuts: chosen.
        options: of the user.
        mesh: of the devices.
        sharding: over the tp axis, whose work the flow graph has divided already.
    """
    captured, flow = graphs.captured, plan.flow
    request, strategy = plan.request, plan.strategy
    stage_of_vertex, stage_of = stages_of(flow, cuts)
    builder = _StageBuilder(captured, plan, cuts, mesh, _specs(captured, stage_of, request.count))
    stages = tuple(builder.stage(index) for index in range(request.count))
    holders = ((held, tuple(sorted({stage_of_vertex[v] for v in held.vertices}))) for held in flow.holdings)
    shared = tuple(
        SharedParameter(held.name, places, held.gradient_bytes)
        for held, places in holders
        if len(places) > 1 and is_parameter(captured.graph_module, held.name)
    )
    return Partition(
        model=graphs.name,
        mesh=mesh,
        hardware=options.hardware,
        places=options.places,
        schedule=strategy.schedule,
        recompute=strategy.recompute,
        data_parallel=strategy.sharding,
        microbatches=options.microbatches_of(mesh),
        stages=stages,
        shared=shared,
        timeline=_timeline(options, plan, mesh, stages, shared),
        exact=cuts.exact and sharding is None,
        candidates=cuts.candidates,
        flow=flow,
        request=request,
        captured=captured,
        constants=graphs.constants,
        persistent=graphs.persistent,
        sharding=sharding,
        context=tuple(_gathers(graphs.notes, stage_of, sharding, training=options.training)),
    )


def stages_of(flow: FlowGraph, cuts: StageCuts) -> tuple[dict[str, int], dict[str, int]]:
    """The stage of each vertex, and of each graph node that belongs to one."""
    members = (np.diff(cuts.prefixes.astype(np.int8), axis=0) > 0).tolist()
    of_vertex = {
        vertex: stage
        for stage, row in enumerate(members)
        for vertex, inside in zip(flow.work, row, strict=True)
        if inside
    }
    return of_vertex, {node: stage for vertex, stage in of_vertex.items() for node in flow.members[vertex]}


def _gathers(
    notes: Mapping[fx.Node, Observed],
    stage_of: Mapping[str, int],
    sharding: Sharding | None,
    *,
    training: bool,
) -> Iterator[Collective]:
    """What the devices that divide a sequence send for each attention, in the order of the graph."""
    for node, note in notes.items():
        if not note.gathered_bytes:
            continue
        divided = sharding is not None and node.name in sharding.plan.steps
        size = note.gathered_bytes // (sharding.plan.tp if sharding is not None and divided else 1)
        name = " and ".join(one.name for one in gathered_nodes(node))
        yield Collective(stage_of[node.name], name, ALL_GATHER, "forward", size)
        if training:
            yield Collective(stage_of[node.name], name, ALL_GATHER, "backward", size)
            yield Collective(stage_of[node.name], name, REDUCE_SCATTER, "backward", size)


def _timeline(
    options: PlanOptions,
    plan: DevicePlan,
    mesh: Mesh,
    stages: Sequence[Stage],
    shared: Sequence[SharedParameter],
) -> Timeline:
    """One step. A transfer keeps both ends busy: it lengthens what sends and what receives."""
    links, sharding = plan.request.links, plan.strategy.sharding
    replica_links = find_replica_links(options.hardware, mesh, sharding.sharers)
    forward, backward, tails = [], [], [0.0] * mesh.pp
    for stage in stages:
        before = links[stage.index - 1] if stage.index else NO_LINK
        after = links[stage.index] if stage.index < len(links) else NO_LINK
        next_gradients = stages[stage.index + 1].gradient_sent_bytes if stage.index + 1 < len(stages) else 0
        replicas = count_replica_seconds(
            sharding,
            replica_links,
            parameter_bytes=stage.parameter_bytes,
            gradient_bytes=stage.gradient_bytes,
            forward_seconds=stage.forward_seconds,
            backward_seconds=stage.backward_seconds,
            units=len(plan.units) // len(stages),
        )
        forward.append(
            stage.forward_seconds
            + replicas.forward
            + before.seconds(stage.received_bytes * (stage.index > 0))
            + after.seconds(stage.sent_bytes)
        )
        backward.append(
            stage.backward_seconds
            + replicas.backward
            + before.seconds(stage.gradient_sent_bytes)
            + after.seconds(next_gradients)
        )
        tails[stage.device] += replicas.tail
    for parameter in shared:
        places = sorted({stage % mesh.pp for stage in parameter.stages})
        link = options.hardware.link(mesh.rank(0, places[0]), mesh.rank(0, places[-1]))
        for place in places:
            tails[place] += _ring_seconds(parameter.gradient_bytes, len(places), link)
    return simulate(options.orders(mesh, plan.strategy), forward, backward, tails if options.training else ())


def _specs(captured: Captured, stage_of: dict[str, int], stages: int) -> list[tuple[TensorSpec, ...]]:
    """The tensors at each end of the stages: the model's inputs, what crosses, and its outputs."""
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    inputs = tuple(name for name, node in nodes.items() if node.op == "placeholder")
    output = next(node for node in nodes.values() if node.op == "output")
    outputs = tuple(node.name for node in output.args[0])
    ends = [inputs, *crossing_names(captured, stage_of, stages), outputs]

    def spec(name: str) -> TensorSpec:
        node = nodes[name]
        value = node.meta["tensor"]
        assert isinstance(value, Tensor)
        users = {stages - 1 if user.op == "output" else stage_of.get(user.name) for user in node.users}
        return TensorSpec(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            requires_grad=value.requires_grad,
            made_in=stage_of.get(name),
            used_in=tuple(sorted(user for user in users if user is not None)),
        )

    return [tuple(map(spec, names)) for names in ends]


class _StageBuilder:
    """Makes the records of stages."""

    def __init__(
        self,
        captured: Captured,
        plan: DevicePlan,
        cuts: StageCuts,
        mesh: Mesh,
        specs: Sequence[tuple[TensorSpec, ...]],
    ) -> None:
        self._captured, self._plan, self._mesh, self._specs = captured, plan, mesh, specs
        self._stage_of_vertex, self._stage_of = stages_of(plan.flow, cuts)
        self._starts = [int(size) for size in cuts.prefixes.sum(axis=1)]
        self._in_order = [
            bool(row[:size].all()) for row, size in zip(cuts.prefixes, self._starts, strict=True)
        ]
        self._sizes = {value.name: (value.bytes, value.gradient_bytes) for value in plan.flow.values}

    def stage(self, index: int) -> Stage:
        """One of them."""
        plan, request, flow = self._plan, self._plan.request, self._plan.flow
        work = [one for vertex, one in flow.work_at(index).items() if self._stage_of_vertex[vertex] == index]
        held = [
            item
            for item in flow.holdings
            if any(self._stage_of_vertex[vertex] == index for vertex in item.vertices)
        ]
        received, given_back = self._bytes(index)
        sent, returned = self._bytes(index + 1)
        is_last, is_first = index == request.count - 1, index == 0
        before = NO_LINK if is_first else request.links[index - 1]
        after = NO_LINK if is_last else request.links[index]
        in_flight, device = request.in_flight[index], index % self._mesh.pp
        saved = sum(one.saved_bytes for one in work)
        # Units are whole or computed again after the loss is gone; once for all stages of a device.
        loss = in_flight * sum(one.loss_bytes for one in work)
        recomputed = max(0, plan.recomputed_bytes - loss) if index == device else 0
        gathered = (
            max(0, plan.gathered_bytes - max(0, loss - plan.recomputed_bytes)) if index == device else 0
        )
        names = [node.name for node in self._captured.graph_module.graph.nodes]
        return Stage(
            index=index,
            device=device,
            forward_seconds=sum(one.forward_seconds for one in work),
            backward_seconds=sum(one.backward_seconds for one in work),
            receive_seconds=before.seconds(received) + after.seconds(returned),
            send_seconds=after.seconds(sent) + before.seconds(given_back),
            parameter_bytes=sum(item.bytes for item in held),
            gradient_bytes=sum(item.gradient_bytes for item in held),
            optimizer_bytes=sum(item.trained_bytes - item.gradient_bytes for item in held),
            activation_bytes=saved,
            in_flight=in_flight,
            memory=StageMemory(
                states=sum(item.memory_bytes for item in held),
                activations=in_flight * (saved + self._kept_input(index, received) // request.parts),
                buffers=(received + sent) // request.parts,
                recomputed=recomputed,
                gathered=gathered,
            ),
            received_bytes=0 if is_first else received,
            sent_bytes=0 if is_last else sent,
            gradient_sent_bytes=0 if is_first else given_back,
            parameters=_names(self._captured, held, parameters=True),
            buffers=_names(self._captured, held, parameters=False),
            nodes=tuple(name for name in names if self._stage_of.get(name) == index),
            inputs=self._specs[index],
            outputs=self._specs[index + 1],
        )

    def _bytes(self, end: int) -> tuple[int, int]:
        """Across one end of a stage: values forward, gradients backward."""
        sizes = [self._sizes.get(spec.name, (0, 0)) for spec in self._specs[end]]
        return sum(size for size, _ in sizes), sum(size for _, size in sizes)

    def _kept_input(self, index: int, received: int) -> int:
        """What a stage keeps of what it receives, where it starts inside of a unit that is computed again."""
        checkpoints = self._plan.flow.checkpoints
        if checkpoints is None:
            return 0
        starts_a_unit = self._in_order[index] and self._starts[index] in (0, *checkpoints)
        return 0 if starts_a_unit else received


def _names(captured: Captured, held: Sequence[Holding], *, parameters: bool) -> tuple[str, ...]:
    return tuple(item.name for item in held if is_parameter(captured.graph_module, item.name) == parameters)
