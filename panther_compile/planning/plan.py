"""Choose a scheme and a rank for every weight under one budget of stored numbers.

Maximise  Σᵤ cᵤ log Eᵤ(rᵤ)  subject to  Σᵤ numbersᵤ(rᵤ) ≤ ratio · Σᵤ denseᵤ,

where E(r) is the share of a weight's squared Frobenius norm that rank r keeps. With c = 1 the product of
the energies is the criterion of Zhang et al., "Accelerating Very Deep Convolutional Networks" (TPAMI 2016):
unlike their sum it is blind to the scale of a layer and starves none. By the weights alone cᵤ = √denseᵤ,
see `ways.BY_WEIGHTS`. Solved by bisection on the Lagrange multiplier (`_lagrange`), then by greedy steps
with what is left (`_fill`).
"""

import heapq
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from panther_compile.config import SketchConfig
from panther_compile.factorization import cost
from panther_compile.kinds.parts import parts_of, units_of, work_on
from panther_compile.planning.cached import stack_cached, unstack, with_rest, within_cache
from panther_compile.planning.coupled import SCHEME, CouplingLosses, join, split
from panther_compile.planning.in_data import in_data
from panther_compile.planning.int8_time import stored_lines, timed_units
from panther_compile.planning.selection import is_picked, of_site
from panther_compile.planning.sites import Found
from panther_compile.planning.ways import (
    BY_WEIGHTS,
    FINEST,
    Allocation,
    Limits,
    Options,
    Way,
    options_of,
    with_dense,
)
from panther_compile.records import Cached, Choice, LayerPlan, Pool, Site, SketchPlan, Timed, Unit, WholeTimes
from panther_compile.reporting.progress import with_progress

# How closely the budget is met, as a share of the dense numbers, before single ranks are added.
TOLERANCE = 0.005
_BISECTIONS = 80
_REASONS = 10  # of layers that stay dense, that an error lists
# A sketch, or a whole model, that was timed and gained less than this is not worth its error.
PAYS = 1.05
TIMED = "measured here"  # how the reason of a layer begins that stays dense for that
WHOLE = "whole within the budget: its last numbers are worth the most"
REST = "whole within the budget: no cut uses what is left of it"


Clock = Callable[[str, Choice], Timed | None]
"""From the name of a unit and a way to store it, how that ran; None where no input is known."""

WholeClock = Callable[[Mapping[nn.Module, nn.Module]], WholeTimes]
"""From the replacements of the dense layers, how the whole model ran with them."""


@dataclass(frozen=True, slots=True)
class TimedSites(Found):
    """Sites with clocks: what a plan would sketch is timed, and stays dense where it does not pay.

    Attributes:
        clock: times single layers.
        whole: times the model.
        returned: lines of units that stay dense for that, by their names.
    """

    clock: Clock
    whole: WholeClock
    returned: Mapping[str, LayerPlan] = field(default_factory=dict)


def make_plan(
    found: Found,
    config: SketchConfig,
    route: str,
    *,
    values: Mapping[str, Tensor] | None = None,
    energies: Mapping[str, Mapping[str, Tensor]] | None = None,
    allocation: Allocation = BY_WEIGHTS,
    couplings: Sequence[CouplingLosses] = (),
    cached: Sequence[Cached] = (),
    whole: bool = True,
    reached: Container[str] | None = None,
) -> SketchPlan:
    """Plan every site, one budget for each entry of `config.ratio`, and list what is left alone.

    What data do not reach has a budget of its own, of the same ratio: what its numbers are worth cannot be
    held against what data show of others.

    Args:
        found: what may be sketched, and what may not; `TimedSites` have what the plan would sketch timed.
        config: the options.
        route: how the sites were found, for the report.
        values: singular values of matrices in the metric of data, by unit, in place of their own.
        energies: what ranks of kernels keep in the metric of data, by unit and scheme, likewise.
        allocation: how a budget is divided.
        couplings: layers that may be narrowed together, in place of being sketched apart.
        cached: what a decoder keeps; the weights that write it have a budget of their own.
        whole: whether weights that are judged in the metric of data may stay dense within the budget.
        reached: the units that data reach; None where there is no data.
    """
    values, energies = values or {}, energies or {}
    budgets = config.ratios()
    pools: list[list[tuple[Unit, str]]] = [[] for _ in budgets]
    beyond: list[list[tuple[Unit, str]]] = [[] for _ in budgets]
    owners: dict[str, str] = {}
    for site, owner in with_progress(
        found.sites, lambda one: work_on(*one), desc="plan", progress=config.progress
    ):
        place = budget_of(site, config)
        parts = parts_of(site, owner)
        own = budgets[place][1] < 1.0 and not all(one in values or energies.get(one) for one in parts)
        units = with_tied(units_of(parts, energies=own), site)
        units = tuple(in_data(unit, values.get(unit.name), energies.get(unit.name, {})) for unit in units)
        for unit in units:
            seen = reached is None or unit.name in reached
            (pools if seen else beyond)[place].append((unit, site.kind))
        owners.update({unit.name: site.name for unit in units})
    lines = list(found.skipped)
    timed, in_int8 = found if isinstance(found, TimedSites) else None, config.objective == "int8"
    slow = config.allow_slower if timed is None and not in_int8 else None
    narrowed = _allowed(couplings, timed, in_int8)
    divided = [allocation] * len(pools) + [_beyond_data(allocation)] * len(beyond)
    for pool, (_, ratio), how in zip([*pools, *beyond], [*budgets, *budgets], divided, strict=True):
        if not pool:
            continue
        stacks, rest = stack_cached(pool, cached, values)
        plan_pool = partial(_plan_pool, config=config, allocation=how, found=timed, whole=whole)
        plan_at = partial(plan_pool, stacks, whole=False)
        written = within_cache(config.cache_ratio, ratio, pool, cached, plan_at)
        lines.extend(unstack(written, pool, cached))
        ratio = with_rest(ratio, written, rest)
        joined = join(rest, narrowed, step=config.round_rank_to, slow=slow)
        planned = plan_pool(timed_units(joined) if in_int8 else joined, ratio)
        lines.extend(split(stored_lines(planned, joined) if in_int8 else planned, joined, rest))
    rank = {name: place for place, name in enumerate(found.order)}
    lines.sort(key=lambda line: rank[owners.get(line.name, line.name)])
    return SketchPlan(tuple(lines), _ratio_text(config), route, cached=tuple(cached))


def _beyond_data(allocation: Allocation) -> Allocation:
    """How a budget is divided among units that no data reached."""
    return allocation if allocation.name == "uniform" else BY_WEIGHTS


def _allowed(
    couplings: Sequence[CouplingLosses], timed: TimedSites | None, in_int8: bool
) -> list[CouplingLosses]:
    """Couplings to be tried: where time counts, those that surely run faster, of no layer put back."""
    if timed is None and not in_int8:
        return list(couplings)
    returned = set() if timed is None else set(timed.returned)
    return [one for one in couplings if not one.coupling.padded and returned.isdisjoint(one.coupling.names)]


def _plan_pool(
    pool: Pool,
    ratio: float,
    *,
    config: SketchConfig,
    allocation: Allocation,
    found: TimedSites | None,
    whole: bool,
) -> tuple[LayerPlan, ...]:
    """Plan a budget, and again without the units whose sketch does not pay, until all that is left do."""
    returned = {} if found is None else found.returned
    slow = {unit.name: returned[unit.name] for unit, _ in pool if unit.name in returned}
    while True:
        rest = [(unit, kind) for unit, kind in pool if unit.name not in slow]
        on_cuda = config.device is not None and torch.device(config.device).type == "cuda"
        lines = plan_units(
            rest,
            ratio,
            config.round_rank_to,
            config.allow_slower,
            allocation,
            on_cuda=on_cuda,
            whole=whole and found is None,  # what is timed is to be fast
        )
        if found is None:
            return lines
        timed = [judged(line, found.clock) for line in lines]
        lost = {
            new.name: new for line, new in zip(lines, timed, strict=True) if line.choice and not new.choice
        }
        if not lost:
            return (*timed, *slow.values())
        slow |= lost


def judged(line: LayerPlan, clock: Clock) -> LayerPlan:
    """The line with what was measured; dense if the sketch does not pay."""
    if line.choice is None or line.choice.scheme == SCHEME:  # narrow layers are dense ones of fewer features
        return line
    timed = clock(line.name, line.choice)
    if timed is None:
        return replace(line, reason="the example never reached it")
    if timed.speedup >= PAYS:
        return replace(line, reason=f"measured {timed.speedup:.2f}x")
    inputs = ", ".join(map(str, timed.inputs))
    reason = f"{TIMED}: its sketch ran at {timed.speedup:.2f} of the dense speed on {inputs}"
    return replace(line, choice=None, reason=reason)


def budget_of(site: Site, config: SketchConfig) -> int:
    """The place of a site's budget among `config.ratios()`: that of the first selector that is for it."""
    layer = of_site(site)
    return next(place for place, (selector, _) in enumerate(config.ratios()) if is_picked(selector, layer))


def with_tied(units: tuple[Unit, ...], site: Site) -> tuple[Unit, ...]:
    """The units; the first also counts the biases of the layers tied to the site."""
    biases = [module._parameters.get("bias") for _, module in site.tied]
    numbers = sum(bias.numel() for bias in biases if bias is not None)
    return (replace(units[0], tied_numbers=numbers), *units[1:]) if numbers else units


def _ratio_text(config: SketchConfig) -> str:
    if isinstance(config.ratio, int | float):
        return f"{config.ratio:g}"
    return ", ".join(
        f"{selector if isinstance(selector, str) else getattr(selector, '__name__', selector)}: {ratio:g}"
        for selector, ratio in config.ratio.items()
    )


def reasons_text(plan: SketchPlan, lines: Sequence[LayerPlan] = ()) -> str:
    """Why layers stay dense, for errors: the first of some lines of a plan, or of all."""
    shown = (lines or plan.layers)[:_REASONS]
    listed = "".join(f"\n  {line.name or '(model)'}: {line.reason}" for line in shown)
    more = len(plan.layers) - len(shown)
    return f"{listed}\n  and {more} more" if more else listed


def plan_units(
    units: Pool,
    ratio: float,
    round_rank_to: int | None,
    allow_slower: bool,
    allocation: Allocation = BY_WEIGHTS,
    *,
    on_cuda: bool = False,
    whole: bool = True,
) -> tuple[LayerPlan, ...]:
    """One line for each (unit, kind of layer): how it is stored under a common budget.

    Units whose sketch would not be smaller, or would be slower, stay dense and leave the budget. One that is
    judged in the metric of data may also stay dense within it, and others where no cut can use what is left.
    The last ranks of the pivoted form cost next to nothing, a fifth of a square matrix's those above
    `CEILING`; kernels of few channels have none there.

    Args:
        units: the weights that share the budget.
        ratio: in (0, 1]; 1 leaves everything dense.
        round_rank_to: ranks are multiples of this; None picks `cost.rank_step`, and `cost.finest_step` where
            the budget would else be missed by more than 0.5 %, for k x k kernels only if need be.
        allow_slower: sketch units also where `cost.speedup` predicts less than `cost.WORTHWHILE`.
        allocation: how the budget is divided.
        on_cuda: whether ranks are rounded for CUDA wherever the weights are.
        whole: whether units may stay dense within the budget.
    """
    limits = {unit.name: Limits(unit, ratio, round_rank_to, allow_slower, on_cuda) for unit, _ in units}
    lines: dict[str, LayerPlan] = {}
    sketched: list[tuple[Unit, str]] = []
    for unit, kind in units:
        reason = "ratio is 1" if ratio == 1.0 else limits[unit.name].why_dense
        if reason is None:
            sketched.append((unit, kind))
        else:
            lines[unit.name] = _line(unit, kind, None, reason)
    dense = sum(unit.dense_numbers + unit.tied_numbers for unit, _ in sketched)
    budget = math.floor(ratio * dense) - sum(unit.tied_numbers for unit, _ in sketched)

    def all_options(step: int | None) -> list[Options]:
        found = []
        for unit, kind in sketched:
            limit = limits[unit.name]
            # The explicit step fits every unit here; where the usual one is too coarse, any rank will do.
            fits = [one for one in (step, FINEST) if limit.fits(one)]
            found.append(options_of(unit, kind, limit, ratio, fits[0] if fits else 1, allocation, whole))
        return found

    options = all_options(round_rank_to)
    if allocation.name == "uniform":
        chosen = [
            _at(option, limits[option.unit.name].share + option.unit.bias_numbers) for option in options
        ]
    else:
        chosen = _lagrange(options, budget)
    chosen = _fill(options, chosen, budget)
    enough = math.ceil(budget - TOLERANCE * budget / ratio)
    if round_rank_to is None and _spent(options, chosen) < enough:
        options, chosen = _refined(options, all_options(FINEST), chosen, budget, enough)
    if whole and all(place == len(one.ways) - 1 for one, place in zip(options, chosen, strict=True)):
        options = [with_dense(option, allocation) for option in options]
        chosen = _fill(options, chosen, budget)
    for choice, option in zip(chosen, options, strict=True):
        way = option.ways[choice]
        why = "" if way is not None else WHOLE if option.unit.in_data else REST
        line = _line(option.unit, option.kind, way, why)
        lines[option.unit.name] = replace(line, whole=way is None)
    return tuple(lines[unit.name] for unit, _ in units)


def _refined(
    options: list[Options], finer: list[Options], chosen: list[int], budget: int, enough: int
) -> tuple[list[Options], list[int]]:
    """Options of finer ranks, and the choice among them that spends what coarse ranks have left.

    First without the kernels of k x k, which run in blocks of 16 channels.
    """
    numbers = [int(option.numbers[place]) for option, place in zip(options, chosen, strict=True)]
    in_blocks = [any(cost.rank_step(c) == cost.TILE for c in one.unit.candidates) for one in options]
    mixed = [o if tiled else fine for o, fine, tiled in zip(options, finer, in_blocks, strict=True)]
    for options in (mixed, finer):
        start = [_at(option, spent) for option, spent in zip(options, numbers, strict=True)]
        chosen = _fill(options, start, budget, enough)
        if _spent(options, chosen) >= enough:
            break
    return options, chosen


def _lagrange(options: list[Options], budget: int) -> list[int]:
    """The best choice of each unit at the smallest price per number that keeps within the budget."""
    alike: dict[int, list[int]] = {}  # units of about as many ways are padded to one matrix
    for place, option in enumerate(options):
        alike.setdefault(len(option.ways).bit_length(), []).append(place)
    groups = [
        (
            places,
            pad_sequence([options[i].values for i in places], batch_first=True, padding_value=-math.inf),
            pad_sequence([options[i].numbers for i in places], batch_first=True),
        )
        for places in alike.values()
    ]

    def at_price(price: float) -> list[Tensor]:
        return [(values - price * numbers).argmax(1, keepdim=True) for _, values, numbers in groups]

    def spent(chosen: list[Tensor]) -> float:
        return sum(
            float(numbers.gather(1, one).sum()) for (*_, numbers), one in zip(groups, chosen, strict=True)
        )

    low, high = -80.0, 20.0  # natural logarithm of the price
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if spent(at_price(math.exp(middle))) > budget:
            low = middle
        else:
            high = middle
    found = [0] * len(options)
    for (places, *_), chosen in zip(groups, at_price(math.exp(high)), strict=True):
        for place, one in zip(places, chosen.flatten().tolist(), strict=True):
            found[place] = one
    return found


def _fill(options: list[Options], chosen: list[int], budget: int, enough: float = math.inf) -> list[int]:
    """Spend what is left, up to `enough`: always the step to a next option that gains most per number."""
    chosen = list(chosen)
    left = budget - _spent(options, chosen)
    steps = [_next_step(o, i, place) for place, (o, i) in enumerate(zip(options, chosen, strict=True))]
    heap = [step for step in steps if step is not None]
    heapq.heapify(heap)
    while heap and budget - left < enough:
        _, numbers, place = heapq.heappop(heap)
        if numbers > left:
            continue
        left -= numbers
        chosen[place] += 1
        step = _next_step(options[place], chosen[place], place)
        if step is not None:
            heapq.heappush(heap, step)
    return chosen


def _next_step(option: Options, index: int, place: int) -> tuple[float, int, int] | None:
    """(minus the gain per number, numbers, place) of the step to the next option, if there is one."""
    if index + 1 == len(option.ways):
        return None
    numbers = int(option.numbers[index + 1] - option.numbers[index])
    gain = float(option.values[index + 1] - option.values[index])
    return -gain / numbers, numbers, place


def _spent(options: list[Options], chosen: list[int]) -> int:
    return sum(int(o.numbers[i]) for o, i in zip(options, chosen, strict=True))


def _at(option: Options, numbers: int) -> int:
    """The last option that stores at most `numbers`; the first one if none does."""
    return max(0, int((option.numbers <= numbers).sum()) - 1)


def _line(unit: Unit, kind: str, way: Way, reason: str) -> LayerPlan:
    if way is None:
        return LayerPlan(unit.name, kind, unit.shape, unit.dense_numbers, None, reason)
    candidate, rank = way
    choice = Choice(
        candidate.scheme,
        rank,
        candidate.ranks(rank),
        candidate.numbers(rank) + unit.bias_numbers,
        candidate.error(rank),
    )
    return LayerPlan(unit.name, kind, unit.shape, unit.dense_numbers, choice, reason)
