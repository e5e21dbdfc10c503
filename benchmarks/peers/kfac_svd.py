"""KFAC-SVD with LEMS: Thoma et al., ICML 2026, "Advancing SVD-based LLM Compression via ... Model Search".

KFAC-SVD: with A = sum x x^T over the inputs and G = sum g g^T over the gradients at the outputs of single
tokens, A = R_A R_A^T and G = R_G R_G^T, W' = R_G^-T SVD_r(R_G^T W R_A) R_A^-1. `DAMPING` times the mean of
their diagonals is added to A and to G, more to G for images. Gradients of a token are scaled to a norm of
`CLIP` times the mean of their sequence; of sequences the first and last eighth is left out of G.

LEMS: the error of layer i at rank r is modelled as

    e_i(r) = KL_i tail_i(r) / tail_i(r_0) d(block of i),    d(b) = 1 + gamma h_b,

tail(r) the squared singular values behind the r-th, KL_i the divergence of the outputs when i alone has
rank r_0, a tenth of the one that stores as much as the layer, and h_b the sum of (k + 1)^-alpha over the
blocks k from b on, brought to 0 ... 1. An integer program chooses a rank for each layer or leaves it dense;
`TRIALS` draws of alpha and gamma are compared by the divergence of the whole model. Their sampler draws its
first ten trials at random, so these are random too. For images d = 1.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peers.budget import choose_one_each, pair_numbers
from peers.calibration import call, main_output, square_root
from peers.job import Job
from peers.layers import factored, with_matrix
from peers.loss import distance, is_language_model, loss_of, references
from peers.nested import Factors, nested
from peers.svd import decompose_matrix

INPUT_DAMPING, DAMPING, IMAGE_DAMPING = 0.1, 0.3, 0.7
CLIP = (0.1, 10.0)
EDGE = 8
MEASURED_AT, LEAST, LEAST_BELOW_HALF, MOST = 0.1, 0.3, 0.1, 0.95
TRIALS, ALPHAS, GAMMAS = 10, 3.0, 7.0
STEPS = 64  # ranks to choose from, of a layer


def decompose(job: Job, name: str) -> Factors:
    """Whiten both sides, factor, undo."""
    left, right, _ = _factors(job)[name]
    return left, right


uniform = nested("kfac-svd", decompose)


def compress(job: Job, ratio: float) -> nn.Module:
    """Choose the ranks by LEMS, then KFAC-SVD."""
    errors = _errors(job)
    vision = not _reads_tokens(job)
    drawn = random.Random(job.seed)
    dense = references(job.dense, list(job.batches))
    best: tuple[float, nn.Module] | None = None
    for _ in range(1 if vision else TRIALS):
        weights = _depth(job, drawn.uniform(0, ALPHAS), drawn.uniform(0, GAMMAS), vision)
        ranks = _choose(job, ratio, {name: weights[name] * errors[name] for name in job.names})
        small = _replaced(job, ranks)
        found = distance(small, list(job.batches), dense, job.outputs)
        if best is None or found < best[0]:
            best = found, small
    assert best is not None
    return best[1]


def _factors(job: Job) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Left, right and squared singular values of each layer."""
    if "kfac" not in job.memory:
        gradients = _gradients(job)
        damping = DAMPING if _reads_tokens(job) else IMAGE_DAMPING
        found = {}
        for name in job.names:
            root_in, inverse_in = square_root(job.statistics[name].gram, INPUT_DAMPING)
            root_out, inverse_out = square_root(gradients[name], damping)
            left, right = decompose_matrix(root_out.T @ job.weight(name) @ root_in)
            found[name] = inverse_out.T @ left, right @ inverse_in, left.square().sum(0)
        job.memory["kfac"] = found
    return job.memory["kfac"]


def _reads_tokens(job: Job) -> bool:
    first = job.batches[0]
    tensors = first.values() if isinstance(first, dict) else first if isinstance(first, tuple) else (first,)
    return any(not tensor.is_floating_point() for tensor in tensors)


def _gradients(job: Job) -> dict[str, Tensor]:
    """G of each layer, (O, O) in float64."""
    generator = torch.Generator().manual_seed(job.seed)
    sums: dict[str, Any] = dict.fromkeys(job.names, 0.0)
    given: dict[str, Tensor] = {}
    handles = [
        job.dense.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: given.__setitem__(name, out)
        )
        for name in job.names
    ]
    with torch.no_grad():
        cut = is_language_model(job.batches[0], main_output(call(job.dense, job.batches[0])))
    try:
        for batch in job.batches:
            loss = loss_of(job.dense, batch, job.outputs, generator)
            gradients = torch.autograd.grad(loss, [given[name] for name in job.names])
            for name, gradient in zip(job.names, gradients, strict=True):
                sums[name] += _outer(gradient, cut)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _outer(gradient: Tensor, cut: bool) -> Tensor:
    """The sum of g g^T over tokens of gradients (B, T, O), (B, O) or (B, O, H, W)."""
    if gradient.dim() == 4:
        gradient = gradient.flatten(2).transpose(1, 2)
    gradient = gradient.reshape(len(gradient), -1, gradient.shape[-1])
    edge = gradient.shape[1] // EDGE if cut else 0
    tokens = gradient[:, edge : gradient.shape[1] - edge].double()
    norms = tokens.norm(dim=2, keepdim=True)
    counted = (norms > 0).sum(1, keepdim=True).clamp_min(1)
    mean = norms.sum(1, keepdim=True) / counted
    wanted = torch.maximum(torch.minimum(norms, CLIP[1] * mean), CLIP[0] * mean)
    tokens = (tokens * (wanted / norms.clamp_min(1e-30))).flatten(0, 1)
    return tokens.T @ tokens


def _equal_rank(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] // sum(shape)


def _errors(job: Job) -> dict[str, Tensor]:
    """The modelled error of each layer by rank 0, 1, ..., without its depth."""
    if "lems" not in job.memory:
        dense = references(job.dense, list(job.batches))
        found = {}
        for name, (left, right, energies) in _factors(job).items():
            rank = max(1, int(MEASURED_AT * _equal_rank(job.shapes[name])))
            small = job.copy()
            with_matrix(small.get_submodule(name), left[:, :rank] @ right[:rank])
            measured = distance(small, list(job.batches), dense, job.outputs)
            tails = torch.cat([energies.sum()[None], energies.sum() - energies.cumsum(0)]).clamp_min(0)
            found[name] = measured * tails / tails[rank].clamp_min(1e-6 * tails[0])
        job.memory["lems"] = found
    return job.memory["lems"]


def _depth(job: Job, alpha: float, gamma: float, vision: bool) -> dict[str, float]:
    """The factor d of each layer, by the block that holds it."""
    if vision or not job.blocks:
        return dict.fromkeys(job.names, 1.0)
    count = len(job.blocks)
    sums = [sum((k + 1) ** -alpha for k in range(block, count)) for block in range(count)]
    span = max(sums[0] - sums[-1], 1e-12)
    heights = {name: (sums[place] - sums[-1]) / span for place, name in enumerate(job.blocks)}
    return {
        name: 1 + gamma * next((heights[b] for b in job.blocks if name.startswith(f"{b}.")), 0.0)
        for name in job.names
    }


def _choose(job: Job, ratio: float, errors: Mapping[str, Tensor]) -> dict[str, int | None]:
    """The ranks of least error in the budget, None for a layer that stays dense; by an integer program."""
    dense = {name: job.shapes[name][0] * job.shapes[name][1] for name in job.names}
    least = LEAST if ratio >= 0.5 else LEAST_BELOW_HALF
    columns: list[tuple[str, int | None, float, float]] = []
    for name in job.names:
        equal = _equal_rank(job.shapes[name])
        low, high = max(1, int(least * equal)), max(1, int(MOST * equal))
        columns.append((name, None, 0.0, dense[name]))
        for rank in sorted({round(one) for one in np.linspace(low, high, STEPS)}):
            columns.append((name, rank, float(errors[name][rank]), pair_numbers(*job.shapes[name], rank)))
    scale = 1 / max(max(column[2] for column in columns), 1e-30)
    return choose_one_each(
        [(*column[:2], column[2] * scale, column[3]) for column in columns], job.budget(ratio)
    )


def _replaced(job: Job, ranks: Mapping[str, int | None]) -> nn.Module:
    small = job.copy()
    for name, rank in ranks.items():
        if rank is not None:
            left, right, _ = _factors(job)[name]
            layer = small.get_submodule(name)
            small.set_submodule(name, factored(layer, left[:, :rank], right[:rank]))
    return small
