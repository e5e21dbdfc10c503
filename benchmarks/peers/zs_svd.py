"""ZS-SVD: Abbasi et al., "Zero Sum SVD: Balancing Loss Sensitivity for Low Rank LLM Compression", ICML 2026.

With X^T X = S S^T, A = W S = U diag(s) V^T and the mean gradient of the loss at W in those coordinates, H =
(dL/dW) S^-T, leaving component i out changes the loss by d_i = -s_i u_i^T H v_i, to first order. Components
of all layers are left out one at a time, of a layer from the smallest s_i on: the one of least |d_i| among
those whose sign brings the running sum of the d_i back to zero. What is left out counts from the rank down
at which two factors store less than the layer. Between `STAGES` of truncation each truncated weight takes a
step towards the dense one, the projection of W - W' on the gradient at W', and has its full rank again.
"""

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peers.budget import pair_numbers
from peers.job import Job
from peers.layers import factored, weight_matrix, with_matrix
from peers.loss import loss_of
from peers.nested import Factors
from peers.svd import decompose_matrix

STAGES = 6


@dataclass
class _Layer:
    """A layer while components are left out of it: its factors, the d_i, and how many are kept."""

    factors: Factors
    changes: list[float]
    kept: int
    dense: int
    pair: int

    @property
    def numbers(self) -> int:
        return min(self.dense, self.kept * self.pair)


def compress(job: Job, ratio: float) -> nn.Module:
    """Truncate and correct by turns; the last turn truncates."""
    total = sum(outputs * inputs for outputs, inputs in job.shapes.values())
    budget = job.budget(ratio)
    model = job.copy()
    for stage in range(1, STAGES + 1):
        layers = _layers(job, model)
        _leave_out(layers, total - (total - budget) * stage / STAGES)
        if stage == STAGES:
            break
        truncated = [name for name, layer in layers.items() if layer.numbers < layer.dense]
        for name, layer in layers.items():
            if name in truncated:
                left, right = layer.factors
                with_matrix(model.get_submodule(name), left[:, : layer.kept] @ right[: layer.kept])
            else:
                with_matrix(model.get_submodule(name), job.weight(name))
        _correct(job, model, truncated)
    small = job.copy()
    for name, layer in layers.items():
        if layer.numbers < layer.dense:
            left, right = layer.factors
            cut = left[:, : layer.kept], right[: layer.kept]
            small.set_submodule(name, factored(small.get_submodule(name), *cut))
    return small


def _layers(job: Job, model: nn.Module) -> dict[str, _Layer]:
    gradients = _mean_gradients(job, model)
    found = {}
    for name in job.names:
        root, inverse = job.statistics[name].root
        left, right = decompose_matrix(weight_matrix(model.get_submodule(name)) @ root)
        # left holds u_i s_i, so that the d_i need no singular values
        changes = -((left.T @ gradients[name] @ inverse.T) * right).sum(1)
        outputs, inputs = job.shapes[name]
        pair = pair_numbers(outputs, inputs, 1)
        found[name] = _Layer(
            (left, right @ inverse), changes.tolist(), min(outputs, inputs), outputs * inputs, pair
        )
    return found


def _leave_out(layers: dict[str, _Layer], budget: float) -> None:
    """Lower `kept` of the layers until they store no more than the budget."""
    queues: dict[bool, list[tuple[float, str]]] = {True: [], False: []}

    def offer(name: str) -> None:
        layer = layers[name]
        if layer.kept > 1:
            change = layer.changes[layer.kept - 1]
            heapq.heappush(queues[change > 0], (abs(change), name))

    for name in layers:
        offer(name)
    stored, drift = sum(layer.numbers for layer in layers.values()), 0.0
    while stored > budget:
        wanted = drift <= 0
        queue = queues[wanted] or queues[not wanted]
        if not queue:
            raise ValueError(f"{budget:.0f} numbers are fewer than those of rank 1 everywhere")
        _, name = heapq.heappop(queue)
        layer = layers[name]
        before = layer.numbers
        drift += layer.changes[layer.kept - 1]
        layer.kept -= 1
        stored -= before - layer.numbers
        offer(name)


def _correct(job: Job, model: nn.Module, names: list[str]) -> None:
    """W' + <G, W - W'> / <G, G> G, with G the mean gradient at W'."""
    gradients = _mean_gradients(job, model)
    for name in names:
        layer, gradient = model.get_submodule(name), gradients[name]
        weight = weight_matrix(layer)
        share = ((job.weight(name) - weight) * gradient).sum() / gradient.square().sum().clamp_min(1e-30)
        with_matrix(layer, weight + share * gradient)


def _mean_gradients(job: Job, model: nn.Module) -> dict[str, Tensor]:
    """(O, I) in float64."""
    generator = torch.Generator().manual_seed(job.seed)
    weights = [model.get_submodule(name).weight for name in job.names]
    sums = [torch.zeros(w.flatten(1).shape, dtype=torch.float64) for w in weights]
    for batch in job.batches:
        found = torch.autograd.grad(loss_of(model, batch, job.outputs, generator), weights)
        for total, gradient in zip(sums, found, strict=True):
            total += gradient.flatten(1).double()
    return dict(zip(job.names, sums, strict=True))
