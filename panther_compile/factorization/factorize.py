"""Low-rank factors of a weight matrix, W ~ left right, exactly or by random sketching.

Two methods:

    svd          G = W^T W (or W W^T, the smaller), G V = V S^2,  W ~ (W V_r) V_r^T   -> _truncate
    randomized   Y = (W W^T)^q W Omega, Q = orth(Y),  W ~ Q (Q^T W)_r                 -> _randomized

``svd`` is the best pair of its rank (Eckart and Young). ``randomized`` is Halko, Martinsson and
Tropp, SIAM Review 53 (2011), algorithms 4.4 (subspace iteration, QR in each half step) and 5.1. With
the default oversampling and iterations its error stays within 1.02 of the best one, also on flat
spectra, where fewer do not suffice.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.errors import ConfigError, RankError, WeightError, check_choice
from panther_compile.factorization.sketches import SKETCH_KINDS, make_sketch
from panther_compile.factorization.values import check_values

# O out_features, I in_features, r rank, s sketch columns, p probes

METHODS = ("auto", "svd", "randomized")
POWER_ITERATIONS = 3
_ALWAYS_EXACT = 512
_PROBE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """A low-rank pair, W ~ left right.

    Attributes:
        left: (O, r); float64 from "svd", from the others float64 for a float64 weight, else
            float32.
        right: (r, I), same dtype and device.
        method: "svd" or "randomized": the one used.
        error: relative Frobenius error ||W - left right|| / ||W||. From "svd" it is the tail of the
            singular values, exact down to about 1e-7, below which it is rounding. From the others it
            is ``probe_error``, an estimate. 0 for a zero matrix.
    """

    left: Tensor
    right: Tensor
    method: str
    error: float

    def residual(self, weight: Tensor) -> float:
        """Frobenius distance from left right to the weight (O, I) that was factorized."""
        return self.error * float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))


@torch.no_grad()
def factorize(
    weight: Tensor,
    rank: int,
    *,
    method: str = "auto",
    sketch: str = "gaussian",
    generator: torch.Generator,
    oversampling: int | None = None,
    power_iterations: int = POWER_ITERATIONS,
) -> LowRankPair:
    """Factorize a weight into a pair of the given rank.

    The work is done on the weight's device. The factors of "svd" and "randomized" are balanced:
    column i of ``left`` and row i of ``right`` both have norm sqrt(sigma_i), down to a floor that
    keeps them finite.

    Args:
        weight: (O, I), any real floating dtype; half types are lifted.
        rank: 1..min(O, I).
        method: "svd", "randomized", or "auto", which takes one of the two by ``choose_method``.
        sketch: test operator of "randomized", one of ``SKETCH_KINDS``.
        generator: source of all randomness; "svd" draws nothing.
        oversampling: columns the sketch has beyond the rank, max(10, rank / 4) unless given. The
            sketch never has more than min(O, I) columns.
        power_iterations: passes (W W^T) of "randomized".

    Returns:
        The factors, the method used and the error reached.

    Raises:
        ConfigError: the method or sketch is unknown, or oversampling or power_iterations negative.
        WeightError: the weight is no real floating matrix with entries, holds NaN or Inf, or is on
            the meta device.
        RankError: the rank is out of range.
    """
    check_choice("method", method, METHODS)
    check_choice("sketch", sketch, SKETCH_KINDS)
    if oversampling is None:
        oversampling = max(10, rank // 4)
    if oversampling < 0 or power_iterations < 0:
        raise ConfigError(
            f"oversampling={oversampling}, power_iterations={power_iterations}, wanted 0 or more"
        )
    if weight.ndim != 2:
        raise WeightError(f"weight of shape {tuple(weight.shape)}, wanted a matrix (O, I)")
    _check_values(weight)
    highest = min(weight.shape)
    if not 1 <= rank <= highest:
        raise RankError(f"rank={rank} for a weight of shape {tuple(weight.shape)}, wanted 1..{highest}")

    if method == "auto":
        method = choose_method(weight.shape[0], weight.shape[1], rank)
    if method == "svd":
        left, right, error = _truncate(weight, rank)
        return LowRankPair(left, right, method, error)
    work = weight if weight.dtype == torch.float64 else weight.float()
    columns = min(rank + oversampling, highest)
    left, right = _randomized(work, rank, columns, power_iterations, sketch, generator)
    return LowRankPair(left, right, method, probe_error(weight, left, right, generator=generator))


def choose_method(out_features: int, in_features: int, rank: int) -> str:
    """Choose between the exact and the randomized route.

    The exact route gives the better pair, so the randomized one must take about half its time or less.
    Measured in CPU time of one thread (AMD EPYC, torch 2.13 with MKL, float32 noise, Gaussian sketch,
    short sides of 512 to 4096), as rank / min(O, I):

        long / short side             1           2           4           8
        half the exact time at   0.24-0.27+  0.17-0.21   0.12-0.14   0.05-0.15
        as much time at          0.38-0.40   0.29-0.33   0.21-0.28   0.14-0.28
        rule                        0.25        0.15        0.10        0.075

    Up to 512 on the short side the exact route takes a tenth of a second or so and is always chosen.

    Args:
        out_features: O.
        in_features: I.
        rank: 1..min(O, I).

    Returns:
        "svd" or "randomized".
    """
    short, long = sorted((out_features, in_features))
    worthwhile = short > _ALWAYS_EXACT and rank <= short * (0.05 + 0.2 * short / long)
    return "randomized" if worthwhile else "svd"


def decomposition_work(out_features: int, in_features: int) -> float:
    """What the exact decompositions of a matrix take, its spectrum's and its factors', but for a common rate.

    Products with the Gram of the shorter side n take n² N, its eigenvectors some n³. The times of shapes from
    1024 x 3072 to 8192 x 2048 are proportional to it within a quarter (one core of an AMD EPYC, torch 2.13).
    """
    short, long = sorted((out_features, in_features))
    return float(short * short * (long + short))


@torch.no_grad()
def singular_values(weight: Tensor) -> Tensor:
    """Return the singular values, from the eigenvalues of the Gram of the smaller side in float64.

    Values below about 1e-8 of the largest are rounding.

    Args:
        weight: (..., m, n), any real floating dtype.

    Returns:
        (..., min(m, n)) float64, descending.

    Raises:
        WeightError: as for ``factorize``.
    """
    if weight.ndim < 2:
        raise WeightError(f"weight of shape {tuple(weight.shape)}, wanted (..., m, n)")
    _check_values(weight)
    unit, size = _to_unit_size(weight.double())
    gram = unit @ unit.mT if unit.shape[-2] <= unit.shape[-1] else unit.mT @ unit
    return torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0).sqrt() * size


@torch.no_grad()
def probe_error(
    weight: Tensor, left: Tensor, right: Tensor, *, generator: torch.Generator, probes: int = 16
) -> float:
    """Estimate the relative Frobenius error of a pair by Gaussian probes.

        ||(W - left right) Omega||_F / ||W||_F,   Omega (I, p)

    The square is unbiased, since E[Omega Omega^T] = 1; its relative deviation is sqrt(2 / p) at worst,
    for a residual of rank one, and less the flatter the residual. Computed in float64, in blocks of
    rows, so that no copy of the weight is made.

    Args:
        weight: (O, I), any real floating dtype.
        left: (O, r), any real floating dtype.
        right: (r, I), any real floating dtype.
        generator: source of the probes.
        probes: p.

    Returns:
        The estimate; for a zero weight 0 if the pair is zero too, else inf.
    """
    omega = make_sketch(
        "gaussian",
        weight.shape[1],
        probes,
        generator=generator,
        device=weight.device,
        dtype=torch.float64,
    )
    image_rp = omega.apply_right(right.double())
    residual = total = 0.0
    for weight_block, left_block in zip(weight.split(_PROBE_ROWS), left.split(_PROBE_ROWS), strict=True):
        block = weight_block.double()
        difference = omega.apply_right(block) - left_block.double() @ image_rp
        residual = math.hypot(residual, _norm(difference))
        total = math.hypot(total, _norm(block))
    if total == 0:
        return 0.0 if residual == 0 else math.inf
    return residual / total


def _truncate(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Truncated SVD, balanced, with its relative error; all in float64.

    V is orthonormal to rounding, so at full rank W V V^T = W to rounding: the small singular values
    that the Gram loses (below 1e-8 of the largest) cost no accuracy. The Gram is
    float64 for float32 weights too: a float32 one takes half the time, but on steep spectra the
    error rises (by 0.5 % where the best is 2e-3, 2.6 times where it is 1e-4).
    """
    if weight.shape[0] < weight.shape[1]:
        right_T, left_T, error = _truncate(weight.mT, rank)
        return left_T.mT, right_T.mT, error
    unit_OI, size = _to_unit_size(weight.double())
    eigenvalues, vectors = torch.linalg.eigh(unit_OI.mT @ unit_OI)  # ascending
    vectors_Ir = vectors[:, -rank:].flip(-1)
    left_Or = unit_OI @ vectors_Ir
    sigma_r = torch.linalg.vector_norm(left_Or, dim=0)
    # A floor only divides the two factors unevenly where there is next to nothing to divide.
    floor = torch.finfo(sigma_r.dtype).eps * sigma_r.max()
    root_r = torch.where(floor > 0, sigma_r.clamp_min(floor), 1.0).sqrt()
    left_Or = left_Or / root_r * size.sqrt()
    right_rI = (vectors_Ir * root_r).mT * size.sqrt()
    energies = eigenvalues.clamp_min(0)
    total = energies.sum()
    error = float((energies[:-rank].sum() / total).sqrt()) if total > 0 else 0.0
    return left_Or, right_rI, error


def _randomized(
    weight: Tensor,
    rank: int,
    columns: int,
    power_iterations: int,
    sketch: str,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Subspace iteration for the range, then the exact truncation of what lies in it."""
    unit_OI, size = _to_unit_size(weight)
    omega = make_sketch(
        sketch,
        weight.shape[1],
        columns,
        generator=generator,
        device=weight.device,
        dtype=weight.dtype,
    )
    range_Os = torch.linalg.qr(omega.apply_right(unit_OI)).Q
    for _ in range(power_iterations):
        corange_Is = torch.linalg.qr(unit_OI.mT @ range_Os).Q
        range_Os = torch.linalg.qr(unit_OI @ corange_Is).Q
    left_sr, right_rI, _ = _truncate(range_Os.mT @ unit_OI, rank)
    root = size.sqrt()
    return range_Os @ left_sr.to(weight.dtype) * root, right_rI.to(weight.dtype) * root


def _to_unit_size(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Divide by the largest entry, so that squares neither overflow nor vanish."""
    size = weight.abs().amax().clamp_min(torch.finfo(weight.dtype).tiny)
    return weight / size, size


def _norm(matrix: Tensor) -> float:
    unit, size = _to_unit_size(matrix)
    return float(torch.linalg.vector_norm(unit) * size)


def _check_values(weight: Tensor) -> None:
    """Raise WeightError unless the weight holds finite real floating numbers."""
    found = f"weight of shape {tuple(weight.shape)} and dtype {weight.dtype}"
    if not weight.is_floating_point() or weight.numel() == 0:
        raise WeightError(f"{found}, wanted a real floating dtype and at least one entry")
    check_values(weight, found)
