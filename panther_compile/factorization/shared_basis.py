"""Several weights (O, I) with one factor in common, the best in their Frobenius norm.

scheme "pair"      W_i ~ U U^T W_i    U (O, r): eigenvectors of the sum of W_i W_i^T, the largest r
scheme "pivoted"   W_i ~ W_i V V^T    V (I, r): of the sum of W_i^T W_i; then pivoted, see pivot.py
"""

# O out_features, I in_features, R rank
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.factorization.gram import gram
from panther_compile.factorization.pivot import to_pivoted


@torch.no_grad()
def shared_values(weights: Sequence[Tensor], scheme: str) -> Tensor:
    """Singular values of the weights beside one another, or below for "pivoted": float64, descending."""
    return torch.linalg.eigvalsh(_gram(weights, scheme)).flip(0).clamp_min(0.0).sqrt()


@torch.no_grad()
def shared_factors(weights: Sequence[Tensor], rank: int, scheme: str) -> list[FittedPair]:
    """The factors of each weight, without a bias; `left`, or `right` for "pivoted", is that of all.

    Args:
        weights: of one shape (O, I), dtype and device.
        rank: R, in 1..min(O, I), below it for "pivoted".
        scheme: see the module's docstring.
    """
    dense = [weight.detach().double() for weight in weights]
    values, vectors = torch.linalg.eigh(_gram(dense, scheme))
    basis = vectors[:, -rank:].flip(1)
    if scheme == "pair":
        return [FittedPair(basis, basis.T @ one, None, None, 0.0) for one in dense]
    residual = math.sqrt(max(0.0, float(values[:-rank].sum())))
    found = to_pivoted(torch.cat(dense) @ basis, basis.T, dtype=weights[0].dtype, residual=residual)
    assert found is not None
    return [FittedPair(left, found.right, found.start, None, 0.0) for left in found.left.split(len(dense[0]))]


def _gram(weights: Sequence[Tensor], scheme: str) -> Tensor:
    total: Tensor | None = None
    for weight in weights:
        dense = weight.detach().double()
        products = gram(dense.T if scheme == "pair" else dense)
        total = products if total is None else total.add_(products)
    assert total is not None
    return total
