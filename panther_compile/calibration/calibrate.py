"""A plan and fitted layers from data: study the dense model, allocate ranks, fit in lockstep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from panther_compile.calibration.batches import Call, kept_positions
from panther_compile.calibration.fit_matrix import FittedMatrix
from panther_compile.calibration.layer_fit import LayerFit, matrix_layer
from panther_compile.calibration.lockstep import Arrival, fit_in_lockstep
from panther_compile.calibration.outputs import distance
from panther_compile.calibration.study import Study, study_layers
from panther_compile.calibration.targets import Target, find_targets, watch
from panther_compile.config import SketchConfig
from panther_compile.layers.base import SketchedLayer
from panther_compile.plan import Allocation, hides_progress, make_plan
from panther_compile.records import Choice, Fitted, SketchPlan
from panther_compile.sites import Found

_HELD_OUT = 0.2  # of the batches, for the choice between allocations
_TRIAL = 8  # batches at most on which an allocation is fitted to be tried


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What data made of a model.

    Attributes:
        plan: that was chosen.
        ready: fitted layers, by the name of the unit; what the data does not reach is missing.
        tried: how far the results were from the dense model's on held-out batches, by allocation.
    """

    plan: SketchPlan
    ready: Mapping[str, tuple[SketchedLayer, Fitted]]
    tried: Mapping[str, float]


def calibrate(
    model: nn.Module, found: Found, config: SketchConfig, route: str, calls: Sequence[Call]
) -> Calibrated:
    """Choose ranks and fit every layer that data can fit.

    Args:
        model: the dense model; is not changed, nor is its mode.
        found: its sites.
        config: the options.
        route: how the sites were found.
        calls: the data.

    Raises:
        ConfigTypeError: the model cannot be copied.
        DataError: NaN or Inf reaches a layer.
    """
    progress = not hides_progress(config)
    targets = find_targets([site for site, _ in found.sites])
    held_out = calls[len(calls) - int(_HELD_OUT * len(calls)) :] or calls
    learnt = calls[: len(calls) - int(_HELD_OUT * len(calls))]
    study = study_layers(
        watch(model, targets), targets, learnt, seed=config.seed, logits=config.logits, progress=progress
    )
    plan, tried = _choose(model, found, config, route, targets, study, (learnt, held_out))
    chosen = _chosen(plan, targets)
    fit = LayerFit(chosen, _choices(plan), study, _masks(model, calls), config)
    fit_in_lockstep(watch(model, chosen), watch(model, chosen), calls, fit, progress=progress)
    return Calibrated(plan, fit.ready, tried)


def _choose(
    model: nn.Module,
    found: Found,
    config: SketchConfig,
    route: str,
    targets: Mapping[str, Target],
    study: Study,
    calls: tuple[Sequence[Call], Sequence[Call]],
) -> tuple[SketchPlan, dict[str, float]]:
    """The plan of the allocation that keeps the results closest on held-out batches."""
    damage = {
        name: study.sensitivity[name] * float(study.values[name].square().sum())
        if name in study.values
        else study.sensitivity[name] * study.power.get(name, 0.0)
        for name in study.sensitivity
    }
    allocations = [Allocation("energy"), Allocation("uniform")]
    if damage:
        allocations.append(Allocation("sensitivity", damage))
    plans = {
        one.name: make_plan(found, config, route, values=study.values, allocation=one) for one in allocations
    }
    different: dict[tuple[object, ...], str] = {}
    for name, plan in plans.items():
        different.setdefault(tuple(line.choice and line.choice.ranks for line in plan.layers), name)
    names = list(different.values())
    if len(names) == 1 or not _chosen(plans[names[0]], targets):
        return plans[names[0]], {}
    learnt, held_out = calls
    dense = watch(model, {})
    with torch.no_grad():
        wanted = [call.run(dense.model) for call in held_out]
    tried = {}
    for name in names:
        chosen = _chosen(plans[name], targets)
        sketched = watch(model, chosen)
        trial = _Trial(LayerFit(chosen, _choices(plans[name]), study, _masks(model, learnt), config), study)
        if set(chosen) <= set(study.factors):
            for unit, watched in sketched.watched.items():
                watched.layer = trial(unit, ())
        else:
            fit_in_lockstep(watch(model, chosen), sketched, learnt[:_TRIAL], trial, progress=False)
        with torch.no_grad():
            tried[name] = sum(
                distance(result, call.run(sketched.model), kept_positions(model, call), logits=config.logits)
                for call, result in zip(held_out, wanted, strict=True)
            ) / len(held_out)
    return plans[min(tried, key=lambda name: tried[name])], tried


class _Trial:
    """Cuts matrices at their rank as the study left them, which costs nothing; fits the rest."""

    def __init__(self, fit: LayerFit, study: Study) -> None:
        self._fit, self._study = fit, study

    def __call__(self, name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        """See `lockstep.Fit`."""
        if name not in self._study.factors:
            return self._fit(name, arrivals)
        left, right, mean = self._study.factors[name]
        target, rank = self._fit.targets[name], self._fit.choices[name].rank
        weight, bias = target.weight_and_bias()
        left, right = left[:, :rank], right[:rank]
        if bias is not None:
            bias = bias.detach() + (weight.detach().float() @ mean - left @ (right @ mean)).to(bias.dtype)
        return matrix_layer(target.layer, FittedMatrix(left, right, None, bias, 0.0))


def _choices(plan: SketchPlan) -> dict[str, Choice]:
    return {line.name: line.choice for line in plan.sketched if line.choice is not None}


def _chosen(plan: SketchPlan, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets that the plan sketches."""
    names = {line.name for line in plan.sketched}
    return {name: target for name, target in targets.items() if name in names}


def _masks(model: nn.Module, calls: Sequence[Call]) -> list[Tensor | None]:
    return [kept_positions(model, call) for call in calls]
