"""The best strategy and cuts for a mesh, and the best mesh for a number of devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

from panther_compile.errors import MeshError, StageCountError, StageMemoryError
from panther_compile.names import is_parameter
from panther_compile.partition.assemble import DevicePlan, assemble, stages_of
from panther_compile.partition.graph.budget import is_budget
from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.graphs import Graphs
from panther_compile.partition.options import AUTO, BUDGETS, PlanOptions, Strategy
from panther_compile.partition.records import Mesh
from panther_compile.partition.replicas import find_context, share_states
from panther_compile.partition.result import Partition
from panther_compile.partition.shards.collectives import place_collectives
from panther_compile.partition.shards.describe import Sharding, describe_shards, explain_whole
from panther_compile.partition.shards.device_flow import per_device_flow
from panther_compile.partition.shards.problem import Prices, Ring
from panther_compile.partition.stages.chains import StageRequest
from panther_compile.partition.stages.ends import StageCuts, choose_cuts, least_memory
from panther_compile.partition.stages.mesh_search import Expectation, find_meshes
from panther_compile.partition.stages.units import recompute_units
from panther_compile.reporting.progress import ProgressBar

# Candidates that are expected to do less than the best that was cut, by this factor, are not cut. One that is
# not expected to fit is cut only if it is expected to do more than that.
_CLOSE = 1.2


@dataclass(frozen=True)
class Candidate:
    """A mesh and a strategy, and what is expected of them.

    Attributes:
        mesh: of the devices.
        strategy: the strategy for it.
        expected: what is expected of both.
    """

    mesh: Mesh
    strategy: Strategy
    expected: Expectation

    @property
    def shape(self) -> tuple[Mesh, str, int]:
        """The mesh, the schedule, and stages a device."""
        return self.mesh, self.strategy.schedule, self.strategy.stages_per_device

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits before what does not, the fastest first."""
        return self.expected.room >= 1, self.expected.per_second


@dataclass(frozen=True)
class _Way:
    """A way to divide a model.

    Attributes:
        graphs: what a device of the mesh sees of the model, where several divide its sequences.
        options: those of the user.
        mesh: of the devices.
        strategy: the strategy for it.
        ring: the devices that share tensors.
    """

    graphs: Graphs
    options: PlanOptions
    mesh: Mesh
    strategy: Strategy
    ring: Ring

    @classmethod
    def of(cls, graphs: Graphs, options: PlanOptions, mesh: Mesh, strategy: Strategy) -> "_Way":
        """The way of a mesh and a strategy, of graphs as the whole mesh sees them."""
        ring = Ring(mesh.tp, options.shared_link(mesh))
        return cls(_of_mesh(graphs, options, mesh), options, mesh, strategy, ring)

    @property
    def prices(self) -> Sequence[Prices]:
        """The prices of memory to be tried."""
        return self.graphs.prices(self.mesh.tp)


def search_meshes(
    graphs: Graphs, options: PlanOptions, devices: int, *, progress: bool | None = None
) -> Partition:
    """The best partition over all meshes of so many devices, and strategies for them.

    Args:
        graphs: of `read_graphs`.
        options: those of the user.
        devices: to divide.
        progress: show progress bars; None shows them on a terminal.

    Raises:
        MeshError: no mesh can run the model.
        StageMemoryError: it fits into none.
    """
    candidates, left_out = expect_meshes(graphs, options, devices, progress=progress)
    if not candidates:
        reasons = "".join(f"\n  {mesh}: {reason}" for mesh, reason in left_out)
        raise MeshError(f"no mesh of {devices} devices can run {graphs.name}:{reasons}")
    best = _cut_candidates(graphs, options, candidates, progress=progress)
    if best is None:
        raise StageMemoryError(_explain_memory(graphs, options, candidates))
    return replace(best, left_out=tuple(left_out))


def expect_meshes(
    graphs: Graphs, options: PlanOptions, devices: int, *, progress: bool | None = None
) -> tuple[list[Candidate], list[tuple[Mesh, str]]]:
    """What is expected of every mesh of so many devices and strategy for it, and meshes left out with why.

    Args:
        graphs: of `read_graphs`.
        options: those of the user.
        devices: to divide.
        progress: show a progress bar; None shows it on a terminal.
    """
    left_out: list[tuple[Mesh, str]] = []
    meshes: list[Mesh] = []
    operations = max(len(flow.work) for flow in graphs.flows.values())
    for mesh in find_meshes(devices, options.hardware, options.context_parallel):
        if mesh.pp > 1 and mesh.pp * (options.stages_per_device or 1) > operations:
            left_out.append((mesh, f"the graph has {operations} operations to divide between the stages"))
            continue
        try:
            options.check(mesh)
            _of_mesh(graphs, options, mesh)
        except MeshError as error:
            left_out.append((mesh, str(error)))
            continue
        meshes.append(mesh)
    shown = ProgressBar(meshes, desc="meshes", progress=progress)
    found = [one for mesh in shown for one in _expect(graphs, options, mesh)]
    return found + list(_expect_budgets(graphs, options, found)), left_out


def _of_mesh(graphs: Graphs, options: PlanOptions, mesh: Mesh) -> Graphs:
    """The model as a device of a mesh sees it, where several divide its sequences."""
    return graphs.in_context(find_context(options.hardware, mesh))


def partition_mesh(graphs: Graphs, options: PlanOptions, mesh: Mesh) -> Partition:
    """The best partition for one mesh, over the strategies that the options leave.

    Raises:
        StageCountError: more stages than places to cut.
        StageMemoryError: no strategy fits.
    """
    candidates = list(_expect(graphs, options, mesh))
    candidates += _expect_budgets(graphs, options, candidates)
    best = _cut_candidates(graphs, options, candidates)
    if best is None:
        raise StageMemoryError(_explain_memory(graphs, options, candidates))
    return best


def _expect(graphs: Graphs, options: PlanOptions, mesh: Mesh) -> Iterator[Candidate]:
    """What is expected of each strategy; of activation checkpointing no more than helps."""
    operations = max(len(flow.work) for flow in graphs.flows.values())
    strategies = options.strategies(mesh, operations)
    for _, of_schedule in groupby(strategies, key=lambda one: (one.schedule, one.stages_per_device)):
        found: list[Candidate] = []
        for _, alike in groupby(of_schedule, key=lambda one: one.recompute):
            tried = [_expect_one(graphs, options, mesh, strategy) for strategy in alike]
            found += tried
            if max(tried, key=lambda one: one.expected.per_second).expected.room >= 1.2:
                break  # computing more again cannot help
        yield from found


def _expect_one(graphs: Graphs, options: PlanOptions, mesh: Mesh, strategy: Strategy) -> Candidate:
    """What is expected of a strategy, at the first price of memory at which it fits."""
    way = _Way.of(graphs, options, mesh, strategy)
    pipeline = options.pipeline(mesh, strategy)
    for prices in dict.fromkeys((way.prices[0], way.prices[-1])):
        plan = _plans(way, prices)[0]
        expected = way.graphs.outline.expect(plan.flow, pipeline, plan.whole_bytes, len(plan.units))
        if expected.room >= 1:
            break
    return Candidate(mesh, strategy, expected)


def _expect_budgets(graphs: Graphs, options: PlanOptions, found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Budgets of checkpointing that are expected to fit, for each way to share states, up to the largest.

    A larger budget keeps more and computes less again, so that it is found by bisection. Passed over are ways
    that would be slower than one that fits of their mesh, or not close to that of any, were nothing computed
    again.

    Args:
        graphs: of `read_graphs`.
        options: those of the user.
        found: of all meshes and schedules, for every kind of checkpointing.
    """
    if options.recompute != AUTO:
        return
    best = max((one.expected.per_second for one in found if one.expected.room >= 1), default=0.0) / _CLOSE
    for _, group in groupby(found, key=lambda one: one.shape):
        alike = list(group)
        fits = (one.expected.per_second for one in alike if one.expected.room >= 1)
        reached = max((best, *fits))
        dense = (one for one in alike if one.strategy.recompute == "none" and one.expected.room < 1)
        for most in sorted(dense, key=lambda one: one.expected.per_second, reverse=True):
            fitting = list(_bisect_budgets(graphs, options, most, reached))
            reached = max((reached, *(one.expected.per_second for one in fitting)))
            yield from fitting


def _bisect_budgets(
    graphs: Graphs, options: PlanOptions, most: Candidate, reached: float
) -> Iterator[Candidate]:
    """Candidates that are expected to fit, on the way to the largest; none slower than what is reached."""
    fitting, over = 0, len(BUDGETS)
    while fitting < over and most.expected.per_second > reached:
        middle = (fitting + over) // 2
        strategy = replace(most.strategy, recompute=BUDGETS[middle])
        one = _expect_one(graphs, options, most.mesh, strategy)
        if one.expected.room >= 1:
            fitting = middle + 1
            yield one
        elif one.expected.per_second <= reached:
            return
        else:
            over = middle


def _cut_candidates(
    graphs: Graphs,
    options: PlanOptions,
    candidates: list[Candidate],
    *,
    progress: bool | None = None,
) -> Partition | None:
    """The fastest, of those worth cutting; of a mesh and schedule the first that fits.

    One in which a device has no parameter to train is taken where there is no other.
    """
    best = spare = None
    reached = 0.0
    done, narrowed = set[tuple[Mesh, str, int]](), set[tuple[Mesh, str, int]]()
    ranked = sorted(candidates, key=lambda one: one.rank, reverse=True)
    for one in ProgressBar(ranked, desc="cuts", progress=progress):
        close = _CLOSE if one.expected.room >= 1 else 1.0
        lost = one.expected.per_second * close < reached
        if lost or one.shape in done or (one.expected.hopeless and len(ranked) > 1):
            continue
        found = _partition(graphs, options, one.mesh, one.strategy)
        if found is not None:
            done.add(one.shape)
        elif _may_keep_less(options, one) and one.shape not in narrowed:
            narrowed.add(one.shape)
            found = _with_smaller_budget(graphs, options, one)
        if found is None:
            continue
        if options.training and found.has_idle_optimizers:
            spare = max(spare or found, found, key=lambda one: one.microbatches_per_second)
        elif found.microbatches_per_second > reached:
            best, reached = found, found.microbatches_per_second
    return best or spare


def _may_keep_less(options: PlanOptions, over: Candidate) -> bool:
    """Whether a smaller budget of checkpointing may fit where a candidate was expected to, and did not."""
    kind = over.strategy.recompute
    return options.recompute == AUTO and over.expected.room >= 1 and (kind == "none" or is_budget(kind))


def _with_smaller_budget(graphs: Graphs, options: PlanOptions, over: Candidate) -> Partition | None:
    """The best partition with the largest budget that fits, below one that did not."""
    kind = over.strategy.recompute
    best, fitting, failing = None, 0, BUDGETS.index(kind) if kind in BUDGETS else len(BUDGETS)
    while fitting < failing:
        middle = (fitting + failing) // 2
        strategy = replace(over.strategy, recompute=BUDGETS[middle])
        found = _partition(graphs, options, over.mesh, strategy)
        if found is None:
            failing = middle
        else:
            best, fitting = found, middle + 1
    return best


def _partition(graphs: Graphs, options: PlanOptions, mesh: Mesh, strategy: Strategy) -> Partition | None:
    """The best partition for one mesh and strategy; None if none was found that fits into the memory."""
    way = _Way.of(graphs, options, mesh, strategy)
    found = (_fit(way, prices) for prices in way.prices)
    return next((partition for partition in found if partition is not None), None)


def _plans(way: _Way, prices: Prices) -> list[DevicePlan]:
    """The flow graphs of a device, before stages are known, with what the strategy makes of them."""
    flows = way.graphs.shared_flows(way.ring, prices, way.strategy.recompute, way.strategy.sharding)
    return [
        _device_plan(way, flow, units, recomputed, gathered)
        for (flow, recomputed, gathered), units in zip(flows, way.graphs.units, strict=True)
    ]


def _device_plan(
    way: _Way, flow: FlowGraph, units: tuple[int, ...], recomputed: int, gathered: int
) -> DevicePlan:
    gathered += flow.gathered_bytes
    whole = recomputed + gathered
    if way.mesh.pp == 1:  # the loss is gone before any unit is whole or computed again
        whole = max(0, whole - flow.total.loss_bytes)
    request = way.options.request(way.mesh, way.strategy, whole)
    return DevicePlan(way.strategy, flow, request, units, recomputed, gathered, whole)


def _fit(way: _Way, prices: Prices) -> Partition | None:
    """The best partition whose shards are chosen at some prices of memory; None if it does not fit.

    One in which a device has no parameter to train, as where what is tied is kept together, is taken where
    there is no other.
    """
    stages = way.mesh.pp * way.strategy.stages_per_device
    plans = _plans(way, prices)
    divisible = [
        (whole, plan)
        for whole, plan in zip(way.graphs.flows.values(), plans, strict=True)
        if len(plan.flow.work) >= stages
    ]
    if not divisible:
        largest = max(len(plan.flow.work) for plan in plans)
        hint = "" if "shared" in way.graphs.flows else "; tied='shared' divides more"
        raise StageCountError(
            f"{stages} stages are asked for (pp {way.mesh.pp} x {way.strategy.stages_per_device} a device), "
            f"and the graph of {way.graphs.name} has {largest} operations to divide between them{hint}"
        )
    found = (_cut(way, whole, plan, prices) for whole, plan in divisible)
    fitting = [partition for partition in found if partition is not None]
    return min(
        fitting,
        key=lambda one: (way.options.training and one.has_idle_optimizers, one.step_seconds),
        default=None,
    )


def _cut(way: _Way, whole: FlowGraph, plan: DevicePlan, prices: Prices) -> Partition | None:
    """The fastest partition of a flow graph that fits; None if none was found."""
    options, mesh = way.options, way.mesh
    spare = options.spare_bytes or (0,) * mesh.pp
    for request in _requests(plan):
        cuts = choose_cuts(plan.flow, request)
        if cuts is None:
            continue
        if options.training and (wanted := _that_use_parameters(way, plan.flow, cuts)):
            cuts = choose_cuts(plan.flow, replace(request, wanted=wanted)) or cuts
        cut, sharding = plan, None
        if mesh.tp > 1:
            flow, sharding = _shard_stages(way, whole, cuts, prices)
            flow, recomputed = recompute_units(flow, plan.units, plan.strategy.recompute)
            flow, gathered = share_states(flow, plan.strategy.sharding, plan.units)
            cut = _device_plan(way, flow, plan.units, recomputed, gathered)
        partition = assemble(way.graphs, cut, cuts, options, mesh, sharding)
        room = (options.memory_bytes + one for one in spare)
        if all(held <= most for held, most in zip(partition.held_bytes, room, strict=True)):
            return partition
    return None


def _that_use_parameters(way: _Way, flow: FlowGraph, cuts: StageCuts) -> frozenset[str]:
    """The vertices that use a parameter, if a device would have none to make an optimizer of; else none."""
    held = [one for one in flow.holdings if is_parameter(way.graphs.captured.graph_module, one.name)]
    users = frozenset(vertex for one in held for vertex in one.vertices)
    stage_of, _ = stages_of(flow, cuts)
    return users if len({stage_of[vertex] % way.mesh.pp for vertex in users}) < way.mesh.pp else frozenset()


def _requests(plan: DevicePlan) -> Iterator[StageRequest]:
    """What to ask of the stages, in turn, until those of each device fit into it together.

    Where a device holds several, large ones may be beside small ones: none has a limit of its own at first.
    """
    if plan.strategy.stages_per_device > 1 and plan.request.memory_bytes is not None:
        yield replace(plan.request, memory_bytes=None, spare_bytes=())
    yield plan.request


def _shard_stages(way: _Way, flow: FlowGraph, cuts: StageCuts, prices: Prices) -> tuple[FlowGraph, Sharding]:
    """The shards once the stages are known, which hand each other whole tensors."""
    _, stage_of = stages_of(flow, cuts)
    problem, plan = way.graphs.shard(way.ring, prices, stage_of)
    placed = place_collectives(problem, plan)
    sharding = Sharding(
        plan=plan,
        shards=describe_shards(problem, plan, placed),
        whole=explain_whole(problem, plan),
        collectives=tuple(one.collective for one in placed),
        sequence=tuple(step for step in plan.steps if plan.steps[step].on_sequence),
        sequence_fits=any(map(problem.sequence_shard, problem.graph_module.graph.nodes)),
    )
    return per_device_flow(problem, plan, flow, placed), sharding


def _explain_memory(graphs: Graphs, options: PlanOptions, candidates: Sequence[Candidate]) -> str:
    """Say which stage of the leanest candidate does not fit, by how much, and what would help."""
    leanest = min(candidates, key=lambda one: one.expected.device_bytes)
    mesh, strategy = leanest.mesh, leanest.strategy
    lean_way = _Way.of(graphs, options, mesh, strategy)
    prices = lean_way.prices[-1]
    limit = options.memory_bytes / strategy.stages_per_device

    def needed(way: _Way) -> tuple[float, int, int]:
        """Bytes of the largest stage, its number, and the number of stages; inf if they cannot be cut."""
        plan = max(_plans(way, prices), key=lambda one: len(one.flow.work))
        if plan.request.count > len(plan.flow.work):
            return inf, 0, plan.request.count
        smallest, stage = least_memory(plan.flow, plan.request)
        return smallest + plan.whole_bytes / way.strategy.stages_per_device, stage, plan.request.count

    smallest, stage, count = needed(lean_way)
    lines = [
        f"{graphs.name} does not fit: cut into {count} stages as leanly as can be, stage {stage} takes "
        f"{smallest / 2**30:.3g} GiB, {(smallest - limit) / 2**30:.3g} GiB more than the "
        f"{limit / 2**30:.3g} GiB of its device"
    ]
    if mesh.replicas > 1:
        lines[0] += f" ({strategy.sharding})"
    if strategy.recompute != "full" and options.training:
        lean, _, _ = needed(replace(lean_way, strategy=replace(strategy, recompute="full")))
        fits = "which fits" if lean <= limit else "which is still too much"
        lines.append(f"  recompute=True would take {lean / 2**30:.3g} GiB, {fits}")
    for factor in () if options.places else (2, 4, 8):
        more = replace(mesh, pp=mesh.pp * factor)
        lean, _, _ = needed(replace(lean_way, mesh=more, options=replace(options, microbatches=None)))
        if lean <= limit:
            lines.append(f"  pp={more.pp} would take {lean / 2**30:.3g} GiB a device, which fits")
            break
    lines.append("  a smaller microbatch saves activations; sketchify(model, ratio=...) saves parameters")
    return "\n".join(lines)
