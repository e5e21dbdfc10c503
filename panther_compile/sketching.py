"""The stages of `sketchify`, in their order: prepare, learn, plan, fit, replace."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from panther_compile.calibration.calibrate import fit_model, study_model
from panther_compile.calibration.few_data import MADE_UP, WEIGHTS_ALONE, has_few
from panther_compile.calibration.first_look import FirstLook, look_at
from panther_compile.calibration.held_out import HeldOut, Studied
from panther_compile.calibration.inputs import Inputs, read_inputs, read_output, with_texts_beside
from panther_compile.calibration.unseen import unseen_closeness
from panther_compile.calibration.verdict import keep_verdict
from panther_compile.config import Selector, SketchConfig, check_has_data
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    NoTargetError,
    SketchQualityWarning,
)
from panther_compile.healing.refine import refine
from panther_compile.healing.report import HEALING_ATTRIBUTE, HealReport, noted_as_healed
from panther_compile.kinds.parts import NOTHING_READY, Ready, replacements_of, sketch_site, work_on
from panther_compile.kinds.registry import wanted
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.models.batch_norms import Norm, take_statistics
from panther_compile.models.batches import Call, Data, record_calls, run_dense
from panther_compile.models.substitute import copied, copy_with, replace_inside, warn_of_functions
from panther_compile.models.surroundings import undisturbed, without_fast_attention
from panther_compile.models.watched import copy_sharing
from panther_compile.planning.fastest import fastest
from panther_compile.planning.other_weights import other_weights, others_text
from panther_compile.planning.own_weights import lift_in_place, lifted, lower_own_weights
from panther_compile.planning.plan import TIMED, TimedSites, reasons_text
from panther_compile.planning.ratio_search import Evaluate, measured, search_ratio
from panther_compile.planning.recipe import config_for, follow
from panther_compile.planning.shared_factor import plan_by_weights
from panther_compile.planning.sites import Found, check_module, check_weights, find_sites, without_uncalled
from panther_compile.planning.timing import time_sites
from panther_compile.planning.trace import read_graph, read_run
from panther_compile.records import (
    RECORD_ATTRIBUTE,
    Closeness,
    Fitted,
    SketchPlan,
    SketchRecord,
    keep_attribute,
    keep_record,
)
from panther_compile.reporting.progress import with_progress
from panther_compile.reporting.ratio_curve import RatioCurve
from panther_compile.tensors_on_disk import TensorsOnDisk


@dataclass(frozen=True, slots=True)
class Prepared:
    """The module given, the module tree to work on (its own, or a clone of it), and what was found in it.

    Attributes:
        recipe: the plan that was given, if one was.
        disk: where large tensors are kept; None keeps them in memory.
    """

    given: nn.Module
    model: nn.Module
    found: Found
    route: str
    reads_weights: bool
    recipe: SketchPlan | None = None
    disk: TensorsOnDisk | None = None


_ADVICE = "normalise it as in training; where it is right, run the model over it in training mode first"


@dataclass(frozen=True, slots=True)
class Made:
    """The replacements of the dense layers, and how they were made.

    Attributes:
        new: sketched layers by the dense ones.
        plan: the plan that was carried out.
        fitted: what came of each weight, by the name of its unit.
        unreached: units that no data reached.
        healed: what healing did.
        small: a copy of the model that holds them, if one was made to be evaluated.
        curve: the search for the ratio.
        note: why data that was given is not used; empty if it is.
        trials: see `Calibrated`.
    """

    new: dict[nn.Module, nn.Module]
    plan: SketchPlan
    fitted: dict[str, Fitted]
    unreached: tuple[str, ...]
    healed: HealReport | None = None
    calibrated: bool = False
    small: nn.Module | None = None
    curve: RatioCurve | None = None
    note: str = ""
    trials: HeldOut | None = None


def read_config(
    ratio: float | Mapping[Selector, float] | None,
    options: Mapping[str, Any],
    config: SketchConfig | None = None,
) -> SketchConfig:
    """The options, checked, in place of those of a config; raises ConfigError or ConfigTypeError."""
    known = {field.name for field in fields(SketchConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigTypeError(
            f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}"
        )
    given = dict(options) if ratio is None else {"ratio": ratio, **options}
    if config is None:
        return SketchConfig(**given)
    if not isinstance(config, SketchConfig):
        raise ConfigTypeError(f"config is a {type(config).__name__}, wanted a SketchConfig")
    return replace(config, **given)


def check_data(
    config: SketchConfig, data: Data | None, resume: str | PathLike[str] | None, example: Any
) -> None:
    """Raise ConfigError for options that need data where there is none."""
    check_has_data(data, {"refine=": config.refine != "none", "resume=": resume is not None})
    check_example(config, example, data)


def check_example(config: SketchConfig, example: Any, data: Data | None) -> None:
    """Raise ConfigError unless there is a batch to time layers on, where they are timed and only there."""
    if config.objective != "latency" and example is not None:
        raise ConfigError(f"example_inputs= is for objective='latency', got objective={config.objective!r}")
    if config.objective == "latency" and example is None and data is None:
        raise ConfigError(
            "objective='latency' needs example_inputs=, a batch to time the layers on; "
            "sketchify takes one of data= else, as the command sketch of --data"
        )
    if config.objective == "cache" and data is None:
        raise ConfigError("objective='cache' needs data=, texts that show what the decoder keeps of a token")


@undisturbed()
def prepare(
    model: nn.Module,
    config: SketchConfig,
    example: Any = None,
    *,
    meta_allowed: bool = False,
    recipe: SketchPlan | None = None,
) -> Prepared:
    """Check the model, lift the functional calls of a graph, find the sites, and time them on an example."""
    exported = isinstance(model, ExportedProgram)
    if exported and config.inplace:
        raise ConfigError("inplace=True conflicts with an ExportedProgram: a new module comes of it")
    if exported:
        model = model.module()  # type: ignore[attr-defined, operator]
    check_module(model)
    if not config.inplace:
        warn_of_functions(model, ", or give inplace=True", stacklevel=4)
    given = model
    model = lifted(model)
    reading = read_graph(model)
    found = find_sites(model, config if recipe is None else config_for(recipe, config, model), reading)
    check_weights(found, meta_allowed=meta_allowed)
    if example is not None:
        found = time_sites(model, found, example)
    route = "torch.export graph" if exported else reading.route
    return Prepared(given, model, found, route, bool(reading.direct), recipe)


@dataclass(frozen=True, slots=True)
class Learnt:
    """All that is known of a model before layers are planned, whatever the ratio.

    Attributes:
        prepared: the model and its sites.
        config: the options, with what `output` was found to be.
        inputs: what layers are fitted to, and sketch and model are compared on.
        calls: those of the fit; empty for the weights alone.
        output: what the model's result is taken for, in words.
        studied: what the calls show of the model; None without any.
        unused: why data that was given is not used; empty if it is.
    """

    prepared: Prepared
    config: SketchConfig
    inputs: Inputs
    calls: Sequence[Call]
    output: str
    studied: Studied | None
    unused: str = ""


@undisturbed()
def learn(
    prepared: Prepared,
    config: SketchConfig,
    data: Data | str | None,
    resume: str | PathLike[str] | None,
    example: Any,
) -> Learnt:
    """Read data, or make inputs up, and study the dense model on them.

    Where time counts and no example was given, layers are timed on the first batch.
    """
    inputs, calls, look = _read(prepared, config, data)
    first = calls[:1]
    unused = look.unlike if inputs.source == "data" and prepared.recipe is None else ""
    if unused:
        warnings.warn(f"{unused}: {_ADVICE}", SketchQualityWarning, stacklevel=4)
        (inputs, calls, look), resume = _read(prepared, config, None, "the data is not used"), None
    if inputs.doubt:
        warnings.warn(inputs.doubt, SketchQualityWarning, stacklevel=4)
    output, config, found = read_output(prepared.model, prepared.found, inputs.judge or calls, config)
    prepared = replace(prepared, found=found)
    doubted, fitted, studied = inputs.source == "data", calls, None
    if calls and doubted:
        fitted, beside = with_texts_beside(prepared.model, prepared.found, calls, config)
        inputs = replace(inputs, what=inputs.what + beside)
    if calls:
        studied = _study(prepared, config, fitted, look, resume, doubted=doubted)
        prepared = replace(prepared, found=studied.found)
    elif config.objective == "cache":
        raise ConfigError(
            f"objective='cache' needs data that layers can be fitted to: {unused or 'none can be made up'}"
        )
    if first and config.objective == "latency" and example is None:
        prepared = replace(prepared, found=time_sites(prepared.model, prepared.found, first[0]))
    if studied is not None:
        studied = replace(studied, found=prepared.found)
        if doubted and has_few(studied):
            studied = replace(studied, made_up=_study_of_made_up(prepared, config))
    return Learnt(prepared, config, inputs, calls, output, studied, unused)


def _read(
    prepared: Prepared, config: SketchConfig, data: Data | str | None, absent: str = "no data was given"
) -> tuple[Inputs, Sequence[Call], FirstLook]:
    """Data, or inputs that are made up, the calls of them that layers are fitted to, and a look at these."""
    inputs = read_inputs(prepared.model, prepared.found, data, config, absent)
    calls = () if inputs.fit is None else record_calls(prepared.model, inputs.fit)
    return inputs, calls, look_at(prepared.model, prepared.found.sites, calls)


def _study_of_made_up(prepared: Prepared, config: SketchConfig) -> Studied | None:
    """What the fit without data would go by, if there is one."""
    inputs, calls, look = _read(prepared, config, None)
    return None if inputs.fit is None else _study(prepared, config, calls, look, None, doubted=False)


@without_fast_attention()
def _study(
    prepared: Prepared,
    config: SketchConfig,
    calls: Sequence[Call],
    look: FirstLook,
    resume: str | PathLike[str] | None,
    *,
    doubted: bool,
) -> Studied:
    if any(parameter.is_inference() for parameter in prepared.model.parameters()):
        raise ConfigTypeError(
            f"{type(prepared.model).__name__} was made under torch.inference_mode(), which rules out the "
            "gradients that data= needs: make it outside"
        )
    uncalled = read_run(copy_sharing(prepared.model, {}), lambda model: run_dense(model, calls[0]))
    prepared = replace(prepared, found=without_uncalled(prepared.found, uncalled))
    if not prepared.found.sites:
        plan_sites(prepared, config)  # says why
    return study_model(
        prepared.model,
        prepared.found,
        config,
        prepared.route,
        calls,
        look,
        resume,
        doubted=doubted,
        disk=prepared.disk,
    )


def learn_and_make(
    prepared: Prepared,
    config: SketchConfig,
    data: Data | str | None,
    resume: str | PathLike[str] | None,
    example: Any,
) -> tuple[Learnt, Made]:
    """Learn, and make what the options ask for at their ratio."""
    learnt = learn(prepared, config, data, resume, example)
    made = make(learnt.prepared, learnt.config, learnt.studied)
    if made.plan.allocation == MADE_UP and config.objective != "latency":
        # As without data, to the bit, but that the data judges it.
        few, learnt = learnt.calls, learn(prepared, config, None, None, None)
        learnt = replace(learnt, inputs=learnt.inputs.judged_on(few), unused=made.note)
        made = make(learnt.prepared, learnt.config, learnt.studied)
    return learnt, made


@undisturbed()
def make(prepared: Prepared, config: SketchConfig, studied: Studied | None) -> Made:
    """Plan, fit and sketch at the ratio of the options, and heal."""
    made = fit(prepared, config, studied)
    if studied is None or config.refine == "none":
        return made
    small = copy_model(prepared.model, made.new)
    return replace(made, healed=refine(small, made.new.values(), prepared.model, studied.calls, config))


def fit(prepared: Prepared, config: SketchConfig, studied: Studied | None) -> Made:
    """Plan, fit and sketch; where time counts, what is faster as a whole."""
    if not isinstance(prepared.found, TimedSites):
        return _fit_once(prepared, config, studied)

    def fit_found(found: Found) -> Made:
        counts = isinstance(found, TimedSites)
        given = config if counts else replace(config, objective="size")
        known = None if studied is None else replace(studied, found=found)
        return _fit_once(replace(prepared, found=found), given, known)

    made, times = fastest(prepared.found, fit_found)
    return made if times is None else replace(made, plan=replace(made.plan, seconds=times.fastest))


def _fit_once(prepared: Prepared, config: SketchConfig, studied: Studied | None) -> Made:
    if studied is None:
        plan = plan_sites(prepared, config)
        new, fitted = _sketch(prepared.found, plan, config, NOTHING_READY, None)
        return Made(new, plan, fitted, ())
    recipe = prepared.recipe
    if recipe is not None:
        recipe = follow(prepared.found, recipe, config, prepared.route, data=True)
    done = fit_model(studied, config, recipe)
    _check_plan(prepared, done.plan, config)
    new, fitted = _sketch(prepared.found, done.plan, config, done.ready, studied.study.put_module)
    notes = done.notes(studied)
    fitted = {name: replace(one, note=notes.get(name, done.note or one.note)) for name, one in fitted.items()}
    for name, norm in done.norms.items():
        dense = prepared.model.get_submodule(name)
        new[dense] = norm.train(dense.training)
    return Made(new, done.plan, fitted, done.unreached, calibrated=True, note=done.note, trials=done.trials)


def search(learnt: Learnt, wanted: RatioCurve, evaluate: Evaluate) -> Made:
    """What passes at the smallest ratio, in the copy of the model that was measured."""
    passing: list[Made] = []
    prepared = learnt.prepared

    def score_at(ratio: float) -> float:
        made = make(prepared, replace(learnt.config, ratio=ratio), learnt.studied)
        if passing and _stored(made.plan) > _stored(passing[0].plan):
            raise NoTargetError(f"ratio {ratio:g} leaves layers dense that larger ratios make smaller")
        with undisturbed():
            small = copy_model(prepared.model, made.new)
        turn_off_nested_tensors(small)
        score = measured(evaluate, small, f"the model of ratio {ratio:g}")
        if wanted.passes(score):
            passing[:] = [replace(made, small=small)]  # a later one is of a smaller ratio
        return score

    curve = search_ratio(score_at, wanted.dense_score, wanted.max_drop)
    return replace(passing[0], curve=curve)


def _stored(plan: SketchPlan) -> int:
    """Stored numbers of all that could be sketched, whether it is or not."""
    return sum(line.stored_numbers for line in plan.layers)


@undisturbed()
def plan_sites(prepared: Prepared, config: SketchConfig) -> SketchPlan:
    """The plan by the weights alone; raises NoTargetError if it sketches nothing that it was asked to."""
    if prepared.recipe is None:
        plan = plan_by_weights(prepared.found, config, prepared.route)
    else:
        plan = follow(prepared.found, prepared.recipe, config, prepared.route, data=False)
    _check_plan(prepared, plan, config)
    return plan


def _check_plan(prepared: Prepared, plan: SketchPlan, config: SketchConfig) -> None:
    """Raise NoTargetError, with the reasons, if the plan sketches nothing that it was asked to."""
    found = prepared.found
    dense_on_purpose = any(ratio == 1.0 for _, ratio in config.ratios())
    if not found.sites or not (plan.sketched or dense_on_purpose):
        slow = tuple(line for line in plan.layers if line.reason.startswith(TIMED))
        reasons = reasons_text(plan, slow)
        others = others_text(other_weights(prepared.model, {line.name for line in plan.layers}))
        sought = f"wanted {wanted()}" + f"; there are {others}" * bool(others)
        if slow:
            sought = "no layer has a sketch of this ratio that is faster here"
        elif prepared.reads_weights and not isinstance(prepared.model, fx.GraphModule):
            sought += "; torch.fx.symbolic_trace(model) makes layers of what its forward computes itself"
        raise NoTargetError(f"nothing to sketch in {type(prepared.model).__name__}: {sought}{reasons}")


def _sketch(
    found: Found,
    plan: SketchPlan,
    config: SketchConfig,
    ready: Ready,
    put: Callable[[nn.Module], object] | None,
) -> tuple[dict[nn.Module, nn.Module], dict[str, Fitted]]:
    """The replacement of every dense layer that the plan sketches, and what came of each weight."""
    choices = plan.choices
    new: dict[nn.Module, nn.Module] = {}
    fitted: dict[str, Fitted] = {}
    for site, owner in with_progress(
        found.sites, lambda one: work_on(*one), desc="sketch", progress=config.progress
    ):
        made = sketch_site(site, owner, choices, config, ready, put)
        if made is not None:
            layer, record = made
            fitted |= record
            new |= replacements_of(site, owner, layer)
    return new, fitted


def put_in_place(model: nn.Module, learnt: Learnt, made: Made) -> nn.Module:
    """The user's model with the new layers, and the record of what was done."""
    prepared, config = learnt.prepared, learnt.config
    with undisturbed():
        closeness, made = _judge(learnt, made)
        if config.inplace:
            result = _replace_in_place(model, prepared, made.new)
        else:
            result = copy_model(prepared.model, made.new) if made.small is None else made.small
        lower_own_weights(result)
    turn_off_nested_tensors(result)
    earlier = vars(prepared.given).get(RECORD_ATTRIBUTE)
    fitted = {name: replace(one, note=learnt.unused or one.note) for name, one in made.fitted.items()}
    if made.healed is not None:
        keep_attribute(result, HEALING_ATTRIBUTE, made.healed)
        if not made.healed.reverted:
            fitted = noted_as_healed(fitted, made.healed.blocks_reverted)
    keep_record(result, SketchRecord.after(earlier, made.plan, fitted, made.curve))
    is_fitted = made.calibrated and made.plan.allocation != WEIGHTS_ALONE
    source = learnt.inputs.source if is_fitted else "weights"
    keep_verdict(result, closeness, fitted_to=source, output=learnt.output)
    if made.unreached:
        warnings.warn(
            f"{learnt.inputs.source} never reached {', '.join(made.unreached)}: sketched from the weights "
            "alone; give data that does, or exclude what is not needed",
            stacklevel=3,
        )
    return result


def _judge(learnt: Learnt, made: Made) -> tuple[Closeness, Made]:
    """How close the outputs are; where nobody asked for the fit, the closer one of it and of none."""
    prepared, config, studied = learnt.prepared, learnt.config, learnt.studied

    def closeness(one: Made) -> Closeness:
        return learnt.inputs.closeness(prepared.model, one.new, learnt.calls, config)

    found = closeness(made)
    if studied is not None and learnt.inputs.source == "data":
        healed = made.healed is not None and not made.healed.reverted
        found = unseen_closeness(studied, config, made.plan, found, made.trials, healed=healed)
    judged = [(found, made)]
    if learnt.inputs.optional and made.curve is None:
        plain = make(prepared, config, None)
        judged.insert(0, (closeness(plain), plain))
    return min(judged, key=lambda one: one[0].share)


def _replace_in_place(model: nn.Module, prepared: Prepared, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """The last step, so that whatever fails before leaves the model as it was."""
    if prepared.model is not model:  # its clone was lifted, and the layers are the clone's
        names = {module: name for name, module in prepared.model.named_modules()}
        lift_in_place(model, (names[old] for old in new if not isinstance(old, Norm)))
        new = {model.get_submodule(names[old]): layer for old, layer in new.items()}
    layers = dict(new)
    for old, made in new.items():
        if isinstance(old, Norm) and isinstance(made, Norm):  # an optimizer has its parameters
            take_statistics(old, made)
            del layers[old]
    return replace_inside(model, layers)


def copy_model(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The copy with the replacements, checked to hold them all."""
    result = copied(lambda given: copy_with(given, new), model, "; inplace=True needs no copy")
    wanted = type(new.get(model, model))
    alike = isinstance(result, fx.GraphModule if issubclass(wanted, fx.GraphModule) else wanted)
    if not alike or not set(result.modules()).issuperset(new.values()):
        raise ConfigTypeError(
            f"a deep copy of {type(model).__name__} does not hold the new layers: its own __deepcopy__ "
            "or __getstate__ made others; inplace=True needs no copy"
        )
    return result
