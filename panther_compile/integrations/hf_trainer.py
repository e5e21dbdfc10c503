"""transformers' Trainer over a parallel model: its loop, its callbacks, its arguments.

model ──► partition ──► PantherTrainer: parallelize_model ──► Trainer's loop on the engine
                            │ checkpoint-N/  the whole model by save_pretrained, and `training/` for any mesh
"""

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import SCHEDULER_NAME

from panther_compile.config import read_options
from panther_compile.errors import CheckpointError, ConfigError, ConfigTypeError, ParallelError
from panther_compile.integrations.accelerated import PantherAccelerator
from panther_compile.parallel import ParallelEngine, TrainingCheckpoints, parallelize_model
from panther_compile.parallel.tensor import share_random_state
from panther_compile.partition import Partition

_TRAINING = "training"


class PantherTrainer(Trainer):
    """transformers' `Trainer` for a model divided by `partition_model`, without a pipeline.

    Every rank (torchrun) makes one of the same model. With dp alone the model itself is trained; with tp
    `trainer.engine` is, whose whole model `save_model` writes.

        >>> part = pc.partition_model(model, batch, mesh={"dp": 4}, microbatches=1)
        >>> trainer = pc.PantherTrainer(
        ...     model, arguments, train_dataset=texts, part=part, parallel={"data_parallel": "fsdp"}
        ... )
        >>> trainer.train()
        >>> trainer.save_model("trained")  # on every rank; from_pretrained reads it without ranks

    Attributes:
        engine: what `parallelize_model` has given.
    """

    engine: ParallelEngine
    label_smoother: Any  # of `Trainer`, which does not say its type
    _counts_own = False

    def __init__(
        self,
        model: PreTrainedModel,
        *args: Any,
        part: Partition,
        parallel: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Divide the model.

        Args:
            model: that `part` was made from.
            *args: of `Trainer`.
            part: of `partition_model`, with the arguments that the Trainer calls the model with: labels among
                them, but where `label_smoothing_factor` or `compute_loss_func` takes them out, and with tp
                `num_items_in_batch`, an integer tensor, where the model takes it.
            parallel: options of `parallelize_model`, as `data_parallel`; the loss is the Trainer's own.
            **kwargs: of `Trainer`.

        Raises:
            ParallelError: the mesh has a pipeline, or the Trainer is to wrap the model by itself.
            ConfigTypeError: there is no model, or no partition; or an option of `parallel` is unknown.
            ConfigError: the best of checkpoints that hold the model alone is to be loaded; or noise is to be
                added to embeddings over a tp axis.
        """
        if not isinstance(model, nn.Module) or not isinstance(part, Partition):
            raise ConfigTypeError(
                f"PantherTrainer is given a {type(model).__name__} and a "
                f"{type(part).__name__} as part; it wants a model, and what partition_model gives"
            )
        if part.mesh.pp > 1:
            raise ParallelError(
                f"the mesh is {part.mesh}: a pipeline's schedule owns the backward, and "
                "the Trainer would call it too; write the loop with engine.step(...), or partition with pp=1"
            )
        options = read_options("parallel", parallel, parallelize_model)
        super().__init__(model, *args, **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ParallelError(
                "fsdp= and deepspeed= of TrainingArguments shard the model a second time; leave them out"
            )
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise ConfigError(
                "load_best_model_at_end=True reads the training state of a checkpoint, which "
                "save_only_model=True leaves out; leave one of the two out"
            )
        noise = self.args.neftune_noise_alpha
        if noise is not None and part.mesh.tp > 1:
            raise ConfigError(
                f"neftune_noise_alpha={noise} hooks into the model's embedding, and over {part.mesh} a graph "
                "runs in its place, without noise; leave it out, or use dp alone"
            )
        inner = getattr(getattr(model, "base_model", None), "model", model)  # beneath adapters of PEFT
        names = {type(one).__name__ for one in (model, inner)}
        if self.label_smoother is not None and names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
            # The Trainer goes by the name of the class that it calls, which is the engine's.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        # Trainer's names of what weight decay is for, before modules are wrapped.
        self._decayed = super().get_decay_parameter_names(model)
        self.engine = parallelize_model(model, part, **options)
        self.accelerator.prepare_model(self.engine)
        self.model_wrapped = self.engine

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's own Accelerator one that knows the mesh."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PantherAccelerator

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that weight decay is for: those that the Trainer finds in the model as it was given.

        Args:
            model: the engine.
        """
        return self._decayed

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Give the engine's parameters to an optimizer.

        Args:
            model: not asked for.
        """
        return super().create_optimizer(self.engine)

    def get_tp_size(self) -> int:
        """Ranks that get the same batches; 1 while one rank counts the items of its own."""
        return 1 if self._counts_own else self.engine.devices.shape.tp

    def _get_num_items_in_batch(self, batch_samples: Any, device: torch.device) -> Any:
        # The Trainer divides by tp, as its sum counts each rank; `PantherAccelerator.gather` does not. It
        # also does where it has summed nothing.
        is_summed = self.args.average_tokens_across_devices and self.args.world_size > 1
        self._counts_own = not is_summed
        try:
            items = super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self._counts_own = False
        return items * self.get_tp_size() if items is not None and is_summed else items

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.engine

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model by `save_pretrained`, on the first rank; every rank has to call this.

        Args:
            output_dir: that of the arguments if None.
        """
        state = self.engine.state_dict(full=True)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with TrainingCheckpoints(Path(output_dir, _TRAINING), keep=1) as checkpoints:
            checkpoints.save(self.engine, self.optimizer.optimizer, step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing but a look whether it can be: the model comes with its optimizer, from `training/`."""
        if not Path(resume_from_checkpoint, _TRAINING).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no folder {_TRAINING}/: it was not written by PantherTrainer, "
                "or holds the model alone"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._load_training(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore generators; the ranks of a tp group go on with those of the first of them.

        They have to draw alike. A file is of one rank of the mesh that saved: some may have none, or others.
        """
        super()._load_rng_state(checkpoint)
        devices = self.engine.devices
        if checkpoint is not None and devices.shape.tp > 1:
            share_random_state(devices.device, devices.group("tp"))
            states: list[Any] = [random.getstate(), np.random.get_state()]
            dist.broadcast_object_list(states, group=devices.group("tp"), group_src=0)
            random.setstate(states[0])
            np.random.set_state(states[1])

    def _load_best_model(self) -> None:
        self._load_training(self.state.best_model_checkpoint)

    def _load_training(self, checkpoint: str) -> None:
        folder = Path(checkpoint, _TRAINING)
        with TrainingCheckpoints(folder, keep=1) as kept:
            if kept.load(self.engine, self.optimizer.optimizer) is None:
                raise CheckpointError(f"{folder} holds no training state: its writing was cut off")
