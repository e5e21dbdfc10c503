"""A low-rank branch from sums over rows: what it is to give, t, and its inputs, z.

A weight lacks D, so t = D z + e: what is known, and what the changes that reached the layer ask for beside;
of e inputs tell C z, see `factorization/reliability.py`. The branch of rank k is then the best B of D + C:

    minimises  ‖ G^½ (D + C - B) S^½ ‖²,   S = E[z zᵀ]
"""

# O out_features, I in_features, k rank of the branch
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.reliability import predictor, reliable_part, with_ridge
from panther_compile.factorization.row_sums import HalvedSums, Means
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


class BranchSums:
    """Adds rows up: products in float32, sums in float64.

    Args:
        centred: whether the means are taken off, since a bias makes up for them.
        halves: whether t is more than the weight lacks, so that halves of the rows are kept apart.
    """

    def __init__(self, centred: bool, *, halves: bool = True) -> None:
        self._centred, self._halved = centred, halves
        self._about: tuple[Tensor, Tensor] | None = None  # near the means, so that no digits are lost to them
        self._sums: HalvedSums | None = None

    def add(self, t: Tensor, z: Tensor) -> None:
        """Add rows t (n, O) and z (n, I); where there are halves, one half of them to each."""
        t, z = t.float(), z.float()
        if self._about is None or self._sums is None:
            self._about = t.mean(0), z.mean(0)
            self._sums = HalvedSums(t.shape[1], z.shape[1], z.device, apart=True)
        self._sums.add(t - self._about[0], z - self._about[1], None, halved=self._halved)

    def best(self, gradient: Tensor | None, rank: int, lacking: Tensor | None) -> Branch:
        """The branch of a rank.

        Args:
            gradient: G, the weight of errors at the output, float64 (O, O), or None for the identity.
            rank: k, at most as large as the smaller side.
            lacking: D (O, I); None for zeros.
        """
        assert self._about is not None
        assert self._sums is not None
        means = self._sums.total().means(self._about, centred=self._centred)
        known = torch.zeros_like(means.cross) if lacking is None else lacking.to(means.cross)
        wanted = known + self._beside(means, known)
        few = self._sums.rows < _FEW_ROWS * len(means.covariance)
        metric = with_ridge(means.covariance, _RIDGE_OF_FEW if few else _RIDGE)
        by_outputs = known.shape[0] <= known.shape[1]
        rank = min(rank, *known.shape)
        up, down = low_rank_solution(wanted @ metric, metric, gradient, rank, by_outputs=by_outputs)
        up, down = _evened(up, down)
        shift = means.x - up @ (down @ means.z) if self._centred else torch.zeros_like(means.x)
        return Branch(up, down, shift)

    def _beside(self, means: Means, known: Tensor) -> Tensor:
        """C (O, I), see the file."""
        assert self._about is not None
        assert self._sums is not None
        halves = self._sums.halves(self._about, centred=self._centred)
        change, covariance = _beyond(means, known)
        if not halves:
            return predictor(change, covariance, 0.0)
        return reliable_part(change, covariance, [_beyond(half, known) for half in halves])


def _beyond(means: Means, known: Tensor) -> tuple[Tensor, Tensor]:
    """E[(t - D z) zᵀ], and E[z zᵀ] with the least ridge, for D (O, I)."""
    return means.cross - known @ means.covariance, with_ridge(means.covariance, _RIDGE)


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
