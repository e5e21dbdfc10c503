"""What stands between operations in the graph of one rank: collectives whose gradients are collectives.

Each is the other's transpose, or its own:

    has           needs                   forward           backward
    sharded       whole                   all-gather        own shard
    whole         sharded                 own shard         all-gather
    whole         whole, by column        nothing           all-reduce          f of Megatron-LM
    (row layer)   whole                   all-reduce        nothing             g of Megatron-LM
    sequence      whole, by column        all-gather        reduce-scatter      g of its sequence parallelism
    (row layer)   sequence                reduce-scatter    all-gather          its transpose
    parameters    used on a sequence      nothing           one all-reduce of the gradients of all of them

and the layers that a rank can only compute in its own way: a part of a vocabulary, and of the pivoted form.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from panther_compile.partition.shards.placements import Shard

# Torch 2.13 has new names for them.
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def _all_reduce(tensor: Tensor, group: Any) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", group))


def _all_gather(tensor: Tensor, dim: int, blocks: int, group: Any) -> Tensor:
    """The whole of a tensor whose axis `dim` is sharded in blocks."""
    parts = tensor.unflatten(dim, (blocks, -1)).contiguous()
    whole = _gather(parts, dim + 1, group)
    return collectives.wait_tensor(whole).flatten(dim, dim + 1)


def _reduce_scatter(tensor: Tensor, dim: int, blocks: int, tp: int, group: Any) -> Tensor:
    """This rank's shard of the sum of the terms that the ranks have."""
    parts = tensor.unflatten(dim, (blocks, tp, -1)).movedim(dim + 1, 0).contiguous()
    own = collectives.wait_tensor(_scatter(parts, "sum", 0, group))
    return own.squeeze(0).flatten(dim, dim + 1)


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(gradients[0], ctx.group), None


class _SumShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, blocks: int, tp: int, rank: int, group: str) -> Tensor:
        ctx.place = Shard(dim, blocks), tp, rank
        return _all_gather(tensor, dim, blocks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layout, tp, rank = ctx.place
        return layout.local(gradients[0], tp, rank), None, None, None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, blocks: int, tp: int, rank: int, group: str) -> Tensor:
        ctx.place = dim, blocks, group
        return Shard(dim, blocks).local(tensor, tp, rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(gradients[0], *ctx.place), None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, blocks: int, tp: int, group: str) -> Tensor:
        ctx.place = dim, blocks, group
        return _reduce_scatter(tensor, dim, blocks, tp, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(gradients[0], *ctx.place), None, None, None, None


class _ScatterGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard: Tensor, dim: int, blocks: int, tp: int, group: str) -> Tensor:
        ctx.place = dim, blocks, tp, group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, _reduce_scatter(gradients[0], *ctx.place), None, None, None, None


class _JoinGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed = _all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), ctx.group)
        parts = summed.split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(one) for part, one in zip(parts, gradients, strict=True))


def sum_gradients(tensor: Tensor, group: str) -> Tensor:
    """The tensor itself; every rank will have a term of its gradient."""
    return _SumGradients.apply(tensor, group)


def sum_shards(tensor: Tensor, group: str) -> Tensor:
    """The sum of the terms that the ranks have."""
    return _SumShards.apply(tensor, group)


def gather_shards(tensor: Tensor, dim: int, blocks: int, tp: int, rank: int, group: str) -> Tensor:
    """The whole of the shards that the ranks have."""
    return _Gather.apply(tensor, dim, blocks, tp, rank, group)


def scatter_shards(tensor: Tensor, dim: int, blocks: int, tp: int, group: str) -> Tensor:
    """This rank's shard of the sum of the terms that the ranks have."""
    return _Scatter.apply(tensor, dim, blocks, tp, group)


def scatter_gradients(whole: Tensor, shard: Tensor, dim: int, blocks: int, tp: int, group: str) -> Tensor:
    """What was gathered from shards; every rank will have a term of its gradient."""
    return _ScatterGradients.apply(whole, shard, dim, blocks, tp, group)


def join_gradients(tensors: Sequence[Tensor], group: str) -> tuple[Tensor, ...]:
    """The tensors themselves, of one dtype; the terms of all gradients are summed in one message."""
    return _JoinGradients.apply(group, *tensors)


def take_shard(tensor: Tensor, dim: int, blocks: int, tp: int, rank: int, group: str) -> Tensor:
    """This rank's shard of what every rank has."""
    return _Take.apply(tensor, dim, blocks, tp, rank, group)


def embed_vocabulary(indices: Tensor, table: Tensor, first: int, padding_index: int) -> Tensor:
    """Rows of a part of a table; zero for indices of other parts.

    Args:
        indices: of the whole table, any shape.
        table: (rows, features), this rank's.
        first: index of its first row.
        padding_index: row that gets no gradient, of the whole table; -1 if there is none.
    """
    own = indices - first
    outside = (own < 0) | (own >= table.shape[0])
    padding = padding_index - first if first <= padding_index < first + table.shape[0] else None
    found = F.embedding(own.masked_fill(outside, 0), table, padding)
    return found.masked_fill(outside.unsqueeze(-1), 0.0)


def pivoted_rows(
    x: Tensor, weight: Tensor, near: Sequence[int], far: Sequence[int], columns: Sequence[int], offset: int
) -> Tensor:
    """This rank's term of z = x1 + C x2, of the features that it has.

    Args:
        x: (..., features of this rank).
        weight: C, whole, (rank, features of x2).
        near: first and last but one of the features that belong to x1.
        far: likewise to x2.
        columns: of C, for the latter.
        offset: place in x1 of the former.
    """
    pivots = x[..., near[0] : near[1]]
    after = weight.shape[0] - offset - pivots.shape[-1]
    product = F.linear(x[..., far[0] : far[1]], weight[:, columns[0] : columns[1]])
    return product + F.pad(pivots, (offset, after))


def pivoted_columns(x: Tensor, weight: Tensor, first: int, others: Sequence[int]) -> Tensor:
    """This rank's features of z = x1 + C x2.

    Args:
        x: (..., features).
        weight: this rank's rows of C.
        first: feature of x for the first of them.
        others: first and last but one feature of x2.
    """
    product = F.linear(x[..., others[0] : others[1]], weight)
    return x[..., first : first + weight.shape[0]] + product
