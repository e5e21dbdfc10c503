"""What a user asks of `parallelize_model`, checked against the plan before any process waits for another."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from panther_compile.config import check_type, read_integer
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    ProcessGroupError,
    ScheduleError,
    check_choice,
)
from panther_compile.parallel.activation_checkpointing import find_written_buffer
from panther_compile.parallel.pipeline import SPLIT_BACKWARD, check_schedule
from panther_compile.partition import Partition
from panther_compile.partition.graph.budget import check_mode
from panther_compile.partition.graph.recomputed import recomputed_region

_FLAGS = ("sync_batchnorm", "broadcast")
_FLAGS_OR_NONE = ("reshard_after_forward", "find_unused_parameters")
_DATA_PARALLEL = (None, "ddp", "fsdp")
ACTIVATION_CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Options:
    """Options of `parallelize_model`, under the same names.

    Attributes:
        data_parallel: "ddp", "fsdp" or None.
        schedule: of the pipeline.
        reshard_after_forward: for "fsdp".
        shard_size: for "fsdp".
        units: for "fsdp".
        mp_policy: for "fsdp".
        offload_policy: for "fsdp".
        find_unused_parameters: for "ddp".
        activation_checkpointing: one of `ACTIVATION_CHECKPOINTING`, or a budget.
        sync_batchnorm: over the dp axis.
        broadcast: from rank 0.
    """

    data_parallel: str | None
    schedule: str
    reshard_after_forward: bool | None
    shard_size: int | None
    units: Sequence[str] | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    find_unused_parameters: bool | None
    activation_checkpointing: str | float
    sync_batchnorm: bool
    broadcast: bool

    @classmethod
    def of(
        cls,
        part: Partition,
        *,
        data_parallel: str | None,
        schedule: str | None,
        reshard_after_forward: bool | None,
        shard_size: int | None,
        activation_checkpointing: str | float | None,
        **others: Any,
    ) -> Self:
        """The options as they are given, and as the plan has them where that is left to it.

        Args:
            part: the plan.
            data_parallel: "auto" is the plan's, and so are the next two then, where they are None.
            schedule: None is the plan's.
            reshard_after_forward: see `data_parallel`.
            shard_size: likewise.
            activation_checkpointing: None is the plan's.
            others: taken as they are.

        Raises:
            ConfigTypeError: `shard_size` is no integer.
        """
        if shard_size is not None:
            shard_size = read_integer("shard_size", shard_size)
        if data_parallel == "auto":
            chosen = replication_of(part)
            data_parallel = chosen.data_parallel
            if data_parallel == "fsdp":
                shard_size = chosen.shard_size if shard_size is None else shard_size
                if reshard_after_forward is None:
                    reshard_after_forward = chosen.reshard_after_forward
        return cls(
            data_parallel=data_parallel,
            schedule=part.schedule if schedule is None else schedule,
            reshard_after_forward=reshard_after_forward,
            shard_size=shard_size,
            activation_checkpointing=part.recompute
            if activation_checkpointing is None
            else activation_checkpointing,
            **others,
        )

    def as_record(self) -> dict[str, Any]:
        """The options as JSON takes them, to compare with other ranks."""
        return {key: value if _is_plain(value) else repr(value) for key, value in asdict(self).items()}

    def reshards(self, part: Partition) -> bool:
        """Whether whole parameters are freed between forward and backward."""
        return part.mesh.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    def check(self, part: Partition, mixing: str | None) -> None:
        """Refuse what cannot be run.

        Args:
            part: the plan.
            mixing: a layer that takes statistics over rows in train mode, if there is one.

        Raises:
            ConfigError: an option that is unknown, or of something else that was not asked for.
            ConfigTypeError: one that is of another type.
            ProcessGroupError: the group is not of the mesh's size.
            ScheduleError: a schedule cannot run these stages.
        """
        mesh, ranks = part.mesh, dist.get_world_size()
        if mesh.devices != ranks:
            raise ProcessGroupError(
                f"the partition is for {mesh}, {mesh.devices} devices, and the process group has {ranks} "
                f"ranks; start {mesh.devices} processes, or partition for mesh sizes that multiply to {ranks}"
            )
        for name in _FLAGS:
            check_type(name, getattr(self, name), bool)
        for name in _FLAGS_OR_NONE:
            check_type(name, getattr(self, name), bool, NoneType)
        check_choice("data_parallel", self.data_parallel, _DATA_PARALLEL)
        if self.data_parallel is None and mesh.dp > 1:
            raise ConfigError(f"the mesh is {mesh}: with dp={mesh.dp}, data_parallel must be 'ddp' or 'fsdp'")
        check_schedule(self.schedule, part)
        self._check_fsdp(part)
        if self.find_unused_parameters is not None and (self.data_parallel != "ddp" or mesh.pp > 1):
            raise ConfigError("find_unused_parameters is an option of data_parallel='ddp' without a pipeline")
        self._check_checkpointing(part, mixing)

    def _check_fsdp(self, part: Partition) -> None:
        names = ("reshard_after_forward", "shard_size", "units", "mp_policy", "offload_policy")
        given = [name for name in names if getattr(self, name) is not None]
        if self.data_parallel != "fsdp" and given:
            raise ConfigError(
                f"{' and '.join(given)} {'is an option' if len(given) == 1 else 'are options'} of "
                f"data_parallel='fsdp', and it is {self.data_parallel!r}"
            )
        if self.reshard_after_forward and part.mesh.pp > 1 and self.schedule in SPLIT_BACKWARD:
            raise ConfigError(
                f"schedule={self.schedule!r} keeps whole parameters: reshard_after_forward must be False"
            )
        size, units = self.shard_size, self.units
        if units is not None and (isinstance(units, str) or not isinstance(units, Sequence)):
            raise ConfigTypeError(f"units={units!r}, wanted a list of names of modules")
        if size is not None and (size < 1 or part.mesh.dp % size):
            raise ConfigError(f"shard_size={self.shard_size!r} does not divide dp={part.mesh.dp}")
        if units is not None and (part.mesh.pp > 1 or part.mesh.tp > 1):
            raise ConfigError(
                f"units= names modules, and with {part.mesh} the graph is run: its units are cut on the graph"
            )
        for name, kind in (("mp_policy", MixedPrecisionPolicy), ("offload_policy", OffloadPolicy)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} is a {type(value).__name__}, wanted torch's {kind.__name__}")

    def _check_checkpointing(self, part: Partition, mixing: str | None) -> None:
        asked = self.activation_checkpointing
        check_mode("activation_checkpointing", asked, ACTIVATION_CHECKPOINTING)
        if asked != "none" and mixing is not None:
            raise ConfigError(
                f"activation_checkpointing={asked!r} runs the forward twice, and {mixing} would count each "
                "batch twice in its running statistics; give activation_checkpointing='none'"
            )
        written = find_written_buffer(part.captured.graph_module) if asked != "none" else None
        if written is not None:
            raise ConfigError(
                f"activation_checkpointing={asked!r} runs the forward twice, and would write the buffer "
                f"{written} twice for each batch; give activation_checkpointing='none'"
            )
        if self.schedule not in SPLIT_BACKWARD or part.mesh.pp == 1:
            return
        nodes = part.captured.graph_module.graph.nodes
        calls = any(recomputed_region(node) is not None for node in nodes)
        if asked != "none" or calls:
            who = "the model's torch.utils.checkpoint" if calls else f"activation_checkpointing={asked!r}"
            raise ScheduleError(
                f"schedule={self.schedule!r} divides the backward, and {who} would compute activations again "
                "for each part of it; use schedule='1f1b' or 'interleaved'"
            )


@dataclass(frozen=True, slots=True)
class Replication:
    """How replicas share states.

    Attributes:
        data_parallel: as of `Options`.
        reshard_after_forward: likewise.
        shard_size: likewise.
    """

    data_parallel: str | None
    reshard_after_forward: bool | None = None
    shard_size: int | None = None


def replication_of(part: Partition) -> Replication:
    """What a plan has chosen for its replicas."""
    plan = part.data_parallel
    if part.mesh.dp == 1:
        return Replication(None)
    if plan.kind in ("ddp", "zero1"):
        return Replication("ddp")
    size = plan.sharers if 1 < plan.sharers < part.mesh.dp else None
    return Replication("fsdp", plan.kind == "zero3", size)


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, str, type(None)))
