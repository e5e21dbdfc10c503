"""Layers that can be narrowed together, as one unit of a plan.

    up (n, I), down (O, n)  ──►  k of the n features between them, and each of the two as it is or of low rank

How many features stay and which ranks go with that is found together: for each price of a number the ways to
narrow and to factorize that lose least, the price included.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from panther_compile.factorization import cost
from panther_compile.factorization.balance import int8_time
from panther_compile.factorization.candidates import Candidate, LinearCandidate
from panther_compile.factorization.pivot import pivoted_numbers
from panther_compile.records import Choice, LayerPlan, Pool, Unit

SCHEME = "narrow"
_PRICES = 160


@dataclass(frozen=True, slots=True)
class Coupling:
    """Layers that write features which one other layer reads, and nothing else does.

    Attributes:
        writers: layers that write the features: one, or two whose features are multiplied one by one.
        reader: the layer that reads them.
        heads: number of heads that the reader's features are divided into; 1 where features pass one by one.
        shared: heads of the reader for each head of the writer (grouped-query attention).
        width: features of a head, or all of them.
        padded: whether what is between needs the dense widths.
        wide: whether features pass one by one, and what is left out is written as zeros all the same, since
            they may go elsewhere on a path that no data has taken.
    """

    writers: tuple[str, ...]
    reader: str
    heads: int
    shared: int
    width: int
    padded: bool
    wide: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The writers, then the reader."""
        return (*self.writers, self.reader)

    @property
    def name(self) -> str:
        """The name of the unit that they make."""
        return " > ".join(self.names)

    def heads_of(self, name: str) -> int:
        """Heads of one of the layers."""
        return self.heads if name == self.reader else self.heads // self.shared

    def narrow_shape(self, name: str, shape: tuple[int, int], kept: int) -> tuple[int, int]:
        """What of the shape (O, I) of one of the layers is left with so many features of a head."""
        features = self.heads_of(name) * kept
        return (shape[0], features) if name == self.reader else (features, shape[1])

    def numbers(
        self, name: str, shape: tuple[int, int], kept: int, rank: int | None = None, *, bias: bool
    ) -> int:
        """Stored numbers of one of the layers so; a rank of None is not factorized."""
        outputs, inputs = self.narrow_shape(name, shape, kept)
        numbers = outputs * inputs if rank is None else pivoted_numbers(outputs, inputs, rank)
        if not self.padded and kept < self.width:
            numbers += kept  # which features they are
        return numbers + (outputs if bias else 0)


@dataclass(frozen=True, slots=True)
class CouplingLosses:
    """What narrowing a coupling and factorizing its layers does to the result.

    Attributes:
        coupling: the layers.
        kept: features of a head `(g,)`, int64, descending; all of them first.
        narrowed: what is lost to the features left out `(g,)`, float64.
        members: what is lost to a rank of 0, 1, ... of each layer, the others as they are
            `(g, layers, r + 1)`, float64; ranks that a layer has not, and those that are full, are infinite.
        total: what is lost without the coupling.
    """

    coupling: Coupling
    kept: Tensor
    narrowed: Tensor
    members: Tensor
    total: float


@dataclass(frozen=True, slots=True)
class NarrowWay:
    """One way to store a coupling.

    Attributes:
        kept: features of each head.
        ranks: rank of each layer; None is not factorized.
        numbers: stored, the reader's bias left out.
        loss: see `CouplingLosses`.
    """

    kept: int
    ranks: tuple[int | None, ...]
    numbers: int
    loss: float


class CouplingCandidate(Candidate):
    """The ways to store a coupling that no other beats, by rising numbers; their places count as ranks.

    Args:
        losses: of the coupling.
        shapes: those of the dense weights (O, I), the writers' first.
        bias: whether the writers have biases, which are narrowed too.
        step: ranks, and widths that are narrower, are multiples of this, if given.
        slow: whether also layers are factorized that are slower for that; None: none are factorized.
        device: the device that they run on.
    """

    scheme = SCHEME

    def __init__(
        self,
        losses: CouplingLosses,
        shapes: Sequence[tuple[int, int]],
        *,
        bias: bool,
        step: int | None = None,
        slow: bool | None = False,
        device: cost.Device = cost.CPU,
    ) -> None:
        self.coupling, self.shapes, self.bias = losses.coupling, tuple(shapes), bias
        self._slow, self._device = slow, device
        self.ways = self._best_ways(losses, step)
        self.max_rank = len(self.ways)
        lost = torch.tensor([way.loss for way in self.ways], dtype=torch.float64)
        self.energies = (1.0 - lost / max(losses.total, 1e-300)).clamp_min(0.0)

    def numbers(self, rank: int) -> int:
        """See `Candidate.numbers`; biases of writers are counted."""
        return self.ways[rank - 1].numbers

    def macs(self, rank: int) -> int:
        """One multiply-add per stored weight, or nearly so."""
        return self.ways[rank - 1].numbers

    def int8_time(self, rank: int) -> int:
        """Time of a row in int8, see `balance.int8_time`."""
        way = self.ways[rank - 1]
        shapes = [self._narrow_shape(member, way.kept) for member in range(len(self.shapes))]
        return sum(int8_time(*shape, one) for shape, one in zip(shapes, way.ranks, strict=True))

    def member_numbers(self, way: NarrowWay, member: int) -> int:
        """Stored numbers of one layer, the reader's bias left out."""
        return self._numbers(member, way.kept, way.ranks[member])

    def _narrow_shape(self, member: int, kept: int) -> tuple[int, int]:
        return self.coupling.narrow_shape(self.coupling.names[member], self.shapes[member], kept)

    def _numbers(self, member: int, kept: int, rank: int | None) -> int:
        bias = self.bias and member < len(self.shapes) - 1
        name, shape = self.coupling.names[member], self.shapes[member]
        return self.coupling.numbers(name, shape, kept, rank, bias=bias)

    def _best_ways(self, losses: CouplingLosses, step: int | None) -> tuple[NarrowWay, ...]:
        dense = sum(outputs * inputs for outputs, inputs in self.shapes)
        unit = losses.total / dense
        found: list[NarrowWay] = []
        prices = torch.logspace(-7, 2, _PRICES, dtype=torch.float64).numpy() * unit
        for place, kept in enumerate(losses.kept.tolist()):
            if kept < self.coupling.width and self._is_between(kept, step):
                continue
            options = [self._options(losses, place, kept, member, step) for member in range(len(self.shapes))]
            if not all(options):
                continue
            cheapest = np.stack([_cheapest(one, prices) for one in options], axis=1)
            for places in dict.fromkeys(map(tuple, cheapest.tolist())):
                chosen = [one[i] for one, i in zip(options, places, strict=True)]
                loss = float(losses.narrowed[place]) + sum(loss for _, loss, _ in chosen)
                numbers = sum(numbers for numbers, _, _ in chosen)
                found.append(NarrowWay(kept, tuple(rank for _, _, rank in chosen), numbers, loss))
        front: list[NarrowWay] = []
        for way in sorted(found, key=lambda way: (way.numbers, way.loss)):
            if not front or way.loss < front[-1].loss:
                front.append(way)
        return tuple(front)

    def _is_between(self, kept: int, step: int | None) -> bool:
        """Whether a layer would have a width that is no multiple of the step."""
        heads = map(self.coupling.heads_of, self.coupling.names)
        return step is not None and any(count * kept % step for count in heads)

    def _options(
        self, losses: CouplingLosses, place: int, kept: int, member: int, step: int | None
    ) -> list[tuple[int, float, int | None]]:
        """(numbers, loss, rank) of one layer at so many features."""
        whole = kept == self.coupling.width
        found: list[tuple[int, float, int | None]] = []
        if not whole:
            found.append((self._numbers(member, kept, None), 0.0, None))
        if self._slow is None or (self.coupling.padded and not whole):
            return found
        shape = self._narrow_shape(member, kept)
        lost = losses.members[place, member].tolist()
        every = step or cost.rank_step(LinearCandidate(*shape, "pivoted"), self._device)
        for rank in range(every, len(lost), every):
            if lost[rank] < float("inf") and (self._slow or self._is_fast(member, shape, rank)):
                found.append((self._numbers(member, kept, rank), lost[rank], rank))
        return found

    def _is_fast(self, member: int, shape: tuple[int, int], rank: int) -> bool:
        positions = self._device.positions
        dense = cost.dense_products(self.shapes[member], 1, (1, 1), positions)
        factors = cost.sketched_products("pivoted", (rank,), shape, 1, (1, 1), positions)
        return cost.seconds(dense, self._device) >= cost.WORTHWHILE * cost.seconds(factors, self._device)


def _cheapest(options: Sequence[tuple[int, float, int | None]], prices: np.ndarray) -> np.ndarray:
    """Place of the option (numbers, loss, rank) of the least loss + price * numbers, at each price."""
    numbers, losses, _ = (np.array(column) for column in zip(*options, strict=True))
    return (losses + prices[:, None] * numbers).argmin(axis=1)


def join(
    pool: Pool, couplings: Sequence[CouplingLosses], *, step: int | None, slow: bool | None
) -> list[tuple[Unit, str]]:
    """The units with kinds; a coupling that is wholly among them is one unit in place of its layers.

    Args:
        pool: units of matrices among others.
        couplings: by which layers are narrowed.
        step: see `CouplingCandidate`.
        slow: likewise.
    """
    units = {unit.name: unit for unit, _ in pool}
    whole = [one for one in couplings if set(one.coupling.names) <= set(units)]
    joined = {name for one in whole for name in one.coupling.names}
    rest = [(unit, kind) for unit, kind in pool if unit.name not in joined]
    return rest + [(_joint(one, units, step, slow), SCHEME) for one in whole]


def _joint(losses: CouplingLosses, units: Mapping[str, Unit], step: int | None, slow: bool | None) -> Unit:
    members = [units[name] for name in losses.coupling.names]
    shapes = [(unit.shape[0], unit.shape[1]) for unit in members]
    device = members[0].device or cost.CPU
    bias = members[0].bias_numbers > 0
    candidate = CouplingCandidate(losses, shapes, bias=bias, step=step, slow=slow, device=device)
    return Unit(
        losses.coupling.name,
        shapes[-1],
        sum(unit.dense_numbers for unit in members),
        members[-1].bias_numbers,
        (candidate,),
        None,  # the candidate has only ways that are fast enough
    )


def split(lines: Sequence[LayerPlan], joined: Pool, pool: Pool) -> Iterator[LayerPlan]:
    """The lines, with one for each layer in place of one for a coupling.

    Args:
        lines: of the joined units.
        joined: see `join`.
        pool: the units before they were joined.
    """
    units = {unit.name: (unit, kind) for unit, kind in pool}
    joint = {unit.name: unit.candidates[0] for unit, kind in joined if kind == SCHEME}
    for line in lines:
        if line.name not in joint:
            yield line
            continue
        candidate = joint[line.name]
        assert isinstance(candidate, CouplingCandidate)
        for place, name in enumerate(candidate.coupling.names):
            unit, kind = units[name]
            choice = None if line.choice is None else _part(line.choice, candidate, unit, place)
            yield replace(
                line,
                name=name,
                kind=kind,
                shape=unit.shape,
                dense_numbers=unit.dense_numbers,
                choice=choice,
            )


def _part(choice: Choice, candidate: CouplingCandidate, unit: Unit, member: int) -> Choice:
    """What becomes of one layer; apart from the others if no features are left out."""
    coupling, way = candidate.coupling, candidate.ways[choice.rank - 1]
    rank = way.ranks[member]
    last = member == len(coupling.names) - 1
    numbers = candidate.member_numbers(way, member) + (unit.bias_numbers if last else 0)
    if way.kept == coupling.width:
        assert rank is not None
        return replace(choice, scheme="pivoted", rank=rank, ranks=(rank,), stored_numbers=numbers)
    features = coupling.heads_of(unit.name) * way.kept
    ranks = (features,) if rank is None else (features, rank)
    return replace(choice, rank=way.kept, ranks=ranks, stored_numbers=numbers, link=coupling.names)
