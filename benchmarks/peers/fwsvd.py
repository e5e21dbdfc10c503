"""FWSVD: Hsu et al., "Language model compression with weighted low-rank factorization", ICLR 2022.

With the Fisher information of each weight estimated by its mean squared gradient and summed over a row, D =
diag(sqrt(sum_j F_ij)), minimise ||D W - D A B||: SVD of D W, then undo D. Their layer is x W, so that a row
belongs to an input: here it is a column. Their F takes the labels of the task; here targets are drawn from
the model itself (see `calibration.fisher`).
"""

from peers.job import Job
from peers.nested import Factors
from peers.svd import decompose_matrix

FLOOR = 1e-6  # of the mean importance: an input without gradient must not divide by zero


def decompose(job: Job, name: str) -> Factors:
    """Scale the inputs by their importance, factor, unscale."""
    importance = job.fisher[name].sum(0)
    scale = (importance + FLOOR * importance.mean()).sqrt()
    left, right = decompose_matrix(job.weight(name) * scale)
    return left, right / scale
