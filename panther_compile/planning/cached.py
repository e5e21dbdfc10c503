"""Weights that write into a cache of keys and values, as units of a plan.

    key (O, I), value (O, I)  ──►  one matrix (2 O, I) of rank r: r numbers a token are kept in place of 2 O

Per number that is kept nothing loses less: factors of ranks a and b apart are one of rank a + b. They have a
budget of their own, the same share of their numbers as of the others: else ranks would go to them, which are
small and matter much, and the cache would stay as it is. With `cache_ratio` their budget is what that leaves.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from panther_compile.errors import ConfigError
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.names import stack_name
from panther_compile.records import Cached, LayerPlan, Pool, SketchPlan, Unit

_MOST = 0.95  # of the dense numbers
_BISECTIONS = 12


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


def within_cache(
    share: float | None,
    ratio: float,
    pool: Pool,
    cached: Sequence[Cached],
    plan_at: Callable[[float], Sequence[LayerPlan]],
) -> Sequence[LayerPlan]:
    """The lines of the largest budget with which no more than a share of the numbers of a token is kept.

    Args:
        share: in (0, 1]; None asks for the lines at the ratio.
        ratio: of the stacks, unless a share is given.
        pool: the units before they were stacked.
        cached: what the cache holds.
        plan_at: gives the lines of the stacks at a ratio.

    Raises:
        ConfigError: no budget keeps so few; what is normalised, or dense, is kept whole.
    """
    if share is None or not cached:
        return plan_at(ratio)
    low, high = 0.0, _MOST
    found: Sequence[LayerPlan] = ()
    least = 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        lines = plan_at(middle)
        plan = SketchPlan(tuple(unstack(lines, pool, cached)), "", "", cached=tuple(cached))
        whole, kept = plan.cached_numbers
        least = min(least, kept / whole)
        if kept <= share * whole:
            low, found = middle, lines
        else:
            high = middle
    if not found:
        raise ConfigError(f"cache_ratio={share:g}: at least {least:.3f} of the numbers of a token are kept")
    return found


def with_rest(ratio: float, lines: Sequence[LayerPlan], others: Pool) -> float:
    """The ratio of the other units, with what the stacks of `lines` left of theirs, or took beyond it.

    Raises:
        ConfigError: nothing is left.
    """
    sketched = [line for line in lines if line.choice is not None]
    left = sum(ratio * line.dense_numbers - line.stored_numbers for line in sketched)
    dense = sum(unit.dense_numbers for unit, _ in others)
    if not sketched or not dense:
        return ratio
    rest = ratio + left / dense
    if rest <= 0.0:
        raise ConfigError(f"ratio={ratio:g}: cache_ratio leaves nothing to the layers that write no cache")
    return rest if left < 0.0 else max(ratio, min(rest, _MOST))
