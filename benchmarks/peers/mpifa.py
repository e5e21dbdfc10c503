"""MPIFA: Zhao et al., "Pivoting Factorization: A Compact Meta Low-Rank Representation", 2025.

Layer by layer: SVD-LLM (W) on the compressed inputs X', then their reconstruction against a mixed target, Y
= W (m X + (1 - m) X') with m = 0.25: the left factor by least squares given the right one, then the right
one given the left one, damped towards the weight. Stored as r pivot rows and coefficients for the others, so
that the rank solves r (O + I - r) + O = ratio O I; the order of the rows is counted.
"""

import torch
from torch import Tensor, nn

from peers.budget import pivoted_numbers
from peers.calibration import DAMPING, square_root
from peers.job import Job
from peers.layers import pivoted
from peers.nested import Factors
from peers.sequential import Drift, replace_in_order
from peers.svd import decompose_matrix

MIX = 0.25


def reconstruct(weight: Tensor, rank: int, drift: Drift) -> Factors:
    """Whiten and truncate, then refit both factors."""
    root, inverse = square_root(drift.now)
    _, right = decompose_matrix(weight @ root)
    right = right[:rank] @ inverse
    damping = DAMPING * drift.now.diagonal().mean() * torch.eye(len(drift.now), dtype=weight.dtype)
    now = drift.now + damping
    target = weight @ (MIX * drift.cross + (1 - MIX) * drift.now + damping)
    left = torch.linalg.solve(right @ now @ right.T, right @ target.T).T
    inner = torch.linalg.solve(left.T @ left, left.T @ target)
    return left, inner @ inverse.T @ inverse


def compress(job: Job, ratio: float) -> nn.Module:
    """Layer by layer."""
    ranks = job.ranks(ratio, pivoted_numbers)

    def fit(layer: nn.Module, weight: Tensor, name: str, drift: Drift) -> nn.Module:
        return pivoted(layer, *reconstruct(weight, ranks[name], drift))

    return replace_in_order(job, fit)
