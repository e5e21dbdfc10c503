"""A sketched linear layer from second moments: the best rank-r matrix, pivoted, its bias made right."""

# O out_features, I in_features, R rank
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.balance import balanced
from panther_compile.factorization.gain import gain_as_told
from panther_compile.factorization.metric import weighed
from panther_compile.factorization.moments import Moments
from panther_compile.factorization.pivot import ROUNDING, from_pivoted, split_at, to_pivoted
from panther_compile.factorization.reliability import combinations, reliable_part
from panther_compile.factorization.row_sums import Means
from panther_compile.factorization.whiten import anchored_mean, low_rank_solution, output_error, solve

# Tried in turn for the singular values of the pivot block, until the output's error grows by at most 0.5 %.
FLOORS = (0.1, 0.03, 0.01, 0.003, 0.001, 1e-4)
_ACCEPTED = 1.005


@dataclass(frozen=True, slots=True)
class FittedPair:
    """Factors as they are stored, float64, and how far their output is from the dense layer's.

    Attributes:
        left: (O, r); the weight itself (O, I) if it is not factorized.
        right: (r, I), or (r, I - r) in the pivoted form; None if it is not factorized.
        start: of the pivot slice; None for a plain pair.
        bias: (O,), or None.
        output_error: relative, on the calibration data.
    """

    left: Tensor
    right: Tensor | None
    start: int | None
    bias: Tensor | None
    output_error: float


def fit_matrix_to(
    weight: Tensor,
    bias: Tensor | None,
    moments: Moments,
    gradient: Tensor | None,
    rank: int,
    *,
    pivoted: bool | None,
    dtype: torch.dtype,
    restores: bool = False,
) -> FittedPair:
    """Fit W' z + b' to W x + b, or to W x + b + s - s' where the output is added to s.

    Args:
        weight: W, `(O, I)`.
        bias: b, `(O,)`, or None.
        moments: of x and z, about the means if there is a bias.
        gradient: weight of errors at the output, float64 `(O, O)`, its diagonal `(O,)`, or None.
        rank: r.
        pivoted: whether the pivoted form is wanted, or a balanced pair; None leaves the factors as they come,
            which is enough to try them.
        dtype: in which the factors will be stored.
        restores: whether outputs are to deviate as the dense layer's do, as much as is told (`gain.py`).
    """
    dense = weight.detach().to(moments.covariance.device).double()
    anchored, by_outputs = anchored_product(dense, moments), dense.shape[0] <= dense.shape[1]
    left, right = low_rank_solution(anchored, moments.covariance, gradient, rank, by_outputs=by_outputs)
    start = None
    if pivoted and rank < min(dense.shape):
        start, left, right = _pivot(dense, anchored, left, right, moments, gradient, dtype)
        down = split_at(right, rank, start)[1]
    else:
        if pivoted is not None:
            left, right = balanced(left, right, moments.covariance)
        down = right
    if restores:
        left = _gain(dense, left, right, moments)[:, None] * left
    error = output_error(dense, left, right, moments)
    bias = shifted_bias(bias, anchored_mean(dense, moments), left @ (right @ moments.mean_z))
    return FittedPair(left, down, start, bias, error)


def fit_beside(
    weight: Tensor, bias: Tensor | None, moments: Moments, gradient: Tensor | None, pair: FittedPair
) -> FittedPair:
    """The same where one factor is given: the left one of a plain pair, the right one of the pivoted form."""
    dense = weight.detach().to(moments.covariance.device).double()
    left, down = pair.left.to(dense), pair.right
    assert down is not None
    anchored = anchored_product(dense, moments)
    if pair.start is None:
        rows = left.T if gradient is None else weighed(gradient, left).T
        solved = solve(moments.covariance, anchored.T).T  # W C S⁻¹
        right = down = torch.linalg.solve(rows @ left, rows @ solved)
    else:
        right = from_pivoted(left, down.to(dense), pair.start)[1]
        left = _refit(anchored, right, moments)
    error = output_error(dense, left, right, moments)
    bias = shifted_bias(bias, anchored_mean(dense, moments), left @ (right @ moments.mean_z))
    return FittedPair(left, down, pair.start, bias, error)


def fit_whole_to(weight: Tensor, bias: Tensor | None, moments: Moments) -> FittedPair:
    """The same without a bound on the rank; z may have other features than x. See `fit_matrix_to`."""
    dense = weight.detach().to(moments.covariance.device).double()
    new = solve(moments.covariance, anchored_product(dense, moments).T).T
    identity = torch.eye(new.shape[1], dtype=new.dtype, device=new.device)
    error = output_error(dense, new, identity, moments)
    bias = shifted_bias(bias, anchored_mean(dense, moments), new @ moments.mean_z)
    return FittedPair(new, None, None, bias, error)


def anchored_product(weight: Tensor, moments: Moments) -> Tensor:
    """E[t zᵀ] (O, I) of what is wanted of the layer, t = W x + s - s', as far as z tells it.

    Of what has changed, t - W z, chance is left out, see `reliability.py`; so this is E[(W + C) z zᵀ].
    """
    if not moments.halves:
        product = weight @ moments.cross
        return product if moments.residual is None else product + moments.residual.cross
    drawn = combinations(weight)
    halves = []
    for one in moments.halves:
        beside = None if one.change is None else drawn @ one.change[0]
        halves.append((_change(drawn @ weight, one, moments.extended, beside), one.covariance))
    beside = None if moments.residual is None else moments.residual.cross
    changed = reliable_part(_change(weight, moments, moments.extended, beside), moments.covariance, halves)
    known = weight if moments.extended is None else weight @ moments.extended
    return (known + changed) @ moments.covariance


def _change(weight: Tensor, means: Moments | Means, extended: Tensor | None, beside: Tensor | None) -> Tensor:
    """E[(t - W z) zᵀ] (O, I); E[d zᵀ] of what the output is added to is in it, if known."""
    if extended is None:
        found = weight @ (means.cross - means.covariance)
    else:
        found = weight @ means.cross - (weight @ extended) @ means.covariance
    return found if beside is None else found + beside


def shifted_bias(bias: Tensor | None, wanted: Tensor, given: Tensor) -> Tensor | None:
    """The bias that makes up for the means; None if there is none.

    Args:
        bias: of the dense layer `(O,)`, or None.
        wanted: the mean output `(O,)` without it.
        given: the mean output `(O,)` of the new weight.
    """
    return None if bias is None else bias.detach().to(wanted) + (wanted - given)


def _gain(weight: Tensor, left: Tensor, right: Tensor, moments: Moments) -> Tensor:
    """The gain of each output (O,), from the rows that `moments` keeps."""
    wanted = (moments.sample_x @ weight.float().T).double().var(0)
    given = ((moments.sample_z @ right.float().T) @ left.float().T).double().var(0)
    return gain_as_told(wanted, given)


def _pivot(
    weight: Tensor,
    anchored: Tensor,
    left: Tensor,
    right: Tensor,
    moments: Moments,
    gradient: Tensor | None,
    dtype: torch.dtype,
) -> tuple[int, Tensor, Tensor]:
    """Start of the pivot slice and factors of the pivoted form, as well conditioned as costs next to nothing.

    Inputs of equal power are pivoted on: else a feature that is always large makes a small change dear.
    """
    size = moments.covariance.diagonal().sqrt()
    rank = left.shape[1]
    accepted = _ACCEPTED * output_error(weight, left, right, moments, gradient) + ROUNDING[dtype]
    for floor in FLOORS:
        found = to_pivoted(left, right * size, dtype=dtype, residual=math.inf, floor=floor)
        assert found is not None
        _, rows = from_pivoted(found.left, found.right, found.start)
        rows = size[found.start : found.start + rank, None] * rows / size
        columns = _refit(anchored, rows, moments)
        best = found.start, columns, rows
        if output_error(weight, columns, rows, moments, gradient) <= accepted:
            break
    return best


def _refit(anchored: Tensor, right: Tensor, moments: Moments) -> Tensor:
    """The best left factor (O, r) for a right one: W C Bᵀ (B S Bᵀ)⁻¹, W C being what was anchored."""
    return solve(right @ moments.covariance @ right.T, (anchored @ right.T).T).T
