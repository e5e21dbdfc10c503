"""The best rank-r matrix in the metric of data: closed form, no training.

For inputs x of the dense layer, z of the sketched one, and G the weight of errors at the output:

    minimise over rank-r W':   E ‖ G^½ (W x - W' z) ‖²

With S = E[z zᵀ] = R Rᵀ and C = E[x zᵀ] the solution is W' = G^-½ [ G^½ W C R^-T ]ᵣ R⁻¹. On the input side
this is objective 4 of AA-SVD (anchored, asymmetric), and SVD-LLM where x = z; G, a Kronecker-factored
Fisher matrix as in K-FAC (Martens and Grosse, 2015), is the output side. Where the layer's output is added to
s, and s is off by d = s - s' in the sketched model, W x + d is wanted in place of W x: W C + E[d zᵀ] stands
for W C, without what of it is chance (`reliability.py`). The square roots are never needed on the larger
side: with M = G^½ W C R^-T, either Vᵣ of Mᵀ M gives W' = (W C R^-T Vᵣ)(Vᵣᵀ R⁻¹), or Uᵣ of M Mᵀ gives W' =
(G^-½ Uᵣ)(Uᵣᵀ G^½ W C S⁻¹).
"""

# O out_features, I in_features, R rank
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.metric import weighed, whole
from panther_compile.factorization.moments import Moments

_SHARES = (1e-9, 1e-7, 1e-5)  # of the largest number on the diagonal, added to all of them


@dataclass(frozen=True, slots=True)
class Root:
    """A symmetric positive matrix as K Kᵀ, K lower triangular, with K⁻¹, both float64 (n, n)."""

    factor: Tensor
    inverse: Tensor


def root_of(matrix: Tensor) -> Root:
    """The root by `lower_root`: no matrix is refused for being singular."""
    factor = lower_root(matrix)
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return Root(factor, torch.linalg.solve_triangular(factor, identity, upper=False))


def best_low_rank(
    weight: Tensor, moments: Moments, gradient: Tensor | None, rank: int
) -> tuple[Tensor, Tensor]:
    """The factors left (O, r) and right (r, I) of the solution, float64.

    Args:
        weight: W, float64 `(O, I)`.
        moments: with x = z.
        gradient: G, float64 `(O, O)`, its diagonal `(O,)`, or None for the identity.
        rank: r.
    """
    by_outputs = weight.shape[0] <= weight.shape[1]
    return low_rank_solution(
        weight @ moments.cross, moments.covariance, gradient, rank, by_outputs=by_outputs
    )


def low_rank_solution(
    anchored: Tensor, covariance: Tensor, gradient: Tensor | None, rank: int, *, by_outputs: bool
) -> tuple[Tensor, Tensor]:
    """The same for any t that is wanted: minimise E ‖ G^½ (t - W' z) ‖².

    Args:
        anchored: E[t zᵀ], float64 `(O, I)`.
        covariance: S = E[z zᵀ], float64 `(I, I)`.
        gradient: G, float64 `(O, O)`, its diagonal `(O,)`, or None for the identity.
        rank: r.
        by_outputs: by Uᵣ, of O rows, in place of Vᵣ, of I.
    """
    if by_outputs:
        solved = solve(covariance, anchored.T).T  # W C S⁻¹
        core = solved @ anchored.T  # M Mᵀ = G^½ (W C S⁻¹ Cᵀ Wᵀ) G^½
        core = (core + core.T) / 2
        if gradient is None:
            vectors = torch.linalg.eigh(core)[1][:, -rank:].flip(1)
            return vectors, vectors.T @ solved
        root = root_of(whole(gradient))
        vectors = torch.linalg.eigh(root.factor.T @ core @ root.factor)[1][:, -rank:].flip(1)
        return root.inverse.T @ vectors, (vectors.T @ root.factor.T) @ solved
    root = root_of(covariance)
    whitened = anchored @ root.inverse.T  # W C R^-T
    core = whitened.T @ (whitened if gradient is None else weighed(gradient, whitened))
    vectors = torch.linalg.eigh((core + core.T) / 2)[1][:, -rank:].flip(1)
    return whitened @ vectors, vectors.T @ root.inverse


def anchored_mean(weight: Tensor, moments: Moments) -> Tensor:
    """E[t] (O,), likewise."""
    mean = weight @ moments.mean_x
    return mean if moments.residual is None else mean + moments.residual.mean


def term_sizes(left: Tensor, right: Tensor, covariance: Tensor, gradient: Tensor | None) -> Tensor:
    """Singular values of G^½ W R (r,) from the factors of W, whose terms are orthogonal in both metrics.

    Args:
        left: `(O, r)`, of `best_low_rank` where x = z.
        right: `(r, I)`, likewise.
        covariance: S = R Rᵀ, float64 `(I, I)`.
        gradient: G, float64 `(O, O)`, its diagonal `(O,)`, or None for the identity.
    """
    outer = left if gradient is None else weighed(gradient, left)
    return ((left * outer).sum(0) * (right @ covariance * right).sum(1)).clamp_min(0.0).sqrt()


def lower_root(matrix: Tensor) -> Tensor:
    """L of a symmetric positive matrix L Lᵀ, lower triangular; a singular one is shifted by a little.

    Of the diagonal (n,) of a diagonal matrix, that of L.
    """
    if matrix.dim() == 1:
        return matrix.sqrt()
    size = matrix.diagonal().abs().max().clamp_min(1e-30)
    for share in (0.0, *_SHARES):
        shifted = matrix + share * size * torch.eye(len(matrix)).to(matrix) if share else matrix
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not int(failed):
            return factor
    values, vectors = torch.linalg.eigh(matrix)  # of rounding alone: as much below 0 as above
    values = values.clamp_min(_SHARES[0] * float(values[-1].clamp_min(1e-30))).sqrt()
    return torch.linalg.qr((vectors * values).T).R.T


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right for a symmetric positive matrix, see `lower_root`."""
    return torch.cholesky_solve(right, lower_root(matrix))


def output_error(
    weight: Tensor, left: Tensor, right: Tensor, moments: Moments, gradient: Tensor | None = None
) -> float:
    """‖G^½ (W x - W' z)‖ over ‖G^½ W x‖ on the rows that `moments` keeps; the means are not counted.

    Where the output is added to s, the error of the sum: ‖G^½ (W x + s - W' z - s')‖ over ‖G^½ (W x + s)‖.

    Args:
        weight: W, `(O, I)`.
        left: `(O, r)`, a factor of W'.
        right: `(r, I)`, the other.
        moments: of x and z.
        gradient: G, `(O, O)`, its diagonal `(O,)`, or None for the identity.
    """
    wanted = moments.sample_x @ weight.float().T
    lost = wanted - (moments.sample_z @ right.float().T) @ left.float().T
    if moments.residual is not None:
        wanted, lost = wanted + moments.residual.sample, lost + moments.residual.sample_change
    if gradient is None:
        size, rest = wanted.square().sum(), lost.square().sum()
    else:
        metric = gradient.float()
        size, rest = ((rows * weighed(metric, rows.T).T).sum() for rows in (wanted, lost))
    return float((rest / size.clamp_min(1e-30)).clamp_min(0.0).sqrt())
