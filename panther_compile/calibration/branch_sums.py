"""A low-rank branch from sums over rows: what it is to give, t, and its inputs, z.

A weight lacks D, so t = D z + e: what is known, and what the changes that reached the layer ask for beside;
of e inputs tell C z, see `factorization/told.py`. The branch of rank k is then the best B of D + C:

    minimises  ‖ G^½ (D + C - B) S^½ ‖²,   S = E[z zᵀ]
"""

# O out_features, I in_features, k rank of the branch
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.gram import gram
from panther_compile.factorization.told import predictor, told, with_ridge
from panther_compile.factorization.whiten import low_rank_solution

_FEW_ROWS = 8  # for each input
_RIDGE, _RIDGE_OF_FEW = 1e-4, 0.1  # of each input's own power: else what no row shows would be free


@dataclass(frozen=True, slots=True)
class Branch:
    """What is added to a layer's output: up (down x) + shift, float64.

    Attributes:
        up: `(O, k)`; both factors have half of the singular values of their product.
        down: `(k, I)`.
        shift: `(O,)`; zeros of a branch without a bias.
    """

    up: Tensor
    down: Tensor
    shift: Tensor

    def scaled(self, share: float) -> "Branch":
        """A share of it."""
        return Branch(self.up * share, self.down, self.shift * share)


@dataclass(frozen=True, slots=True)
class _Means:
    """E[t zᵀ] (O, I), E[z zᵀ] (I, I), E[t] and E[z], float64; about the means if they count for nothing."""

    product: Tensor
    covariance: Tensor
    t: Tensor
    z: Tensor

    def beyond(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """E[(t - D z) zᵀ], and E[z zᵀ] with the least ridge, for D (O, I)."""
        return self.product - known @ self.covariance, with_ridge(self.covariance, _RIDGE)


class BranchSums:
    """Adds rows up: products in float32, sums in float64.

    Args:
        centred: whether the means are taken off, since a bias makes up for them.
        halves: whether t is more than the weight lacks, so that halves of the rows are kept apart.
    """

    def __init__(self, centred: bool, *, halves: bool = True) -> None:
        self._centred = centred
        self._about: tuple[Tensor, Tensor] | None = None  # near the means, so that no digits are lost to them
        self._sums: list[tuple[Tensor, ...]] = [()] * (1 + halves)
        self._rows = [0] * (1 + halves)

    def add(self, t: Tensor, z: Tensor) -> None:
        """Add rows t (n, O) and z (n, I); where there are halves, one half of them to each."""
        t, z = t.float(), z.float()
        if self._about is None:
            self._about = (t.mean(0), z.mean(0)) if self._centred else (torch.zeros(()), torch.zeros(()))
        t, z = (one - mean.to(one) for one, mean in zip((t, z), self._about, strict=True))
        middle = len(z) // len(self._sums) if len(self._sums) > 1 else len(z)
        for half, part in enumerate((slice(middle), slice(middle, None))[: len(self._sums)]):
            rows, inputs = t[part], z[part]
            found = (rows.T @ inputs, gram(inputs), rows.sum(0), inputs.sum(0))
            new = tuple(one.double() for one in found)
            known = self._sums[half]
            self._sums[half] = tuple(map(torch.add, known, new)) if known else new
            self._rows[half] += len(inputs)

    def best(self, gradient: Tensor | None, rank: int, lacking: Tensor | None) -> Branch:
        """The branch of a rank.

        Args:
            gradient: G, the weight of errors at the output, float64 (O, O), or None for the identity.
            rank: k, at most as large as the smaller side.
            lacking: D (O, I); None for zeros.
        """
        assert self._about is not None
        means = self._means(*map(sum, zip(*self._sums, strict=True)), rows=sum(self._rows))  # type: ignore[arg-type]
        known = torch.zeros_like(means.product) if lacking is None else lacking.to(means.product)
        wanted = known + self._beside(means, known)
        few = sum(self._rows) < _FEW_ROWS * len(means.covariance)
        metric = with_ridge(means.covariance, _RIDGE_OF_FEW if few else _RIDGE)
        by_outputs = known.shape[0] <= known.shape[1]
        rank = min(rank, *known.shape)
        up, down = low_rank_solution(wanted @ metric, metric, gradient, rank, by_outputs=by_outputs)
        up, down = _evened(up, down)
        shift = torch.zeros_like(means.t)
        if self._centred:
            shift = means.t + self._about[0] - up @ (down @ (means.z + self._about[1]))
        return Branch(up, down, shift)

    def _means(self, product: Tensor, covariance: Tensor, t: Tensor, z: Tensor, *, rows: int) -> _Means:
        product, covariance, t, z = (one / max(1, rows) for one in (product, covariance, t, z))
        if self._centred:
            product, covariance = product - torch.outer(t, z), covariance - torch.outer(z, z)
        return _Means(product, covariance, t, z)

    def _beside(self, means: _Means, known: Tensor) -> Tensor:
        """C (O, I), see the file."""
        change, covariance = means.beyond(known)
        if len(self._sums) == 1 or not all(self._rows):
            return predictor(change, covariance, 0.0)
        halves = [self._means(*one, rows=rows) for one, rows in zip(self._sums, self._rows, strict=True)]
        return told(change, covariance, [half.beyond(known) for half in halves])


def best_of_matrix(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors (O, k) and (k, I) of a matrix (O, I), each with half of the singular values."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    half = values[:rank].sqrt()
    return u[:, :rank] * half, half[:, None] * vh[:rank]


def _evened(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product, each with half of its singular values."""
    (q, r), (p, t) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, values, v = torch.linalg.svd(r @ t.T)
    half = values.sqrt()
    return q @ u * half, half[:, None] * (v @ p.T)
