"""Swift-SVD, arXiv 2604.01609: optimal factors from the covariance of the outputs.

With the outputs Y = X W^T and Y^T Y = W X^T X W^T = V L V^T (eigh), W' = V_r V_r^T W: the optimum of SVD-LLM
(W) from one eigendecomposition of the outputs' covariance. Uniform ranks, without their dynamic allocation.
"""

import torch

from peers.job import Job
from peers.nested import Factors


def decompose(job: Job, name: str) -> Factors:
    """Project the outputs on their principal directions."""
    weight = job.weight(name)
    _, vectors = torch.linalg.eigh(weight @ job.statistics[name].gram @ weight.T)
    directions = vectors.flip(1)[:, : min(weight.shape)]
    return directions, directions.T @ weight
