"""Truncated SVD, W ~ U_r S_r V_r^T: the best of its rank for the weight itself (Eckart and Young, 1936)."""

import torch
from torch import Tensor

from peers.job import Job
from peers.nested import Factors


def decompose_matrix(matrix: Tensor) -> Factors:
    """(U S, V^T), from eigh of the smaller of M M^T and M^T M: several times faster than a float64 SVD."""
    wide = matrix.shape[0] <= matrix.shape[1]
    tall = matrix.T if wide else matrix
    _, vectors = torch.linalg.eigh(tall.T @ tall)
    directions = vectors.flip(1)
    scaled = tall @ directions
    if not wide:
        return scaled, directions.T
    values = scaled.norm(dim=0).clamp_min(torch.finfo(matrix.dtype).tiny)
    return directions * values, (scaled / values).T


def decompose(job: Job, name: str) -> Factors:
    """The singular value decomposition of the weight."""
    return decompose_matrix(job.weight(name))
