"""Few data: how far they are believed, and whether more than the weights alone.

    ridge        a share of the mean power that is added to second moments: few rows show fewer directions
                 than a layer has, and the more is added, the more W counts as it is in all of them
    alone        the sketch of the weights alone, or of made-up inputs, which no data can mislead

Both are judged by held-out batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from panther_compile.calibration.held_out import (
    TRIAL,
    Calibrated,
    HeldOut,
    Studied,
    chosen_targets,
)
from panther_compile.calibration.study import Study
from panther_compile.config import SketchConfig
from panther_compile.kinds.parts import sketch_parts
from panther_compile.kinds.targets import Target, most_are, watch
from panther_compile.models.watched import put_layers
from panther_compile.planning.plan import make_plan
from panther_compile.planning.shared_factor import plan_by_weights
from panther_compile.planning.ways import Allocation
from panther_compile.records import SketchPlan

RIDGES = (0.1, 1.0)  # that are tried beside the usual one
_WORTH = 0.8  # of the distance, below which another one is taken
_FEW_ROWS = 8  # for each input of a layer, below which data may tell less than the weights alone
WEIGHTS_ALONE = "weights alone"
MADE_UP = "made-up inputs"
TOO_FEW = "data too few: on held-out batches the sketch of the {} is closer"


def best_study(
    studied: Studied, config: SketchConfig, study: Callable[[Sequence[float]], list[Study]]
) -> Study:
    """The study whose ridge brings results closest on held-out batches; the one there is if data is many.

    Larger ridges are tried as long as each is closer than the one before.

    Args:
        studied: with the usual ridge.
        config: the options; ranks are those of half the numbers, whatever the ratio.
        study: gives others, by their ridges.
    """
    if not has_few(studied):
        return studied.study
    config = replace(config, ratio=0.5)
    last = _lost(studied, config)
    found = {last: studied.study}
    for one in study(RIDGES):
        lost = _lost(replace(studied, study=one), config)
        found.setdefault(lost / _WORTH, one)
        if lost >= last:  # nor would more of it help
            break
        last = lost
    return found[min(found)]


def _lost(studied: Studied, config: SketchConfig) -> float:
    """How far the results of a plan by energies are on held-out batches."""
    plan = make_plan(
        studied.found,
        config,
        studied.route,
        values=studied.study.values,
        energies=studied.study.energies,
        allocation=Allocation("energy"),
        reached=studied.study.reached,
    )
    held_out = HeldOut(studied, config, studied.held_out)
    return held_out.distance(held_out.cut(plan))


def without_data(
    studied: Studied,
    plan: SketchPlan,
    config: SketchConfig,
    trials: HeldOut,
    made_up: Calibrated | None,
) -> Calibrated | None:
    """What is made of the weights alone, or of inputs made up, if data is few and that is closer.

    All are judged by batches that none has seen; without such there is nothing to judge by.

    Args:
        studied: of the model.
        plan: the best with data.
        config: the options.
        trials: makes the fit to part of the data, and keeps it.
        made_up: what inputs that were made up give, if there are any.
    """
    chosen = chosen_targets(plan, studied.targets)
    if not has_few(studied, chosen):
        return None
    held_out, tried = HeldOut(studied, config, studied.held_out), dict(plan.tried)
    lost_by_batch = held_out.tried(plan, "fitted-to-all", trials.fitted_to_all)  # others may be of less
    tried[plan.allocation] = sum(lost_by_batch) / len(lost_by_batch)
    alone = plan_by_weights(studied.found, config, studied.route)
    choices = alone.choices
    targets = chosen_targets(alone, studied.targets)
    parts = {name: target.layer for name, target in targets.items()}
    made = sketch_parts(parts, choices, config, studied.study.put_module)
    layers: dict[str, nn.Module] = {name: layer for name, (layer, _) in made.items()}
    others = {WEIGHTS_ALONE: Calibrated(alone, {}, (), TOO_FEW.format(WEIGHTS_ALONE))} if targets else {}
    ready = {WEIGHTS_ALONE: layers}
    if made_up is not None and made_up.ready:
        others[MADE_UP] = replace(made_up, note=TOO_FEW.format(MADE_UP), trials=None)
        ready[MADE_UP] = {name: layer for name, (layer, _) in made_up.ready.items()}
    for name, other in others.items():
        norms = {one: studied.model.get_submodule(one) for one in other.norms}
        side = watch(studied.model, {one: studied.targets[one] for one in ready[name]}, norms)
        put_layers(side, {**ready[name], **other.norms})
        tried[name] = held_out.distance(side)
    lost = {name: tried[name] for name in (plan.allocation, *others) if math.isfinite(tried[name])}
    best = min(lost, key=lambda name: lost[name], default=plan.allocation)
    if best == plan.allocation:
        return None
    return replace(others[best], plan=replace(others[best].plan, allocation=best, tried=tried))


def has_few(studied: Studied, targets: Mapping[str, Target] | None = None) -> bool:
    """Whether data is few for most of the numbers of some targets, and what none would give can be judged.

    Args:
        studied: the model.
        targets: by name; all that data can fit if None.
    """
    looked_at = (studied.targets if targets is None else targets).values()
    return most_are(looked_at, lambda target: has_few_rows(studied, target)) and can_be_judged(studied)


def can_be_judged(studied: Studied) -> bool:
    """Whether batches are held out, and so few are learnt from that trials cost little."""
    return len(studied.learnt) < len(studied.calls) and len(studied.learnt) <= 2 * TRIAL


def has_few_rows(studied: Studied, target: Target) -> bool:
    """Whether a layer was given few rows for its inputs; those of an image are too much alike to count."""
    rows = studied.study.reached.get(target.name, 0)
    return target.view.is_spatial or rows < _FEW_ROWS * target.shape[1]
