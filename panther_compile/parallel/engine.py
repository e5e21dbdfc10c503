"""What a rank trains with: its stages as one module, and steps that all ranks take together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther_compile.errors import BatchError, ConfigError, ParallelError
from panther_compile.names import dotted
from panther_compile.parallel.agreement import named_failures
from panther_compile.parallel.clipping import global_norm, scale_gradients
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.losses import Loss, share_loss
from panther_compile.parallel.microbatches import Batch, Share, merge, read_batch, take_rows
from panther_compile.parallel.model_state import (
    Names,
    full_state,
    held_buffers,
    held_parameters,
    load_state,
    own_state,
)
from panther_compile.parallel.pipeline import reshard, send_to_all
from panther_compile.parallel.replicas import SharedGradients, average_gradients
from panther_compile.parallel.whole_model import OneModule
from panther_compile.partition import TensorSpec
from panther_compile.partition.graph.capture import CallForm
from panther_compile.partition.shards.placements import Shard

_NO_TARGET = object()


class Runner(Protocol):
    """Runs the stages of this rank over the microbatches of a step."""

    def train(self, batch: Batch, shares: Sequence[Share]) -> Tensor | None:
        """Forward and backward; the sum of the losses on the rank of the last stage, else None."""

    def forward(self, batch: Batch) -> list[tuple[Tensor, ...]] | None:
        """Forward alone; the outputs of each microbatch on the rank of the last stage, else None."""

    def waits_for(self) -> str:
        """What the schedule has last asked of other ranks, for errors."""


@dataclass(frozen=True)
class Task:
    """What a step is taken of.

    Attributes:
        form: of the model's call.
        inputs: of the example, in the order of the graph's inputs.
        microbatches: that a batch is divided into.
        loss: of one microbatch; None if there is nothing to train with.
        count_tokens: of a microbatch's target; None where the loss is a mean over rows.
        mixes_rows: a layer whose result for one row depends on the others, as batch norm; None if there is
            none.
        mixes_always: such a layer that does so in eval mode too, as it keeps no running statistics.
        any_shape: whether other shapes than the example's can be run.
        dtype: of losses and norms.
        unread: parameters that the model's graph does not read.
        in_step: whether replicas wait for each other in each microbatch.
    """

    form: CallForm
    inputs: tuple[TensorSpec, ...]
    microbatches: int
    loss: Loss | None
    count_tokens: Callable[[Any], int | Tensor] | None
    mixes_rows: str | None
    mixes_always: str | None
    any_shape: bool
    dtype: torch.dtype
    unread: frozenset[str]
    in_step: bool = False


class ParallelEngine(nn.Module):
    """One rank's part of a model that many ranks train; made by `parallelize_model`.

    Every rank calls the same methods in the same order, and those of one replica with the same batch.

        >>> engine = pc.parallelize_model(model, part, data_parallel="ddp", loss_fn=loss_fn)
        >>> optimizer = torch.optim.AdamW(engine.parameters())
        >>> for batch, target in loader:
        ...     loss = engine.step(batch, target)
        ...     engine.clip_grad_norm_(1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Without a pipeline it is called as the model is, and `loss.backward()` is the user's own:

        >>> loss = loss_fn(engine(batch), target)
        >>> loss.backward()

    Attributes:
        module: what runs. With dp alone the model that was given, in `DistributedDataParallel` or sharded in
            place by `fully_shard`; with tp the graph in shards, called as the model is; with pp the stages.
        devices: the mesh, and this rank's place in it.
        stages: of this rank, by index.
        names: of the whole model's tensors.
        layouts: of the parameters that the tp axis divides, by name.
        task: what a step is taken of.
        wraps_itself: whether the trainer that was given this knows it; set by `integrations`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        devices: Devices,
        stages: Mapping[int, nn.Module],
        runner: Runner,
        task: Task,
        last_place: int,
        shared: SharedGradients,
        owned: frozenset[int],
        names: Names,
        layouts: Mapping[str, Shard],
        along_tp: Sequence[str],
        averages: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.devices = devices
        self.stages = dict(stages)
        self.task = task
        self._runner = runner
        self._last_place = last_place
        self._shared = shared
        self._owned = owned
        self.names = names
        self.layouts = dict(layouts)
        self._along_tp = tuple(along_tp)
        self._averages = averages
        self._steps = 0
        self.wraps_itself = self._is_prepared = False
        self.training = any(stage.training for stage in stages.values())

    @property
    def microbatches(self) -> int:
        """Number of microbatches into which `step` divides a batch."""
        return self.task.microbatches

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which makes outputs and losses."""
        return self.devices.pp == self._last_place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for one call; its backward is `loss.backward()`.

        Args:
            *args: of the model.
            **kwargs: of the model.

        Raises:
            ParallelError: there is a pipeline, whose schedule owns the backward.
        """
        if self.devices.shape.pp > 1:
            raise ParallelError(
                f"the mesh is {self.devices.shape}: a pipeline's schedule runs forward and backward of all "
                "microbatches; call step(...), evaluate(...) or predict(...)"
            )
        with self._named("forward"):
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            reshard([self.module])
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here add to this rank's gradients; the next one outside reduces them all.

        Raises:
            ParallelError: there is a pipeline, whose schedule owns the backward.
        """
        if self.devices.shape.pp > 1:
            raise ParallelError("no_sync() is for loss.backward(); step() reduces once for all microbatches")
        assert isinstance(self._runner, OneModule)
        return self._runner.without_reduction()

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by every Accelerator before it wraps a model; one that does not know the mesh must not."""
        if not self.wraps_itself:
            raise ParallelError(
                "an Accelerator would wrap the engine in DDP over all ranks; use "
                "panther_compile.PantherAccelerator"
            )
        return self._is_prepared

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._is_prepared = value

    def step(self, *args: Any, target: Any = _NO_TARGET, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch through all stages; gradients are added to `.grad`.

        Args:
            *args: of the model; the last one is the target, unless that is given by its name.
            target: of any structure; tensors of it are divided along their first dimension.
            **kwargs: of the model.

        Returns:
            The mean of the losses over the rows or tokens of all replicas, the same on every rank: float32,
            or float64 for a model with float64 parameters.

        Raises:
            BatchError: the batch is not of a size or shape that the partition was made for.
            CommunicationError: another rank did not answer.
            ParallelError: gradients are turned off, there is no target, or no loss was given.
        """
        if not torch.is_grad_enabled():
            raise ParallelError("step() needs gradients, which are turned off here; evaluate() needs none")
        step = f"step {self._steps + 1}"
        batch, shares = self._read(args, target, kwargs, step)
        self._steps += 1
        self._shared.set_aside()
        with self._named(f"{step}, forward and backward: {self._exchanges()}", self._runner.waits_for):
            loss = self._runner.train(batch, shares)
        with self._named(f"{step}, all-reduce of gradients"):
            if self._averages:
                average_gradients(self.parameters(), self.devices.group("dp"))
            self._shared.sum()
        with self._named(f"{step}, all-reduce of the loss"):
            return self._mean(loss, batch.rows)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = _NO_TARGET, **kwargs: Any) -> Tensor:
        """The loss that `step` would give, from a forward alone; call `eval()` first to turn dropout off.

        Args:
            *args: as of `step`.
            target: as of `step`.
            **kwargs: as of `step`.

        Raises:
            BatchError, CommunicationError, ParallelError: as of `step`, with gradients on or off.
        """
        batch, shares = self._read(args, target, kwargs, "evaluate")
        with self._named("evaluate"):
            outputs = self._runner.forward(batch)
            loss = None
            if outputs is not None:
                assert self.task.loss is not None
                parts = [
                    self.task.loss(
                        self.task.form.unflatten(take_rows(output, share.rows, batch.width)), share
                    )
                    for output, share in zip(outputs, shares, strict=True)
                    if share.rows != 0
                ]
                loss = torch.stack(parts).sum()
            return self._mean(loss, batch.rows)

    @torch.no_grad()
    def predict(self, *args: Any, everywhere: bool = False, **kwargs: Any) -> Any:
        """The model's own output for this replica's batch, from a forward alone.

        Tensors of the output are those of the microbatches, one after the other along the first dimension.

        Args:
            *args: of the model.
            everywhere: give it to every rank of the replica; else those without the last stage get None.
            **kwargs: of the model.
        """
        batch = self._read_batch(args, kwargs)
        with self._named("predict"):
            parts = self._runner.forward(batch)
            outputs = None
            if parts is not None:
                sizes = batch.sizes if batch.is_filled_up else [None] * len(parts)
                outputs = merge(
                    [
                        take_rows(part, size, batch.width)
                        for part, size in zip(parts, sizes, strict=True)
                        if size != 0
                    ]
                )
            if everywhere and self.devices.shape.pp > 1:
                outputs = send_to_all(outputs, self.devices, self._last_place)
        return None if outputs is None else self.task.form.unflatten(outputs)

    def _read(
        self, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any], action: str
    ) -> tuple[Batch, list[Share]]:
        if self.task.loss is None:
            raise ParallelError("there is no loss: give loss_fn to parallelize_model")
        if target is _NO_TARGET:
            if not args:
                raise ParallelError("there is no target: give it as the last argument, or as target=")
            *args, target = args  # type: ignore[assignment]
        batch = self._read_batch(args, kwargs)
        count_tokens, in_step = self.task.count_tokens, self.task.in_step
        with self._named(f"{action}, all-reduce of the sizes of batches"):
            return batch, share_loss(batch, target, count_tokens, self.devices, in_step=in_step)

    def _read_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        task = self.task
        values = task.form.flatten(args, kwargs)
        is_alone = self.devices.shape.pp == 1
        batch = read_batch(
            values, task.inputs, task.microbatches, any_shape=task.any_shape, any_dtype=is_alone
        )
        mixes = task.mixes_always or (task.mixes_rows if self.training else None)
        if batch.is_filled_up and mixes is not None:
            raise BatchError(
                f"a batch of {batch.rows} rows, where {task.microbatches} microbatches of {batch.width} are "
                f"wanted: {mixes} takes statistics over rows, which repeated ones would change; "
                f"drop the last batch{'' if task.mixes_always else ', or call eval()'}"
            )
        return batch

    def _mean(self, loss: Tensor | None, rows: int) -> Tensor:
        """Over the replicas, for every rank; only those of the last stage have a part in it."""
        shape = self.devices.shape
        sums = torch.zeros(3, dtype=torch.float64, device=self.devices.device)
        if loss is not None:
            sums[0] = loss.detach()
        sums[1], sums[2] = rows, rows * rows
        dist.all_reduce(sums)
        ranks = shape.devices
        if self.task.count_tokens is None and sums[2] * ranks != sums[1] * sums[1]:
            raise BatchError(
                f"replicas have batches of different sizes ({rows} rows here, {float(sums[1] / ranks):.4g} "
                "on average): the mean of their means is not that of all rows; give count_tokens= to "
                "parallelize_model, and a loss_fn that sums"
            )
        return (sums[0] / (shape.dp * shape.tp)).to(self.task.dtype)

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

    def _named(self, action: str, pending: Callable[[], str] = lambda: "") -> AbstractContextManager[None]:
        stages = ", ".join(map(str, self.stages))
        return named_failures(
            f"rank {self.devices.rank} (stage {stages}; dp {self.devices.dp}, pp {self.devices.pp}, "
            f"tp {self.devices.tp}), {action}",
            pending,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages under the user's names; shards where data_parallel="fsdp"."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in held_parameters(stage):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield dotted(prefix, name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What this rank's optimizer trains."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank's stages under the user's names."""
        for stage in self.stages.values():
            for name, buffer in held_buffers(stage):
                yield dotted(prefix, name), buffer

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Buffers of this rank's stages."""
        for _, buffer in self.named_buffers():
            yield buffer

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
        """Scale the gradients of all ranks so that the norm of the whole model's is at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_` knows this rank's stages only, and would scale each stage by another
        factor.

        Args:
            max_norm: of all gradients taken as one vector, 0 or more.
            norm_type: p of the p-norm, above 0; inf or "inf" for the largest magnitude.

        Returns:
            The norm before, the same on every rank, float32, or float64 for a model with float64 parameters.

        Raises:
            ConfigError: `norm_type` is not above 0, or `max_norm` below 0.
        """
        norm_type, max_norm = float(norm_type), float(max_norm)
        if not norm_type > 0:
            raise ConfigError(f"norm_type={norm_type!r}, wanted a number above 0, or inf")
        if not max_norm >= 0:
            raise ConfigError(f"max_norm={max_norm!r}, wanted a number, 0 or more")
        gradients = (
            (parameter.grad, name in self.layouts)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and id(parameter) in self._owned
        )
        with self._named("clip_grad_norm_"):
            zero = torch.zeros((), dtype=self.task.dtype, device=self.devices.device)
            norm = global_norm(gradients, norm_type, self.devices.shape, zero)
        held = (parameter.grad for parameter in self.parameters() if parameter.grad is not None)
        scale_gradients(held, norm, max_norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ParallelEngine":
        """Refuse another dtype, as of `double()`, where what ranks send each other is of the plan's."""
        if self.devices.shape.pp > 1 or any(isinstance(one, DTensor) for one in self.parameters()):
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                wanted = fn(torch.empty(0, dtype=tensor.dtype)).dtype
                if wanted != tensor.dtype:
                    raise ParallelError(
                        f"{name} is {tensor.dtype} here, and {wanted} is asked for: convert the model, "
                        "before partition_model; for mixed precision call step() under torch.autocast"
                    )
        super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> "ParallelEngine":
        """Set dropout and batch norms of this rank's stages to train, or eval.

        Args:
            mode: train if True.
        """
        for stage in self.stages.values():
            stage.train(mode)
        self.module.training = self.training = mode
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled."""
        raise ParallelError(
            "an engine holds process groups, so that it is neither copied (AveragedModel, deepcopy) nor "
            "pickled: copy its named_parameters(), or save its state_dict(full=True)"
        )

    def state_dict(  # type: ignore[override]
        self, *args: Any, full: bool = False, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Parameters and buffers under the user's names.

        Args:
            *args: of `nn.Module.state_dict`; none is known here.
            full: the whole model's, on the CPU of every rank, for `model.load_state_dict`; else those of
                this rank's stages, as they are: DTensors where data_parallel="fsdp", and of what the tp axis
                divides this rank's shards, which only `TrainingCheckpoints` knows to be such.
            **kwargs: likewise.

        Raises:
            ConfigError: another option is given.
        """
        if args or any(value for value in kwargs.values()):
            raise ConfigError(f"state_dict takes full= alone, and {args or kwargs} is given")
        if not full:
            return own_state(self)
        with self._named("state_dict"):
            return full_state(self)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Copy parameters and buffers in: of the whole model, or what `state_dict()` gave on this rank.

        Args:
            state_dict: under the user's names, all of them, and no others.
            *args: of `nn.Module.load_state_dict`; none is known here.
            **kwargs: likewise.

        Raises:
            CheckpointMismatchError: a tensor is missing, unknown, or of another shape; nothing is changed.
            ConfigError: an option is given.
        """
        if args or kwargs:
            raise ConfigError(f"load_state_dict takes the state alone, and {args or kwargs} is given")
        load_state(self, state_dict)
