"""ASVD: Yuan et al., "ASVD: Activation-aware Singular Value Decomposition", arXiv 2312.05821.

W = (W S) S^-1 with S = diag(mean |x_i| ^ alpha), alpha = 0.5; SVD of W S, then undo S. Without their search
of a rank for each layer, which needs labelled data: all methods have uniform ratios.
"""

from peers.job import Job
from peers.nested import Factors
from peers.svd import decompose_matrix

ALPHA = 0.5
FLOOR = 1e-3  # of the mean magnitude


def decompose(job: Job, name: str) -> Factors:
    """Scale the inputs by their magnitude, factor, unscale."""
    magnitude = job.statistics[name].magnitude
    scale = (magnitude + FLOOR * magnitude.mean()) ** ALPHA
    left, right = decompose_matrix(job.weight(name) * scale)
    return left, right / scale
