"""The pivoted representation of a low-rank matrix: the same matrix in r (O + I - r) numbers.

A rank-r matrix W (O, I) equals A [1 C] Pᵀ: r of its columns, A (O, r), and the coefficients
C (r, I - r) that rebuild the other columns from them; P permutes the columns. Output-side form:
Zhao et al., "Pivoting Factorization" (ICML 2025). On the input side, used here, the identity is
a slice of the input, so that y = A (x₁ + C x₂) is one addmm and one contiguous product.

The pivot columns are the leading or the trailing slice where that is accurate in the layer's dtype,
else those found by LU with partial pivoting (Golub & Van Loan, 3.4), which keeps the entries of C small
at the price of gathering the input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Largest relative rounding error, in the layer's own dtype, at which pivots are accepted. Truncation at
# useful ratios is 1e-2 and more, but deep models add up what 50 layers round. Measured on
# all-MiniLM-L6-v2 and Gaussian weights, leading columns give 2e-6 to 2e-4 in float32 and 3e-2 to 2 in
# bfloat16; LU pivots give 1e-6 and 1e-2.
_ACCEPTED_ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
_PROBES = 32


@dataclass(frozen=True, slots=True)
class Pivoted:
    """W = A [1 C] Pᵀ with A = `columns` (O, r) and C = `coefficients` (r, I - r).

    `start` is where the pivot slice begins in the (permuted) input: 0 or I - r. `order` is the
    permutation (I,) int64 of the input columns, pivots first, or None where none is needed.
    """

    columns: Tensor
    coefficients: Tensor
    start: int
    order: Tensor | None


def pivoted_numbers(out_features: int, in_features: int, rank: int, *, gathered: bool) -> int:
    """Stored numbers of the pivoted form: r (O + I - r), and I more for an index buffer."""
    return rank * (out_features + in_features - rank) + (in_features if gathered else 0)


def to_pivoted(
    left: Tensor, right: Tensor, *, dtype: torch.dtype, max_numbers: int | None = None
) -> Pivoted | None:
    """Rewrite left (O, r) @ right (r, I) in pivoted form, or None if it would be inaccurate in `dtype`.

    Args:
        left: `(O, r)`, float32 or float64.
        right: `(r, I)` with r < I, float32 or float64.
        dtype: the dtype in which the layer will run; decides what conditioning is acceptable.
        max_numbers: what the form may store; the last columns of `left` and rows of `right` are dropped to
            stay within it, a few more where an index buffer is needed.
    """
    in_features = right.shape[1]
    left64, right64 = _within(max_numbers, left.double(), right.double(), gathered=False)
    rank = right64.shape[0]
    if rank >= in_features or not _has_full_rank(right64):
        return None
    probe = _probe(right64)
    for start in (0, in_features - rank):
        found = _pivot_on(left64, right64, start, None)
        if found is not None and _is_accurate(found, left64, right64, probe, dtype):
            return found
    left64, right64 = _within(max_numbers, left64, right64, gathered=True)
    found = _pivot_on(left64, right64, 0, _lu_pivots(right64))
    return found if found is not None and _is_accurate(found, left64, right64, probe, dtype) else None


def from_pivoted(pivoted: Pivoted) -> tuple[Tensor, Tensor]:
    """The plain factors left (O, r), right (r, I) of a pivoted matrix: exact, up to rounding."""
    rank = pivoted.columns.shape[1]
    identity = torch.eye(rank, dtype=pivoted.columns.dtype, device=pivoted.columns.device)
    parts = (identity, pivoted.coefficients)
    right = torch.cat(parts if pivoted.start == 0 else parts[::-1], dim=1)
    if pivoted.order is not None:
        right = right[:, torch.argsort(pivoted.order)]
    return pivoted.columns, right


def _within(max_numbers: int | None, left: Tensor, right: Tensor, *, gathered: bool) -> tuple[Tensor, Tensor]:
    """The leading part of a pair whose pivoted form stores at most `max_numbers`, or has rank 1."""
    (rank, in_features), out_features = right.shape, left.shape[0]
    if max_numbers is not None:
        while rank > 1 and pivoted_numbers(out_features, in_features, rank, gathered=gathered) > max_numbers:
            rank -= 1
    return left[:, :rank], right[:rank]


def _pivot_on(left: Tensor, right: Tensor, start: int, order: Tensor | None) -> Pivoted | None:
    rank = right.shape[0]
    permuted = right if order is None else right[:, order]
    block = permuted[:, start : start + rank]
    rest = permuted[:, rank:] if start == 0 else permuted[:, :start]
    coefficients, info = torch.linalg.solve_ex(block, rest)
    if info.item() != 0 or not bool(torch.isfinite(coefficients).all()):
        return None
    return Pivoted(left @ block, coefficients, start, order)


def _lu_pivots(right: Tensor) -> Tensor:
    """All columns of `right` (r, I), r well-conditioned ones first, by partial pivoting of rightᵀ."""
    rank, in_features = right.shape
    _, swaps = torch.linalg.lu_factor(right.T)
    order = torch.arange(in_features)
    for row, other in enumerate((swaps - 1).tolist()):  # LAPACK counts rows from 1
        order[[row, other]] = order[[other, row]]
    pivots = order[:rank].sort().values
    rest = torch.ones(in_features, dtype=torch.bool)
    rest[pivots] = False
    return torch.cat([pivots, rest.nonzero().flatten()]).to(right.device)


def _has_full_rank(right: Tensor) -> bool:
    diagonal = torch.linalg.qr(right.T, mode="r").R.diagonal().abs()
    return bool(diagonal.min() > 1e-12 * diagonal.max())


def _probe(right: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBES, right.shape[1], generator=generator, dtype=torch.float64)
    return probe.to(right.device)


def _is_accurate(found: Pivoted, left: Tensor, right: Tensor, probe: Tensor, dtype: torch.dtype) -> bool:
    """Whether the form, run in `dtype` on Gaussian rows, stays within the accepted rounding error."""
    exact = probe @ right.T @ left.T
    x = (probe if found.order is None else probe[:, found.order]).to(dtype)
    rank = right.shape[0]
    pivots = x[:, found.start : found.start + rank]
    rest = x[:, rank:] if found.start == 0 else x[:, : found.start]
    latent = rest @ found.coefficients.to(dtype).T + pivots
    result = (latent @ found.columns.to(dtype).T).double()
    scale = exact.norm()
    return bool((result - exact).norm() <= _ACCEPTED_ROUNDING[dtype] * scale)
