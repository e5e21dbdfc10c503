"""ROCKET: Ali et al., "Rapid Optimization via Calibration-guided Knapsack Enhanced Truncation", 2026.

With X^T X = R R^T, W R = A and V_r its first r right singular vectors, a weight is a dictionary of r rows and
coefficients C = A V_r, of which each output keeps s: those of the largest |c_oi| |R^-T v_i|^½, the geometric
mean of what a coefficient is worth for outputs and for the weight. The dictionary follows by least squares:

    W' = C_s D R^-1,    D = (C_s^T C_s + e I)^-1 C_s^T A

e is `DAMPING` times the mean of the diagonal. For each share of a layer's numbers the best r / s is found; a
multiple-choice knapsack then takes one share of each layer, the sum of |W - W'| / |W| being least.

Their count is r I + s O: where the coefficients are is free. Here it is stored, a bit for each, packed into
integers of 32 that count as a number each, so that what is written down is all that is needed. Their code
moves half a percent of the coefficients between outputs, and refines by descent; both are left out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.budget import choose_one_each
from peers.job import Job
from peers.layers import Factored, factored, first_layer
from peers.nested import Factors
from peers.svd import decompose_matrix

DAMPING = 1e-3
SHARES = [round(0.02 * step, 2) for step in range(2, 50)]
SPARSITIES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)  # r / s
BITS = 32


class Sparse(nn.Module):
    """A linear layer, or a 1 x 1 convolution, of few coefficients.

    Args:
        matrix: (O, r), mostly zeros.
        convolution: whether inputs are (B, r, H, W), else (..., r).
        bias: (O,) or None.
    """

    def __init__(self, matrix: Tensor, convolution: bool, bias: Tensor | None) -> None:
        super().__init__()
        self.shape, self.convolution = matrix.shape, convolution
        here = matrix != 0
        self.values = nn.Parameter(matrix[here].float())
        padded = F.pad(here.flatten().long(), (0, -here.numel() % BITS)).view(-1, BITS)
        words = (padded << torch.arange(BITS)).sum(1)
        self.register_buffer("places", words.where(words < 2**31, words - 2**32).to(torch.int32))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def matrix(self) -> Tensor:
        """(O, r)."""
        bits = (self.places[:, None] >> torch.arange(BITS)) & 1
        here = bits.flatten()[: self.shape.numel()].bool()
        return torch.zeros(self.shape.numel()).masked_scatter(here, self.values).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """As the dense layer of these coefficients."""
        matrix = self.matrix()
        return (
            F.conv2d(x, matrix[..., None, None], self.bias)
            if self.convolution
            else F.linear(x, matrix, self.bias)
        )


def stored(outputs: int, inputs: int, rank: int, kept: int) -> int:
    """Numbers of a dictionary and `kept` coefficients of each output, with their places if not all stay."""
    places = 0 if kept == rank else -(-outputs * rank // BITS)
    return rank * inputs + kept * outputs + places


def choices(outputs: int, inputs: int) -> dict[tuple[int, int], int]:
    """(r, s) to the numbers stored: for each share of the dense ones, each r / s."""
    found = {}
    for share in SHARES:
        for sparsity in SPARSITIES:
            place = 0.0 if sparsity == 1 else outputs / BITS
            rank = int(share * outputs * inputs / (inputs + outputs / sparsity + place))
            kept = int(rank / sparsity)
            if kept > 0 and rank <= min(outputs, inputs):
                found[rank, kept] = stored(outputs, inputs, rank, kept)
    return found


class _Layer:
    """A weight, its coefficients over singular vectors, and how well each choice does."""

    def __init__(self, job: Job, name: str) -> None:
        self.weight = job.weight(name)
        root, self.inverse = job.statistics[name].root
        self.target = self.weight @ root
        self.coefficients, self.directions = decompose_matrix(self.target)
        self.worth = self.coefficients.abs() * (self.directions @ self.inverse).norm(dim=1).sqrt()
        self.errors = {choice: self._error(*choice) for choice in choices(*self.weight.shape)}

    def factors(self, rank: int, kept: int) -> Factors:
        """(O, r) of which each row has `kept` coefficients, and the dictionary (r, I)."""
        left = self.coefficients[:, :rank]
        if kept == rank:
            return left, self.directions[:rank] @ self.inverse
        best = self.worth[:, :rank].topk(kept, 1).indices
        left = torch.zeros_like(left).scatter(1, best, left.gather(1, best))
        gram = left.T @ left
        gram.diagonal().add_(DAMPING * gram.diagonal().mean())
        return left, torch.linalg.solve(gram, left.T @ self.target) @ self.inverse

    def _error(self, rank: int, kept: int) -> float:
        left, right = self.factors(rank, kept)
        return float((self.weight - left @ right).norm() / self.weight.norm())


def compress(job: Job, ratio: float) -> nn.Module:
    """Choose shares by the knapsack, then factor."""
    if "rocket" not in job.memory:
        job.memory["rocket"] = {name: _Layer(job, name) for name in job.names}
    layers: dict[str, _Layer] = job.memory["rocket"]
    small = job.copy()
    for name, (rank, kept) in _choose(job, layers, ratio).items():
        left, right = layers[name].factors(rank, kept)
        layer = small.get_submodule(name)
        if kept == rank:
            small.set_submodule(name, factored(layer, left, right))
        else:
            tail = Sparse(left, isinstance(layer, nn.Conv2d), layer.bias)
            small.set_submodule(name, Factored(first_layer(layer, right), tail))
    return small


def _choose(job: Job, layers: dict[str, _Layer], ratio: float) -> dict[str, tuple[int, int]]:
    """(r, s) of each layer."""
    columns = [
        (name, choice, error, stored(*job.shapes[name], *choice))
        for name, layer in layers.items()
        for choice, error in layer.errors.items()
    ]
    return choose_one_each(columns, job.budget(ratio))
