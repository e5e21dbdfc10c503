"""Stages on several devices, driven by a schedule of torch.distributed.pipelining.

A schedule is made for the shapes and dtypes that cross between stages. They depend on the autocast that a
step is called under: the first step under another one finds them anew and makes another schedule.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from panther_compile.errors import ParallelError, ScheduleError, check_choice
from panther_compile.parallel.agreement import describe_tensor
from panther_compile.parallel.crossing import CrossingTensors
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.divided_backward import joined
from panther_compile.parallel.losses import Loss, no_loss
from panther_compile.parallel.microbatches import Batch, Share, take_rows
from panther_compile.parallel.stage_module import StageModule
from panther_compile.partition import Partition, TensorSpec
from panther_compile.partition.graph.capture import Precision

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SCHEDULES = (*_SINGLE, *_SEVERAL)
SPLIT_BACKWARD = ("zero_bubble", "zbv")


def check_schedule(schedule: str, part: Partition) -> None:
    """Refuse what torch's schedules cannot run, before any process waits for another.

    Raises:
        ConfigError: of an unknown name.
        ScheduleError: of stages or microbatches that do not fit.
    """
    check_choice("schedule", schedule, SCHEDULES)
    stages, pp, count = len(part.stages), part.mesh.pp, part.microbatches
    each = stages // pp
    if pp == 1:
        if stages > 1:
            raise ScheduleError(f"the partition has {stages} stages for pp=1; one device needs no pipeline")
        return
    if schedule in _SINGLE and each > 1:
        raise ScheduleError(
            f"schedule={schedule!r} runs one stage on each device, and the partition has {stages} stages for "
            f"pp={pp}; use schedule='interleaved', or partition_model(schedule={schedule!r})"
        )
    if schedule == "zbv" and each != 2:
        raise ScheduleError(
            f"schedule='zbv' runs two stages on each device, and the partition has {stages} stages for "
            f"pp={pp}; use partition_model(schedule='interleaved', stages_per_device=2)"
        )
    if schedule == "1f1b" and count < stages:
        raise ScheduleError(
            f"schedule='1f1b' needs a microbatch for each of {stages} stages, and the partition has {count}"
        )
    rounds = max(1, count // pp)
    if schedule in ("interleaved", "zero_bubble") and count % rounds:
        raise ScheduleError(
            f"schedule={schedule!r} runs {count} microbatches in {rounds} rounds of pp={pp}, which must "
            "be of equal size"
        )
    _check_torch(schedule, part)


def _check_torch(schedule: str, part: Partition) -> None:
    """Before torch 2.13 every tensor between stages had to have a gradient."""
    if "output_grads" in inspect.signature(PipelineStage).parameters:
        return
    fixed = [spec.name for stage in part.stages[1:] for spec in stage.inputs if not spec.requires_grad]
    if fixed:
        raise ScheduleError(
            f"torch {torch.__version__} can only send tensors that need a gradient from stage to stage, and "
            f"{', '.join(fixed)} of this model need none; use torch 2.13 or newer"
        )
    if schedule in SPLIT_BACKWARD:
        raise ScheduleError(f"schedule={schedule!r} needs torch 2.13 or newer, not {torch.__version__}")


class _Stage(PipelineStage):
    """Remembers what it last asked to be sent and received, and divides its backward so that it adds up."""

    asked: dict[str, str]

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Do as torch, and take a note of it."""
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return grads, groups and joined(groups)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Do as torch, and take a note of it."""
        return self._remember("activations", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Do as torch, and take a note of it."""
        return self._remember("gradients", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Do as torch, and take a note of it."""
        return self._remember("activations", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Do as torch, and take a note of it."""
        return self._remember("gradients", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _remember(self, what: str, microbatch: int, asked: list[dist.P2POp]) -> list[dist.P2POp]:
        if asked:
            way = "receive" if asked[0].op is dist.irecv else "send"
            tensors = ", ".join(describe_tensor(one.tensor) for one in asked)
            peers = ", ".join(str(peer) for peer in sorted({one.peer for one in asked}))
            towards = "from" if way == "receive" else "to"
            self.asked[way] = (
                f"{way} {what} of microbatch {microbatch} {towards} rank {peers} "
                f"(stage {self.stage_index}; {tensors})"
            )
        return asked


class Pipeline:
    """Runs the stages of this rank over all microbatches."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        places: Sequence[int],
        part: Partition,
        devices: Devices,
        schedule: str,
        loss: Loss | None,
        crossing: CrossingTensors,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._places = tuple(places)
        self._count = part.microbatches
        self._devices = devices
        self._name = schedule
        self._loss = loss
        self._unflatten = part.captured.form.unflatten
        self._crossing = crossing
        self._specs: Sequence[tuple[TensorSpec, ...]] = ()
        self._known: dict[Precision, tuple[Sequence[tuple[TensorSpec, ...]], Any]] = {}
        self._shares: Sequence[Share] = ()
        self._width = 0
        self._asked: dict[str, str] = {}
        # Two directions between the same two ranks are two groups: the order of one cannot block the other.
        several = len(places) > devices.shape.pp
        self._up = devices.group("pp")
        self._down = devices.subgroup(range(devices.shape.pp)) if several else None

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs of the last stage, as it last ran."""
        return self._specs[-1]

    def _prepare(self) -> Any:
        """The schedule for the autocast that this is called under."""
        precision = Precision.current(self._devices.device.type)
        if precision not in self._known:
            specs = self._crossing.find(precision)
            self._known[precision] = specs, self._make_schedule(specs)
        self._specs, schedule = self._known[precision]
        for index, stage in self._stages.items():
            stage.promised = self._specs[index + 1] if index + 1 < len(self._places) else None
        return schedule

    def _make_schedule(self, specs: Sequence[tuple[TensorSpec, ...]]) -> Any:
        made = [self._pipeline_stage(specs, index) for index in self._stages]
        # The loss has its weight; torch would divide the gradients of a parameter once for every stage that
        # holds it.
        options: dict[str, Any] = {
            "n_microbatches": self._count,
            "loss_fn": self._nth_loss,
            "scale_grads": False,
        }
        if self._name in _SINGLE:
            return _SINGLE[self._name](made[0], **options)
        return _SEVERAL[self._name](made, **options)  # type: ignore[arg-type]

    def _pipeline_stage(self, specs: Sequence[tuple[TensorSpec, ...]], index: int) -> PipelineStage:
        """Make a stage of given shapes: torch would find them by running it on memory that holds anything."""
        # Without gradients of inputs there is nothing to do first: the backward is not divided.
        whole = None if any(spec.requires_grad for spec in specs[index]) or not index else _nothing_left
        made = _Stage(
            self._stages[index],
            index,
            len(self._places),
            self._devices.device,
            input_args=tuple(spec.empty("meta") for spec in specs[index]),
            output_args=tuple(spec.empty("meta") for spec in specs[index + 1]),
            group=self._up,
            dw_builder=whole,
        )
        made.asked = self._asked
        return made

    def _nth_loss(self, outputs: Sequence[Tensor], number: Tensor) -> Tensor:
        assert self._loss is not None
        share = self._shares[int(number)]
        if share.rows == 0:
            return no_loss(outputs)
        return self._loss(self._unflatten(take_rows(outputs, share.rows, self._width)), share)

    def train(self, batch: Batch, shares: Sequence[Share]) -> Tensor | None:
        """Forward and backward.

        Args:
            batch: of all microbatches.
            shares: of each microbatch in the loss.

        Returns:
            The sum of the losses on the rank of the last stage, else None.
        """
        schedule = self._prepare()
        self._shares, self._width = shares, batch.width
        self._asked.clear()
        losses: list[Tensor] = []
        is_first, is_last = 0 in self._stages, len(self._places) - 1 in self._stages
        try:
            schedule.step(
                *(batch.joined() if is_first else ()),
                # torch divides tensors only; the numbers stand for targets of any structure.
                target=torch.arange(self._count) if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, ParallelError):
                raise error.__cause__  # noqa: B904  of a stage, which torch has wrapped
            raise
        self._shares = ()
        return torch.stack([loss.detach() for loss in losses]).sum() if is_last else None

    def forward(self, batch: Batch) -> list[tuple[Tensor, ...]] | None:
        """Forward alone: groups of as many microbatches as there are devices, one stage after the other.

        Args:
            batch: of all microbatches.

        Returns:
            The outputs of each microbatch on the rank of the last stage, else None.
        """
        self._prepare()
        width = self._devices.shape.pp
        chunks = list(batch.microbatches()) if 0 in self._stages else []
        held: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        outputs, sends = [], []
        for first in range(0, self._count, width):
            for index, stage in self._stages.items():
                for number in range(first, min(first + width, self._count)):
                    if index == 0:
                        inputs: tuple[Tensor, ...] = tuple(chunks[number])
                    elif (index, number) in held:
                        inputs = held.pop((index, number))
                    else:
                        inputs = self._receive(index)
                    result = stage(*inputs)
                    if index == len(self._places) - 1:
                        outputs.append(result)
                    elif index + 1 in self._stages:
                        held[index + 1, number] = result
                    else:
                        sends += self._send(index, result)
        for work, _ in sends:
            work.wait()
        reshard(self._stages.values())
        return outputs if len(self._places) - 1 in self._stages else None

    def waits_for(self) -> str:
        """The last receive and the last send; torch tells of only one of them that it did not end."""
        return " and ".join(self._asked[way] for way in ("receive", "send") if way in self._asked)

    def _link(self, index: int) -> tuple[dist.ProcessGroup, int, int]:
        """Group, sender and receiver of what a stage sends to the next."""
        sender, receiver = self._places[index], self._places[index + 1]
        group = self._up if sender < receiver or self._down is None else self._down
        return group, sender, receiver

    def _receive(self, index: int) -> tuple[Tensor, ...]:
        group, sender, _ = self._link(index - 1)
        received = tuple(
            torch.empty(spec.shape, dtype=spec.torch_dtype, device=self._devices.device)
            for spec in self._specs[index]
        )
        for tensor in received:
            dist.recv(tensor, group=group, group_src=sender)
        return received

    def _send(self, index: int, tensors: Sequence[Tensor]) -> list[tuple[dist.Work, Tensor]]:
        """Send tensors; gives them too, as they must live until they are sent."""
        group, _, receiver = self._link(index)
        sent = [(dist.isend(tensor, group=group, group_dst=receiver), tensor) for tensor in tensors]
        return [(work, tensor) for work, tensor in sent if work is not None]


def _nothing_left() -> Callable[[], None]:
    """A callback for torch's schedules: the whole backward ran with the gradients of inputs."""
    return lambda: None


def reshard(stages: Any) -> None:
    """Free whole parameters that no backward will free; they would be stale after the optimizer's step."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def send_to_all(outputs: Sequence[Tensor] | None, devices: Devices, source: int) -> list[Tensor]:
    """The last stage's outputs, to every device of the pipeline.

    Args:
        outputs: on the devices that have the last stage.
        devices: this one among them.
        source: place of the last stage along the pipeline.
    """
    group, received = devices.group("pp"), []
    specs: list[Any] = [None]
    if outputs is not None:
        specs = [[(tuple(value.shape), value.dtype) for value in outputs]]
    dist.broadcast_object_list(specs, group=group, group_src=source)
    for place, (shape, dtype) in enumerate(specs[0]):
        value = (
            torch.empty(shape, dtype=dtype, device=devices.device)
            if outputs is None
            else outputs[place].contiguous()
        )
        # As bytes: not every backend knows every dtype.
        dist.broadcast(value.reshape(-1).view(torch.uint8), group=group, group_src=source)
        received.append(value)
    return received
