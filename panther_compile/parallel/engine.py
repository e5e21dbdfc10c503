"""What a rank trains with: its stages as one optimizer sees them, and steps that all ranks take together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from panther_compile.errors import CheckpointMismatchError, ParallelError
from panther_compile.parallel.agreement import named_failures
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.microbatches import check_batch, divide, merge
from panther_compile.parallel.pieces import whole_shape
from panther_compile.parallel.pipeline import Loss, Runner
from panther_compile.parallel.replicas import SharedGradients, average_gradients
from panther_compile.parallel.stage_module import StageModule
from panther_compile.parallel.tensor import join_shards
from panther_compile.partition import TensorSpec
from panther_compile.partition.layouts import Layout

_NO_TARGET = object()


@dataclass(frozen=True)
class Names:
    """The user's names of a model's tensors.

    Attributes:
        first: every name of the model's state dict -> the first name of the same tensor.
        rest: tensors that no stage holds, by first name.
    """

    first: Mapping[str, str]
    rest: Mapping[str, Tensor]


class ParallelEngine:
    """One rank's part of a model that many ranks train; made by `parallelize_model`.

    Every rank calls the same methods in the same order, and those of one replica with the same batch.

        >>> engine = pc.parallelize_model(model, part, data_parallel="ddp", loss_fn=loss_fn)
        >>> optimizer = torch.optim.AdamW(engine.parameters())
        >>> for batch, target in loader:
        ...     loss = engine.step(batch, target)
        ...     engine.clip_grad_norm_(1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Attributes:
        devices: the mesh, and this rank's place in it.
        stages: of this rank, by index; the modules hold parameters under the user's names.
        names: of the whole model's tensors.
        layouts: of the parameters that the tp axis divides, by name.
    """

    def __init__(
        self,
        *,
        devices: Devices,
        stages: Mapping[int, StageModule],
        runner: Runner,
        loss: Loss | None,
        flatten: Callable[..., list[Tensor]],
        unflatten: Callable[[Sequence[Tensor]], Any],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        count: int,
        last_place: int,
        shared: SharedGradients,
        owned: frozenset[int],
        names: Names,
        layouts: Mapping[str, Layout],
        along_tp: Sequence[str],
        averages: bool,
    ) -> None:
        self.devices = devices
        self.stages = dict(stages)
        self._runner = runner
        self._loss = loss
        self._flatten = flatten
        self._unflatten = unflatten
        self._inputs = inputs
        self._outputs = outputs
        self._count = count
        self._last_place = last_place
        self._shared = shared
        self._owned = owned
        self.names = names
        self.layouts = dict(layouts)
        self._along_tp = tuple(along_tp)
        self._averages = averages
        self._steps = 0

    @property
    def microbatches(self) -> int:
        """Into which `step` divides a batch."""
        return self._count

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which makes outputs and losses."""
        return self.devices.pp == self._last_place

    # ------------------------------------------------------------------------------------- steps

    def step(self, *args: Any, target: Any = _NO_TARGET, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch through all stages; gradients are added to `.grad`.

        Args:
            *args: of the model; the last one is the target, unless that is given by its name.
            target: of any structure; tensors of it are divided along their first dimension.
            **kwargs: of the model.

        Returns:
            The mean of the losses over the batches of all replicas, a float tensor, the same on every rank.

        Raises:
            BatchError: the batch is not of the size that the partition was made for.
            CommunicationError: another rank did not answer.
        """
        batch, targets = self._read(args, target, kwargs)
        self._steps += 1
        step = f"step {self._steps}"
        self._shared.set_aside()
        with self._named(f"{step}, forward and backward: {self._exchanges()}", self._runner.waits_for):
            loss = self._runner.train(batch, targets)
        with self._named(f"{step}, all-reduce of gradients"):
            if self._averages:
                average_gradients(self.parameters(), self.devices.group("dp"))
            self._shared.sum()
        with self._named(f"{step}, all-reduce of the loss"):
            return self._mean(loss)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = _NO_TARGET, **kwargs: Any) -> Tensor:
        """The loss that `step` would give, from a forward alone; call `eval()` first to turn dropout off.

        Args:
            *args: as of `step`.
            target: as of `step`.
            **kwargs: as of `step`.
        """
        batch, targets = self._read(args, target, kwargs)
        with self._named("evaluate"):
            outputs = self._runner.forward(batch)
            loss = None
            if outputs is not None:
                assert self._loss is not None
                parts = [self._loss(output, one) for output, one in zip(outputs, targets, strict=True)]
                loss = torch.stack(parts).sum()
            return self._mean(loss)

    @torch.no_grad()
    def predict(self, *args: Any, everywhere: bool = False, **kwargs: Any) -> Any:
        """The model's own output for this replica's batch, from a forward alone.

        Tensors of the output are those of the microbatches, one after the other along the first dimension.

        Args:
            *args: of the model.
            everywhere: give it to every rank of the replica; else those without the last stage get None.
            **kwargs: of the model.
        """
        batch = check_batch(self._flatten(*args, **kwargs), self._inputs, self._count)
        with self._named("predict"):
            parts = self._runner.forward(batch)
            outputs = None if parts is None else merge(parts)
            if everywhere and self.devices.shape.pp > 1:
                outputs = self._send_to_all(outputs)
        return None if outputs is None else self._unflatten(outputs)

    def _read(
        self, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Any]]:
        if self._loss is None:
            raise ParallelError("there is no loss: give loss_fn to parallelize_model")
        if target is _NO_TARGET:
            if not args:
                raise ParallelError("there is no target: give it as the last argument, or as target=")
            *args, target = args  # type: ignore[assignment]
        batch = check_batch(self._flatten(*args, **kwargs), self._inputs, self._count)
        return batch, divide(target, self._count)

    def _mean(self, loss: Tensor | None) -> Tensor:
        """Over the replicas, for every rank; only those of the last stage have a part in it."""
        total = torch.zeros((), device=self.devices.device) if loss is None else loss.float().clone()
        dist.all_reduce(total)
        return total / (self.devices.shape.dp * self.devices.shape.tp)

    def _send_to_all(self, outputs: Sequence[Tensor] | None) -> list[Tensor]:
        """The last stage's outputs, to every device of the pipeline."""
        group, received = self.devices.group("pp"), []
        for place, spec in enumerate(self._outputs):
            shape = (spec.shape[0] * self._count, *spec.shape[1:]) if spec.shape else ()
            dtype = getattr(torch, spec.dtype)
            value = (
                torch.empty(shape, dtype=dtype, device=self.devices.device)
                if outputs is None
                else outputs[place].contiguous()
            )
            # As bytes: not every backend knows every dtype.
            dist.broadcast(value.reshape(-1).view(torch.uint8), group=group, group_src=self._last_place)
            received.append(value)
        return received

    def _exchanges(self) -> str:
        """What the ranks exchange in a forward and a backward, for errors."""
        shape, found = self.devices.shape, []
        if shape.pp > 1:
            found.append(f"send and receive along pp{self._among('pp')}")
        if self._along_tp:
            kinds = " and ".join(kind.replace("_", "-") for kind in self._along_tp)
            found.append(f"{kinds} along tp{self._among('tp')}")
        if shape.dp > 1 and not self._averages:
            is_sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters())
            kind = "all-gather and reduce-scatter" if is_sharded else "all-reduce"
            found.append(f"{kind} along dp{self._among('dp')}")
        return ", ".join(found)

    def _among(self, axis: str) -> str:
        return f" (ranks {', '.join(map(str, dist.get_process_group_ranks(self.devices.group(axis))))})"

    def _named(self, action: str, told: Callable[[], str] = lambda: "") -> AbstractContextManager[None]:
        stages = ", ".join(map(str, self.stages))
        return named_failures(
            f"rank {self.devices.rank} (stage {stages}; dp {self.devices.dp}, pp {self.devices.pp}, "
            f"tp {self.devices.tp}), {action}",
            told,
        )

    # -------------------------------------------------------------------------------- parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages under the user's names; shards where data_parallel="fsdp"."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.graph.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank's optimizer trains."""
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all ranks so that the norm of the whole model's is at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_` knows this rank's stages only, and would scale each stage by another
        factor.

        Args:
            max_norm: of all gradients taken as one vector.

        Returns:
            The norm before, the same on every rank.
        """
        total = torch.zeros((), device=self.devices.device)
        for name, parameter in self.named_parameters():
            gradient = parameter.grad
            if gradient is None or id(parameter) not in self._owned:
                continue
            # Each part of a gradient counts once: ranks that hold the same part share it.
            copies = 1 if name in self.layouts else self.devices.shape.tp
            if isinstance(gradient, DTensor):
                copies *= gradient.device_mesh.size() // _shards(gradient)
                gradient = gradient.to_local()
            else:
                copies *= self.devices.shape.dp
            total += gradient.float().square().sum() / copies
        with self._named("clip_grad_norm_"):
            dist.all_reduce(total)
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                local.mul_(scale.to(local.dtype))
        return norm

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode: bool = True) -> "ParallelEngine":
        """Set dropout and batch norms of this rank's stages to train, or eval.

        Args:
            mode: train if True.
        """
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def eval(self) -> "ParallelEngine":
        """Set dropout and batch norms of this rank's stages to eval."""
        return self.train(False)

    # ------------------------------------------------------------------------------------- state

    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers under the user's names.

        Args:
            full: the whole model's, on the CPU of every rank, for `model.load_state_dict`; else those of
                this rank's stages, as they are: DTensors where data_parallel="fsdp", and of what the tp axis
                divides this rank's shards, which only `TrainingCheckpoints` knows to be such.
        """
        own = self.own_tensors()
        if not full:
            return {name: own[first].detach() for name, first in self.names.first.items() if first in own}
        with self._named("state_dict"):
            whole = {name: self._whole(name, tensor.detach()).cpu() for name, tensor in own.items()}
            parts: list[Any] = [None] * self.devices.shape.pp
            dist.all_gather_object(parts, whole, group=self.devices.group("pp"))
        found = {name: tensor.detach().cpu() for name, tensor in self.names.rest.items()}
        for part in parts:
            found |= part
        return {name: found[first] for name, first in self.names.first.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers in: of the whole model, or what `state_dict()` gave on this rank.

        Args:
            state: under the user's names; names of other stages are passed over.

        Raises:
            CheckpointMismatchError: a tensor of this rank's stages is missing, or of another shape.
        """
        own = self.own_tensors()
        for name, first in self.names.first.items():
            if first not in own:
                continue
            held, layout, shape = tuple(own[first].shape), self.layouts.get(first), self.devices.shape
            wanted = whole_shape(own[first], layout, shape.tp)
            if name not in state or tuple(state[name].shape) not in (wanted, held):
                given = f"{tuple(state[name].shape)} is given" if name in state else "it is not given"
                raise CheckpointMismatchError(
                    f"{name} of stage {', '.join(map(str, self.stages))} has the shape {wanted}, and {given}"
                )
            value = state[name]
            if layout is not None and tuple(value.shape) == wanted:
                value = layout.shard(value, shape.tp, self.devices.tp)
            for stage in self.stages.values():
                for key, tensor in (*stage.graph.named_parameters(), *stage.graph.named_buffers()):
                    if key == first:
                        tensor.copy_(_like(value, tensor))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor that all ranks of a stage have together."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        layout = self.layouts.get(name)
        return tensor if layout is None else join_shards(tensor, layout, self.devices.group("tp"))

    def own_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages by first name; of several copies, the last."""
        own: dict[str, Tensor] = {}
        for stage in self.stages.values():
            own |= dict(stage.graph.named_parameters())
            own |= dict(stage.graph.named_buffers())
        return own


def _like(value: Tensor, tensor: Tensor) -> Tensor:
    """A value in the layout of a tensor."""
    if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
        value = value.to(tensor.device)
        return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return value


def _shards(tensor: DTensor) -> int:
    """Ranks that a tensor is divided over."""
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            count *= tensor.device_mesh.size(axis)
    return count
