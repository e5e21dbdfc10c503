"""A whole model on each device: the user's own module tree, or with tensor parallelism its graph.

    dp alone     the module that was given, in DDP or sharded in place: it is called as ever
    tp           `GraphModel`: the graph in this rank's shards, called as the model is

Either is called with any optimizer, GradScaler or hook of the user's own loop. `OneModule` is the loop over
microbatches that `ParallelEngine.step` runs: gradients add up, and the last microbatch reduces them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from panther_compile.errors import BatchError, ParallelError, first_line, some_names
from panther_compile.models.outputs import tensors_in
from panther_compile.parallel.losses import Loss, no_loss
from panther_compile.parallel.microbatches import Batch, Share, take_rows
from panther_compile.parallel.model_state import held_parameters
from panther_compile.parallel.pipeline import reshard
from panther_compile.parallel.stage_module import StageModule, copies_of_buffers
from panther_compile.partition import TensorSpec
from panther_compile.partition.graph.capture import CallForm


class GraphModel(nn.Module):
    """One stage that is the whole model, called as the model is.

    Attributes:
        stage: of the graph, tensors in and tensors out.
    """

    def __init__(self, stage: StageModule, form: CallForm, inputs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self.stage = stage
        self._form = form
        self._inputs = inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph.

        Raises:
            CaptureError: it is called with other arguments than the example's.
            BatchError: it cannot run them, as they are of other shapes than the example's.
        """
        given = self._form.flatten(args, kwargs)
        try:
            return self._form.unflatten(self.stage(*given))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            for tensor, spec in zip(given, self._inputs, strict=True):
                if tensor.shape != spec.shape:
                    raise BatchError(
                        f"{spec.name} has the shape {tuple(tensor.shape)}; with tp a graph runs, of the "
                        f"example's sizes, here {spec.shape}: drop a smaller last batch, or fill it up as "
                        f"step(...) does ({first_line(error)})"
                    ) from error
            raise


class OneModule:
    """Runs one module over the microbatches of a step."""

    def __init__(
        self, module: nn.Module, form: CallForm, loss: Loss | None, *, keeps_whole: bool = False
    ) -> None:
        """Take what the user may call himself.

        Args:
            module: the model, `GraphModel`, or either in DDP.
            form: of the model's call.
            loss: of one microbatch.
            keeps_whole: whether parameters that `fully_shard` has gathered stay until gradients are reduced
                (ZeRO-2).
        """
        self.module = module
        self._form = form
        self._loss = loss
        self._keeps_whole = keeps_whole

    def train(self, batch: Batch, shares: Sequence[Share]) -> Tensor:
        """Forward and backward of one microbatch after the other; the sum of their losses."""
        assert self._loss is not None
        losses = []
        for number, (inputs, share) in enumerate(zip(batch.microbatches(), shares, strict=True)):
            with nullcontext() if number == len(shares) - 1 else self.without_reduction():
                output = self._call(inputs)
                if share.rows is not None:
                    tensors = take_rows(self._tensors(output), share.rows, batch.width)
                    output = self._form.unflatten(tensors)
                loss = no_loss(self._tensors(output)) if share.rows == 0 else self._loss(output, share)
                loss.backward()
            # A weight that autocast has kept from this microbatch would get the next gradient by an older
            # node of the graph, behind what reduces it: `fully_shard` would leave that out.
            torch.clear_autocast_cache()
            losses.append(loss.detach())
        self._check_reduced()
        return torch.stack(losses).sum()

    def _check_reduced(self) -> None:
        """Look for missing gradients: DDP waits for them, and has not averaged the others of their bucket."""
        if not isinstance(self.module, DistributedDataParallel) or self.module.find_unused_parameters:
            return
        inner = self.module.module
        held = held_parameters(inner.stage if isinstance(inner, GraphModel) else inner)
        missing = [name for name, one in held if one.requires_grad and one.grad is None]
        if missing:
            raise ParallelError(
                f"the loss does not reach {some_names(missing)}, and DDP waits for the gradient of every "
                "parameter: gradients of this step are not averaged; give find_unused_parameters=True to "
                "parallelize_model, or freeze what does not learn (requires_grad_(False))"
            )

    def forward(self, batch: Batch) -> list[tuple[Tensor, ...]]:
        """Forward of one microbatch after the other."""
        outputs = [
            tuple(copies_of_buffers(self._tensors(self._call(inputs)), self.module.buffers()))
            for inputs in batch.microbatches()
        ]
        reshard([self.module])
        return outputs

    def waits_for(self) -> str:
        """Nothing: there is no schedule."""
        return ""

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Backwards in here add to gradients of this rank only; the next one outside reduces them all."""
        held: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.module, DistributedDataParallel):
            held = self.module.no_sync()
        sharded = next((one for one in self.module.modules() if isinstance(one, FSDPModule)), None)
        try:
            if sharded is not None:
                sharded.set_requires_gradient_sync(False)
                sharded.set_is_last_backward(False)
                sharded.set_reshard_after_backward(not self._keeps_whole)
            with held:
                yield
        finally:
            if sharded is not None:
                sharded.set_requires_gradient_sync(True)
                sharded.set_is_last_backward(True)
                sharded.set_reshard_after_backward(True)

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        args, kwargs = self._form.call(inputs)
        return self.module(*args, **kwargs)

    def _tensors(self, output: Any) -> list[Tensor]:
        leaves = tensors_in(output)
        if len(leaves) != len(self._form.out_tensors):
            raise ParallelError(
                f"the model gives {len(leaves)} tensors, and gave {len(self._form.out_tensors)} when the "
                "partition read it"
            )
        return leaves
