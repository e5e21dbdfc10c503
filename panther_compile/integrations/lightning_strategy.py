"""A strategy of Lightning that trains one module of a LightningModule by a partition.

    LightningModule                       on each rank, while `fit` runs
    ├── net      the user's model    ──►  ParallelEngine: self.net(x) as ever
    └── metrics, losses, ...              as they are, without trained parameters

A checkpoint of Lightning is one file with the whole model, under the LightningModule's names, and beside it
a folder `<file>.training` with optimizer and shards, which resumes on any mesh.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from panther_compile.config import check_type, read_options
from panther_compile.errors import ConfigError, ParallelError
from panther_compile.parallel import ParallelEngine, TrainingCheckpoints, parallelize_model
from panther_compile.parallel.checkpoint_folder import keep_one
from panther_compile.parallel.model_state import laid_out_like
from panther_compile.partition import Mesh, partition_model
from panther_compile.partition.records import RUN_AXES

_ALL = 2**20  # states beside a file; the one of the file's own step stays


class PantherStrategy(DDPStrategy):
    """Lightning's strategy for a mesh: `Trainer(strategy=pc.PantherStrategy({"tp": 4}), devices=4)`.

    One module of the LightningModule is divided when `fit` begins; all that is trained has to be in it.
    Without a pipeline the LightningModule stays as it is. With one, whose schedule owns the backward,
    optimization is manual and `training_step` calls `self.net.step(batch, target)`, with a `loss_fn` in
    `parallel`.

    `gradient_clip_val` clips by the norm of the whole model's gradients, and `self.net.clip_grad_norm_(inf)`
    gives it. Lightning's `grad_norm` reads what one rank holds: with tp or pp the norm of a part, which
    differs from rank to rank, and with "fsdp" an error of torch's.

        >>> class Classifier(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = make_model()
        ...         self.example_input_array = torch.zeros(8, 3, 32, 32)
        ...     ...
        >>> strategy = pc.PantherStrategy({"dp": 4}, model="net", parallel={"data_parallel": "fsdp"})
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4)

    Attributes:
        engine: what `parallelize_model` has given; None before `fit`.
    """

    def __init__(
        self,
        mesh: Mapping[str, int],
        *,
        model: str = "model",
        example_inputs: Any = None,
        partition: Mapping[str, Any] | None = None,
        parallel: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Say what is divided, and how.

        Args:
            mesh: sizes of "dp", "pp" and "tp", of as many devices as the Trainer has.
            model: name of the module, an attribute of the LightningModule.
            example_inputs: one microbatch for `partition_model`; the LightningModule's `example_input_array`
                if None.
            partition: options of `partition_model`; one microbatch a step, unless there is a pipeline.
            parallel: options of `parallelize_model`; with dp over 1 it needs `data_parallel`.
            **options: of `DDPStrategy` that are not of DDP itself, as `timeout`.

        Raises:
            ConfigError, ConfigTypeError: an axis or an option is unknown, or the mesh no mapping.
            MeshError: the size of an axis is none.
        """
        super().__init__(**options)
        check_type("mesh", mesh, Mapping)
        if set(mesh) - set(RUN_AXES):
            raise ConfigError(f"mesh={dict(mesh)}; its axes are {', '.join(RUN_AXES)}")
        sizes = Mesh.read(mesh)
        self._mesh = {axis: getattr(sizes, axis) for axis in RUN_AXES}
        self._name = model
        self._example = example_inputs
        self._partition = read_options("partition", partition, partition_model, but="mesh")
        self._parallel = read_options("parallel", parallel, parallelize_model)
        self._whole: nn.Module | None = None
        self._resumed: Path | None = None
        self.engine: ParallelEngine | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Shares of the data: one a replica."""
        others = self._mesh["pp"] * self._mesh["tp"]
        return {"num_replicas": self._mesh["dp"], "rank": self.global_rank // others}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read once the model is divided."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Divide the model, make the optimizer.

        Args:
            trainer: that fits.

        Raises:
            ParallelError: something outside of the model is trained; several optimizers; a pipeline with
                automatic optimization; a model in shards of an earlier `fit`; a callback that averages
                weights, where ranks have parts of them.
            ConfigError: there is no such module or no example; fp16 over a tp axis.
        """
        module = self.lightning_module
        sharded = [name for name, one in module.named_parameters() if isinstance(one, DTensor)]
        if sharded and trainer.state.fn == TrainerFn.FITTING:
            raise ParallelError(
                f"{sharded[0]} of {type(module).__name__} is in shards already, of an earlier fit: make a "
                f"new {type(module).__name__}; fit(..., ckpt_path=...) goes on from a checkpoint"
            )
        if sharded:  # each rank has its own, which those of the first would be written over
            module._ddp_params_and_buffers_to_ignore = sharded
        super().setup(trainer)
        if self.engine is None:
            return
        self._check_averages(trainer)
        if len(self.optimizers) != 1:
            raise ParallelError(
                f"configure_optimizers gives {len(self.optimizers)} optimizers; "
                f"PantherStrategy takes one, of all parameters of {self._name}"
            )
        engine = self.engine

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            engine.clip_grad_norm_(clip_val)

        # torch's own norm, which the plugin would take, is that of this rank's shards.
        self.precision_plugin.clip_grad_by_norm = clip_grad_by_norm

    @property
    def _trains_whole(self) -> bool:
        """Whether each rank has all parameters, and not shards or stages."""
        return self._mesh["tp"] * self._mesh["pp"] == 1 and self._parallel.get("data_parallel") != "fsdp"

    def _check_averages(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and not self._trains_whole:
                raise ParallelError(
                    f"{type(callback).__name__} averages a whole model, of which a rank has a part here; "
                    f"keep averages of self.{self._name}.named_parameters(), or use dp alone and "
                    "data_parallel='ddp'"
                )

    def configure_ddp(self) -> None:
        """Put the engine in the place of the model."""
        module = self.lightning_module
        found = getattr(module, self._name, None)
        if not isinstance(found, nn.Module):
            raise ConfigError(
                f"{type(module).__name__} has no module {self._name}; PantherStrategy(model=...) is the "
                "name of the one to divide"
            )
        self._check(module, found)
        example = module.example_input_array if self._example is None else self._example
        if example is None:
            raise ConfigError(
                f"there is no example: set {type(module).__name__}.example_input_array, or give "
                "example_inputs"
            )
        example = pytree.tree_map_only(Tensor, lambda value: value.to(self.root_device), example)
        example = self.precision_plugin.convert_input(example)
        example = (example,) if isinstance(example, Tensor) else example
        options = {"microbatches": self._mesh["pp"], **self._partition}
        part = partition_model(found, example, mesh=self._mesh, **options)
        self._whole = found
        self.engine = parallelize_model(found, part, **self._parallel)
        self.engine.wraps_itself = True
        setattr(module, self._name, self.engine)

    def _check(self, module: Any, found: nn.Module) -> None:
        held = {id(parameter) for parameter in found.parameters()}
        outside = [
            name for name, one in module.named_parameters() if one.requires_grad and id(one) not in held
        ]
        if outside:
            raise ParallelError(
                f"{', '.join(outside[:3])} of {type(module).__name__} is trained outside of {self._name}, "
                f"where no rank sums its gradients; move it into {self._name}"
            )
        if self._mesh["pp"] > 1 and module.automatic_optimization:
            raise ParallelError(
                f"the mesh is {self._mesh}: a pipeline's schedule owns the backward; set "
                "automatic_optimization = False, and call "
                f"self.{self._name}.step(batch, target) in training_step"
            )
        if (
            self._mesh["tp"] * self._mesh["pp"] > 1
            and getattr(self.precision_plugin, "scaler", None) is not None
        ):
            raise ConfigError(
                f"precision='16-mixed' over {self._mesh}: ranks would skip different steps, each for the "
                "gradients of its own part; use 'bf16-mixed'"
            )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards in here, of gradient accumulation, reduce nothing."""
        if self.engine is None or self._mesh["pp"] > 1:
            yield
            return
        with self.engine.no_sync():
            yield

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: torch.distributed.ReduceOp | str | None = "mean"
    ) -> Any:
        """What `self.log(..., sync_dist=True)` makes of all ranks' values: in a sum a replica counts once.

        Args:
            tensor: of this rank; what is none is given back.
            group: all ranks if None.
            reduce_op: "sum", which the ranks of a pp or tp axis would be in as copies; or any other.
        """
        reduced = super().reduce(tensor, group, reduce_op)
        is_of_copies = reduce_op == "sum" and group is None and isinstance(tensor, Tensor)
        return reduced / (self._mesh["pp"] * self._mesh["tp"]) if is_of_copies else reduced

    def on_train_end(self) -> None:
        """Join the stages and shards of a pp or tp axis in the LightningModule's own model."""
        if self.engine is not None and self._whole is not None and self._mesh["tp"] * self._mesh["pp"] > 1:
            self._whole.load_state_dict(self.engine.state_dict(full=True))

    def teardown(self) -> None:
        """Give the LightningModule its own model back; with dp alone and "fsdp" it stays sharded."""
        if self.engine is not None and self._whole is not None:
            setattr(self.lightning_module, self._name, self._whole)
            self.engine = self._whole = None
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole LightningModule's parameters and buffers; every rank has to call this."""
        module = self.lightning_module
        if self.engine is None:
            return {name: _joined(value) for name, value in module.state_dict().items()}
        state: dict[str, Any] = {}
        module._save_to_state_dict(state, "", False)
        for name, child in module.named_children():
            if child is self.engine:
                state |= {f"{name}.{key}": value for key, value in self.engine.state_dict(full=True).items()}
            else:
                child.state_dict(destination=state, prefix=f"{name}.")
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing in Lightning's file: the folder beside it has what every rank holds.

        Args:
            optimizer: of the engine.
        """
        is_alone = self.engine is None and self._trains_whole
        return super().optimizer_state(optimizer) if is_alone else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write while `fit` runs the training state, then Lightning's file; every rank has to call this.

        A process that is killed meanwhile leaves the file that was there, and its state beside it.

        Args:
            checkpoint: of Lightning.
            filepath: of the file.
            storage_options: of its `CheckpointIO`.
        """
        path = Path(self.broadcast(str(filepath)))
        if self.engine is None or "optimizer_states" not in checkpoint:  # weights alone
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        folder, step = _folder(path), checkpoint["global_step"]
        with TrainingCheckpoints(folder, keep=_ALL) as written:
            written.save(self.engine, self.optimizers[0], step=step)
        super().save_checkpoint(checkpoint, path, storage_options)
        if self.is_global_zero:
            keep_one(folder, step)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a file and the folder beside it.

        Args:
            filepath: of the file.
        """
        super().remove_checkpoint(filepath)
        if self.is_global_zero and _folder(Path(filepath)).is_dir():
            shutil.rmtree(_folder(Path(filepath)))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's file.

        Args:
            checkpoint_path: of the file.
            weights_only: of `torch.load`.
        """
        self._resumed = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the LightningModule, whole or divided.

        Args:
            checkpoint: that was read.
            strict: whether every name has to be there.
        """
        state, prefix = checkpoint["state_dict"], f"{self._name}."
        if self.engine is None:
            held = self.lightning_module.state_dict()
            state = {name: laid_out_like(value, held.get(name)) for name, value in state.items()}
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
            return
        self.engine.load_state_dict(
            {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        )
        rest = {key: value for key, value in state.items() if not key.startswith(prefix)}
        setattr(self.lightning_module, self._name, nn.Module())  # the engine has loaded its own
        try:
            super().load_model_state_dict({**checkpoint, "state_dict": rest}, strict)
        finally:
            setattr(self.lightning_module, self._name, self.engine)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer, on whatever mesh it was saved.

        Args:
            checkpoint: that was read.

        Raises:
            ParallelError: the folder beside the file is not there, or has no state of the file's step.
        """
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self._resumed is not None
        # Lightning's save_last="link" makes a link of the last file.
        folder = _folder(self._resumed.resolve() if self._resumed.is_symlink() else self._resumed)
        if not folder.is_dir():
            raise ParallelError(
                f"{folder} is not there: {self._resumed} has the model, and not its optimizer"
            )
        step = checkpoint["global_step"]
        with TrainingCheckpoints(folder, keep=_ALL) as kept:
            if kept.load(self.engine, self.optimizers[0], step=step) is None:
                raise ParallelError(
                    f"{folder} has no training state of step {step}, which {self._resumed} is of: one of the "
                    "two was copied, removed or written over alone"
                )


def _folder(path: Path) -> Path:
    """What is beside a file of Lightning."""
    return path.with_name(f"{path.name}.training")


def _joined(value: Any) -> Any:
    """A tensor on the CPU, where it is in shards."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value
