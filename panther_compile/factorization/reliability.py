"""What inputs tell of a change that comes with them, without chance: halves of the rows judge each other.

Of rows e that come with inputs z, a matrix C = E[e zᵀ] (S + ridge)⁻¹, S = E[z zᵀ], makes as much as the rows
tell. Few rows tell more than there is: part of C is chance. So C is made of each half of the rows, and judged
by the other: the ridge is taken, and the share of C, that predict most of it,

    half = Σ <C, E[e zᵀ]'> / Σ <C S', C>,   0 to 1, the primed moments being those of the other half.

All rows have half the chance of one half of them: share = 2 half / (1 + half) (Spearman, Brown 1910).
Both sums are traces over the outputs, so few random combinations of many outputs tell them (Hutchinson 1990).
"""

# O out_features, I in_features
from collections.abc import Sequence

import torch
from torch import Tensor

from panther_compile.factorization.whiten import solve

RIDGES = (1e-6, 1e-2, 0.3)  # of each input's own power, that are tried
PROBES = 128  # combinations of the outputs, where those are more
_MANY = 1024  # inputs, above which ridges are not tried, two solves each, but the middle one is taken
_LEAST = 1e-6  # of that, of the mean power


def reliable_part(change: Tensor, covariance: Tensor, halves: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The share of C (O, I) that is no chance.

    Args:
        change: E[e zᵀ], float64 `(O, I)`, of all rows.
        covariance: S, float64 `(I, I)`, likewise.
        halves: the same two of each half, C of a few `combinations` of the outputs (P, I); none, as of a
            single row, tell nothing.
    """
    if not halves:
        return torch.zeros_like(change)
    best = 0.0, 0.0, RIDGES[-1]
    for ridge in RIDGES if len(covariance) <= _MANY else RIDGES[1:2]:
        product = power = 0.0
        for (own, own_covariance), (other, other_covariance) in (halves, halves[::-1]):
            found = predictor(own, own_covariance, ridge)
            product += float((found * other).sum())
            power += float((found @ other_covariance * found).sum())
        if product > 0.0 and power > 0.0:
            best = max(best, (product * product / power, min(1.0, product / power), ridge))
    _, half, ridge = best
    share = 2.0 * half / (1.0 + half)
    return share * predictor(change, covariance, ridge) if share else torch.zeros_like(change)


def combinations(weight: Tensor) -> Tensor:
    """Combinations (P, O) of the outputs of a weight (O, I) to judge it by: all, or few random ones."""
    outputs = len(weight)
    if outputs <= PROBES:
        return torch.eye(outputs, dtype=weight.dtype, device=weight.device)
    drawn = torch.randn(PROBES, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return drawn.to(weight)


def predictor(change: Tensor, covariance: Tensor, ridge: float) -> Tensor:
    """C (O, I), see the file."""
    return solve(with_ridge(covariance, ridge), change.T).T


def with_ridge(covariance: Tensor, ridge: float) -> Tensor:
    """A covariance with a share of each input's own power added."""
    found, power = covariance.clone(), covariance.diagonal()
    found.diagonal().add_(ridge * (power + _LEAST * power.mean().clamp_min(1e-30)))
    return found
