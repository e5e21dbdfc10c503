"""Budgets of the time that products take in int8 on a CPU, in place of stored numbers.

    a matrix (O, I)    O I + 100 (O + I)
    a pair             r (O + I) + 100 (O + I + 2 r)
    narrow matrices    as those of their widths

in multiply-adds of a row (`factorization/balance.py`). What is moved counts, so that a pair has to be of a
far lower rank than in float32 to be worth it; where none is, the matrix stays dense, which is one more way to
spend the budget.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from panther_compile.factorization.balance import int8_time
from panther_compile.factorization.candidates import Candidate, LinearCandidate
from panther_compile.planning.coupled import SCHEME, CouplingCandidate
from panther_compile.records import LayerPlan, Pool, Unit

_KINDS = ("Linear", "Conv1D", SCHEME)


class _Timed(Candidate):
    """A candidate whose numbers are its time, and whose last rank stands for what is dense."""

    costs = ("take", "multiply-adds of int8 time")

    def __init__(self, stored: LinearCandidate | CouplingCandidate, dense: int) -> None:
        self.stored, self.scheme, self._dense = stored, stored.scheme, dense
        self.whole = self.max_rank = stored.max_rank + 1
        self.energies = (
            None if stored.energies is None else torch.cat([stored.energies, stored.energies.new_ones(1)])
        )

    def numbers(self, rank: int) -> int:
        """Time of a rank."""
        if rank == self.whole:
            return self._dense
        if isinstance(self.stored, CouplingCandidate):
            return self.stored.int8_time(rank)
        return int8_time(self.stored.out_features, self.stored.in_features, rank)

    def macs(self, rank: int) -> int:
        """The same; it decides between ways of equal time."""
        return self.numbers(rank)


def timed_units(pool: Pool) -> list[tuple[Unit, str]]:
    """The units with times in place of numbers; those of other layers than linear ones have no candidates."""
    return [(_timed(unit, kind in _KINDS), kind) for unit, kind in pool]


def _timed(unit: Unit, linear: bool) -> Unit:
    known = [
        _as_pair(one) if isinstance(one, LinearCandidate) else one
        for one in unit.candidates
        if linear and isinstance(one, LinearCandidate | CouplingCandidate)
    ]
    shapes = next((one.shapes for one in known if isinstance(one, CouplingCandidate)), (unit.shape[:2],))
    dense = sum(int8_time(outputs, inputs) for outputs, inputs in shapes)
    return replace(
        unit,
        dense_numbers=dense,
        bias_numbers=0,
        tied_numbers=0,
        candidates=tuple(_Timed(one, dense) for one in known),
        device=None,
    )


def _as_pair(one: LinearCandidate) -> LinearCandidate:
    pair = LinearCandidate(one.out_features, one.in_features, "pair")
    pair.max_rank = one.max_rank
    pair.energies = one.energies
    return pair


def stored_lines(lines: Sequence[LayerPlan], pool: Pool) -> list[LayerPlan]:
    """The lines of timed units with numbers that are stored.

    Args:
        lines: of `timed_units`.
        pool: the units before that.
    """
    units, kinds = {unit.name: unit for unit, _ in pool}, {unit.name: kind for unit, kind in pool}
    timed = {unit.name: unit for unit, _ in timed_units(pool)}
    found = []
    for line in lines:
        unit, choice, reason = units[line.name], line.choice, line.reason
        wholes = {one.scheme: one.whole for one in timed[line.name].candidates}
        if choice is not None and choice.rank == wholes[choice.scheme]:
            choice, reason = None, "in int8 its time is best spent on it dense"
        elif not wholes and unit.candidates and "ratio" not in reason:
            reason = f"objective='int8' sketches linear layers alone, and no {kinds[line.name]}"
        elif choice is not None and choice.scheme == "pair":
            choice = replace(choice, stored_numbers=choice.rank * sum(unit.shape[:2]) + unit.bias_numbers)
        found.append(replace(line, dense_numbers=unit.dense_numbers, choice=choice, reason=reason))
    return found
