"""Factors that survive int8: a plain pair whose latent is even, where a pair pays at all.

Any invertible matrix M between two factors is free, W = (A M⁻¹) (M B). In the pivoted form there is no such
choice, and little is left after rounding: the columns of A are nearly dependent, so that the latent is large
and cancels, and each of its rounding errors comes out many times as large. Here, with S = E[x xᵀ],

    W S^½ = U diag(s) Vᵀ,    left = U √s Qᵀ,    right = Q √s Vᵀ S^-½

The square roots make what a latent feature is rounded by as large as what comes out of that, which minimises
the sum over the features; Q, orthogonal, makes all features alike, so that one range fits them. Measured on
all-MiniLM-L6-v2 at ratio .75, weights in int8, activations in dynamic uint8 (`docs/benchmarks/quantize.md`):
Spearman .884 in the pivoted form, .961 as pairs with S and Q the identity, .972 with S from data, .974 with Q
too; .981 before rounding.
"""

import math

import torch
from torch import Tensor

from panther_compile.factorization.whiten import lower_root

# What moving a number in or out of an int8 product costs, in multiply-adds: ONNX Runtime 1.32, AVX-512 VNNI.
_MOVED = 100
_CLAMP = 1e-9  # relative, of singular values


def balanced(left: Tensor, right: Tensor, covariance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The factors left (O, r) and right (r, I) of the same matrix, float64, with an even latent.

    Args:
        left: `(O, r)`, r at most O and I.
        right: `(r, I)`.
        covariance: S, `(I, I)`, second moments of the input; None for the identity.
    """
    left, right = left.double(), right.double()
    seen = right if covariance is None else right @ lower_root(covariance.double())
    outer, upper = torch.linalg.qr(left)
    vectors, values, _ = torch.linalg.svd(upper @ seen, full_matrices=False)
    sizes = values.clamp_min(_CLAMP * float(values[0].clamp_min(1e-30))).sqrt()
    turn = _cosines(len(sizes)).to(outer)
    return outer @ (vectors * sizes) @ turn.T, turn @ ((vectors.T @ upper @ right) / sizes[:, None])


def _cosines(size: int) -> Tensor:
    """The orthogonal matrix of the discrete cosine transform, whose entries are all of like size."""
    places = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi / size * places[:, None] * (places + 0.5)) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves


def int8_time(out_features: int, in_features: int, rank: int | None = None) -> int:
    """Time of a row in int8 on a CPU, in multiply-adds: of a pair of a rank, or of the dense product."""
    moved = _MOVED * (out_features + in_features)
    if rank is None:
        return out_features * in_features + moved
    return rank * (out_features + in_features) + moved + 2 * _MOVED * rank


def pays_in_int8(out_features: int, in_features: int, rank: int) -> bool:
    """Whether a pair of a rank takes less time than the dense product, both in int8 on a CPU."""
    return int8_time(out_features, in_features, rank) < int8_time(out_features, in_features)
