"""Steps that are as large for every factor as the weights that they change: Muon's, and Adam's for vectors.

The factors of one model differ in scale by orders of magnitude, so a rate is relative to the root mean square
of each tensor. Of a matrix whose mean gradient is U S Vᵀ a step is along U Vᵀ, as far in all directions
(Muon, Jordan et al., 2024, kellerjordan.github.io/posts/muon), where Adam's is as far in all entries.
A pivoted weight A [1 C] needs more: its C is as badly conditioned as the pivot columns are, and steps of one
size do harm in some directions and nothing in others. There steps are taken in the coordinates (AᵀA)^½ C and
A (1 + C Cᵀ)^½, in which one is as long as the change of the weight that it makes (the metric of ScaledGD,
Tong, Ma & Chi, JMLR 2021).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from panther_compile.factorization.pivot import from_pivoted
from panther_compile.layers.base import SketchedLayer

BETAS = (0.9, 0.99)
CLIP = 3.0  # gradients above this multiple of their usual norm are scaled down
MOST_GAIN = 0.3  # of the loss, that a step may take
_NEWTON, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # Muon's own
_SMALLEST = 1e-30
# Added to the size that a gradient is divided by, the second as a share of its mean in the factor. Squares
# of gradients below 1e-22, as of dead channels, are 0 in float32: they would be divided by next to nothing.
_LEAST, _LEAST_SHARE = 1e-18, 1e-6
_FLOOR = 1e-4  # of the eigenvalues of a metric, relative to their mean


@dataclass(frozen=True, slots=True)
class Factor:
    """A parameter that learns.

    Attributes:
        parameter: seen as a matrix (n, m), its first dimension against the others.
        scale: root mean square of its entries; in the coordinates below that which gives it the norm of the
            whole weight.
        left: M^-½ (n, n), where steps are taken in M^½ of the parameter.
        right: the same (m, m), from the right.
    """

    parameter: nn.Parameter
    scale: float
    left: Tensor | None = None
    right: Tensor | None = None

    def bend(self, change: Tensor) -> Tensor:
        """A gradient in the coordinates of steps, or a step in those of the parameter (n, m)."""
        if self.left is not None:
            change = self.left @ change
        return change if self.right is None else change @ self.right


@torch.no_grad()
def factors_of(layers: Iterable[SketchedLayer], learnt: Iterable[nn.Parameter]) -> list[Factor]:
    """The parameters that learn, those of pivoted layers with the coordinates of their steps."""
    found: dict[int, Factor] = {}
    pivoted: dict[int, list[SketchedLayer]] = {}  # by the input factor, which several may share
    for part in (part for layer in layers for part in layer.modules()):
        if (
            isinstance(part, SketchedLayer)
            and getattr(part, "scheme", None) == "pivoted"
            and _has_own_factors(part)
        ):
            pivoted.setdefault(id(part.down.weight), []).append(part)  # type: ignore[union-attr]
    for parts in pivoted.values():
        for factor in _pivoted_factors(parts):
            found.setdefault(id(factor.parameter), factor)
    for parameter in learnt:
        found.setdefault(id(parameter), Factor(parameter, _rms(parameter)))
    # A bias of zeros has no scale of its own: it takes one of the others.
    scales = sorted(factor.scale for factor in found.values() if factor.scale) or [1.0]
    usual = scales[len(scales) // 2]
    return [f if f.scale else Factor(f.parameter, usual, f.left, f.right) for f in found.values()]


def _has_own_factors(layer: SketchedLayer) -> bool:
    """Whether both factors are parameters; those that are pruned or parametrized are made of others."""
    weights = (layer.down.weight, layer.up.weight)  # type: ignore[union-attr]
    return all(isinstance(weight, nn.Parameter) for weight in weights)


def _pivoted_factors(layers: Sequence[SketchedLayer]) -> Iterator[Factor]:
    """Factors of layers with one input factor, which changes the weights of all."""
    down: nn.Parameter = layers[0].down.weight  # type: ignore[assignment, union-attr]
    first = layers[0].rank_first
    ups: dict[int, nn.Parameter] = {id(layer.up.weight): layer.up.weight for layer in layers}  # type: ignore[misc, union-attr]
    matrices = {key: up.flatten(1).double() for key, up in ups.items()}
    if first:
        matrices = {key: matrix.T for key, matrix in matrices.items()}
    stack = torch.cat(list(matrices.values()))
    _, right = from_pivoted(stack, down.flatten(1).double(), 0)
    size = float(torch.linalg.norm(stack @ right))
    yield Factor(down, size / down.numel() ** 0.5, left=_inverse_root(stack.T @ stack))
    root = _inverse_root(right @ right.T)
    for key, up in ups.items():
        size = float(torch.linalg.norm(matrices[key] @ right))
        sides = (root, None) if first else (None, root)
        yield Factor(up, size / up.numel() ** 0.5, *sides)


def _inverse_root(metric: Tensor) -> Tensor:
    """M^-½ in float32 of a symmetric matrix, its small eigenvalues lifted."""
    values, vectors = torch.linalg.eigh(metric)
    floor = _FLOOR * values.mean().clamp_min(_SMALLEST)
    return ((vectors * values.clamp_min(floor).rsqrt()) @ vectors.T).float()


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


@dataclass(frozen=True, slots=True)
class _Learning:
    """A factor with what steps along it are made of, float32.

    Attributes:
        factor: that learns.
        master: its numbers: steps of a thousandth would be lost in the rounding of half types.
        mean: of its gradients, as a matrix in the coordinates of steps.
        square: mean of their squares; None of a matrix, whose steps need none.
    """

    factor: Factor
    master: Tensor
    mean: Tensor
    square: Tensor | None

    @classmethod
    def of(cls, factor: Factor) -> Self:
        """A factor that no gradient was seen of."""
        master = factor.parameter.detach().float().clone()
        mean = torch.zeros_like(_matrix(master))
        return cls(factor, master, mean, torch.zeros_like(mean) if min(mean.shape) == 1 else None)

    def next_step(self, gradient: Tensor, taken: int) -> tuple[Tensor, Tensor]:
        """The step, over the scale of the factor and the rate, and what the loss would lose, were it linear.

        Args:
            gradient: of the factor.
            taken: steps, this one counted.
        """
        bent = self.factor.bend(_matrix(gradient))
        self.mean.lerp_(bent, 1 - BETAS[0])
        mean = self.mean / (1 - BETAS[0] ** taken)
        if self.square is None:
            step = max(mean.shape) ** 0.5 * evened(mean.lerp(bent, 1 - BETAS[0]))
        else:
            self.square.mul_(BETAS[1]).addcmul_(bent, bent, value=1 - BETAS[1])
            size = (self.square / (1 - BETAS[1] ** taken)).sqrt_()
            step = mean / size.add_(_LEAST_SHARE * size.mean() + _LEAST)
        return step, self.factor.scale * (mean * step).sum()

    def take(self, step: Tensor, rate: float) -> None:
        """Go along a step."""
        _matrix(self.master).sub_(self.factor.bend(step), alpha=rate * self.factor.scale)
        self.factor.parameter.copy_(self.master)


def evened(matrix: Tensor) -> Tensor:
    """U Vᵀ of a matrix U S Vᵀ (n, m), nearly: singular values between .7 and 1.2, small ones below.

    One of next to nothing stays that. By Newton-Schulz iterations x ← (a + b q + c q²) x, q = x xᵀ, which are
    polynomials of the first q alone.
    """
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.abs().amax().clamp_min(_LEAST)
    wide = wide / torch.linalg.vector_norm(wide).clamp_min(1.0)
    square = wide @ wide.T
    made: Tensor | None = None
    for _ in range(_ITERATIONS):
        factor = _NEWTON[1] * square + _NEWTON[2] * (square @ square)
        factor.diagonal().add_(_NEWTON[0])
        made = factor if made is None else made @ factor
        square = factor @ factor @ square
    assert made is not None
    wide = made @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class Descent:
    """Muon and Adam in float32 on some factors.

    Args:
        factors: to be changed.
    """

    def __init__(self, factors: Sequence[Factor]) -> None:
        self._taken = 0
        self._usual = 0.0
        self._all = [_Learning.of(factor) for factor in factors]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], loss: float, rate: float) -> None:
        """Take a step.

        Args:
            gradients: of the factors; None of one that the loss does not reach.
            loss: whose gradients they are. A step that would take more than `MOST_GAIN` of it, were it
                linear, is cut to that, as in Polyak's rule: no loss is below 0.
            rate: change of an entry over the factor's scale; of a matrix the root mean square.
        """
        self._taken += 1
        clip = self._clip([gradient for gradient in gradients if gradient is not None])
        steps = [
            (one, *one.next_step(gradient.float() * clip, self._taken))
            for one, gradient in zip(self._all, gradients, strict=True)
            if gradient is not None
        ]
        gain = rate * float(sum(gain for _, _, gain in steps))
        rate *= min(1.0, MOST_GAIN * loss / gain) if gain > 0 else 1.0
        for one, step, _ in steps:
            one.take(step, rate)

    def _clip(self, gradients: Sequence[Tensor]) -> float:
        """The number to scale gradients by, so that no single batch outdoes the others."""
        norm = float(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients]).norm())
        clip = min(1.0, CLIP * self._usual / norm) if self._usual and norm else 1.0
        self._usual += (clip * norm - self._usual) / min(self._taken, 20)
        return clip


def _matrix(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, a vector as one row."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.view(1, -1)
