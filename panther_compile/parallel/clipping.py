"""The norm of the whole model's gradients, from the parts that ranks hold."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from panther_compile.partition import Mesh


def global_norm(
    gradients: Iterable[tuple[Tensor, bool]], norm_type: float, shape: Mesh, total: Tensor
) -> Tensor:
    """The p-norm of all gradients as one vector; every rank has to call this.

    Args:
        gradients: of this rank's parameters that count, each with whether the tp axis divides it.
        norm_type: p, above 0; inf for the largest magnitude.
        shape: of the mesh.
        total: zero, in the dtype that the norm is taken in, on this rank's device.
    """
    dtype = total.dtype
    for gradient, is_divided in gradients:
        # Each part of a gradient counts once: ranks that hold the same part share it.
        copies = 1 if is_divided else shape.tp
        if isinstance(gradient, DTensor):
            copies *= gradient.device_mesh.size() // _shards(gradient)
            gradient = gradient.to_local()
        else:
            copies *= shape.dp
        if not gradient.numel():
            continue
        magnitudes = gradient.abs().to(dtype)
        if math.isinf(norm_type):
            total = torch.maximum(total, magnitudes.max().to(total.device))
        else:
            total = total + magnitudes.pow(norm_type).sum().to(total.device) / copies
    dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def scale_gradients(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`.

    Args:
        gradients: of this rank.
        norm: of all ranks' together.
        max_norm: wanted.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(local.device, local.dtype))


def _shards(tensor: DTensor) -> int:
    """Ranks that a tensor is divided over."""
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            count *= tensor.device_mesh.size(axis)
    return count
