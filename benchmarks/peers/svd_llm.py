"""SVD-LLM (W): Wang et al., "SVD-LLM: Truncation-aware Singular Value Decomposition", ICLR 2025.

With X^T X = R R^T, ||X W^T - X W'^T|| = ||(W - W') R||, so that W' = SVD_r(W R) R^-1 is the best of its rank
on the calibration inputs. R comes from eigh in place of Cholesky, as in their version 2: the same optimum,
and no failure on singular X^T X. Without their fine-tuning by LoRA.
"""

from peers.job import Job
from peers.nested import Factors
from peers.svd import decompose_matrix


def decompose(job: Job, name: str) -> Factors:
    """Whiten, factor, undo; the norms of the left columns are the singular values of W R."""
    root, inverse = job.statistics[name].root
    left, right = decompose_matrix(job.weight(name) @ root)
    return left, right @ inverse
