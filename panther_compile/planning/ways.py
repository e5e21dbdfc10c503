"""The ways to store a weight, what each costs and what it is worth.

A way is a candidate and its rank; None leaves the weight as it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.factorization import cost
from panther_compile.factorization.candidates import Candidate
from panther_compile.planning.coupled import SCHEME
from panther_compile.records import Unit

# A sketched weight keeps at least FLOOR of its share of the budget, and at most CEILING of its dense numbers.
FLOOR, CEILING = 0.3, 0.95
EXACT = 1e-9  # of the energy: a cut that loses no more is off by rounding alone
# Decay of the squared singular values, i^-0.5, assumed where a spectrum is unknown.
_ASSUMED_DECAY = -0.5
FINEST = -1  # in place of a multiple: the one of `cost.finest_step`


@dataclass(frozen=True, slots=True)
class Allocation:
    """How a budget is divided.

    Attributes:
        name: "energy" maximises the product of the kept energies; "balanced" that of their powers, by the
            root of each weight's numbers; "sensitivity" minimises the sum of what is lost, weighted;
            "uniform" gives every weight its own share.
        damage: for "sensitivity", what losing a weight altogether does to the result, by unit.
    """

    name: str
    damage: Mapping[str, float] = field(default_factory=dict)

    def value(self, unit: Unit, candidate: Candidate) -> Tensor:
        """What each rank is worth (max_rank,)."""
        energies = _energies(candidate)
        known = energies if self.name == "sensitivity" else energies.clamp_min(1e-30).log()
        return self.weight(unit) * known

    def most(self, unit: Unit) -> float:
        """What the whole weight is worth."""
        return self.weight(unit) if self.name == "sensitivity" else 0.0

    def weight(self, unit: Unit) -> float:
        """How much the kept energy of a unit, or its logarithm, counts beside that of others."""
        if self.name == "sensitivity":
            return self.damage.get(unit.name, 0.0)
        return math.sqrt(unit.dense_numbers) if self.name == "balanced" else 1.0


# Where the weights alone are known: energies are unweighted by what inputs do, and the same share of a small
# weight's costs fewer numbers, so their bare product would pay for small weights with the large ones.
BY_WEIGHTS = Allocation("balanced")


Way = tuple[Candidate, int] | None
"""A candidate and its rank; None leaves the weight as it is."""


@dataclass(frozen=True, slots=True)
class Options:
    """The useful ways to store one unit, by rising numbers (n,) and rising log-energy (n,)."""

    unit: Unit
    kind: str
    numbers: Tensor
    values: Tensor
    ways: tuple[Way, ...]


class Limits:
    """The largest worthwhile rank of each candidate of a unit, or why there is none.

    Attributes:
        ranks: 0 where no rank of the candidate is worthwhile.
        device: the class that ranks are rounded for.
        share: what the weight alone may store if it takes just its part of the budget.
        why_dense: None if the unit can be sketched.
    """

    def __init__(
        self, unit: Unit, ratio: float, round_rank_to: int | None, allow_slower: bool, on_cuda: bool
    ) -> None:
        self.device = cost.CUDA if on_cuda and unit.device is not None else unit.device
        self.ranks = {
            candidate: candidate.max_rank if allow_slower else _fast_rank(unit, candidate)
            for candidate in unit.candidates
        }
        dense = unit.dense_numbers + unit.tied_numbers
        self.share = math.floor(ratio * dense) - unit.bias_numbers - unit.tied_numbers
        self.why_dense = self._reason(unit, round_rank_to)

    def least_numbers(self, step: int | None) -> int | None:
        """What the smallest rank stores that is a multiple of the step, None if there is no such rank.

        A step of None is the usual one.
        """
        numbers = [
            candidate.numbers(ranks[0])
            for candidate, limit in self.ranks.items()
            if (ranks := _ranks(candidate, step, limit, self.device))
        ]
        return min(numbers, default=None)

    def fits(self, step: int | None) -> bool:
        """Whether the smallest rank that is a multiple of the step keeps to the weight's share."""
        least = self.least_numbers(step)
        return least is not None and least <= self.share

    def _reason(self, unit: Unit, round_rank_to: int | None) -> str | None:
        if not unit.candidates:
            single = min(unit.shape[:2]) == 1
            return "its weight has a single row or column" if single else "no scheme fits this layer"
        smallest = min(candidate.numbers(1) for candidate in unit.candidates)
        verb, counted = unit.candidates[0].costs
        weight_numbers = unit.dense_numbers - unit.bias_numbers
        if smallest > CEILING * weight_numbers:
            return f"rank 1 would {verb} {smallest:,} {counted}, the dense weight {verb}s {weight_numbers:,}"
        if smallest > self.share:
            return f"rank 1 would {verb} {smallest:,} {counted}, more than its share of the budget"
        affordable = {candidate: candidate.largest_rank(self.share) for candidate in unit.candidates}
        if any(0 < rank <= self.ranks[candidate] for candidate, rank in affordable.items()):
            if round_rank_to is None or self.fits(round_rank_to):
                return None
            least = self.least_numbers(round_rank_to)
            if least is None:
                largest = max(self.ranks.values())
                return (
                    f"ranks are to be multiples of {round_rank_to}, its largest worthwhile one is {largest}"
                )
            return f"rank {round_rank_to} would {verb} {least:,} {counted}, more than its share of the budget"
        best = max(_speedup(unit, candidate, rank) for candidate, rank in affordable.items() if rank)
        return f"its sketch would run at {best:.2f} of the dense speed; allow_slower=True sketches it"


def _step(candidate: Candidate, asked: int | None, device: cost.Device | None) -> int:
    """Ranks are multiples of this; those of a coupling are the places of its ways."""
    if candidate.scheme == SCHEME:
        return 1
    if asked == FINEST:
        return cost.finest_step(candidate, device)
    return cost.rank_step(candidate, device) if asked is None else asked


def _ranks(candidate: Candidate, asked: int | None, limit: int, device: cost.Device | None) -> Sequence[int]:
    """The multiples of a step up to a limit; where the step is not the user's and too coarse, any rank."""
    step = _step(candidate, asked, device)
    ranks = range(step, limit + 1, step)
    return ranks if ranks or asked not in (None, FINEST) else range(1, limit + 1)


def _fast_rank(unit: Unit, candidate: Candidate) -> int:
    """The largest rank that is predicted to be worthwhile; time rises with the rank."""
    low, high = 0, candidate.max_rank
    while low < high:
        middle = (low + high + 1) // 2
        fast = _speedup(unit, candidate, middle) >= cost.WORTHWHILE
        low, high = (middle, high) if fast else (low, middle - 1)
    return low


def _speedup(unit: Unit, candidate: Candidate, rank: int) -> float:
    if unit.device is None:
        return math.inf
    shape = unit.cost_shape or unit.shape
    predicted = cost.speedup(
        candidate, rank, shape, groups=unit.groups, stride=unit.stride, device=unit.device
    )
    return unit.speed * predicted


def options_of(
    unit: Unit,
    kind: str,
    limits: Limits,
    ratio: float,
    round_rank_to: int | None,
    allocation: Allocation,
    whole: bool,
) -> Options:
    """All (candidate, rank) that no other one beats, between the floor and the ceiling."""
    found: list[tuple[int, float, Candidate, int]] = []
    for candidate, limit in limits.ranks.items():
        ranks = [*_ranks(candidate, round_rank_to, limit, limits.device)]
        if candidate.whole is not None and candidate.whole not in ranks:
            ranks.append(candidate.whole)
        values_of_ranks = allocation.value(unit, candidate).tolist()
        found.extend(
            (candidate.numbers(rank) + unit.bias_numbers, values_of_ranks[rank - 1], candidate, rank)
            for rank in ranks
        )
    found.sort(key=lambda way: (way[0], -way[1], way[2].macs(way[3])))
    share = ratio * unit.dense_numbers
    affordable = [way for way in found if way[0] <= share] or found[:1]
    floor = min(FLOOR * share, affordable[-1][0])
    front: list[tuple[int, float, Candidate, int]] = []
    for way in found:
        ceiling = 1.0 if way[2].whole == way[3] else CEILING
        inside = floor <= way[0] <= ceiling * unit.dense_numbers
        if inside and (not front or way[1] > front[-1][1]):
            front.append(way)
    front = front or affordable[-1:]
    ways: list[tuple[int, float, Way]] = [(way[0], way[1], (way[2], way[3])) for way in front]
    numbers, values, choices = zip(*ways, strict=True)
    options = Options(
        unit,
        kind,
        torch.tensor(numbers, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        choices,
    )
    return with_dense(options, allocation) if whole and unit.in_data else options


def with_dense(options: Options, allocation: Allocation) -> Options:
    """The ways with that of leaving the unit as it is, where it may be and a cut loses something."""
    unit, ways, most = options.unit, options.ways, allocation.most(options.unit)
    if allocation.name == "uniform" or None in ways or any(one.whole is not None for one in unit.candidates):
        return options
    if most - float(options.values[-1]) <= EXACT * allocation.weight(unit):
        return options
    return replace(
        options,
        numbers=F.pad(options.numbers, (0, 1), value=unit.dense_numbers),
        values=F.pad(options.values, (0, 1), value=most),
        ways=(*ways, None),
    )


def _energies(candidate: Candidate) -> Tensor:
    energies = candidate.energies
    if energies is None:
        decay = torch.arange(1, candidate.max_rank + 1, dtype=torch.float64).pow(_ASSUMED_DECAY)
        energies = decay.cumsum(0) / decay.sum()
    return energies
