"""What the user asked for, and the strategies among which the planner chooses for a mesh."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from panther_compile.errors import MeshError, check_choice
from panther_compile.partition.graph.budget import check_mode
from panther_compile.partition.graph.hardware import NO_LINK, Hardware, Link, slowest_of
from panther_compile.partition.records import Mesh
from panther_compile.partition.replicas import (
    DATA_PARALLEL,
    StateSharding,
    find_replica_links,
    find_shardings,
)
from panther_compile.partition.stages.chains import StageRequest
from panther_compile.partition.stages.mesh_search import PipelineShape
from panther_compile.partition.stages.schedule import SCHEDULES, Action, count_in_flight, order_actions
from panther_compile.partition.stages.units import RECOMPUTE

AUTO = "auto"
# Of activation checkpointing, where the planner is to choose: shares of what a unit would keep.
BUDGETS = tuple(number / 20 for number in range(1, 20))
_MICROBATCHES_PER_STAGE = 4
# Stages of fewer operations are not compared, where a device may have one or several.
_OPERATIONS_OF_A_STAGE = 8
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))  # compared where none is asked for


@dataclass(frozen=True, slots=True)
class Strategy:
    """What is chosen for a mesh.

    Attributes:
        sharding: how states are divided over the replicas.
        recompute: one of `units.RECOMPUTE`, or a budget.
        schedule: name of the schedule.
        stages_per_device: 1 unless interleaved.
    """

    sharding: StateSharding
    recompute: str | float
    schedule: str
    stages_per_device: int


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user asked for, the mesh aside.

    Attributes:
        hardware: of the cluster; the slowest of `places`, where there are such.
        memory_bytes: memory of each device; of the smallest, where they differ.
        places: the hardware of each place along the pipeline, where it differs.
        spare_bytes: bytes that the device of each of them has beyond `memory_bytes`.
        microbatches: number in a step, through each replica; None for four for each device of the pipeline.
        global_batch: samples of a step over all replicas, in place of microbatches.
        samples: number in a microbatch.
        schedule: name of the schedule, or "auto".
        stages_per_device: for "interleaved"; None for 2, or for what is faster with "auto".
        training: whether there is a backward.
        recompute: one of `units.RECOMPUTE`, a budget, or "auto".
        data_parallel: one of `replicas.DATA_PARALLEL`, or "auto".
        shard_size: replicas that share states; None for what is faster.
        master_weights: whether float32 copies of the parameters are among the states.
        context_parallel: sizes of cp to compare, where devices are divided.
        scattered: whether each device of a stage sends a part of what the next stage gathers, as other
            runtimes do; ours sends all of it from each.

    Raises:
        ConfigError: an option is none of what is wanted.
        MeshError: a number of stages that the schedule does not have.
    """

    hardware: Hardware
    memory_bytes: int
    microbatches: int | None = None
    global_batch: int | None = None
    samples: int = 1
    schedule: str = "1f1b"
    stages_per_device: int | None = None
    training: bool = True
    recompute: str | float = "none"
    data_parallel: str = AUTO
    shard_size: int | None = None
    master_weights: bool = False
    context_parallel: tuple[int, ...] = (1,)
    scattered: bool = False
    places: tuple[Hardware, ...] = ()
    spare_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, (AUTO, *SCHEDULES))
        check_choice("data_parallel", self.data_parallel, (AUTO, *DATA_PARALLEL))
        check_mode("recompute", self.recompute, (AUTO, *RECOMPUTE))
        if self.stages_per_device not in (None, 1) and self.schedule not in (AUTO, "interleaved"):
            raise MeshError(
                f"stages_per_device={self.stages_per_device} needs schedule='interleaved', "
                f"not {self.schedule!r}"
            )

    def microbatches_of(self, mesh: Mesh) -> int:
        """Microbatches of one step, through each replica."""
        if self.global_batch is not None:
            return self.global_batch // (mesh.dp * self.samples)
        return _MICROBATCHES_PER_STAGE * mesh.pp if self.microbatches is None else self.microbatches

    def check(self, mesh: Mesh) -> None:
        """Refuse what cannot be divided into microbatches or replicas, and what the schedule cannot run."""
        batch = self.global_batch
        if batch is not None and batch % (mesh.dp * self.samples):
            raise MeshError(
                f"global_batch={batch} is not divisible by dp={mesh.dp} x {self.samples} samples of a "
                "microbatch"
            )
        count = self.microbatches_of(mesh)
        if self.schedule == "interleaved" and count % mesh.pp:
            raise MeshError(
                f"interleaved runs microbatches in groups of pp={mesh.pp}; of microbatches={count} some are "
                "left over"
            )
        if self.shard_size is not None and mesh.replicas % self.shard_size:
            over = f"dp={mesh.dp}" + (f" x cp={mesh.cp}" if mesh.cp > 1 else "")
            raise MeshError(f"shard_size={self.shard_size} does not divide {over}")

    def strategies(self, mesh: Mesh, operations: int) -> Iterator[Strategy]:
        """Strategies that a mesh and the user's choices leave.

        Args:
            mesh: that passes `check`.
            operations: vertices of the graph; each stage needs one.
        """
        shardings = list(
            find_shardings(
                mesh,
                self.microbatches_of(mesh),
                self.hardware,
                self.data_parallel,
                self.shard_size,
                master_weights=self.master_weights,
            )
        )
        kinds = RECOMPUTE if self.recompute == AUTO else (self.recompute,)
        for schedule, stages_per_device in self._schedules(mesh, operations):
            for recompute in kinds if self.training else kinds[:1]:
                for sharding in shardings if self.training else shardings[:1]:
                    yield Strategy(sharding, recompute, schedule, stages_per_device)

    def _schedules(self, mesh: Mesh, operations: int) -> Iterator[tuple[str, int]]:
        if self.schedule == "interleaved":
            yield self.schedule, self.stages_per_device or 2
        elif self.schedule != AUTO:
            yield self.schedule, 1
        else:
            for schedule, count in _SCHEDULES:
                fits = mesh.pp * count * _OPERATIONS_OF_A_STAGE <= operations
                fits = fits and self.microbatches_of(mesh) % mesh.pp == 0
                if count == 1 or (mesh.pp > 1 and fits and self.stages_per_device in (None, count)):
                    yield schedule, count

    def orders(self, mesh: Mesh, strategy: Strategy) -> tuple[tuple[Action, ...], ...]:
        """What each device of the pipeline does."""
        return order_actions(
            strategy.schedule,
            mesh.pp,
            self.microbatches_of(mesh),
            stages_per_device=strategy.stages_per_device,
            training=self.training,
        )

    def request(self, mesh: Mesh, strategy: Strategy, whole_bytes: int) -> StageRequest:
        """The stages that a mesh asks for; a device's memory is divided evenly over its stages.

        Args:
            mesh: of the devices.
            strategy: for it.
            whole_bytes: that a device needs besides what its stages hold, for units.
        """
        pipeline = self.pipeline(mesh, strategy)
        memory = max(1, self.memory_bytes - whole_bytes) // strategy.stages_per_device
        parts = self._parts(mesh)
        return StageRequest(pipeline.links, pipeline.in_flight, memory, pipeline.spare_bytes, parts)

    def pipeline(self, mesh: Mesh, strategy: Strategy) -> PipelineShape:
        """The pipeline of a mesh."""
        stages, microbatches = mesh.pp * strategy.stages_per_device, self.microbatches_of(mesh)
        return PipelineShape(
            links=_stage_links(self.places or (self.hardware,), mesh, stages, self._parts(mesh)),
            in_flight=_in_flight(
                strategy.schedule, mesh.pp, microbatches, strategy.stages_per_device, self.training
            ),
            memory_bytes=self.memory_bytes // strategy.stages_per_device,
            spare_bytes=tuple(one // strategy.stages_per_device for one in self.spare_bytes)
            * strategy.stages_per_device,
            microbatches=microbatches,
            devices=mesh.pp,
            replicas=mesh.dp,
            sharding=strategy.sharding,
            replica_links=find_replica_links(self.hardware, mesh, strategy.sharding.sharers),
        )

    def _parts(self, mesh: Mesh) -> int:
        """Devices of a stage that divide what crosses a cut."""
        return mesh.tp if self.scattered else 1

    def shared_link(self, mesh: Mesh) -> Link:
        """The slowest link between devices that share a stage."""
        return _slowest(
            self.hardware,
            (
                (mesh.rank(dp, pp), mesh.rank(dp, pp, mesh.tp - 1))
                for dp in range(mesh.dp)
                for pp in range(mesh.pp)
            ),
        )


@lru_cache(maxsize=256)
def _in_flight(
    schedule: str, devices: int, microbatches: int, stages_per_device: int, training: bool
) -> tuple[int, ...]:
    """Microbatches that each stage holds at once."""
    if not training:
        return (1,) * (devices * stages_per_device)
    return count_in_flight(schedule, devices, microbatches, stages_per_device)


@lru_cache(maxsize=256)
def _stage_links(places: tuple[Hardware, ...], mesh: Mesh, stages: int, senders: int) -> tuple[Link, ...]:
    """The slowest link, over the replicas, from each stage to the next, for so many senders that share it."""
    between = []
    for stage in range(min(stages - 1, mesh.pp)):
        first, second = stage % mesh.pp, (stage + 1) % mesh.pp
        pairs = ((mesh.rank(dp, first), mesh.rank(dp, second)) for dp in range(mesh.dp))
        ends = [places[place % len(places)] for place in (first, second)]
        link = NO_LINK if first == second else _slowest(slowest_of(ends), pairs)
        between.append(replace(link, bytes_per_second=senders * link.bytes_per_second))
    return tuple(between[stage % mesh.pp] for stage in range(stages - 1))


def _slowest(hardware: Hardware, pairs: Iterator[tuple[int, int]]) -> Link:
    links = {hardware.link(*pair) for pair in pairs}
    return min(links, key=lambda link: link.bytes_per_second)
