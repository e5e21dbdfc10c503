"""Magnitude pruning to 2:4: of every four inputs in a row the two smallest weights are zero.

Mishra et al., "Accelerating Sparse Deep Neural Networks", arXiv 2104.08378. Half of the numbers are stored,
and two bits for each of those to say where it is (1/32 of the dense float32 weight): a ratio of .53 where the
others have .5. Inputs beyond a multiple of four stay.
"""

import torch
from torch import Tensor, nn

from peers.job import Job, NotDefinedError
from peers.layers import with_matrix


def prune(weight: Tensor) -> Tensor:
    """(O, I) with half of its entries zero."""
    whole = weight.shape[1] // 4 * 4
    quads = weight[:, :whole].unflatten(1, (-1, 4))
    smallest = quads.abs().argsort(-1)[..., :2]
    kept = torch.scatter(quads, -1, smallest, 0.0)
    return torch.cat([kept.flatten(1), weight[:, whole:]], 1)


def compress(job: Job, ratio: float) -> nn.Module:
    """At 0.5 only."""
    if ratio != 0.5:
        raise NotDefinedError("2:4 keeps half, no other ratio")
    small = job.copy()
    for name in job.names:
        with_matrix(small.get_submodule(name), prune(job.weight(name)))
    return small
