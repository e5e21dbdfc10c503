"""Choice among plans: how the budget is divided, with layers narrowed and left whole or not, by trial.

    cut         every plan, with matrices cut as the study left them, which costs next to nothing
    fitted      where others are near the closest one, with their layers fitted in lockstep to a few batches,
                as the chosen plan's will be to all

What a layer loses the layers behind it make up for in part, when they are fitted, and cuts do not show how
well: of all-MiniLM-L6-v2 at half the numbers they are within 9 % of one another and fits differ by 30 %. Fits
to two batches put its plans in the same order as fits to eight.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from panther_compile.calibration.held_out import HeldOut, Studied, chosen_targets
from panther_compile.calibration.trials import pick
from panther_compile.config import SketchConfig
from panther_compile.models.watched import Side
from panther_compile.planning.coupled import CouplingLosses
from panther_compile.planning.plan import make_plan
from panther_compile.planning.ways import Allocation
from panther_compile.records import SketchPlan

NEAR = 1.2  # of the least distance of a cut, within which plans are fitted
FINALISTS = 4  # that are fitted, beside the plain one


def choose_plan(studied: Studied, config: SketchConfig) -> SketchPlan:
    """The plan that keeps results closest on held-out batches; equal shares where that cannot be told.

    Args:
        studied: the model.
        config: the options.
    """
    plain = _plan(studied, config, Allocation("uniform"), ())
    plans = _different([plain, *_candidates(studied, config)])
    if len(plans) == 1 or not chosen_targets(plain, studied.targets):
        return plain
    held_out = HeldOut(studied, config, studied.held_out)
    distances = _distances(studied, plans, held_out, held_out.cut, "cut")
    near = finalists = _near(plans, distances)
    # What has no factors to cut, as kernels, was fitted already.
    if len(near) > 1 and len(studied.learnt) < len(studied.calls) and studied.cut_by_study:
        finalists = near[:FINALISTS] + [one for one in near[FINALISTS:] if one is plain]
        distances = _distances(studied, finalists, held_out, held_out.fitted, "fitted")
    plan, undecided = _pick(finalists, distances, plain)
    means = {name: sum(found) / len(found) for name, found in distances.items()}
    return replace(plan, tried=means, undecided=undecided)


def _candidates(studied: Studied, config: SketchConfig) -> Iterator[SketchPlan]:
    """Plans of all allocations, with narrow layers and without; where some stay whole, with all cut too."""
    study = studied.study
    damage = {
        name: study.sensitivity[name] * float(study.values[name].square().sum())
        if name in study.values
        else study.sensitivity[name] * study.power.get(name, 0.0)
        for name in study.sensitivity
    }
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
                yield replace(cut, allocation=f"{cut.allocation}, all cut")


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


def _distances(
    studied: Studied,
    plans: Sequence[SketchPlan],
    held_out: HeldOut,
    made: Callable[[SketchPlan], Side],
    how: str,
) -> Mapping[str, Sequence[float]]:
    """How far the results of each plan are from the dense model's, batch by batch, by allocation."""
    found: dict[str, Sequence[float]] = {}
    for plan in plans:
        folder = studied.folder
        kept = None if folder is None else folder.tried(plan, how, len(studied.held_out))
        if kept is None:
            kept = held_out.distances(made(plan))
            if folder is not None:
                folder.keep_tried(plan, how, kept)
        found[plan.allocation] = kept
    return found


def _near(plans: Sequence[SketchPlan], distances: Mapping[str, Sequence[float]]) -> list[SketchPlan]:
    """The plans that are near the closest one, which is the first."""
    sums = {plan.allocation: sum(distances[plan.allocation]) for plan in plans}
    total = {name: math.inf if math.isnan(found) else found for name, found in sums.items()}
    closest = sorted(plans, key=lambda plan: total[plan.allocation])
    least = total[closest[0].allocation]  # of what is exact it may be negative, by rounding
    return [one for one in closest if total[one.allocation] <= max(least, NEAR * least)]


def _pick(
    plans: Sequence[SketchPlan], distances: Mapping[str, Sequence[float]], plain: SketchPlan
) -> tuple[SketchPlan, str]:
    """See `pick`; where the plain plan is not among them, the first one is."""
    by_name = {plan.allocation: plan for plan in plans}
    usual = plain if plain in plans else plans[0]
    name, undecided = pick({one: distances[one] for one in by_name}, usual.allocation)
    return by_name[name], undecided
