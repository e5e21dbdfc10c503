"""A plan and fitted layers from data: study the dense model, allocate ranks, fit in lockstep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import torch
from torch import Tensor, nn

from panther_compile.calibration.couplings import find_couplings
from panther_compile.calibration.layer_fit import LayerFit
from panther_compile.calibration.lockstep import fit_in_lockstep
from panther_compile.calibration.residuals import Residuals, find_residuals
from panther_compile.calibration.resume import Folder, identity_of
from panther_compile.calibration.shared_input import stack_name
from panther_compile.calibration.shared_plan import share_input
from panther_compile.calibration.study import Study, check_batches, study_layers
from panther_compile.calibration.trials import pick
from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigError
from panther_compile.factorization.fit_matrix import FittedPair, shifted_bias
from panther_compile.kinds.registry import kind_of
from panther_compile.kinds.targets import Target, find_targets, watch
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batches import Call, kept_positions
from panther_compile.models.outputs import distance
from panther_compile.models.watched import Arrival, Side
from panther_compile.planning.coupled import CouplingLosses
from panther_compile.planning.plan import Allocation, hides_progress, make_plan
from panther_compile.planning.sites import Found
from panther_compile.records import Fitted, SketchPlan

_HELD_OUT = 0.2  # of the batches, for the choice between allocations
# One input factor for several layers is taken where results come closer than this share of the distance.
WORTH_SHARING = 0.95
WORTH_TRYING = 1.1  # and tried where the study expects no more than this times what is lost apart
_OF_GROUPS = 4  # one in so many of the held-out batches tries groups, as there are many
_TRIAL = 8  # batches at most on which an allocation is fitted to be tried
_FEW_ROWS = 8  # for each input of a layer, below which data may tell less than the weights alone
WEIGHTS_ALONE = "weights alone"
TOO_FEW = "data too few: on held-out batches the sketch of the weights alone is closer"


@dataclass(frozen=True, slots=True)
class Studied:
    """A dense model and what data shows of it, whatever the ratio.

    Attributes:
        model: is not changed, nor is its mode.
        found: its sites.
        route: how the sites were found.
        calls: the data.
        masks: of each batch, see `batches.kept_positions`.
        targets: what data can fit.
        left_alone: why data fits no other weight, by the name of its unit.
        residuals: where the outputs of layers are added to, see `find_residuals`.
        study: of the batches in `learnt`.
        folder: where the work is kept as it is done, or None.
    """

    model: nn.Module
    found: Found
    route: str
    calls: Sequence[Call]
    masks: Sequence[Tensor | None]
    targets: Mapping[str, Target]
    left_alone: Mapping[str, str]
    residuals: Residuals
    study: Study
    folder: Folder | None

    @property
    def held_out(self) -> Sequence[tuple[Call, Tensor | None]]:
        """The batches on which allocations are compared, with their masks."""
        batches = list(zip(self.calls, self.masks, strict=True))
        return batches[len(self.learnt) :] or batches

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
        note: why the layers are to be sketched from the weights alone; empty if they are fitted.
    """

    plan: SketchPlan
    ready: Mapping[str, tuple[SketchedLayer, Fitted]]
    unreached: tuple[str, ...]
    note: str = ""


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
    targets, left_alone = find_targets([site for site, _ in found.sites])
    folder = study = None
    if resume is not None:
        folder = Folder(resume, identity_of(model, [site.name for site, _ in found.sites], config, calls))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        study = folder.study(device)
    check_batches(watch(model, targets), targets, calls, len(_learnt(calls)))
    if study is None:
        couplings = find_couplings(watch(model, targets), targets, calls) if config.narrow else []
        study = study_layers(
            watch(model, targets),
            targets,
            _learnt(calls),
            couplings,
            seed=config.seed,
            logits=config.logits,
            progress=not hides_progress(config),
        )
        if folder is not None:
            folder.keep_study(study)
    residuals = find_residuals(watch(model, targets), calls)
    masks = [kept_positions(model, call) for call in calls]
    return Studied(model, found, route, calls, masks, targets, left_alone, residuals, study, folder)


def fit_model(studied: Studied, config: SketchConfig, plan: SketchPlan | None = None) -> Calibrated:
    """Choose ranks and fit every layer that data can fit.

    Args:
        studied: of `study_model`, with options that differ in the ratio alone.
        config: the options.
        plan: to be carried out as it stands; None chooses one.

    Raises:
        ConfigError: the plan narrows layers that this data does not show to be coupled.
        ConfigTypeError: the model cannot be copied.
        ResumeError: the folder cannot be read or written.
    """
    if plan is None:
        plan = _choose(studied, config)
        alone = _without_data(studied, plan, config)
        if alone is not None:
            return Calibrated(alone, {}, (), TOO_FEW)
        plan = _share(studied, plan, config)
    else:
        _check_couplings(studied, plan)
    chosen = _chosen(plan, studied.targets)
    fit = LayerFit(chosen, plan, studied.study, studied.masks, config, studied.folder)
    fit_in_lockstep(
        watch(studied.model, chosen),
        watch(studied.model, chosen),
        studied.calls,
        fit,
        residuals=studied.residuals,
        progress=not hides_progress(config),
    )
    unreached = tuple(name for name in chosen if name not in fit.ready)
    fit.cut(unreached)
    return Calibrated(plan, fit.ready, unreached)


def _check_couplings(studied: Studied, plan: SketchPlan) -> None:
    """Raise ConfigError if the plan narrows layers that are not coupled, as far as data shows."""
    known = {losses.coupling.names for losses in studied.study.losses.values()}
    for line in plan.sketched:
        if line.choice is not None and line.choice.link and line.choice.link not in known:
            names = " > ".join(line.choice.link)
            raise ConfigError(f"the plan narrows {names}, which on this data do not hand features on alone")


def _choose(studied: Studied, config: SketchConfig) -> SketchPlan:
    """The plan that keeps the results closest on held-out batches: of allocations, then without couplings."""
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
    couplings = tuple(study.losses.values())
    plans = [_plan(studied, config, one, couplings) for one in allocations]
    narrow, tried, doubt = _best(studied, plans, config, {}, plain=plans[1])
    best, undecided = narrow, [doubt]
    if any(line.choice and line.choice.link for line in narrow.layers):
        apart = _plan(studied, config, allocations[plans.index(narrow)], ())
        best, tried, doubt = _best(studied, [narrow, apart], config, tried, plain=apart)
        undecided.append(doubt)
    means = {name: sum(found) / len(found) for name, found in tried.items()}
    return replace(best, tried=means, undecided="; ".join(filter(None, undecided)))


def _without_data(studied: Studied, plan: SketchPlan, config: SketchConfig) -> SketchPlan | None:
    """The plan of the weights alone, if data is few and that keeps results closer on held-out batches.

    Both are judged by batches that neither has seen; without such there is nothing to judge by.

    Args:
        studied: of the model.
        plan: the best with data.
        config: the options.
    """
    chosen = _chosen(plan, studied.targets)
    few = any(_has_few_rows(studied, target) for target in chosen.values())
    if not few or len(studied.learnt) == len(studied.calls) or len(studied.learnt) > 2 * _TRIAL:
        return None
    alone = replace(make_plan(studied.found, config, studied.route), allocation=WEIGHTS_ALONE)
    held_out, tried = _HeldOut(studied, config, studied.held_out), dict(plan.tried)
    if plan.allocation not in tried:
        tried[plan.allocation] = held_out.distance(held_out.cut(plan))
    targets = _chosen(alone, studied.targets)
    choices = {line.name: line.choice for line in alone.sketched if line.choice is not None}
    side = watch(studied.model, targets)
    layers = {
        name: kind_of(target.layer).sketch(name, target.layer, choices[name], config)[0]
        for name, target in targets.items()
    }
    _put(side, layers)
    tried[WEIGHTS_ALONE] = held_out.distance(side)
    closer = tried[WEIGHTS_ALONE] < tried[plan.allocation]
    return replace(alone, tried=tried) if targets and closer else None


def _has_few_rows(studied: Studied, target: Target) -> bool:
    """Whether a layer was given few rows for its inputs; those of an image are too much alike to count."""
    rows = studied.study.reached.get(target.name, 0)
    return not target.view.is_linear or rows < _FEW_ROWS * target.weight_and_bias()[0].shape[1]


def _plan(
    studied: Studied, config: SketchConfig, allocation: Allocation, couplings: Sequence[CouplingLosses]
) -> SketchPlan:
    plan = make_plan(
        studied.found,
        config,
        studied.route,
        values=studied.study.values,
        allocation=allocation,
        couplings=couplings,
    )
    return replace(plan, allocation=f"{allocation.name}, narrow" if couplings else allocation.name)


def _best(
    studied: Studied,
    plans: Sequence[SketchPlan],
    config: SketchConfig,
    known: Mapping[str, Sequence[float]],
    *,
    plain: SketchPlan,
) -> tuple[SketchPlan, Mapping[str, Sequence[float]], str]:
    """The best of some plans, the distances of those that differ, and why the plain one is kept if it is.

    Distances that are known already, by allocation, are not measured again.
    """
    different: dict[tuple[object, ...], SketchPlan] = {}
    for plan in plans:
        choices = tuple(line.choice and (line.choice.scheme, line.choice.ranks) for line in plan.layers)
        different.setdefault(choices, plan)
    plans = list(different.values())
    if len(plans) == 1 or not _chosen(plans[0], studied.targets):
        return plans[0], known, ""
    folder = studied.folder
    new = [plan for plan in plans if plan.allocation not in known]
    tried = None if folder is None else folder.tried(new)
    if tried is None:
        tried = _try(studied, new, config)
        if folder is not None:
            folder.keep_tried(new, tried)
    distances: dict[str, Sequence[float]] = {**known, **tried}
    names = [plan.allocation for plan in plans]
    usual = plain.allocation if plain.allocation in names else names[0]
    name, undecided = pick({one: distances[one] for one in names}, usual)
    return plans[names.index(name)], distances, undecided


def _try(studied: Studied, plans: Sequence[SketchPlan], config: SketchConfig) -> dict[str, list[float]]:
    """How far the results of each plan are from the dense model's on each held-out batch, by allocation."""
    held_out = _HeldOut(studied, config, studied.held_out)
    return {plan.allocation: held_out.distances(held_out.cut(plan)) for plan in plans}


def _share(studied: Studied, plan: SketchPlan, config: SketchConfig) -> SketchPlan:
    """The plan with one input factor for layers of one input, where that brings the results closer.

    Each group is tried by itself, at equal stored numbers, all other layers dense.
    """
    study, targets = studied.study, studied.targets
    if not study.shared:
        return plan
    held_out = _HeldOut(studied, config, studied.held_out[::_OF_GROUPS][:_TRIAL])
    side = watch(studied.model, targets)
    for sets in study.shared:
        found: list[tuple[SketchPlan, Sequence[str]]] = []
        for names in sets:
            members, key = [targets[name] for name in names], stack_name(names)
            shared = share_input(plan, members, study.values[key], studied.found, config)
            if shared is None or not {key, *names} <= set(study.factors):
                continue
            if _expected(study, shared, names) < WORTH_TRYING * _expected(study, plan, names):
                found.append((shared, names))
        dense = {name: side.watched[name].layer for _, names in found for name in names}
        best, least = plan, math.inf
        for tried in (plan, *(shared for shared, _ in found)) if found else ():
            trial = held_out.trial(tried)
            _put(side, {name: trial(name, ()) for name in dense})
            lost = held_out.distance(side) * (1.0 if tried is plan else 1.0 / WORTH_SHARING)
            if lost < least:
                best, least = tried, lost
        _put(side, dense)
        plan = best
    return plan


def _expected(study: Study, plan: SketchPlan, names: Sequence[str]) -> float:
    """What the ranks of some layers of one input lose by the study, weighed by what the results mind."""
    choices = {line.name: line.choice for line in plan.sketched if line.choice is not None}
    if choices[names[0]].sharing:
        return float(study.values[stack_name(names)][choices[names[0]].rank :].square().sum())
    return sum(
        study.sensitivity.get(name, 1.0) * float(study.values[name][choices[name].rank :].square().sum())
        for name in names
    )


def _put(side: Side, layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        side.watched[name].layer = layer


class _HeldOut:
    """Compares results on held-out batches with those of the dense model."""

    def __init__(
        self, studied: Studied, config: SketchConfig, batches: Sequence[tuple[Call, Tensor | None]]
    ) -> None:
        self._studied, self._config = studied, config
        dense = watch(studied.model, {})
        with torch.no_grad():
            self._wanted = [(call, kept, call.run(dense.model)) for call, kept in batches]

    def trial(self, plan: SketchPlan) -> "_Trial":
        """What makes the layers of a plan."""
        studied, chosen = self._studied, _chosen(plan, self._studied.targets)
        fit = LayerFit(chosen, plan, studied.study, studied.masks, self._config)
        return _Trial(fit, studied.study)

    def cut(self, plan: SketchPlan) -> Side:
        """The model with the layers of a plan."""
        studied, chosen = self._studied, _chosen(plan, self._studied.targets)
        sketched, trial = watch(studied.model, chosen), self.trial(plan)
        coupled = {line.name for line in plan.sketched if line.choice and line.choice.link}
        if set(chosen) - coupled <= set(studied.study.factors):
            _put(sketched, {name: trial(name, ()) for name in chosen})
        else:
            dense, calls = watch(studied.model, chosen), studied.learnt[:_TRIAL]
            fit_in_lockstep(dense, sketched, calls, trial, residuals={}, progress=False)
        return sketched

    def distance(self, side: Side) -> float:
        """How far the results of a model are from the dense one's."""
        return sum(self.distances(side)) / len(self._wanted)

    def distances(self, side: Side) -> list[float]:
        """The same on each batch."""
        with torch.no_grad():
            return [
                distance(wanted, call.run(side.model), kept, logits=self._config.logits)
                for call, kept, wanted in self._wanted
            ]


class _Trial:
    """Cuts matrices at their rank as the study left them, which costs nothing; fits the rest."""

    def __init__(self, fit: LayerFit, study: Study) -> None:
        self._fit, self._study = fit, study

    def __call__(self, name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        """See `lockstep.Fit`."""
        target, choice = self._fit.targets[name], self._fit.choices[name]
        if choice.link:
            return self._fit.cut_coupling(choice)[name]
        together = choice.sharing or (name,)
        if stack_name(together) not in self._study.factors:
            return self._fit(name, arrivals)
        left, right, mean = self._study.factors[stack_name(together)]
        if choice.sharing:
            left = left.split([self._fit.targets[one].outputs for one in together])[together.index(name)]
        weight, bias = target.weight_and_bias()
        left, right = left[:, : choice.rank], right[: choice.rank]
        bias = shifted_bias(bias, weight.detach().float() @ mean, left @ (right @ mean))
        return target.build(FittedPair(left, right, None, bias, 0.0))


def _learnt(calls: Sequence[Call]) -> Sequence[Call]:
    return calls[: len(calls) - int(_HELD_OUT * len(calls))]


def _chosen(plan: SketchPlan, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets that the plan sketches."""
    names = {line.name for line in plan.sketched}
    return {name: target for name, target in targets.items() if name in names}
