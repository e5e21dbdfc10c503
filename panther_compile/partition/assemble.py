"""Cuts become records: what each stage holds, sends and takes, and one simulated step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from panther_compile.errors import MeshError
from panther_compile.partition.capture import Captured, attribute
from panther_compile.partition.chains import StageRequest
from panther_compile.partition.flow import FlowGraph, Holding
from panther_compile.partition.hardware import NO_LINK, Hardware, Link
from panther_compile.partition.mesh_search import Setting
from panther_compile.partition.records import Mesh, SharedParameter, Stage, TensorSpec
from panther_compile.partition.result import Partition
from panther_compile.partition.schedule import Action, Timeline, count_in_flight, order_actions, simulate
from panther_compile.partition.shards import Sharding
from panther_compile.partition.split import crossing_names
from panther_compile.partition.stages import StageCuts

_MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class Settings:
    """What the user asked for, the mesh aside.

    Attributes:
        hardware: of the cluster.
        memory_bytes: of each device.
        microbatches: of a step, through each replica; None for four for each device of the pipeline.
        schedule: its name.
        stages_per_device: 1 unless interleaved.
        training: whether there is a backward.
        recompute: whether activations are computed again in it.
        samples: of a microbatch.
        global_batch: samples of a step over all replicas, in place of microbatches.
    """

    hardware: Hardware
    memory_bytes: int
    microbatches: int | None
    schedule: str
    stages_per_device: int
    training: bool
    recompute: bool
    samples: int = 1
    global_batch: int | None = None

    def microbatches_of(self, mesh: Mesh) -> int:
        """Of one step, through each replica."""
        if self.global_batch is not None:
            return self.global_batch // (mesh.dp * self.samples)
        return _MICROBATCHES_PER_STAGE * mesh.pp if self.microbatches is None else self.microbatches

    def check(self, mesh: Mesh) -> None:
        """Refuse what cannot be divided into microbatches, and what the schedule cannot run."""
        batch = self.global_batch
        if batch is not None and (
            not isinstance(batch, int) or batch < 1 or batch % (mesh.dp * self.samples)
        ):
            raise MeshError(
                f"global_batch={batch!r} is not divisible by dp={mesh.dp} x {self.samples} samples of a "
                "microbatch"
            )
        count = self.microbatches_of(mesh)
        if not isinstance(count, int) or count < 1:
            raise MeshError(f"microbatches={count!r}; it must be a whole number, 1 or more")
        if self.schedule == "interleaved" and (self.stages_per_device < 1 or count % mesh.pp):
            raise MeshError(
                f"interleaved runs microbatches in groups of pp={mesh.pp}, on at least one stage a "
                f"device; microbatches={count} and stages_per_device={self.stages_per_device} do not fit"
            )

    def orders(self, mesh: Mesh) -> tuple[tuple[Action, ...], ...]:
        """What each device of the pipeline does."""
        return order_actions(
            self.schedule,
            mesh.pp,
            self.microbatches_of(mesh),
            stages_per_device=self.stages_per_device,
            training=self.training,
        )

    def request(self, mesh: Mesh) -> StageRequest:
        """The stages that a mesh asks for; a device's memory is divided evenly over its stages."""
        setting = self.setting(mesh)
        return StageRequest(
            setting.links, setting.in_flight, memory_bytes=setting.memory_bytes, recompute=self.recompute
        )

    def setting(self, mesh: Mesh) -> Setting:
        """The same, and what else a mesh decides."""
        stages, microbatches = mesh.pp * self.stages_per_device, self.microbatches_of(mesh)
        if not self.training:
            in_flight = (1,) * stages
        elif self.schedule == "1f1b":  # without counting, as there may be a thousand stages
            in_flight = tuple(min(microbatches, stages - stage) for stage in range(stages))
        else:
            in_flight = count_in_flight(self.orders(mesh), stages)
        return Setting(
            links=tuple(self._link(mesh, stage) for stage in range(stages - 1)),
            in_flight=in_flight,
            memory_bytes=self.memory_bytes // self.stages_per_device,
            microbatches=microbatches,
            replicas=mesh.dp,
            replica_link=self._replica_link(mesh, 0),
            devices=mesh.pp,
        )

    def shared_link(self, mesh: Mesh) -> Link:
        """The slowest link between devices that share a stage."""
        links = [
            self.hardware.link(mesh.rank(dp, pp), mesh.rank(dp, pp, mesh.tp - 1))
            for dp in range(mesh.dp)
            for pp in range(mesh.pp)
        ]
        return min(links, key=lambda link: link.bytes_per_second)

    def _link(self, mesh: Mesh, stage: int) -> Link:
        """The slowest link, over the replicas, from a stage to the next."""
        first, second = stage % mesh.pp, (stage + 1) % mesh.pp
        if first == second:
            return NO_LINK
        links = [self.hardware.link(mesh.rank(dp, first), mesh.rank(dp, second)) for dp in range(mesh.dp)]
        return min(links, key=lambda link: link.bytes_per_second)

    def _replica_link(self, mesh: Mesh, device: int) -> Link:
        """The slowest link between the replicas of a device."""
        return self.hardware.link(mesh.rank(0, device), mesh.rank(mesh.dp - 1, device))

    def reduce_seconds(
        self, mesh: Mesh, stages: Sequence[Stage], shared: Sequence[SharedParameter]
    ) -> list[float]:
        """Time of each device to sum gradients in rings: over the replicas, and over stages that share."""
        spent = [0.0] * mesh.pp
        for stage in stages:
            link = self._replica_link(mesh, stage.device)
            spent[stage.device] += _ring_seconds(stage.gradient_bytes, mesh.dp, link)
        for parameter in shared:
            places = sorted({stage % mesh.pp for stage in parameter.stages})
            link = self.hardware.link(mesh.rank(0, places[0]), mesh.rank(0, places[-1]))
            for place in places:
                spent[place] += _ring_seconds(parameter.gradient_bytes, len(places), link)
        return spent


def count_samples(example_inputs: Any) -> int:
    """Samples of a microbatch: the first dimension of the first input that has one.

    Args:
        example_inputs: of one microbatch: a tensor, a tuple, or a mapping of keywords.
    """
    tensors = (leaf for leaf in pytree.tree_leaves(example_inputs) if isinstance(leaf, Tensor))
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim and tensor.shape[0]), 1)


def _ring_seconds(size: int, members: int, link: Link) -> float:
    """A ring all-reduce: each member sends 2 (n - 1) / n of the bytes in 2 (n - 1) messages."""
    if members < 2 or not size:
        return 0.0
    return 2 * (members - 1) * link.seconds(size / members)


def assemble(
    name: str,
    captured: Captured,
    flow: FlowGraph,
    cuts: StageCuts,
    settings: Settings,
    mesh: Mesh,
    *,
    constants: tuple[fx.Node, ...],
    persistent: frozenset[str],
    sharding: Sharding | None = None,
) -> Partition:
    """The records of chosen cuts, and a simulated step.

    Args:
        name: of the model.
        captured: the model.
        flow: its flow graph.
        cuts: chosen.
        settings: of the user.
        mesh: of the devices.
        constants: nodes that are no vertices.
        persistent: names in the model's state dict.
        sharding: over the tp axis, whose work the flow graph has divided already.
    """
    request = settings.request(mesh)
    stage_of_vertex, stage_of = stages_of(flow, cuts)
    specs = _specs(captured, stage_of, request.count)
    stages = tuple(
        _stage(captured, flow, stage, stage_of_vertex, stage_of, specs, request, mesh)
        for stage in range(request.count)
    )
    holders = ((held, tuple(sorted({stage_of_vertex[v] for v in held.vertices}))) for held in flow.holdings)
    shared = tuple(
        SharedParameter(held.name, places, held.gradient_bytes)
        for held, places in holders
        if len(places) > 1 and isinstance(attribute(captured.graph_module, held.name), nn.Parameter)
    )
    return Partition(
        model=name,
        route=captured.route,
        mesh=mesh,
        hardware=settings.hardware,
        schedule=settings.schedule,
        microbatches=settings.microbatches_of(mesh),
        stages=stages,
        shared=shared,
        unused=captured.unused,
        timeline=_timeline(settings, mesh, stages, shared, request),
        exact=cuts.exact and sharding is None,
        candidates=cuts.candidates,
        flow=flow,
        request=request,
        captured=captured,
        constants=constants,
        persistent=persistent,
        sharding=sharding,
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


def _timeline(
    settings: Settings,
    mesh: Mesh,
    stages: Sequence[Stage],
    shared: Sequence[SharedParameter],
    request: StageRequest,
) -> Timeline:
    """One step. A transfer keeps both ends busy: it lengthens what sends and what receives."""
    forward, backward = [], []
    for stage in stages:
        before = request.links[stage.index - 1] if stage.index else NO_LINK
        after = request.links[stage.index] if stage.index < len(request.links) else NO_LINK
        next_gradients = stages[stage.index + 1].gradient_sent_bytes if stage.index + 1 < len(stages) else 0
        forward.append(
            stage.forward_seconds
            + before.seconds(stage.received_bytes * (stage.index > 0))
            + after.seconds(stage.sent_bytes)
        )
        backward.append(
            stage.backward_seconds + before.seconds(stage.gradient_sent_bytes) + after.seconds(next_gradients)
        )
    tails = settings.reduce_seconds(mesh, stages, shared) if settings.training else ()
    return simulate(settings.orders(mesh), forward, backward, tails)


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


def _stage(
    captured: Captured,
    flow: FlowGraph,
    index: int,
    stage_of_vertex: dict[str, int],
    stage_of: dict[str, int],
    specs: Sequence[tuple[TensorSpec, ...]],
    request: StageRequest,
    mesh: Mesh,
) -> Stage:
    vertices = [vertex for vertex in flow.work if stage_of_vertex[vertex] == index]
    work = [flow.work[vertex] for vertex in vertices]
    held = [
        held for held in flow.holdings if any(stage_of_vertex[vertex] == index for vertex in held.vertices)
    ]
    forward = sum(part.forward_seconds for part in work)
    backward = sum(part.backward_seconds for part in work) + request.recompute * forward
    sizes = {value.name: (value.bytes, value.gradient_bytes) for value in flow.values}
    entering = [sizes.get(spec.name, (0, 0)) for spec in specs[index]]
    leaving = [sizes.get(spec.name, (0, 0)) for spec in specs[index + 1]]
    is_last, is_first = index == request.count - 1, index == 0
    received, given_back = (sum(column) for column in zip((0, 0), *entering, strict=True))
    sent, returned = (sum(column) for column in zip((0, 0), *leaving, strict=True))
    before = NO_LINK if is_first else request.links[index - 1]
    after = NO_LINK if is_last else request.links[index]
    saved, in_flight = sum(part.saved_bytes for part in work), request.in_flight[index]
    whole = sum(item.bytes + item.trained_bytes for item in held)
    kept = saved + (in_flight - 1) * received if request.recompute else in_flight * saved
    nodes = [node.name for node in captured.graph_module.graph.nodes]
    return Stage(
        index=index,
        device=index % mesh.pp,
        forward_seconds=forward,
        backward_seconds=backward,
        receive_seconds=before.seconds(received) + after.seconds(returned),
        send_seconds=after.seconds(sent) + before.seconds(given_back),
        parameter_bytes=sum(item.bytes for item in held),
        gradient_bytes=sum(item.gradient_bytes for item in held),
        optimizer_bytes=sum(item.trained_bytes - item.gradient_bytes for item in held),
        activation_bytes=saved,
        in_flight=in_flight,
        memory_bytes=whole + kept + received + sent,
        received_bytes=0 if is_first else received,
        sent_bytes=0 if is_last else sent,
        gradient_sent_bytes=0 if is_first else given_back,
        parameters=_names(captured, held, parameters=True),
        buffers=_names(captured, held, parameters=False),
        nodes=tuple(name for name in nodes if stage_of.get(name) == index),
        inputs=specs[index],
        outputs=specs[index + 1],
    )


def _names(captured: Captured, held: Sequence[Holding], *, parameters: bool) -> tuple[str, ...]:
    return tuple(
        item.name
        for item in held
        if isinstance(attribute(captured.graph_module, item.name), nn.Parameter) == parameters
    )
