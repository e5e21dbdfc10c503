"""SoLA: Huang, Huang and Wen, "Soft Activation Sparsity and Low-Rank Decomposition for LLMs", AAAI 2025.

Of each feed-forward part the `PRIME` share of the neurons whose activations are largest in mean stay as they
are, in the layers before them and behind them; the rest of these layers, and the projections of attention,
are cut as by SVD-LLM. Ranks go to what keeps most of the singular energy: one component at a time, the one
with the largest share s_i^2 / sum s^2 of its matrix for what it stores. A matrix whose factors would store
more than it does stays whole. Neurons are put in order, prime ones first, so that nothing says which they
are.

The paper is read here from its abstract and the facts of its repository. There value projections, and blocks
at both ends, stay whole, and kinds of layers have one rank each; here all layers are cut, as by all methods.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peers.budget import pair_numbers
from peers.calibration import square_root
from peers.job import Job, NotDefinedError
from peers.layers import factored, linear_layer
from peers.nested import Factors
from peers.svd import decompose_matrix

PRIME = 0.15


class Writer(nn.Module):
    """Prime neurons (p, I), and the others, behind one another."""

    def __init__(self, prime: nn.Module, others: nn.Module) -> None:
        super().__init__()
        self.prime, self.others = prime, others

    def forward(self, x: Tensor) -> Tensor:
        """As the layer replaced, prime neurons first."""
        return torch.cat([self.prime(x), self.others(x)], -1)


class Reader(nn.Module):
    """What reads the prime neurons, and what reads the others."""

    def __init__(self, prime: nn.Linear, others: nn.Module) -> None:
        super().__init__()
        self.prime, self.others = prime, others

    def forward(self, x: Tensor) -> Tensor:
        """As the layer replaced, its inputs prime neurons first."""
        first = self.prime.in_features
        return self.prime(x[..., :first]) + self.others(x[..., first:])


@dataclass
class _Part:
    """What of a layer is cut: its bounds among neurons, and its factors.

    Attributes:
        order: of the layer's neurons, prime ones first; None for a layer of no neurons.
        is_writer: whether the neurons are outputs.
        prime: how many are.
        matrix: (O, I) that is cut.
        factors: of it, whitened.
    """

    order: Tensor | None
    is_writer: bool
    prime: int
    matrix: Tensor
    factors: Factors


def compress(job: Job, ratio: float) -> nn.Module:
    """Keep the prime neurons, cut the rest.

    Raises:
        NotDefinedError: the layers are not all linear, in blocks of one feed-forward part, or the prime
            neurons alone store more than asked.
    """
    if not job.is_linear or not job.blocks:
        raise NotDefinedError("SoLA is written for linear layers in blocks")
    if "sola" not in job.memory:
        job.memory["sola"] = _parts(job)
    parts: dict[str, _Part] = job.memory["sola"]
    cut = sum(part.matrix.numel() for part in parts.values())
    ranks = _ranks(parts, job.budget(ratio) - (job.budget(1.0) - cut))
    small = job.copy()
    for name, part in parts.items():
        small.set_submodule(name, _replacement(job.dense.get_submodule(name), part, ranks[name]))
    return small


def _parts(job: Job) -> dict[str, _Part]:
    orders: dict[str, tuple[Tensor, bool]] = {}
    for block in job.blocks:
        inside = [name for name in job.names if name.startswith(f"{block}.")]
        found = {
            reader: [name for name in inside if job.shapes[name] == (inputs, outputs)]
            for reader in inside
            for outputs, inputs in [job.shapes[reader]]
            if inputs > outputs
        }
        pairs = [(reader, writers) for reader, writers in found.items() if writers]
        if len(pairs) != 1:
            raise NotDefinedError(
                f"SoLA is written for one feed-forward part a block, {block} has {len(pairs)}"
            )
        reader, writers = pairs[0]
        order = job.statistics[reader].magnitude.argsort(descending=True)
        orders |= {reader: (order, False)} | dict.fromkeys(writers, (order, True))
    return {name: _part(job, name, *orders.get(name, (None, False))) for name in job.names}


def _part(job: Job, name: str, order: Tensor | None, is_writer: bool) -> _Part:
    matrix, gram = job.weight(name), job.statistics[name].gram
    prime = 0 if order is None else int(PRIME * len(order))
    if order is not None and is_writer:
        matrix = matrix[order[prime:]]
    elif order is not None:
        matrix, gram = matrix[:, order[prime:]], gram[order[prime:]][:, order[prime:]]
    root, inverse = square_root(gram)
    left, right = decompose_matrix(matrix @ root)
    return _Part(order, is_writer, prime, matrix, (left, right @ inverse))


def _ranks(parts: dict[str, _Part], budget: float) -> dict[str, int]:
    """As many components as fit, by the share of energy that each keeps for a stored number."""
    queue: list[tuple[float, str]] = []
    ranks, stored = dict.fromkeys(parts, 0), 0
    shares = {}
    for name, part in parts.items():
        energies = part.factors[0].square().sum(0)
        shares[name] = (energies / energies.sum() / pair_numbers(*part.matrix.shape, 1)).tolist()
        heapq.heappush(queue, (-1.0, name))  # one of each at least
    while queue:
        _, name = heapq.heappop(queue)
        outputs, inputs = parts[name].matrix.shape
        before = min(pair_numbers(outputs, inputs, ranks[name]), outputs * inputs)
        after = min(pair_numbers(outputs, inputs, ranks[name] + 1), outputs * inputs)
        if stored + after - before > budget:
            continue
        stored += after - before
        ranks[name] += 1
        if ranks[name] < min(outputs, inputs):
            heapq.heappush(queue, (-shares[name][ranks[name]], name))
    if min(ranks.values()) == 0:
        raise NotDefinedError(f"prime neurons alone store more than the {budget:.0f} numbers that are left")
    return ranks


def _replacement(layer: nn.Linear, part: _Part, rank: int) -> nn.Module:
    weight, bias, order, prime = layer.weight.detach(), layer.bias, part.order, part.prime
    if order is None:
        return _cut(layer, part, rank)
    bias = None if bias is None else bias.detach()
    if part.is_writer:
        biases: tuple[Any, Any] = (None, None) if bias is None else (bias[order[:prime]], bias[order[prime:]])
        others = linear_layer(part.matrix, biases[1])
        return Writer(linear_layer(weight[order[:prime]], biases[0]), _cut(others, part, rank))
    others = linear_layer(part.matrix, bias)
    return Reader(linear_layer(weight[:, order[:prime]], None), _cut(others, part, rank))


def _cut(layer: nn.Linear, part: _Part, rank: int) -> nn.Module:
    if pair_numbers(*part.matrix.shape, rank) >= part.matrix.numel():
        return layer
    left, right = part.factors
    return factored(layer, left[:, :rank], right[:rank])
