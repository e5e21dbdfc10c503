"""Panther's copy of a dense weight: arXiv 2601.15473, `SKLinear(W_init=...)` and `SKConv2d`, one term.

W ~ (U1^T U1 W + W U2^T U2) / 2 with random signs U1 (k, O) and U2 (k, I) over sqrt(k); both the sketches and
the signs are stored, 2 k (O + I) numbers. Convolutions have the first half alone, with 2 k rows in U1.
"""

import torch
from torch import Tensor, nn

from peers.job import Job
from peers.layers import factored
from peers.nested import Factors


def sketch(weight: Tensor, terms: int, generator: torch.Generator, *, convolution: bool) -> Factors:
    """Left (O, 2 k) and right (2 k, I)."""
    outputs, inputs = weight.shape

    def signs(rows: int, columns: int) -> Tensor:
        drawn = torch.randint(0, 2, (rows, columns), generator=generator, dtype=weight.dtype)
        return (2 * drawn - 1) / rows**0.5

    if convolution:
        u1 = signs(2 * terms, outputs)
        return u1.T, u1 @ weight
    u1, u2 = signs(terms, outputs), signs(terms, inputs)
    return torch.cat([u1.T / 2, weight @ u2.T / 2], 1), torch.cat([u1 @ weight, u2])


def compress(job: Job, ratio: float) -> nn.Module:
    """Sketch every layer."""
    generator = torch.Generator().manual_seed(job.seed)
    small = job.copy()
    terms = job.ranks(ratio, lambda o, i, k: 2 * k * (o + i))
    for name in job.names:
        layer = small.get_submodule(name)
        pair = sketch(job.weight(name), terms[name], generator, convolution=isinstance(layer, nn.Conv2d))
        small.set_submodule(name, factored(layer, *pair))
    return small
