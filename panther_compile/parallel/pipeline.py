"""What a rank does with its stages in a step: a schedule of torch.distributed.pipelining, or no pipeline."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from panther_compile.errors import ConfigError, ParallelError, ScheduleError
from panther_compile.parallel.agreement import describe_tensor
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.divided_backward import joined
from panther_compile.parallel.stage_module import StageModule
from panther_compile.partition import Partition, TensorSpec

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SCHEDULES = (*_SINGLE, *_SEVERAL)
SPLIT_BACKWARD = ("zero_bubble", "zbv")

Loss = Callable[[Sequence[Tensor], Any], Tensor]


class Runner(Protocol):
    """Runs the stages of this rank over all microbatches."""

    def train(self, batch: Sequence[Tensor], targets: Sequence[Any]) -> Tensor | None:
        """Forward and backward.

        Args:
            batch: inputs of the first stage, for all microbatches.
            targets: of each microbatch.

        Returns:
            The sum of the losses on the rank of the last stage, else None.
        """

    def forward(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]] | None:
        """Forward alone; the outputs of each microbatch on the rank of the last stage, else None."""

    def waits_for(self) -> str:
        """What the schedule has last asked of other ranks, for errors."""


def check_schedule(schedule: str, part: Partition) -> None:
    """Refuse what torch's schedules cannot run, before any process waits for another.

    Raises:
        ConfigError: of an unknown name.
        ScheduleError: of stages or microbatches that do not fit.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule={schedule!r} is none of {', '.join(map(repr, SCHEDULES))}")
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


class SingleStage:
    """A whole model on each device: gradients accumulate over the microbatches, the last one reduces them."""

    def __init__(self, stage: StageModule, loss: Loss, count: int) -> None:
        self._stage = stage
        self._count = count
        self.with_loss: nn.Module = _WithLoss(stage, loss)

    def train(self, batch: Sequence[Tensor], targets: Sequence[Any]) -> Tensor | None:
        """Forward and backward of one microbatch after the other."""
        losses = []
        for number, (inputs, target) in enumerate(zip(_chunks(batch, self._count), targets, strict=True)):
            is_last = number == self._count - 1
            if isinstance(self._stage, FSDPModule):
                self._stage.set_requires_gradient_sync(is_last)
                self._stage.set_is_last_backward(is_last)
            held = isinstance(self.with_loss, DistributedDataParallel) and not is_last
            with cast(DistributedDataParallel, self.with_loss).no_sync() if held else nullcontext():
                loss = self.with_loss(target, *inputs)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def forward(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]] | None:
        """Forward of one microbatch after the other."""
        outputs = [self._stage(*inputs) for inputs in _chunks(batch, self._count)]
        _reshard([self._stage])
        return outputs

    def waits_for(self) -> str:
        """Nothing: there is no schedule."""
        return ""


class _WithLoss(nn.Module):
    """The loss is the output, so that DDP sees which parameters it depends on."""

    def __init__(self, stage: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.stage = stage
        self._loss = loss

    def forward(self, target: Any, *inputs: Tensor) -> Tensor:
        """The loss of one microbatch."""
        return self._loss(self.stage(*inputs), target)


class _Stage(PipelineStage):
    """Remembers what it last asked to be sent and received, and divides its backward so that it adds up."""

    asked: dict[str, str]

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Of torch."""
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return grads, groups and joined(groups)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Of torch."""
        return self._remember("activations", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Of torch."""
        return self._remember("gradients", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Of torch."""
        return self._remember("activations", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Of torch."""
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
    """Stages on several devices."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        places: Sequence[int],
        part: Partition,
        devices: Devices,
        schedule: str,
        loss: Loss,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._places = tuple(places)
        self._specs = [stage.inputs for stage in part.stages]
        self._count = part.microbatches
        self._devices = devices
        self._targets: Sequence[Any] = ()
        self._asked: dict[str, str] = {}
        self._loss = loss
        # Two directions between the same two ranks are two groups: the order of one cannot block the other.
        several = len(places) > devices.shape.pp
        self._up = devices.group("pp")
        self._down = devices.subgroup(range(devices.shape.pp)) if several else None
        made = [self._pipeline_stage(part, index, stage) for index, stage in self._stages.items()]
        # The mean over microbatches is taken in the loss; torch would divide the gradients of a parameter
        # once for every stage that holds it.
        options: dict[str, Any] = {
            "n_microbatches": part.microbatches,
            "loss_fn": self._nth_loss,
            "scale_grads": False,
        }
        self._schedule = (
            _SINGLE[schedule](made[0], **options)
            if schedule in _SINGLE
            else _SEVERAL[schedule](made, **options)  # type: ignore[arg-type]
        )

    def _pipeline_stage(self, part: Partition, index: int, module: nn.Module) -> PipelineStage:
        """With shapes given: torch would find them by running the stage on memory that holds anything."""
        record = part.stages[index]
        # Without gradients of inputs there is nothing to do first: the backward is not divided.
        whole = None if any(spec.requires_grad for spec in record.inputs) or not index else _nothing_left
        made = _Stage(
            module,
            index,
            len(part.stages),
            self._devices.device,
            input_args=tuple(map(_meta_tensor, record.inputs)),
            output_args=tuple(map(_meta_tensor, record.outputs)),
            group=self._up,
            dw_builder=whole,
        )
        made.asked = self._asked
        return made

    def _nth_loss(self, outputs: Sequence[Tensor], number: Tensor) -> Tensor:
        return self._loss(outputs, self._targets[int(number)])

    def train(self, batch: Sequence[Tensor], targets: Sequence[Any]) -> Tensor | None:
        """Run the schedule."""
        self._targets = targets
        self._asked.clear()
        losses: list[Tensor] = []
        is_first, is_last = 0 in self._stages, len(self._places) - 1 in self._stages
        self._schedule.step(
            *(batch if is_first else ()),
            # torch divides tensors only; the numbers stand for targets of any structure.
            target=torch.arange(self._count) if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        self._targets = ()
        return torch.stack([loss.detach() for loss in losses]).sum() if is_last else None

    def forward(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]] | None:
        """Run groups of as many microbatches as there are devices through one stage after the other."""
        width = self._devices.shape.pp
        chunks = list(_chunks(batch, self._count)) if 0 in self._stages else []
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
        _reshard(self._stages.values())
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
            torch.empty(spec.shape, dtype=_dtype(spec), device=self._devices.device)
            for spec in self._specs[index]
        )
        for tensor in received:
            dist.recv(tensor, group=group, group_src=sender)
        return received

    def _send(self, index: int, tensors: Sequence[Tensor]) -> list[tuple[dist.Work, Tensor]]:
        """With the tensors, which must live until they are sent."""
        group, _, receiver = self._link(index)
        sent = [(dist.isend(tensor, group=group, group_dst=receiver), tensor) for tensor in tensors]
        return [(work, tensor) for work, tensor in sent if work is not None]


def _nothing_left() -> Callable[[], None]:
    """For torch's schedules: the whole backward ran with the gradients of inputs."""
    return lambda: None


def _chunks(batch: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Inputs of each microbatch."""
    columns = [value.chunk(count) for value in batch]
    return [[column[number] for column in columns] for number in range(count)]


def _reshard(stages: Any) -> None:
    """Free whole parameters that no backward will free; they would be stale after the optimizer's step."""
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.reshard()


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _meta_tensor(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=_dtype(spec), device="meta", requires_grad=spec.requires_grad)


def mean_loss(
    loss_fn: Callable[[Any, Any], Tensor], unflatten: Callable[[Sequence[Tensor]], Any], count: int
) -> Loss:
    """The user's loss of one microbatch, divided by their number.

    Args:
        loss_fn: of the model's output and a target.
        unflatten: from the last stage's tensors to the model's output.
        count: of microbatches.
    """

    def loss(outputs: Sequence[Tensor], target: Any) -> Tensor:
        value = loss_fn(unflatten(outputs), target)
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            shown = f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else value
            raise ParallelError(
                f"loss_fn gave {shown}; it must give a floating number, the mean over a batch"
            )
        return value / count

    return loss
