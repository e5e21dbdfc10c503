"""The ways one weight may be stored: for each scheme, what a rank costs and what it keeps.

A planner compares candidates without knowing what kind of layer they come from.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from panther_compile.factorization.pivot import pivoted_numbers


class Candidate(ABC):
    """One scheme for one weight, as functions of a rank in 1..max_rank.

    Attributes:
        scheme: name of the scheme, as the report shows it.
        max_rank: the largest rank that makes sense.
        energies: float64 `(max_rank,)`, share of the weight's squared Frobenius norm kept at rank 1, 2, ...;
            None where it is unknown (too large to compute, or a meta tensor).
        whole: the rank that stands for the dense weight, if there is one.
        costs: what messages say of `numbers`: a verb, and what they count.
    """

    scheme: str
    max_rank: int
    energies: Tensor | None
    whole: int | None = None
    costs: ClassVar[tuple[str, str]] = ("store", "numbers")

    @abstractmethod
    def numbers(self, rank: int) -> int:
        """Stored numbers, bias not counted."""

    @abstractmethod
    def macs(self, rank: int) -> int:
        """Multiply-adds per row (Linear) or per output position (convolution)."""

    def ranks(self, rank: int) -> tuple[int, ...]:
        """The rank of each factor (two for Tucker-2)."""
        return (rank,)

    def error(self, rank: int) -> float | None:
        """Predicted relative Frobenius error of the best approximation of this rank."""
        if self.energies is None:
            return None
        return float((1.0 - self.energies[rank - 1]).clamp_min(0.0).sqrt())

    def largest_rank(self, numbers: int) -> int:
        """The largest rank that stores at most `numbers`; 0 if none does."""
        low, high = 0, self.max_rank
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.numbers(middle) <= numbers else (low, middle - 1)
        return low


class LinearCandidate(Candidate):
    """A matrix (O, I) as a plain pair of factors or in the pivoted form.

    Args:
        out_features: O.
        in_features: I.
        form: "pair" or "pivoted".
        singular_values: descending, `(min(O, I),)`, or None if unknown.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        form: str,
        *,
        singular_values: Tensor | None = None,
    ) -> None:
        self.scheme = form
        self.out_features, self.in_features = out_features, in_features
        self.max_rank = min(out_features, in_features) - (form == "pivoted")
        self.energies = None if singular_values is None else kept_energies(singular_values)

    def numbers(self, rank: int) -> int:
        """Stored numbers: r (O + I), or r (O + I - r) for the pivoted form."""
        if self.scheme == "pair":
            return rank * (self.out_features + self.in_features)
        return pivoted_numbers(self.out_features, self.in_features, rank)

    def macs(self, rank: int) -> int:
        """One multiply-add per stored weight."""
        coupled = rank * rank if self.scheme == "pivoted" else 0
        return rank * (self.out_features + self.in_features) - coupled


def kept_energies(singular_values: Tensor) -> Tensor:
    """Share of the squared Frobenius norm kept at each rank; ones for a zero matrix."""
    energies = singular_values.double().square().cumsum(dim=0)
    total = energies[-1]
    return torch.ones_like(energies) if total == 0 else energies / total
