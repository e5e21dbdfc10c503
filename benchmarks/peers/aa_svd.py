"""AA-SVD: "AA-SVD: Anchored and Adaptive SVD for Large Language Model Compression", arXiv 2604.02119.

Their objective 4: min over rank r of ||W X - W' X'||, X the inputs of the dense model and X' those after the
layers before are compressed. With X' X'^T = R R^T and C = X X'^T it is W' = SVD_r(W C R^-T) R^-1. Uniform
ranks. The refined form then trains the factors of each block by Adam towards the outputs of the dense block,
on the block's compressed inputs; rates are relative to the RMS of each factor, and a block that got worse on
the last batch, which is not trained on, is put back.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peers.calibration import DAMPING, main_output, square_root, told
from peers.job import Job, NotDefinedError
from peers.layers import Factored, factored
from peers.nested import Factors
from peers.sequential import Call, Drift, replace_in_order
from peers.svd import decompose_matrix

STEPS, RATE = 60, 3e-3


def decompose(weight: Tensor, drift: Drift) -> Factors:
    """The anchored optimum of every rank; damped towards the weight itself as the inverse is."""
    _, inverse = square_root(drift.now)
    damping = DAMPING * drift.now.diagonal().mean()
    anchored = weight @ drift.cross + damping * weight
    left, right = decompose_matrix(anchored @ inverse.T)
    return left, right @ inverse


def compress(job: Job, ratio: float) -> nn.Module:
    """Objective 4, layer by layer."""
    return _compress(job, ratio, refined=False)


def compress_and_refine(job: Job, ratio: float) -> nn.Module:
    """Objective 4, layer by layer, and training of each block."""
    if not job.blocks:
        raise NotDefinedError("refinement needs a chain of blocks, this model has none")
    return _compress(job, ratio, refined=True)


def _compress(job: Job, ratio: float, *, refined: bool) -> nn.Module:
    ranks = job.ranks(ratio)

    def fit(layer: nn.Module, weight: Tensor, name: str, drift: Drift) -> nn.Module:
        left, right = decompose(weight, drift)
        return factored(layer, left[:, : ranks[name]], right[: ranks[name]])

    return replace_in_order(job, fit, refine if refined else None)


def refine(block: nn.Module, batches: Sequence[Any], calls: list[Call], wanted: list[Tensor]) -> None:
    """Train the factors of a block, in place."""
    pairs = (module for module in block.modules() if isinstance(module, Factored))
    factors = [factor.weight for pair in pairs for factor in pair]
    before = copy.deepcopy(block.state_dict())
    groups = [{"params": [p], "lr": RATE * float(p.detach().square().mean().sqrt())} for p in factors]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    start = float(_error(block, batches[-1], calls[-1], wanted[-1]))
    for step in range(STEPS):
        place = step % max(1, len(calls) - 1)
        loss = _error(block, batches[place], calls[place], wanted[place])
        gradients = torch.autograd.grad(loss, factors)
        for parameter, gradient in zip(factors, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    if not float(_error(block, batches[-1], calls[-1], wanted[-1])) < start:
        block.load_state_dict(before)


def _error(block: nn.Module, batch: Any, given: Call, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(told(batch, main_output(given.run(block))), told(batch, wanted))
