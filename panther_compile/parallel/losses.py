"""The loss of each microbatch, as a share of that of one process over the rows or tokens of all replicas.

    rows     loss_fn gives the mean over its rows; a microbatch of n of N rows counts n / N
    tokens   loss_fn gives the sum, which is divided by the number of tokens of all replicas

Gradients are averaged over the dp replicas, so what is divided by a global count is multiplied by dp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther_compile.errors import BatchError, ParallelError
from panther_compile.parallel.agreement import describe_tensor
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.microbatches import Batch, Share, divide_target

Loss = Callable[[Any, Share], Tensor]


def weighted_loss(loss_fn: Callable[[Any, Any], Tensor]) -> Loss:
    """The user's loss of the model's output for one microbatch, times its weight.

    Args:
        loss_fn: of the model's output and a target.
    """

    def loss(output: Any, share: Share) -> Tensor:
        value = loss_fn(output, share.target)
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            shown = f"a tensor {describe_tensor(value)}" if isinstance(value, Tensor) else value
            raise ParallelError(f"loss_fn gave {shown}; it must give a floating number")
        return value * share.weight

    return loss


def share_loss(
    batch: Batch,
    target: Any,
    count_tokens: Callable[[Any], int | Tensor] | None,
    devices: Devices,
    *,
    in_step: bool = False,
) -> list[Share]:
    """What the loss of each microbatch is taken of; every rank has to call this.

    Args:
        batch: of this replica.
        target: of the batch.
        count_tokens: of a microbatch's target, the number that the sum of all losses is divided by; None
            where rows are averaged.
        devices: of the mesh.
        in_step: whether replicas wait for each other in each microbatch.

    Raises:
        BatchError: the target cannot be divided, there are no tokens at all, or replicas in step have
            different numbers of microbatches.
    """
    targets = divide_target(target, batch)
    rows = [size if batch.is_filled_up else None for size in batch.sizes]
    if count_tokens is None:
        # Stages of graphs have as many microbatches whatever the rows.
        if in_step and not batch.width:
            _sum_tokens(0, batch, devices, in_step=True)
        weights = [size / batch.rows if batch.rows else 1 / len(batch.sizes) for size in batch.sizes]
    else:
        count = sum(int(count_tokens(one)) for one in targets)
        total = _sum_tokens(count, batch, devices, in_step=in_step)
        if not total > 0:
            raise BatchError("count_tokens gave 0 for the batches of all replicas: there is no loss to take")
        weights = [devices.shape.dp / total] * len(targets)
    return [Share(*one) for one in zip(targets, rows, weights, strict=True)]


def _sum_tokens(count: int, batch: Batch, devices: Devices, *, in_step: bool) -> float:
    """The tokens of all replicas; replicas in step must have as many microbatches as one another."""
    dp, number = devices.shape.dp, len(batch.sizes)
    if dp == 1:
        return count
    sums = torch.tensor([count, number, number**2], dtype=torch.float64, device=devices.device)
    dist.all_reduce(sums, group=devices.group("dp"))
    total, numbers, squares = sums.tolist()
    if in_step and squares * dp != numbers**2:
        raise BatchError(
            f"replicas have different numbers of microbatches, {number} of {batch.rows} rows here and "
            f"{numbers / dp:.4g} on average, and wait for each other in each of them "
            "(fully_shard, sync_batchnorm); a replica needs a row for each microbatch"
        )
    return float(total)


def no_loss(outputs: Sequence[Tensor]) -> Tensor:
    """Zero, which depends on every output: for a microbatch that no row counts of."""
    parts = [output.sum() for output in outputs if output.requires_grad]
    total = torch.zeros((), device=outputs[0].device) if not parts else parts[0] * 0.0
    for part in parts[1:]:
        total = total + part * 0.0
    return total
