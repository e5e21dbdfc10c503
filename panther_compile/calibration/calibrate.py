"""A plan and fitted layers from data: study the dense model, allocate ranks, fit in lockstep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import torch
from torch import Tensor, nn

from panther_compile.calibration.batches import Call, kept_positions
from panther_compile.calibration.fit_matrix import FittedMatrix
from panther_compile.calibration.layer_fit import LayerFit, matrix_layer
from panther_compile.calibration.lockstep import Arrival, fit_in_lockstep
from panther_compile.calibration.outputs import distance
from panther_compile.calibration.resume import Folder, identity_of
from panther_compile.calibration.study import Study, study_layers
from panther_compile.calibration.targets import Target, find_targets, watch
from panther_compile.config import SketchConfig
from panther_compile.layers.base import SketchedLayer
from panther_compile.plan import Allocation, hides_progress, make_plan
from panther_compile.records import Fitted, SketchPlan
from panther_compile.sites import Found

_HELD_OUT = 0.2  # of the batches, for the choice between allocations
_TRIAL = 8  # batches at most on which an allocation is fitted to be tried


@dataclass(frozen=True, slots=True)
class Studied:
    """A dense model and what data shows of it, whatever the ratio.

    Attributes:
        model: is not changed, nor is its mode.
        found: its sites.
        route: how the sites were found.
        calls: the data.
        targets: what data can fit.
        study: of the batches in `learnt`.
        folder: where the work is kept as it is done, or None.
    """

    model: nn.Module
    found: Found
    route: str
    calls: Sequence[Call]
    targets: Mapping[str, Target]
    study: Study
    folder: Folder | None

    @property
    def held_out(self) -> Sequence[Call]:
        """The batches on which allocations are compared."""
        return self.calls[len(self.calls) - int(_HELD_OUT * len(self.calls)) :] or self.calls

    @property
    def learnt(self) -> Sequence[Call]:
        """The other batches."""
        return _learnt(self.calls)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What data made of a model at one ratio.

    Attributes:
        plan: that was chosen.
        ready: fitted layers, by the name of the unit.
        unreached: units that the plan sketches, and that no batch reached.
    """

    plan: SketchPlan
    ready: Mapping[str, tuple[SketchedLayer, Fitted]]
    unreached: tuple[str, ...]


def study_model(
    model: nn.Module,
    found: Found,
    config: SketchConfig,
    route: str,
    calls: Sequence[Call],
    resume: str | PathLike[str] | None = None,
) -> Studied:
    """Study the dense model; its ratio and what is chosen for it do not matter yet.

    Args:
        model: the dense model; is not changed, nor is its mode.
        found: its sites.
        config: the options.
        route: how the sites were found.
        calls: the data.
        resume: a folder to keep the work in, and to take up what an earlier call has kept there.

    Raises:
        ConfigTypeError: the model cannot be copied.
        DataError: NaN or Inf reaches a layer.
        ResumeError: the folder is of another run, or cannot be used.
    """
    targets = find_targets([site for site, _ in found.sites])
    folder = study = None
    if resume is not None:
        folder = Folder(resume, identity_of(model, [site.name for site, _ in found.sites], config, calls))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        study = folder.study(device)
    if study is None:
        study = study_layers(
            watch(model, targets),
            targets,
            _learnt(calls),
            seed=config.seed,
            logits=config.logits,
            progress=not hides_progress(config),
        )
        if folder is not None:
            folder.keep_study(study)
    return Studied(model, found, route, calls, targets, study, folder)


def fit_model(studied: Studied, config: SketchConfig) -> Calibrated:
    """Choose ranks and fit every layer that data can fit.

    Args:
        studied: of `study_model`, with options that differ in the ratio alone.
        config: the options.

    Raises:
        ConfigTypeError: the model cannot be copied.
        ResumeError: the folder cannot be read or written.
    """
    plan = _choose(studied, config)
    model, calls = studied.model, studied.calls
    chosen = _chosen(plan, studied.targets)
    fit = LayerFit(chosen, plan, studied.study, _masks(model, calls), config, studied.folder)
    fit_in_lockstep(
        watch(model, chosen), watch(model, chosen), calls, fit, progress=not hides_progress(config)
    )
    return Calibrated(plan, fit.ready, tuple(name for name in chosen if name not in fit.ready))


def _choose(studied: Studied, config: SketchConfig) -> SketchPlan:
    """The plan of the allocation that keeps the results closest on held-out batches."""
    study, folder = studied.study, studied.folder
    damage = {
        name: study.sensitivity[name] * float(study.values[name].square().sum())
        if name in study.values
        else study.sensitivity[name] * study.power.get(name, 0.0)
        for name in study.sensitivity
    }
    allocations = [Allocation("energy"), Allocation("uniform")]
    if damage:
        allocations.append(Allocation("sensitivity", damage))
    different: dict[tuple[object, ...], SketchPlan] = {}
    for one in allocations:
        plan = make_plan(studied.found, config, studied.route, values=study.values, allocation=one)
        plan = replace(plan, allocation=one.name)
        different.setdefault(tuple(line.choice and line.choice.ranks for line in plan.layers), plan)
    plans = list(different.values())
    if len(plans) == 1 or not _chosen(plans[0], studied.targets):
        return plans[0]
    tried = None if folder is None else folder.tried(plans)
    if tried is None:
        tried = _try(studied, plans, config)
        if folder is not None:
            folder.keep_tried(plans, tried)
    best = min(plans, key=lambda plan: tried[plan.allocation])
    return replace(best, tried=tried)


def _try(studied: Studied, plans: Sequence[SketchPlan], config: SketchConfig) -> dict[str, float]:
    """How far the results of each plan are from the dense model's on held-out batches, by allocation."""
    model, study, learnt = studied.model, studied.study, studied.learnt
    dense = watch(model, {})
    with torch.no_grad():
        wanted = [call.run(dense.model) for call in studied.held_out]
    tried = {}
    for plan in plans:
        chosen = _chosen(plan, studied.targets)
        sketched = watch(model, chosen)
        trial = _Trial(LayerFit(chosen, plan, study, _masks(model, learnt), config), study)
        if set(chosen) <= set(study.factors):
            for unit, watched in sketched.watched.items():
                watched.layer = trial(unit, ())
        else:
            fit_in_lockstep(watch(model, chosen), sketched, learnt[:_TRIAL], trial, progress=False)
        with torch.no_grad():
            tried[plan.allocation] = sum(
                distance(result, call.run(sketched.model), kept_positions(model, call), logits=config.logits)
                for call, result in zip(studied.held_out, wanted, strict=True)
            ) / len(wanted)
    return tried


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


def _learnt(calls: Sequence[Call]) -> Sequence[Call]:
    return calls[: len(calls) - int(_HELD_OUT * len(calls))]


def _chosen(plan: SketchPlan, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets that the plan sketches."""
    names = {line.name for line in plan.sketched}
    return {name: target for name, target in targets.items() if name in names}


def _masks(model: nn.Module, calls: Sequence[Call]) -> list[Tensor | None]:
    return [kept_positions(model, call) for call in calls]
