"""accelerate's own loop over a parallel model.

    engine, optimizer, loader = accelerator.prepare(engine, optimizer, loader)

What `prepare` would do to a model is done already, so the engine is not wrapped again; and accelerate's
belief that each process is a replica is set right where the mesh has a tp axis:

    prepare_model         autocast of `mixed_precision=` alone, no second DDP
    prepare_scheduler     one step a replica
    prepare_data_loader   one share of the data a replica, the same on all ranks of a tp group
    clip_grad_norm_       the norm of the whole model
    gather, reduce        one value a replica, and so are the objects of gather_for_metrics
    split_between_...     one share of the inputs a replica
    get_state_dict        the whole model's
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader

from panther_compile.errors import ConfigError, ParallelError
from panther_compile.parallel import ParallelEngine


class PantherAccelerator(Accelerator):
    """accelerate's `Accelerator` for what `parallelize_model` gives, without a pipeline.

    It takes the arguments of `Accelerator`, and no plugin for FSDP, DeepSpeed or Megatron: the engine is
    sharded as its plan has it. Other models, optimizers and schedulers are prepared as ever.

        >>> accelerator = pc.PantherAccelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        >>> engine = pc.parallelize_model(model, part, data_parallel="fsdp")
        >>> optimizer = torch.optim.AdamW(engine.parameters())
        >>> engine, optimizer, loader = accelerator.prepare(engine, optimizer, loader)
        >>> for batch, target in loader:
        ...     with accelerator.accumulate(engine):
        ...         accelerator.backward(loss_fn(engine(batch), target))
        ...         if accelerator.sync_gradients:
        ...             accelerator.clip_grad_norm_(engine.parameters(), 1.0)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    _engine: ParallelEngine | None = None

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare an engine and what goes with it, in any order.

        Args:
            *args: of `Accelerator.prepare`.
            device_placement: likewise.

        Raises:
            ParallelError: the engine is a pipeline; there is another engine already; or with a tp axis
                loaders or schedulers were prepared before it.
            ConfigError: fp16 over a tp axis.
        """
        for engine in args:
            if isinstance(engine, ParallelEngine):
                self._take(engine)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Let an engine run under the autocast that was asked for; other models as ever.

        Args:
            model: the engine, or any other.
            device_placement: of other models.
            evaluation_mode: likewise.
        """
        if not isinstance(model, ParallelEngine):
            return super().prepare_model(model, device_placement, evaluation_mode)
        self._take(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """Divide the data over replicas: the ranks of a tp group get the same batches.

        With a tp axis every rank reads an `IterableDataset` itself, which has to give the same on each.

        Args:
            data_loader: of the whole data.
            device_placement: whether batches are moved to this rank's device.
            slice_fn_for_dispatch: of `dispatch_batches`.

        Raises:
            ConfigError: `dispatch_batches=True` over a tp axis, whose ranks would get different batches.
        """
        if self._engine is None or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        devices, dispatches = self._engine.devices, self.dispatch_batches
        if devices.shape.tp > 1:
            if dispatches:
                raise ConfigError(
                    f"dispatch_batches=True over {devices.shape}: accelerate would give each rank of a tp "
                    "group other rows; leave it out, and let the data be the same on every rank"
                )
            dispatches = False
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=devices.shape.dp,
            process_index=devices.dp,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=dispatches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Let a scheduler take one step for each replica and step of the optimizer, as accelerate counts.

        With `split_batches=True` it takes one step for all replicas, and with
        `step_scheduler_with_optimizer=False` one for each call.

        Args:
            scheduler: of the optimizer.
        """
        engine, is_done = self._engine, getattr(scheduler, "_is_accelerate_prepared", False)
        once_a_process = self.step_scheduler_with_optimizer and not self.split_batches
        if engine is not None and engine.devices.shape.tp > 1 and once_a_process and not is_done:
            scheduler = _OncePerReplica(scheduler, engine.devices.shape.tp)
        return super().prepare_scheduler(scheduler)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale gradients so that their norm is at most `max_norm`: of an engine, those of all ranks.

        Args:
            parameters: all of the engine's, or those of another model.
            max_norm: of the gradients taken as one vector.
            norm_type: p of the p-norm.

        Raises:
            ParallelError: some of the engine's parameters, and not all.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        held = set() if self._engine is None else {id(one) for one in self._engine.parameters()}
        asked = {id(one) for one in given}
        if self._engine is None or not asked & held:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        trained = {id(one) for one in self._engine.parameters() if one.grad is not None}
        if not trained <= asked <= held:
            raise ParallelError(
                f"clip_grad_norm_ is given {len(asked & held)} of the engine's {len(held)} parameters: "
                "the norm over all ranks is that of engine.parameters() together"
            )
        self.unscale_gradients()
        return self._engine.clip_grad_norm_(max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Join tensors of all replicas along the first dimension; copies on a tp axis count once.

        Args:
            tensor: or a structure of tensors, of the same shape on every rank.
        """
        gathered = super().gather(tensor)
        if self._engine is None or self._engine.devices.shape.tp == 1:
            return gathered
        tp, world = self._engine.devices.shape.tp, self.num_processes
        return torch.utils._pytree.tree_map_only(
            Tensor, lambda whole: torch.cat(whole.chunk(world)[::tp]), gathered
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Join what metrics need of all replicas, without the rows that fill up the last batch.

        Args:
            input_data: tensors, as of `gather`; or a list of objects, whose copies on a tp axis count once.
            use_gather_object: take tensors for objects, as where their shapes differ.
        """
        is_of_objects = use_gather_object or not _are_tensors(input_data)
        given = [] if is_of_objects and self._is_copy else input_data
        return super().gather_for_metrics(given, is_of_objects)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Add or average tensors of all replicas; copies on a tp axis count once.

        Args:
            tensor: or a structure of tensors, of the same shape on every rank.
            reduction: "sum", "mean", "max" or "none".
            scale: of `Accelerator.reduce`.
        """
        if reduction == "sum" and self._is_copy:
            tensor = recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Divide inputs over replicas: the ranks of a tp group get the same.

        Args:
            inputs: of `Accelerator.split_between_processes`.
            apply_padding: likewise.
        """
        state = copy.copy(PartialState())  # with an own dictionary, where instances share one
        if self._engine is not None:
            devices = self._engine.devices
            state.num_processes, state.process_index = devices.shape.dp, devices.dp
        with state.split_between_processes(inputs, apply_padding=apply_padding) as share:
            yield share

    @property
    def _is_copy(self) -> bool:
        """Whether an earlier rank of the tp group has the same results as this one."""
        return self._engine is not None and self._engine.devices.tp > 0

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Parameters and buffers; the whole model's of an engine. Every rank has to call this.

        Args:
            model: the engine, or any other.
            unwrap: of other models.
        """
        if isinstance(model, ParallelEngine):
            return model.state_dict(full=True)
        return super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save everything that was prepared, unless an engine is part of it.

        Args:
            *args: of `Accelerator.save_state`.
            **kwargs: likewise.

        Raises:
            ParallelError: of an engine the first rank holds a part only.
        """
        self._refuse_state("save_state", "save(engine, optimizer, step=...)")
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `save_state` has saved.

        Args:
            *args: of `Accelerator.load_state`.
            **kwargs: likewise.

        Raises:
            ParallelError: of an engine the first rank holds a part only.
        """
        self._refuse_state("load_state", "load(engine, optimizer)")
        return super().load_state(*args, **kwargs)

    def _refuse_state(self, name: str, instead: str) -> None:
        if self._engine is not None:
            raise ParallelError(
                f"accelerator.{name}() knows the first rank's part of the model alone; "
                f"panther_compile.TrainingCheckpoints(folder).{instead} has every rank's, for any mesh"
            )

    def _take(self, engine: ParallelEngine) -> None:
        if self._engine is engine:
            return
        if self._engine is not None:
            raise ParallelError(
                "this accelerator has an engine already; one PantherAccelerator serves one engine"
            )
        shape = engine.devices.shape
        if shape.pp > 1:
            raise ParallelError(
                f"the mesh is {shape}: a pipeline's schedule owns the backward, and accelerate's loop "
                "would call it itself; write the loop with engine.step(...), or partition with pp=1"
            )
        if shape.tp > 1 and (self._dataloaders or self._schedulers):
            raise ParallelError(
                f"a loader or a scheduler was prepared before the engine: each rank would be taken for a "
                f"replica, and the mesh is {shape}; prepare the engine first, or all in one call"
            )
        if self.mixed_precision == "fp16" and shape.tp > 1:
            raise ConfigError(
                f"mixed_precision='fp16' over {shape}: ranks of one tp group would "
                "skip different steps, each "
                "for the gradients of its own shards; use 'bf16'"
            )
        engine.wraps_itself = True
        self._engine = engine


def _are_tensors(data: Any) -> bool:
    """Whether accelerate gathers them as tensors, and not as objects."""
    try:
        recursively_apply(lambda one: one, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


class _OncePerReplica:
    """A scheduler that accelerate steps once for each process, where several are one replica."""

    def __init__(self, scheduler: Any, processes: int) -> None:
        self._scheduler = scheduler
        self._processes = processes
        self._calls = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._calls += 1
        if self._calls % self._processes == 0:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
