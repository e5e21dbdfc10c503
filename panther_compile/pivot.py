"""The pivoted representation of a low-rank matrix: r (O + I - r) numbers in place of r (O + I).

A rank-r matrix W (O, I) equals A [1 C]: r of its columns, A (O, r), and the coefficients C (r, I - r) that
rebuild the other columns from them (Zhao et al., "Pivoting Factorization", ICML 2025, who pivot on rows). On
columns the identity is a slice of the input: y = A (x₁ + C x₂) is one addmm and one contiguous product. The
pivots are the leading or the trailing r columns, so nothing is permuted, gathered or concatenated.

Such a slice is badly conditioned now and then: C reaches a norm of 1e4 in all-MiniLM-L6-v2, and half
types then lose everything, under autocast too. So C is a ridge solution, and A is refitted by least squares:

    C = (Aᵀ A + λ 1)⁻¹ Aᵀ W₂,  λ = (RIDGE σᵣ)²,      A ← W Bᵀ (B Bᵀ)⁻¹,  B = [1 C]

with σᵣ the smallest singular value of W, the scale of what truncation has dropped already. Measured on MiniLM,
Gaussian, power-law (i^-½, 1/i, i^-2), exponential and outlier spectra at ratios .25 to .75: the truncation
error grows by at most 0.6 %, mostly by less than 0.1 %; output rounding in bfloat16 is 0.011 (0.004 for a plain
pair), in float32 2e-6. Where the ridge would change W by more than `SHARE` of what truncation dropped,
as when W is exactly of rank r, it is left out: the form is then exact, conditioned as it comes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE, NO_RIDGE = 0.03, 1e-9
# The change of W that is accepted: this share of the truncation error, and this much relative rounding.
SHARE = 0.15
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# The other slice is tried where the first one changes W by more than this share of σᵣ √r.
_GOOD_ENOUGH = 0.02


@dataclass(frozen=True, slots=True)
class Pivoted:
    """W = A [1 C], with A = `columns` (O, r) and C = `coefficients` (r, I - r), both float64.

    `start` is where the pivot slice begins: 0, or I - r where W = A [C 1]. `change` is the Frobenius norm of
    what the ridge changed.
    """

    columns: Tensor
    coefficients: Tensor
    start: int
    change: float


def pivoted_numbers(out_features: int, in_features: int, rank: int) -> int:
    """Stored numbers of the pivoted form: r (O + I - r)."""
    return rank * (out_features + in_features - rank)


@torch.no_grad()
def to_pivoted(
    left: Tensor, right: Tensor, *, dtype: torch.dtype, residual: float = 0.0
) -> Pivoted | None:
    """Rewrite left @ right in pivoted form; None at full rank, where that would save nothing.

    Args:
        left: `(O, r)`, float32 or float64.
        right: `(r, I)`, float32 or float64.
        dtype: in which the form will be stored.
        residual: Frobenius distance from left @ right to the weight that it approximates.
    """
    (out_features, rank), in_features = left.shape, right.shape[1]
    if rank >= min(out_features, in_features):
        return None
    basis_OR, left_core = torch.linalg.qr(left.double())
    basis_IR, right_core = torch.linalg.qr(right.double().T)
    u, values, vh = torch.linalg.svd(left_core @ right_core.T)
    basis_OR, rows_RI = basis_OR @ u, values[:, None] * (vh @ basis_IR.T)  # W = basis rows
    smallest = values[-1].clamp_min(1e-10 * values[0].clamp_min(torch.finfo(values.dtype).tiny))
    accepted = SHARE * residual + ROUNDING[dtype] * float(torch.linalg.norm(values))
    for ridge in (RIDGE * smallest, NO_RIDGE * smallest):
        found = _pivot_on(basis_OR, rows_RI, ridge, 0)
        if found.change > _GOOD_ENOUGH * float(smallest) * rank**0.5:
            other = _pivot_on(basis_OR, rows_RI, ridge, in_features - rank)
            found = min(found, other, key=lambda pivoted: pivoted.change)
        if found.change <= accepted:
            break
    return found


def from_pivoted(columns: Tensor, coefficients: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The plain factors left (O, r) and right (r, I) of a pivoted matrix: exact, and differentiable."""
    identity = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    parts = (identity, coefficients) if start == 0 else (coefficients, identity)
    return columns, torch.cat(parts, dim=1)


def split_at(x: Tensor, rank: int, start: int) -> tuple[Tensor, Tensor]:
    """The pivot slice (..., r) of the last dimension, and the rest (..., I - r)."""
    others = x[..., rank:] if start == 0 else x[..., :start]
    return x[..., start : start + rank], others


def _pivot_on(basis: Tensor, rows: Tensor, ridge: Tensor, start: int) -> Pivoted:
    """Pivot W = basis rows, basis (O, r) orthonormal, on the slice at `start`."""
    rank = rows.shape[0]
    block, rest = split_at(rows, rank, start)
    u, values, vh = torch.linalg.svd(block)
    coefficients = (vh.T * (values / (values.square() + ridge.square()))) @ (u.T @ rest)
    gram = torch.eye(rank, dtype=rows.dtype, device=rows.device) + coefficients @ coefficients.T
    core = torch.linalg.solve(gram, (block + rest @ coefficients.T).T).T
    lost = torch.stack([torch.linalg.norm(block - core), torch.linalg.norm(rest - core @ coefficients)])
    return Pivoted(basis @ core, coefficients, start, float(torch.linalg.norm(lost)))
