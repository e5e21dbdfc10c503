"""Layers that are given the same tensor, and one input factor for all of them.

    W₁ x, W₂ x, ... with Wᵢ of rank r apart:   Aᵢ (x₁ + Cᵢ x₂),   Σ r (Oᵢ + I - r) numbers
    with one input factor:                     Aᵢ (x₁ + C x₂),    r (Σ Oᵢ + I - r) numbers

At equal numbers r is larger in the second. It is the pivoted form of the stack of all Wᵢ, which is cut at
rank r as one matrix: with sᵢ Gᵢ = Kᵢ Kᵢᵀ the weight of an error at output i (`sensitivity.py`), the squared
errors of the rows Kᵢᵀ Wᵢ, one below the other, add up to the damage of all. Whether that is better depends on
how much the row spaces of the Wᵢ have in common, and on how their errors, which are alike then, add up in the
model: it is tried at equal numbers (`calibrate.py`).
"""

# O out_features, I in_features, R rank
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from panther_compile.factorization.fit_matrix import FittedPair, fit_matrix_to, shifted_bias
from panther_compile.factorization.gram import gram
from panther_compile.factorization.metric import rooted, unrooted
from panther_compile.factorization.moments import Moments
from panther_compile.factorization.pivot import from_pivoted, to_pivoted
from panther_compile.factorization.whiten import Root, lower_root, output_error
from panther_compile.kinds.targets import Target

MOST_WITH_PAIRS = 4  # layers of a group whose pairs are tried too


class InputGroups:
    """Finds the layers that are given the very same tensor in every batch, once in each."""

    def __init__(self) -> None:
        self._batch = -1
        self._seen: dict[int, tuple[str, Tensor]] = {}  # holds the tensors, so that no address is used again
        self._first: dict[str, dict[int, str]] = defaultdict(
            dict
        )  # by layer and batch, who had its input first
        self._repeated: set[str] = set()

    def see(self, batch: int, name: str, x: Tensor) -> None:
        """Tell of a layer's input."""
        if batch != self._batch:
            self._batch, self._seen = batch, {}
        if batch in self._first[name]:
            self._repeated.add(name)
        self._first[name][batch] = self._seen.setdefault(id(x), (name, x))[0]

    def found(self, targets: Mapping[str, Target]) -> Iterator[list[tuple[str, ...]]]:
        """Sets of layers that may share an input factor, for each group: all, and two of up to four."""
        groups: dict[object, list[str]] = defaultdict(list)
        for name, first in self._first.items():
            target = targets[name]
            if target.view.is_matrix and target.view.is_linear and name not in self._repeated:
                weight, bias = target.weight_and_bias()
                form = weight.shape[1], weight.dtype, weight.device, weight.requires_grad, bias is None
                groups[tuple(first.items()), form].append(name)
        for names in groups.values():
            pairs = itertools.combinations(names, 2) if 2 < len(names) <= MOST_WITH_PAIRS else ()
            if len(names) > 1:
                yield [tuple(names), *pairs]


@dataclass(frozen=True, slots=True)
class Stack:
    """Weights Wᵢ of one input as rows Kᵢᵀ Wᵢ of one matrix.

    Attributes:
        weight: float64 `(Σ Oᵢ, I)`.
        outputs: Oᵢ.
        roots: Kᵢ, lower triangular, float64 `(Oᵢ, Oᵢ)`, or its diagonal `(Oᵢ,)`; None for the identity.
    """

    weight: Tensor
    outputs: tuple[int, ...]
    roots: tuple[Tensor | None, ...]

    @classmethod
    def of(
        cls,
        weights: Sequence[Tensor],
        metrics: Iterable[Tensor | None],
        put: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ) -> Self:
        """The stack of Wᵢ `(Oᵢ, I)`.

        Args:
            weights: Wᵢ.
            metrics: the weights of their errors sᵢ Gᵢ, float64 `(Oᵢ, Oᵢ)`, their diagonals `(Oᵢ,)`, or None;
                taken one by one.
            put: what keeps a Kᵢ.
        """
        roots = tuple(None if one is None else _root(one, put) for one in metrics)
        dense = [weight.detach().double() for weight in weights]
        rows = [one if root is None else rooted(root, one) for root, one in zip(roots, dense, strict=True)]
        return cls(torch.cat(rows), tuple(len(one) for one in rows), roots)

    def parts(self, left: Tensor) -> tuple[Tensor, ...]:
        """The factors Aᵢ (Oᵢ, r) of the Wᵢ from the left factor (Σ Oᵢ, r) of the stack, float64."""
        return tuple(
            rows if root is None else unrooted(root, rows)
            for root, rows in zip(self.roots, left.split(self.outputs), strict=True)
        )


def _root(metric: Tensor, put: Callable[[Tensor], Tensor]) -> Tensor:
    """See `lower_root`; Kᵀ is what is contiguous."""
    found = lower_root(metric)
    return put(found) if found.dim() == 1 else put(found.T).T


def best_of_stack(stack: Stack, moments: Moments, root: Root) -> tuple[Tensor, Tensor]:
    """The factors left (Σ Oᵢ, m) and right (m, I), m = min(Σ Oᵢ, I), that `best_low_rank` finds.

    Args:
        stack: of weights.
        moments: see `Moments`.
        root: of its covariance, which stacks of one input have in common.
    """
    whitened = stack.weight @ (moments.cross @ root.inverse.T)
    vectors = torch.linalg.eigh(gram(whitened))[1][:, -min(whitened.shape) :].flip(1)
    return whitened @ vectors, vectors.T @ root.inverse


def fit_shared(
    targets: Sequence[Target], stack: Stack, moments: Moments, rank: int, dtype: torch.dtype
) -> list[FittedPair]:
    """Fit Wᵢ' z + bᵢ' to Wᵢ x + bᵢ with one input factor: of each, `down` and `start` are the same.

    Args:
        targets: the layers.
        stack: of their weights.
        moments: of x and z, about the means if the layers have biases.
        rank: r.
        dtype: in which the factors will be stored.
    """
    found = fit_matrix_to(stack.weight, None, moments, None, rank, pivoted=True, dtype=dtype)
    assert found.start is not None
    assert found.right is not None
    right = from_pivoted(found.left, found.right, found.start)[1]
    fitted = []
    for target, left in zip(targets, stack.parts(found.left), strict=True):
        weight, bias = target.weight_and_bias()
        dense = weight.detach().double()
        bias = shifted_bias(bias, dense @ moments.mean_x, left @ (right @ moments.mean_z))
        error = output_error(dense, left, right, moments)
        fitted.append(replace(found, left=left, bias=bias, output_error=error))
    return fitted


def cut_shared(
    targets: Sequence[Target], left: Tensor, right: Tensor, mean: Tensor, rank: int
) -> list[FittedPair]:
    """The same from the factors of the stack, see `Study.factors`, without moments."""
    dtype = targets[0].weight_and_bias()[0].dtype
    left, right, start = left[:, :rank].double(), right[:rank].double(), None
    down = right
    if targets[0].shared_scheme == "pivoted":
        found = to_pivoted(left, right, dtype=dtype, residual=math.inf)
        assert found is not None
        left, down, start = found.left, found.right, found.start
        right = from_pivoted(left, down, start)[1]
    cut = []
    for place, target in enumerate(targets):
        weight, bias = target.weight_and_bias()
        columns, rows, own = own_of_stack(targets, place, left, right, mean.double())
        bias = shifted_bias(bias, weight.detach().double() @ own, columns @ (rows @ own))
        cut.append(FittedPair(columns, rows if start is None else down, start, bias, 0.0))
    return cut


def own_of_stack(
    targets: Sequence[Target], place: int, left: Tensor, right: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer's part of the factors, and of the means of inputs, that several layers have in common.

    Args:
        targets: the layers.
        place: of the one asked for.
        left: `(Σ O, r)`, or `(O, r)` if it is common to all.
        right: `(r, Σ I)`, or `(r, I)`.
        mean: `(Σ I,)`, or `(I,)`.
    """
    outputs, inputs = zip(*(one.shape for one in targets), strict=True)
    return (
        left.split(outputs)[place] if len(left) == sum(outputs) else left,
        right.split(inputs, 1)[place] if right.shape[1] == sum(inputs) else right,
        mean.split(inputs)[place] if len(mean) == sum(inputs) else mean,
    )
