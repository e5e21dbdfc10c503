"""A model and a cluster become pipeline stages: capture, observe, weigh, cut, simulate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from torch import fx, nn

from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    MeshError,
    StageCountError,
    StageMemoryError,
)
from panther_compile.partition.assemble import Settings, assemble, count_samples, stages_of
from panther_compile.partition.capture import Captured, capture, example_arguments
from panther_compile.partition.flow import FlowGraph
from panther_compile.partition.flow_graph import (
    OPTIMIZER_BYTES,
    Costs,
    build_flow_graph,
    find_constants,
    shared_parameters,
)
from panther_compile.partition.hardware import Hardware, find_hardware, read_bytes
from panther_compile.partition.label import Labelling, find_labelling
from panther_compile.partition.layout_rules import KnownRules
from panther_compile.partition.measure import Measured, measure_nodes
from panther_compile.partition.mesh_search import Expectation, Outline, find_meshes
from panther_compile.partition.observe import Observed, fold_shapes, observe, observe_backward
from panther_compile.partition.records import Mesh
from panther_compile.partition.result import Partition
from panther_compile.partition.schedule import SCHEDULES
from panther_compile.partition.sharding_problem import ALL_REDUCE, Prices, Problem, Ring, pose
from panther_compile.partition.shards import (
    Sharding,
    describe_shards,
    explain_whole,
    lighten,
    place_collectives,
)
from panther_compile.partition.stages import StageCuts, choose_cuts, least_memory

TIED = ("auto", "shared", "together")
SEQUENCE_PARALLEL = ("auto", True, False)
# Meshes that are expected to do less than the best that was cut, by this factor, are not cut. One that is not
# expected to fit is cut only if it is expected to do more than that.
_CLOSE = 1.2
# Of a step over all replicas, where devices are divided and no global batch is asked for.
MICROBATCHES_PER_DEVICE = 2
# What the memory of the whole model costs when shards are chosen, in times of what all its work and an
# all-reduce of every tensor take: one price after the other where it is short, the last to save all it can.
_PRICES = (Prices(), Prices(1.0, 1.0), Prices(1000.0, 1000.0))
# The first one where sequences are asked for.
_SEQUENCES = Prices(kept=10.0)


@dataclass(frozen=True)
class Graphs:
    """The model, and its flow graph with tied parameters free or kept together; of `read_graphs`."""

    captured: Captured
    notes: Mapping[fx.Node, Observed]
    costs: Costs
    constants: tuple[fx.Node, ...]
    persistent: frozenset[str]
    flows: Mapping[str, FlowGraph]
    sequence_parallel: bool | str = "auto"
    _known: KnownRules = field(default_factory=KnownRules)
    _lightened: dict[tuple[Ring, Prices], tuple[FlowGraph, ...]] = field(default_factory=dict)

    def prices(self, tp: int) -> tuple[Prices, ...]:
        """Of memory when sharding, in the order to be tried."""
        if tp == 1:
            return _PRICES[:1]
        return (_SEQUENCES, *_PRICES[1:]) if self.sequence_parallel is True else _PRICES

    def lightened(self, ring: Ring, prices: Prices) -> tuple[FlowGraph, ...]:
        """The flow graphs as one device of a stage sees them, before the stages are known."""
        if ring.tp == 1:
            return tuple(self.flows.values())
        if (ring, prices) not in self._lightened:
            problem, labelling = self.shard(ring, prices)
            placed = place_collectives(problem, labelling)
            self._lightened[ring, prices] = tuple(
                lighten(problem, labelling, flow, placed) for flow in self.flows.values()
            )
        return self._lightened[ring, prices]

    def shard(
        self, ring: Ring, prices: Prices, stage_of: Mapping[str, int] | None = None
    ) -> tuple[Problem, Labelling]:
        """How the model is sharded over the devices of a stage, before and after the stages are known."""
        flow = next(iter(self.flows.values()))
        seconds = sum(one.seconds for one in flow.work.values())
        seconds += sum(ring.seconds(ALL_REDUCE, one.bytes) for one in flow.values)
        memory = sum(one.saved_bytes for one in flow.work.values())
        memory += sum(one.bytes + one.trained_bytes for one in flow.holdings)
        problem = pose(
            self.captured,
            self.notes,
            self.costs,
            ring,
            self.constants,
            stage_of,
            sequence=bool(self.sequence_parallel),
            prices=Prices(*(price * seconds / max(memory, 1) for price in (prices.kept, prices.held))),
            known=self._known,
        )
        return problem, find_labelling(problem)


def partition_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    devices: int | None = None,
    hardware: Hardware | str = "h100",
    memory_per_device: int | str | None = None,
    microbatches: int | None = None,
    global_batch: int | None = None,
    schedule: str = "1f1b",
    stages_per_device: int | None = None,
    training: bool = True,
    optimizer: str = "adam",
    recompute: bool = False,
    tied: str = "auto",
    profile: bool | Mapping[str, float] = False,
    boundaries: Sequence[str] = (),
    sequence_parallel: bool | str = "auto",
) -> Partition:
    """Cut a model into pipeline stages, and the layers of a stage into shards, by minimum cuts.

    The slowest stage, its transfers included, is made as fast as the memory allows; then as few bytes as
    possible cross the cuts. The model is left as it is: `partition.split()` makes the stages' modules.

    Args:
        model: any model whose graph can be read, also on the meta device.
        example_inputs: of one microbatch of one replica: a tensor, a tuple, or a mapping of keywords.
        mesh: {"dp": 2, "pp": 4, "tp": 2}; axes not named are 1. Layers are sharded over "tp".
        devices: without a mesh, the devices to divide into dp x pp x tp, as is predicted to be fastest at the
            global batch; tp is at most 8, and stays within a node.
        hardware: a preset, "cpu", "h100" or "h200", or your own.
        memory_per_device: as "40GiB" or in bytes; all the hardware has if None.
        microbatches: of a step, through each replica; four for each device of the pipeline if None.
        global_batch: samples of a step over all replicas, in place of microbatches: each replica gets
            global_batch / (dp * the first dimension of the first example input) of them. With devices= and
            without this, two microbatches for each device.
        schedule: "gpipe", "1f1b" or "interleaved".
        stages_per_device: for "interleaved"; 2 if None.
        training: count backward, gradients and optimizer states.
        optimizer: "adam", "momentum" or "sgd", for its states.
        recompute: compute activations again in the backward instead of keeping them.
        tied: "shared" holds a parameter used by several stages in each and sums its gradients, "together"
            keeps its users on one stage, "auto" takes what is predicted to be faster.
        profile: True measures each node here on the example, forward and backward, in place of estimates; or
            seconds by node, forward.
        boundaries: modules to keep whole, where no graph can be read without.
        sequence_parallel: whether norms, sums and the like run on shards of the sequence over "tp", between
            layers that are sharded: "auto" where that is predicted to be faster, or where nothing else fits;
            True wherever it saves memory; False nowhere.

    Raises:
        CaptureError: no graph can be read; the message names the construct.
        MeshError: the mesh does not multiply to the devices, or the schedule cannot run on it.
        StageCountError: more stages than places to cut.
        StageMemoryError: a stage cannot fit; the message says by how much and what would help.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model is a {type(model).__name__}; it must be an nn.Module")
    for name, value, allowed in (
        ("schedule", schedule, SCHEDULES),
        ("optimizer", optimizer, tuple(OPTIMIZER_BYTES)),
        ("tied", tied, TIED),
        ("sequence_parallel", sequence_parallel, SEQUENCE_PARALLEL),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")
    if mesh is None and devices is None:
        raise MeshError("give mesh={'dp': 1, 'pp': 4} or devices=4")
    if microbatches is not None and (global_batch is not None or mesh is None):
        raise MeshError(
            f"microbatches={microbatches} is of each replica; give global_batch= alone where devices= are "
            "divided, and one of the two with mesh="
        )
    if devices is not None and (not isinstance(devices, int) or devices < 1):
        raise MeshError(f"devices={devices!r}; it must be a whole number, 1 or more")
    if stages_per_device is not None and schedule != "interleaved" and stages_per_device != 1:
        raise MeshError(
            f"stages_per_device={stages_per_device} needs schedule='interleaved', not {schedule!r}"
        )
    chosen = find_hardware(hardware)
    samples = count_samples(example_inputs)
    if mesh is None and global_batch is None:
        global_batch = MICROBATCHES_PER_DEVICE * (devices or 1) * samples
    settings = Settings(
        hardware=chosen,
        memory_bytes=chosen.memory_bytes if memory_per_device is None else read_bytes(memory_per_device),
        microbatches=microbatches,
        schedule=schedule,
        stages_per_device=(stages_per_device or 2) if schedule == "interleaved" else 1,
        training=training,
        recompute=recompute and training,
        samples=samples,
        global_batch=global_batch,
    )
    fixed = None
    if mesh is not None:
        fixed = Mesh.read(mesh, devices)
        settings.check(fixed)
    graphs = read_graphs(
        model, example_inputs, boundaries, chosen, training, optimizer, tied, profile, sequence_parallel
    )
    name = type(model).__name__
    if fixed is None:
        return search_meshes(name, graphs, settings, devices or 1)
    found = _partition(name, graphs, settings, fixed)
    if found is None:
        raise StageMemoryError(_explain_memory(name, graphs, settings, fixed))
    sharding = found.sharding
    if sequence_parallel != "auto" and sequence_parallel and sharding and not sharding.sequence_fits:
        reasons = "".join(f"\n  {layer}: {reason}" for layer, reason in found.whole)
        raise MeshError(f"sequence_parallel=True, and nothing of {name} can run on shards of it:{reasons}")
    return found


def search_meshes(name: str, graphs: Graphs, settings: Settings, devices: int) -> Partition:
    """The best partition over all meshes of so many devices that may be the best."""
    outline = Outline(next(iter(graphs.flows.values())), recompute=settings.recompute)
    ranked: list[tuple[Expectation, Mesh]] = []
    left_out: list[tuple[Mesh, str]] = []
    most = max(len(flow.work) for flow in graphs.flows.values())
    for mesh in find_meshes(devices, settings.hardware):
        if mesh.pp > 1 and mesh.pp * settings.stages_per_device > most:
            left_out.append((mesh, f"the graph has {most} operations to divide between the stages"))
            continue
        try:
            settings.check(mesh)
        except MeshError as error:
            left_out.append((mesh, str(error)))
            continue
        ring = Ring(mesh.tp, settings.shared_link(mesh))
        tried = graphs.prices(mesh.tp)
        for prices in dict.fromkeys((tried[0], tried[-1])):
            expected = outline.expect(graphs.lightened(ring, prices)[0], settings.setting(mesh))
            if expected.room >= 1:
                break
        ranked.append((expected, mesh))
    if not ranked:
        reasons = "".join(f"\n  {mesh}: {reason}" for mesh, reason in left_out)
        raise MeshError(f"no mesh of {devices} devices can run {name}:{reasons}")
    ranked.sort(key=lambda one: (one[0].room >= 1, one[0].per_second), reverse=True)
    best, reached = None, 0.0
    for expected, mesh in ranked:
        close = _CLOSE if expected.room >= 1 else 1.0
        if expected.hopeless or expected.per_second * close < reached:
            continue
        found = _partition(name, graphs, settings, mesh)
        per_second = found.microbatches_per_second if found is not None else 0.0
        if per_second > reached:
            best, reached = found, per_second
    if best is None:
        roomiest = max(ranked, key=lambda one: one[0].room)[1]
        raise StageMemoryError(_explain_memory(name, graphs, settings, roomiest))
    return replace(best, left_out=tuple(left_out))


def read_graphs(
    model: nn.Module,
    example_inputs: Any,
    boundaries: Sequence[str],
    hardware: Hardware,
    training: bool,
    optimizer: str,
    tied: str,
    profile: bool | Mapping[str, float],
    sequence_parallel: bool | str = "auto",
) -> Graphs:
    """Read the model and weigh its graph."""
    captured = capture(model, *example_arguments(example_inputs), boundaries=boundaries)
    notes: dict[fx.Node, Observed] = observe(captured)
    fold_shapes(captured, notes)
    if hardware.rates and training:
        observe_backward(captured, notes)
    measured = measure_nodes(captured, training=training) if profile is True else None
    if isinstance(profile, Mapping):
        measured = Measured(profile)
    costs = Costs(hardware, training, optimizer, measured)
    free = build_flow_graph(captured, notes, costs)
    several = shared_parameters(free)
    flows = {}
    if tied != "together" or not several:
        flows["shared"] = free
    if tied != "shared" and several:
        flows["together"] = build_flow_graph(captured, notes, costs, together=several)
    constants = tuple(find_constants(captured, notes))
    persistent = frozenset(model.state_dict(keep_vars=True))
    return Graphs(captured, notes, costs, constants, persistent, flows, sequence_parallel)


def _partition(name: str, graphs: Graphs, settings: Settings, mesh: Mesh) -> Partition | None:
    """The best partition for one mesh; None if none was found that fits into the memory."""
    found = (_fit(name, graphs, settings, mesh, prices) for prices in graphs.prices(mesh.tp))
    return next((partition for partition in found if partition is not None), None)


def _fit(name: str, graphs: Graphs, settings: Settings, mesh: Mesh, prices: Prices) -> Partition | None:
    """The best partition whose shards are chosen at some prices of memory; None if it does not fit."""
    stages = mesh.pp * settings.stages_per_device
    ring = Ring(mesh.tp, settings.shared_link(mesh))
    flows = graphs.lightened(ring, prices)
    divisible = [
        (whole, flow)
        for whole, flow in zip(graphs.flows.values(), flows, strict=True)
        if len(flow.work) >= stages
    ]
    if not divisible:
        largest = max(len(flow.work) for flow in flows)
        hint = "" if "shared" in graphs.flows else "; tied='shared' divides more"
        raise StageCountError(
            f"{stages} stages are asked for (pp {mesh.pp} x {settings.stages_per_device} a device), and the "
            f"graph of {name} has {largest} operations to divide between them{hint}"
        )
    request = settings.request(mesh)
    found = []
    for whole, flow in divisible:
        cuts = choose_cuts(flow, request)
        if cuts is None:
            continue
        sharding = None
        if mesh.tp > 1:
            flow, sharding = _shard_stages(graphs, whole, cuts, ring, prices)
        partition = assemble(
            name,
            graphs.captured,
            flow,
            cuts,
            settings,
            mesh,
            constants=graphs.constants,
            persistent=graphs.persistent,
            sharding=sharding,
        )
        if max(stage.memory_bytes for stage in partition.stages) <= (request.memory_bytes or inf):
            found.append(partition)
    return min(found, key=lambda partition: partition.step_seconds, default=None)


def _shard_stages(
    graphs: Graphs, flow: FlowGraph, cuts: StageCuts, ring: Ring, prices: Prices
) -> tuple[FlowGraph, Sharding]:
    """The shards once the stages are known, which hand each other whole tensors."""
    _, stage_of = stages_of(flow, cuts)
    problem, labelling = graphs.shard(ring, prices, stage_of)
    placed = place_collectives(problem, labelling)
    sharding = Sharding(
        labelling=labelling,
        shards=describe_shards(problem, labelling, placed),
        whole=explain_whole(problem, labelling),
        collectives=tuple(one.collective for one in placed),
        sequence=tuple(step for step in labelling.steps if labelling.steps[step].on_sequence),
        sequence_fits=any(map(problem.sequence_of, problem.graph_module.graph.nodes)),
    )
    return lighten(problem, labelling, flow, placed), sharding


def _explain_memory(name: str, graphs: Graphs, settings: Settings, mesh: Mesh) -> str:
    """Which stage does not fit, by how much, and what would help."""
    request = settings.request(mesh)
    ring = Ring(mesh.tp, settings.shared_link(mesh))
    flows = graphs.lightened(ring, graphs.prices(mesh.tp)[-1])
    flow = max(flows, key=lambda flow: len(flow.work))
    limit = request.memory_bytes or 0
    smallest, stage = least_memory(flow, request)
    lines = [
        f"{name} does not fit: cut into {request.count} stages as leanly as can be, stage {stage} takes "
        f"{smallest / 2**30:.3g} GiB, {(smallest - limit) / 2**30:.3g} GiB more than the "
        f"{limit / 2**30:.3g} GiB of its device"
    ]
    if not settings.recompute and settings.training:
        lean, _ = least_memory(flow, replace(request, recompute=True))
        fits = "which fits" if lean <= limit else "which is still too much"
        lines.append(f"  recompute=True would take {lean / 2**30:.3g} GiB, {fits}")
    for factor in (2, 4, 8):
        more = replace(mesh, pp=mesh.pp * factor)
        wider = replace(settings, microbatches=None).request(more)
        if wider.count <= len(flow.work):
            needed, _ = least_memory(flow, wider)
            if needed <= limit:
                lines.append(f"  pp={more.pp} would take {needed / 2**30:.3g} GiB a device, which fits")
                break
    lines.append("  a smaller microbatch saves activations; sketchify(model, ratio=...) saves parameters")
    return "\n".join(lines)
