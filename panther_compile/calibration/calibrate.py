"""A plan and fitted layers from data: study the dense model, allocate ranks, fit in lockstep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike

import torch
from torch import nn

from panther_compile.calibration.choose import choose_plan
from panther_compile.calibration.couplings import find_couplings
from panther_compile.calibration.few_data import best_study, without_data
from panther_compile.calibration.first_look import FirstLook
from panther_compile.calibration.held_out import (
    TRIAL,
    Calibrated,
    HeldOut,
    Studied,
    fit_plan,
)
from panther_compile.calibration.inputs import LEAST
from panther_compile.calibration.norms import find_norms
from panther_compile.calibration.residuals import find_residuals
from panther_compile.calibration.resume import CalibrationFolder, identity_of
from panther_compile.calibration.study import Study, study_layers
from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigError, some_names
from panther_compile.factorization.moments import RIDGE, RIDGE_OF_PLACES
from panther_compile.kinds.targets import Target, find_targets, most_are, watch
from panther_compile.memory import FreedMemory
from panther_compile.models.batches import Call, device_of, kept_positions, learnt_of, spread_out
from panther_compile.models.cached import find_cached
from panther_compile.models.divided import divided, first_samples
from panther_compile.models.surroundings import without_fast_attention
from panther_compile.models.watched import put_layers
from panther_compile.names import stack_name
from panther_compile.planning.coupled import Coupling
from panther_compile.planning.recipe import follow_couplings
from panther_compile.planning.shared_factor import WORTH_SHARING, share_factor
from panther_compile.planning.sites import Found
from panther_compile.records import Cached, SketchPlan
from panther_compile.tensors_on_disk import TensorsOnDisk

# One factor for several layers is tried where the study expects no more than this times what is lost apart.
WORTH_TRYING = 1.1
_OF_GROUPS = 4  # one in so many of the held-out batches tries groups, as there are many


def study_model(
    model: nn.Module,
    found: Found,
    config: SketchConfig,
    route: str,
    calls: Sequence[Call],
    look: FirstLook,
    resume: str | PathLike[str] | None = None,
    *,
    doubted: bool = True,
    disk: TensorsOnDisk | None = None,
) -> Studied:
    """Study the dense model; its ratio and what is chosen for it do not matter yet.

    Args:
        model: the dense model; is not changed, nor is its mode.
        found: its sites.
        config: the options.
        route: how the sites were found.
        calls: the data.
        look: of the data, at these sites and maybe others.
        resume: a folder to keep the work in, and to take up what an earlier call has kept there.
        doubted: whether it is tried how far the data is to be believed, if it is few; the least doubt is how
            far it is off the statistics of batch norms.
        disk: where large tensors are kept; None keeps them in memory.

    Raises:
        ConfigError: `objective="cache"`, and no layer writes what the model keeps of a token.
        ConfigTypeError: the model cannot be copied.
        ResumeError: the folder is of another run, or cannot be used.
    """
    targets, left_alone = _readable_targets(found, look)
    folder: CalibrationFolder | None = None
    kept: Study | None = None
    if resume is not None:
        folder = CalibrationFolder(
            resume, identity_of(model, [site.name for site, _ in found.sites], config, calls)
        )
        kept = folder.study(device_of(model) or torch.device("cpu"), disk)
    repeated = look.repeated.intersection(targets)
    freed = FreedMemory()
    calls = spread_out(divided(watch(model, {}).model, calls, LEAST))
    looked_at = first_samples(watch(model, {}).model, calls)
    residuals = find_residuals(watch(model, targets), looked_at)
    masks = [kept_positions(model, call) for call in calls]
    cached = _find_cached(model, targets, calls) if config.objective == "cache" else ()
    couplings: Sequence[Coupling] = ()
    if config.narrow and kept is None:
        writers = _written(cached)
        coupled = find_couplings(watch(model, targets), targets, looked_at)
        couplings = [one for one in coupled if writers.isdisjoint(one.names)]
    freed.give_back()

    def study_with(ridges: Sequence[float], like: Study | None = None) -> list[Study]:
        return study_layers(
            watch(model, targets),
            targets,
            learnt_of(calls),
            config,
            couplings,
            ridges=ridges,
            stacks=[one.names for one in cached if len(one.names) > 1],
            disk=disk,
            like=like,
            repeated=repeated,
        )

    # Inputs show the moments of those in training no nearer than what batch norms know of them.
    are_places = most_are(targets.values(), lambda target: target.view.is_spatial)
    least = RIDGE_OF_PLACES if are_places else RIDGE
    study = kept or study_with([max(least, look.off)])[0]
    studied = Studied(
        model=model,
        found=found,
        route=route,
        calls=calls,
        masks=masks,
        targets=targets,
        left_alone=left_alone,
        residuals=residuals,
        study=study,
        folder=folder,
        cached=cached,
        repeated=repeated,
        norms=find_norms(model, looked_at),
    )
    if kept is None and doubted:
        studied = replace(studied, study=best_study(studied, config, partial(study_with, like=study)))
    if kept is None and folder is not None:
        folder.keep_study(studied.study)
    return studied


def _readable_targets(found: Found, look: FirstLook) -> tuple[dict[str, Target], dict[str, str]]:
    """Layers that data can fit, by name, and the others with the reason why not."""
    targets, left_alone = find_targets([site for site, _ in found.sites])
    for name in look.hidden.intersection(targets):
        del targets[name]
        left_alone[name] = "it is called under torch.func (vmap, jvp, grad), where its input cannot be read"
    return targets, left_alone


def _written(cached: Sequence[Cached]) -> set[str]:
    """Layers that write what the model keeps of a token: they are not narrowed, and share no factor."""
    return {name for one in cached for name in one.names}


def _find_cached(
    model: nn.Module, targets: Mapping[str, Target], calls: Sequence[Call]
) -> tuple[Cached, ...]:
    """What the model keeps of a token; raises ConfigError if none of its layers writes that."""
    cached = find_cached(watch(model, targets), calls[0])
    if not cached:
        raise ConfigError(
            f"objective='cache': {type(model).__name__} returns no past_key_values that its layers write as "
            "they are; wanted a decoder of transformers, whose projections of keys or values are to be "
            "sketched (latent attention, as DeepSeek-V3's, keeps parts of what one layer gives)"
        )
    return cached


@without_fast_attention()
def fit_model(studied: Studied, config: SketchConfig, plan: SketchPlan | None = None) -> Calibrated:
    """Choose ranks and fit every layer that data can fit.

    Args:
        studied: of `study_model`, with options that differ in the ratio alone.
        config: the options.
        plan: to be carried out as it stands; None chooses one.

    Raises:
        ConfigError: the plan narrows layers that this data does not show to be coupled, or has share a
            factor others than those of one input.
        ConfigTypeError: the model cannot be copied.
        RankError: a rank of a narrow layer is out of range.
        ResumeError: the folder cannot be read or written.
    """
    trials = HeldOut(studied, config, [])
    if plan is None:
        plan = choose_plan(studied, config)
        made_up = None if studied.made_up is None else fit_model(studied.made_up, config)
        better = None if studied.cached else without_data(studied, plan, config, trials, made_up)
        if better is not None:
            return better
        plan = _share(studied, plan, config)
    else:
        plan = follow_couplings(plan, (one.coupling for one in studied.study.losses.values()))
        _check_sharing(studied, plan)
    fit, norms, _ = fit_plan(studied, config, plan, studied.calls, studied.folder)
    unreached = tuple(name for name in fit.targets if name not in fit.ready)
    fit.cut(unreached)
    return Calibrated(plan, fit.ready, unreached, trials=trials, norms=norms)


def _check_sharing(studied: Studied, plan: SketchPlan) -> None:
    """Raise ConfigError if the plan has layers share a factor that, by this data, cannot."""
    groups = [{name for names in sets for name in names} for sets in studied.study.shared]
    for line in plan.sketched:
        sharing = () if line.choice is None else line.choice.sharing
        target = studied.targets.get(line.name)
        if not sharing:
            continue
        if target is not None and target.together:
            able, what = stack_name(sharing) in studied.study.factors, "are not those that this data reaches"
        else:
            able, what = any(group.issuperset(sharing) for group in groups), "have other inputs on this data"
        if not able:
            others = some_names(name for name in sharing if name != line.name)
            raise ConfigError(f"the plan has {line.name} share a factor with {others}, which {what}")


def _share(studied: Studied, plan: SketchPlan, config: SketchConfig) -> SketchPlan:
    """The plan with one factor for layers of one input, or parts of one module, where results come closer.

    Each group is tried by itself, at equal stored numbers, all other layers dense.
    """
    study, targets = studied.study, studied.targets
    if not study.shared:
        return plan
    held_out = HeldOut(studied, config, studied.held_out[::_OF_GROUPS][:TRIAL])
    side = watch(studied.model, targets)
    writers = _written(studied.cached)
    for sets in study.shared:
        found: list[tuple[SketchPlan, Sequence[str]]] = []
        for names in sets:
            if not writers.isdisjoint(names):
                continue
            members, key = [targets[name] for name in names], stack_name(names)
            sites = {one.name: one.site for one in members}
            shared = share_factor(
                plan, sites, study.values[key], studied.found, config, scheme=members[0].shared_scheme
            )
            if shared is None or not {key, *names} <= set(study.factors):
                continue
            if _expected(study, shared, names) < WORTH_TRYING * _expected(study, plan, names):
                found.append((shared, names))
        dense = {name: side.watched[name].layer for _, names in found for name in names}
        best, least = plan, math.inf
        for tried in (plan, *(shared for shared, _ in found)) if found else ():
            trial = held_out.trial(tried)
            put_layers(side, {name: trial(name, ()) for name in dense})
            lost = held_out.distance(side) * (1.0 if tried is plan else 1.0 / WORTH_SHARING)
            if lost < least:
                best, least = tried, lost
        put_layers(side, dense)
        plan = best
    return plan


def _expected(study: Study, plan: SketchPlan, names: Sequence[str]) -> float:
    """What the ranks of some layers of one input lose by the study, weighed by what the results mind."""
    choices = plan.choices
    if choices[names[0]].sharing:
        return float(study.values[stack_name(names)][choices[names[0]].rank :].square().sum())
    return sum(
        study.cost(name) * float(study.values[name][choices[name].rank :].square().sum()) for name in names
    )
