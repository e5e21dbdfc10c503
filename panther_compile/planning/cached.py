"""Weights that write into a cache of keys and values, as units of a plan.

    key (O, I), value (O, I)  ──►  one matrix (2 O, I) of rank r: r numbers a token are kept in place of 2 O

Per number that is kept nothing loses less: factors of ranks a and b apart are one of rank a + b. They have a
budget of their own, the same share of their numbers as of the others: else ranks would go to them, which are
small and matter much, and the cache would stay as it is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.names import stack_name
from panther_compile.records import Cached, LayerPlan, Unit

Pool = Sequence[tuple[Unit, str]]
_MOST = 0.95  # of the dense numbers


def stack_cached(
    pool: Pool, cached: Sequence[Cached], values: Mapping[str, Tensor]
) -> tuple[list[tuple[Unit, str]], list[tuple[Unit, str]]]:
    """The units that write into the cache, those of one input stacked; and the other units.

    Args:
        pool: units with kinds.
        cached: what the cache holds.
        values: singular values of stacks in the metric of data, by name; weights without stay apart.
    """
    units = {unit.name: (unit, kind) for unit, kind in pool}
    stacks: list[tuple[Unit, str]] = []
    for one in cached:
        names = [name for name in one.names if name in units]
        if len(names) > 1 and names == list(one.names) and stack_name(names) in values:
            members = [units.pop(name) for name in names]
            stacks.append((_stack([unit for unit, _ in members], values[stack_name(names)]), members[0][1]))
        else:
            stacks.extend(units.pop(name) for name in names)
    return stacks, list(units.values())


def _stack(members: Sequence[Unit], values: Tensor) -> Unit:
    outputs, inputs = sum(unit.shape[0] for unit in members), members[0].shape[1]
    candidate = LinearCandidate(outputs, inputs, "pivoted", singular_values=values.cpu())
    candidate.max_rank = min(candidate.max_rank, *(unit.shape[0] for unit in members))  # each is a layer
    return Unit(
        stack_name([unit.name for unit in members]),
        (outputs, inputs),
        sum(unit.dense_numbers for unit in members),
        sum(unit.bias_numbers for unit in members),
        (candidate,),
        members[0].device,
        tied_numbers=sum(unit.tied_numbers for unit in members),
    )


def unstack(lines: Sequence[LayerPlan], pool: Pool, cached: Sequence[Cached]) -> Iterator[LayerPlan]:
    """The lines, with one for each weight in place of one for a stack.

    Args:
        lines: of units, some of them stacks.
        pool: the units before they were stacked.
        cached: what the cache holds.
    """
    stacks = {stack_name(one.names): one.names for one in cached}
    units = {unit.name: (unit, kind) for unit, kind in pool}
    for line in lines:
        if line.name in units:
            yield line
            continue
        for place, name in enumerate(stacks[line.name]):
            unit, kind = units[name]
            choice = line.choice
            if choice is not None:
                down = 0 if place else choice.rank * (math.prod(line.shape[1:]) - choice.rank)
                numbers = down + choice.rank * unit.shape[0] + unit.bias_numbers
                choice = replace(choice, stored_numbers=numbers, sharing=stacks[line.name])
            yield LayerPlan(name, kind, unit.shape, unit.dense_numbers, choice, line.reason)


def with_rest(ratio: float, lines: Sequence[LayerPlan], others: Pool) -> float:
    """The ratio of the other units, with what the stacks of `lines` left of theirs: ranks have limits."""
    sketched = [line for line in lines if line.choice is not None]
    left = sum(ratio * line.dense_numbers - line.stored_numbers for line in sketched)
    dense = sum(unit.dense_numbers for unit, _ in others)
    return max(ratio, min(ratio + left / dense, _MOST)) if sketched and dense else ratio
