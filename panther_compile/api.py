"""The public verbs: each one a few stages, called in order."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from tqdm import tqdm

from panther_compile.calibration.batches import Call, Data, record_calls
from panther_compile.calibration.calibrate import Studied, fit_model, study_model
from panther_compile.calibration.watched import copy_sharing
from panther_compile.config import Selector, SketchConfig
from panther_compile.errors import ConfigError, ConfigTypeError, NoTargetError
from panther_compile.healing.healer import heal, keep_report
from panther_compile.healing.report import HealReport, heal_report
from panther_compile.layers.base import outermost
from panther_compile.layers.nested_tensors import turn_off_nested_tensors, turn_on_nested_tensors
from panther_compile.passes.base import NOTHING_READY, Ready, SharingPass
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.plan import PAYS, TIMED, TimedSites, hides_progress, make_plan
from panther_compile.ratio_search import Evaluate, check_search, measured, search_ratio
from panther_compile.records import (
    NEVER_REACHED,
    RECORD_ATTRIBUTE,
    Fitted,
    RatioCurve,
    SketchPlan,
    SketchRecord,
    keep_record,
)
from panther_compile.sites import Found, check_module, check_weights, find_sites, without_uncalled
from panther_compile.substitute import copied, copy_with, replace_inside
from panther_compile.surroundings import undisturbed
from panther_compile.timing import time_sites, without_least
from panther_compile.trace import clone_structure, read_graph, read_run

Model = TypeVar("Model", bound=nn.Module)
_HALF = 0.5  # the ratio where none is given


class SketchOptions(TypedDict, total=False):
    """The keyword options of `sketchify` and `plan_sketch`: see `SketchConfig`."""

    include: Selector | Sequence[Selector] | None
    exclude: Selector | Sequence[Selector] | None
    method: str
    sketch: str
    attention: str
    features: int
    min_params: int
    round_rank_to: int | None
    allow_slower: bool
    objective: str
    inplace: bool
    seed: int
    progress: bool | None
    device: torch.device | str | None
    output: str
    refine: str
    refine_steps: int
    narrow: bool


def sketchify(
    model: Model,
    ratio: float | Mapping[Selector, float] = _HALF,
    *,
    data: Data | None = None,
    max_drop: float | None = None,
    evaluate: Evaluate | None = None,
    resume: str | PathLike[str] | None = None,
    example_inputs: Any = None,
    **options: Unpack[SketchOptions],
) -> Model:
    """Replace the linear, convolution and attention layers of a model by sketched ones.

    A second call on a sketched model sketches what is still dense, and leaves the rest as it is.

    Args:
        model: any `nn.Module`. An `fx.GraphModule` or a `torch.export.ExportedProgram` has its functional
            calls (`F.linear`, `F.conv2d`) sketched too; the latter gives a GraphModule back.
        ratio: stored numbers of the replaced layers over their dense count, in (0, 1].
        data: inputs of the model, without labels, to fit the layers to: a loader, a list of batches, or a
            function that calls the model. A few hundred samples of what the model will be used for keep it
            much closer to itself than the weights alone can tell. The model runs on them in eval mode.
        max_drop: in place of a ratio: how far the score may fall below the dense model's, in its own units.
            The smallest ratio that keeps it is searched for, with at most 7 evaluations of smaller models;
            `sketch_report(result).curve` has what was measured.
        evaluate: with `max_drop`: gives the score of a model, higher is better. It runs in eval mode.
        resume: a folder, made if missing, to keep what was learnt from `data` and each fitted layer in; a
            later call with the same model, data and options goes on from there. Ratios may share one.
        example_inputs: with `objective="latency"`: a batch as the model will be given it, on which layers and
            the model are timed; a tensor, a tuple of arguments or a mapping of keywords. Default: the first
            batch of data.
        **options: the fields of `SketchConfig`.

    Returns:
        A model of the user's own class, with the layers replaced. `model` itself is untouched, unless
        `inplace=True` was asked for; then it is what is returned, or its replacement if it is a layer itself.

    Raises:
        ConfigError, ConfigTypeError: an option, or the model, is not what is wanted; or it cannot be copied.
        EvaluateError, RatioSearchError: evaluate raised or gave no number; no ratio is within max_drop.
        ResumeError: the folder is of another run, or cannot be used.
        DataError: the data holds no batch, cannot be read to its end, or leads to NaN.
        NoTargetError: nothing in the model can be sketched; the message says why.
        WeightError: a weight holds NaN or Inf, or has no data.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
    """
    config = _config(ratio, options)
    check_search(ratio != _HALF, max_drop, evaluate)
    for option, given in (("refine", config.refine != "none"), ("resume", resume is not None)):
        if given and data is None:
            raise ConfigError(f"{option}= needs data=, inputs of the model to fit it to")
    _check_example(config, example_inputs, data)
    with undisturbed():
        prepared = _prepare(model, config)
        check_weights(prepared.found, meta_allowed=False)
        if example_inputs is not None:
            prepared = _timed(prepared, example_inputs)
        if data is not None and evaluate is None:
            _plan(prepared, config)  # says that nothing can be sketched before any data is read
    wanted = None
    if evaluate is not None and max_drop is not None:
        wanted = RatioCurve((), measured(evaluate, prepared.given, "the dense model"), max_drop, None)
    with undisturbed():
        studied = None if data is None else _study(prepared, config, data, resume)
        if studied is not None:
            prepared = replace(prepared, found=studied.found)
        if studied is not None and config.objective == "latency" and example_inputs is None:
            prepared = _timed(prepared, studied.calls[0])
            studied = replace(studied, found=prepared.found)
    if evaluate is not None and wanted is not None:
        made, small, curve = _search(prepared, config, studied, wanted, evaluate)
    else:
        made, small, curve = _make(prepared, config, studied), None, None
    with undisturbed():
        if config.inplace:
            small = _replace_in_place(model, prepared, made.new)
        result = _copy(prepared.model, made.new) if small is None else small
    turn_off_nested_tensors(result)
    earlier = vars(prepared.given).get(RECORD_ATTRIBUTE)
    keep_record(result, SketchRecord.after(earlier, made.plan, made.fitted, curve))
    if made.healed is not None:
        keep_report(result, made.healed)
    if made.unreached:
        warnings.warn(
            f"data never reached {', '.join(made.unreached)}: sketched from the weights alone; give "
            "data that does, or exclude what is not needed",
            stacklevel=2,
        )
    return result  # type: ignore[return-value]


def plan_sketch(
    model: nn.Module,
    ratio: float | Mapping[Selector, float] = 0.5,
    *,
    example_inputs: Any = None,
    **options: Unpack[SketchOptions],
) -> SketchPlan:
    """What `sketchify` would do with the same arguments, layer by layer, and why; changes nothing.

    Works on models on the meta device too, whose errors are unknown, unless layers are to be timed: to time
    the whole model, it is sketched too, as without data.

    Raises:
        ConfigError, ConfigTypeError, NoTargetError, WrappedModelError: see `sketchify`.
        WeightError: a weight holds NaN or Inf, or has no data to be timed with.
    """
    config = _config(ratio, options)
    _check_example(config, example_inputs, None)
    with undisturbed():
        prepared = _prepare(model, config)
        check_weights(prepared.found, meta_allowed=example_inputs is None)
        if example_inputs is None:
            return _plan(prepared, config)
        return _fit(_timed(prepared, example_inputs), config, None).plan


def densify(model: Model, *, inplace: bool = False) -> Model:
    """Multiply the factors out: ordinary layers again, with the outputs of the sketched ones.

    Args:
        model: a model with sketched layers.
        inplace: change the model given, in place of a copy.

    Raises:
        ConfigTypeError: the model is no `nn.Module`, or cannot be copied.
        NoTargetError: the model holds no sketched layer.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
    """
    check_module(model)
    with undisturbed():
        dense: dict[nn.Module, nn.Module] = {layer: layer.to_dense() for layer in outermost(model)}
        if not dense:
            raise NoTargetError(f"{type(model).__name__} holds no sketched layer")
        _tie_again(dense)
        result = replace_inside(model, dense) if inplace else _copy(model, dense)
    turn_on_nested_tensors(result)
    keep_record(result, None)
    return result  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The module given, the module tree to work on (its own, or a clone of it), and what was found in it."""

    given: nn.Module
    model: nn.Module
    found: Found
    route: str
    reads_weights: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """The stand-ins of the dense layers, and what they came of."""

    new: dict[nn.Module, nn.Module]
    plan: SketchPlan
    fitted: dict[str, Fitted]
    unreached: tuple[str, ...]
    healed: HealReport | None = None


def _config(ratio: float | Mapping[Selector, float], options: Mapping[str, Any]) -> SketchConfig:
    known = {field.name for field in fields(SketchConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigTypeError(
            f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}"
        )
    return SketchConfig(ratio=ratio, **options)


def _check_example(config: SketchConfig, example: Any, data: Data | None) -> None:
    """Raise ConfigError unless there is a batch to time layers on, where they are timed and only there."""
    if config.objective != "latency" and example is not None:
        raise ConfigError(f"example_inputs= is for objective='latency', got objective={config.objective!r}")
    if config.objective == "latency" and example is None and data is None:
        raise ConfigError("objective='latency' needs example_inputs=, a batch to time the layers on")


def _prepare(model: nn.Module, config: SketchConfig) -> _Prepared:
    """Check the model, lift the functional calls of a graph, and find the sites."""
    exported = isinstance(model, ExportedProgram)
    if exported and config.inplace:
        raise ConfigError("inplace=True conflicts with an ExportedProgram: a new module comes of it")
    if exported:
        model = model.module()  # type: ignore[attr-defined, operator]
    check_module(model)
    given = model
    if isinstance(model, fx.GraphModule):
        model = copied(clone_structure, model)
        lift_functional(model)  # type: ignore[arg-type]
    reading = read_graph(model)
    found = find_sites(model, config, reading)
    route = "torch.export graph" if exported else reading.route
    return _Prepared(given, model, found, route, bool(reading.direct))


def _timed(prepared: _Prepared, example: Any) -> _Prepared:
    return replace(prepared, found=time_sites(prepared.model, prepared.found, example))


def _study(
    prepared: _Prepared, config: SketchConfig, data: Data, resume: str | PathLike[str] | None
) -> Studied:
    calls = record_calls(prepared.model, data)
    uncalled = read_run(copy_sharing(prepared.model, {}), calls[0].run)
    prepared = replace(prepared, found=without_uncalled(prepared.found, uncalled))
    if not prepared.found.sites:
        _plan(prepared, config)  # says why
    return study_model(prepared.model, prepared.found, config, prepared.route, calls, resume)


def _make(prepared: _Prepared, config: SketchConfig, studied: Studied | None) -> _Made:
    """Plan, fit and sketch at the ratio of the options, and heal."""
    with undisturbed():
        made = _fit(prepared, config, studied)
        if studied is not None and config.refine != "none":
            healed = _refine(prepared.model, made.new, studied.calls, config)
            return replace(made, healed=healed)
    return made


def _fit(prepared: _Prepared, config: SketchConfig, studied: Studied | None) -> _Made:
    """Plan, fit and sketch; where time counts, with fewer layers until the whole model is faster."""
    while True:
        made, found = _fit_once(prepared, config, studied), prepared.found
        if not isinstance(found, TimedSites) or not made.new:
            return made
        times = found.whole(made.new)
        if times.speedup >= PAYS:
            return replace(made, plan=replace(made.plan, seconds=times.fastest))
        found = without_least(found, made.plan, times)
        prepared = replace(prepared, found=found)
        studied = None if studied is None else replace(studied, found=found)


def _fit_once(prepared: _Prepared, config: SketchConfig, studied: Studied | None) -> _Made:
    unreached: tuple[str, ...] = ()
    if studied is None:
        plan, ready = _plan(prepared, config), NOTHING_READY
    else:
        calibrated = fit_model(studied, config)
        plan, ready, unreached = calibrated.plan, calibrated.ready, calibrated.unreached
        _check_plan(prepared, plan, config)
    new, fitted = _sketch(prepared.found, plan, config, ready)
    fitted |= {name: replace(fitted[name], note=NEVER_REACHED) for name in unreached}
    return _Made(new, plan, fitted, unreached)


def _search(
    prepared: _Prepared,
    config: SketchConfig,
    studied: Studied | None,
    wanted: RatioCurve,
    evaluate: Evaluate,
) -> tuple[_Made, nn.Module, RatioCurve]:
    """What passes at the smallest ratio, in the copy of the model that was measured."""
    passing: list[tuple[_Made, nn.Module]] = []

    def score_at(ratio: float) -> float:
        made = _make(prepared, replace(config, ratio=ratio), studied)
        if passing and _stored(made.plan) > _stored(passing[0][0].plan):
            raise NoTargetError(f"ratio {ratio:g} leaves layers dense that larger ratios make smaller")
        with undisturbed():
            small = _copy(prepared.model, made.new)
        turn_off_nested_tensors(small)
        score = measured(evaluate, small, f"the model of ratio {ratio:g}")
        if wanted.passes(score):
            passing[:] = [(made, small)]  # a later one is of a smaller ratio
        return score

    curve = search_ratio(score_at, wanted.dense_score, wanted.max_drop)
    return *passing[0], curve


def _stored(plan: SketchPlan) -> int:
    """Stored numbers of all that could be sketched, whether it is or not."""
    return sum(line.stored_numbers for line in plan.layers)


def _plan(prepared: _Prepared, config: SketchConfig) -> SketchPlan:
    plan = make_plan(prepared.found, config, prepared.route)
    _check_plan(prepared, plan, config)
    return plan


def _check_plan(prepared: _Prepared, plan: SketchPlan, config: SketchConfig) -> None:
    """Raise NoTargetError, with the reasons, if the plan sketches nothing that it was asked to."""
    found = prepared.found
    dense_on_purpose = any(ratio == 1.0 for _, ratio in config.ratios())
    if not found.sites or not (plan.sketched or dense_on_purpose):
        slow = tuple(line for line in plan.layers if line.reason.startswith(TIMED))
        lines = (slow or plan.layers)[:10]
        reasons = "".join(f"\n  {line.name or '(model)'}: {line.reason}" for line in lines)
        more = f"\n  and {len(plan.layers) - len(lines)} more" if len(plan.layers) > len(lines) else ""
        wanted = "wanted an nn.Linear, nn.Conv2d, nn.MultiheadAttention or Conv1D"
        if slow:
            wanted = "no layer has a sketch of this ratio that is faster here"
        elif prepared.reads_weights:
            wanted += "; torch.fx.symbolic_trace(model) makes layers of what its forward computes itself"
        raise NoTargetError(f"nothing to sketch in {type(prepared.model).__name__}: {wanted}{reasons}{more}")


def _sketch(
    found: Found, plan: SketchPlan, config: SketchConfig, ready: Ready
) -> tuple[dict[nn.Module, nn.Module], dict[str, Fitted]]:
    """The stand-in of every dense layer that the plan sketches, and what came of each weight."""
    choices = {line.name: line.choice for line in plan.sketched if line.choice is not None}
    new: dict[nn.Module, nn.Module] = {}
    fitted: dict[str, Fitted] = {}
    for site, owner in tqdm(found.sites, desc="sketch", disable=hides_progress(config), leave=False):
        own = {name: choices[name] for name in owner.unit_names(site) if name in choices}
        if not own:
            continue
        layer, came_of_it = owner.sketch(site, own, config, ready)
        fitted |= came_of_it
        new[site.module] = layer
        for _, other in site.tied:
            assert isinstance(owner, SharingPass)
            new[other] = owner.share(layer, other)
    return new, fitted


def _refine(
    dense: nn.Module, new: Mapping[nn.Module, nn.Module], calls: Sequence[Call], config: SketchConfig
) -> HealReport:
    """Heal the new layers, where they are in a copy of the dense model."""
    healed = heal(
        _copy(dense, new),
        teacher=dense,
        data=calls,
        steps=config.refine_steps,
        method=config.refine,
        output=config.output,
        seed=config.seed,
        progress=config.progress,
        inplace=True,
    )
    return heal_report(healed)


def _replace_in_place(model: nn.Module, prepared: _Prepared, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """The last step, so that whatever fails before leaves the model as it was."""
    if prepared.model is not model:  # a graph: its clone was lifted, and the layers are the clone's
        names = {module: name for name, module in prepared.model.named_modules()}
        lift_functional(model)  # type: ignore[arg-type]
        new = {model.get_submodule(names[old]): layer for old, layer in new.items()}
    return replace_inside(model, new)


def _copy(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
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


def _tie_again(dense: Mapping[nn.Module, nn.Module]) -> None:
    """Let dense layers share a weight where the sketched ones shared their factors."""
    first: dict[tuple[int, ...], nn.Module] = {}
    for layer, plain in dense.items():
        factors = tuple(id(p) for name, p in layer.named_parameters() if not name.endswith("bias"))
        twin = first.setdefault(tuple(sorted(factors)), plain)
        if twin is not plain and plain.weight.shape == twin.weight.shape:  # type: ignore[union-attr]
            plain.weight = twin.weight
