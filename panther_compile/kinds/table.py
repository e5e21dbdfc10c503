"""The best table of rank r for the tokens of data.

    E ‖ (e_v - e'_v) G^½ ‖² = Σ_v p_v ‖ (e_v - e'_v) G^½ ‖²,

e_v being the rows of the table (V, D), p_v how often token v is read, and G the weight of errors at what is
looked up, as at the outputs of other layers (`factorization/whiten.py`). With G = K Kᵀ and Q the r leading
eigenvectors of Kᵀ (Σ_v p_v e_vᵀ e_v) K the solution is e'_v = (e_v K Q) (Qᵀ K⁻¹). Weights by frequency alone
are those of GroupReduce (Chen et al., NeurIPS 2018).

Tokens that the data has not are read too: as often, all together, as those that it has once (the estimate of
Good and Turing; Good, 1953), each alike.
"""

# V num_embeddings, D embedding_dim, R rank
from collections.abc import Iterator

import torch
from torch import Tensor

from panther_compile.factorization.whiten import root_of

_ROWS = 1 << 14  # of the table that are in float64 at once


class TableSums:
    """Counts the tokens that are read.

    Args:
        table: (V, D).
    """

    def __init__(self, table: Tensor) -> None:
        self._counts = torch.zeros(len(table), dtype=torch.int64, device=table.device)

    def add(self, tokens: Tensor) -> None:
        """Add tokens (n,) or (n, 1)."""
        self._counts += torch.bincount(tokens.reshape(-1).long(), minlength=len(self._counts))

    def shares(self) -> Tensor:
        """How often each token is expected to be read (V,), float64; they sum to 1."""
        counts = self._counts.double()
        total, unseen = counts.sum().clamp_min(1.0), self._counts == 0
        missing = (self._counts == 1).sum() / total if bool(unseen.any()) else torch.zeros_like(total)
        return torch.where(unseen, missing / unseen.sum().clamp_min(1), counts / total * (1.0 - missing))

    @property
    def rows(self) -> int:
        """How many tokens were added."""
        return int(self._counts.sum())


def best_table(
    table: Tensor, shares: Tensor, gradient: Tensor | None, rank: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The factors left (V, r) and right (r, D), and all m singular values; m is the lesser of V and D.

    Args:
        table: (V, D).
        shares: p (V,), float64.
        gradient: G, float64 `(D, D)`, or None for the identity.
        rank: r; None for m. The first of these are the best of each lower rank.
    """
    count, width = table.shape
    identity = torch.eye(width, dtype=torch.float64, device=table.device)
    root = root_of(identity if gradient is None else gradient.to(identity))
    total = torch.zeros_like(identity)
    for rows, weights in rows_with(table, shares):
        weighed = rows @ root.factor
        total += weighed.T @ (weights[:, None] * weighed)
    powers, vectors = torch.linalg.eigh(total)
    most = min(count, width)
    powers, vectors = powers.flip(0)[:most].clamp_min(0.0), vectors.flip(1)[:, : rank or most]
    into = root.factor @ vectors
    dtype = torch.promote_types(table.dtype, torch.float32)
    left = torch.cat([(rows @ into).to(dtype) for rows, _ in rows_with(table, shares)])
    return left, vectors.T @ root.inverse, powers.sqrt()


def fit_table(
    table: Tensor, shares: Tensor, gradient: Tensor | None, rank: int
) -> tuple[Tensor, Tensor, float]:
    """The factors left (V, r) and right (r, D), and the relative error of what is looked up."""
    left, right, values = best_table(table, shares, gradient, rank)
    kept = values.square().cumsum(0)
    lost = float(1.0 - kept[rank - 1] / kept[-1]) if float(kept[-1]) > 0 else 0.0
    return left, right, max(0.0, lost) ** 0.5


def rows_with(table: Tensor, shares: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The table in pieces, float64, with the shares of their rows."""
    for rows, weights in zip(table.detach().split(_ROWS), shares.split(_ROWS), strict=True):
        yield rows.double(), weights
