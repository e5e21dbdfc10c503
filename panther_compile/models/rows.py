"""Tensors as rows: padded positions left out, and rows of one token brought together."""

import math

import torch
from torch import Tensor

_TOKENS = "_panther_tokens"


def kept_rows(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """The tensor (..., F) as rows (n, F), without those at padded positions.

    Args:
        tensor: a tensor whose first two dimensions, or the first one that is their product, are the mask's;
            of another shape it is taken whole.
        kept: bool `(batch, length)`, or None.
    """
    *rest, features = tensor.shape or (1,)
    rows = tensor.reshape(math.prod(rest), features)  # -1 is ambiguous where there are no features
    tokens = getattr(tensor, _TOKENS, None)
    if kept is not None and tokens is not None:
        return rows[kept.reshape(-1)[tokens]]
    if kept is None or tensor.dim() < 2:
        return rows
    if tensor.dim() == 3 and tensor.shape[:2] == kept.shape:
        return rows[kept.reshape(-1)]
    if tensor.dim() == 3 and tensor.shape[:2] == kept.T.shape:  # (length, batch, F)
        return rows[kept.T.reshape(-1)]
    if tensor.dim() == 2 and tensor.shape[0] == kept.numel():
        return rows[kept.reshape(-1)]
    return rows


def with_tokens(rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows (n, F) that know which tokens of the batch they are of `(n,)`, int64, ascending, each once."""
    rows = rows.view_as(rows)
    setattr(rows, _TOKENS, tokens)
    return rows


def paired(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the tokens that a router sends here in both models; all of them where that is not known."""
    tokens_x, tokens_z = getattr(x, _TOKENS, None), getattr(z, _TOKENS, None)
    if tokens_x is None or tokens_z is None or torch.equal(tokens_x, tokens_z):
        return x, z
    in_z, in_x = torch.isin(tokens_x, tokens_z), torch.isin(tokens_z, tokens_x)
    return with_tokens(x[in_z], tokens_x[in_z]), with_tokens(z[in_x], tokens_z[in_x])
