"""The public verbs: each one a few stages, called in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from tqdm import tqdm

from panther_compile.config import Selector, SketchConfig
from panther_compile.errors import (
    ConfigTypeError,
    NoTargetError,
    WeightError,
    WrappedModelError,
)
from panther_compile.layers.base import outermost
from panther_compile.passes.base import SharingPass
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.plan import hides_progress, make_plan
from panther_compile.records import RECORD_ATTRIBUTE, Fitted, SketchPlan, SketchRecord
from panther_compile.sites import Found, find_sites
from panther_compile.substitute import copy_with, replace_inside
from panther_compile.trace import clone_structure, read_graph

Model = TypeVar("Model", bound=nn.Module)


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
    inplace: bool
    seed: int
    progress: bool | None
    device: torch.device | str | None


def sketchify(
    model: Model,
    ratio: float | Mapping[Selector, float] = 0.5,
    **options: Unpack[SketchOptions],
) -> Model:
    """Replace the linear, convolution and attention layers of a model by sketched ones.

    Args:
        model: any `nn.Module`. An `fx.GraphModule` or a `torch.export.ExportedProgram` has its functional
            calls (`F.linear`, `F.conv2d`) sketched too; the latter gives a GraphModule back.
        ratio: stored numbers of the replaced layers over their dense count, in (0, 1].
        **options: the fields of `SketchConfig`.

    Returns:
        A model of the user's own class, with the layers replaced. `model` itself is untouched, unless
        `inplace=True` was asked for.

    Raises:
        ConfigError, ConfigTypeError: an option, or the model, is not what is wanted.
        NoTargetError: nothing in the model can be sketched; the message says why.
        WeightError: a weight holds NaN or Inf, or has no data.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
    """
    config = _config(ratio, options)
    prepared = _prepare(model, config)
    plan = _plan(prepared, config)
    _check_weights(prepared.found)
    new, fitted = _sketch(prepared.found, plan, config)
    result = (replace_inside if config.inplace else copy_with)(prepared.model, new)
    setattr(result, RECORD_ATTRIBUTE, SketchRecord(plan, fitted))
    return result  # type: ignore[return-value]


def plan_sketch(
    model: nn.Module,
    ratio: float | Mapping[Selector, float] = 0.5,
    **options: Unpack[SketchOptions],
) -> SketchPlan:
    """What `sketchify` would do with the same arguments, layer by layer, and why; changes nothing.

    Works on models on the meta device too; the errors of the layers are then unknown.

    Raises:
        ConfigError, ConfigTypeError, NoTargetError, WrappedModelError: see `sketchify`.
    """
    config = _config(ratio, options | {"inplace": False})
    return _plan(_prepare(model, config), config)


def densify(model: Model, *, inplace: bool = False) -> Model:
    """Multiply the factors out: ordinary layers again, with the outputs of the sketched ones.

    Args:
        model: a model with sketched layers.
        inplace: change the model given, in place of a copy.

    Raises:
        NoTargetError: the model holds no sketched layer.
    """
    dense: dict[nn.Module, nn.Module] = {layer: layer.to_dense() for layer in outermost(model)}
    if not dense:
        raise NoTargetError(f"{type(model).__name__} holds no sketched layer")
    _tie_again(dense)
    result = (replace_inside if inplace else copy_with)(model, dense)
    result.__dict__.pop(RECORD_ATTRIBUTE, None)
    return result  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The module tree to work on, and what was found in it."""

    model: nn.Module
    found: Found
    route: str


def _config(ratio: float | Mapping[Selector, float], options: Mapping[str, Any]) -> SketchConfig:
    known = {field.name for field in fields(SketchConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigTypeError(
            f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}"
        )
    return SketchConfig(ratio=ratio, **options)


def _prepare(model: nn.Module, config: SketchConfig) -> _Prepared:
    """Check the model, lift the functional calls of a graph, and find the sites."""
    exported = isinstance(model, ExportedProgram)
    if exported:
        model = model.module()  # type: ignore[attr-defined]
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model is a {type(model).__name__}, wanted an nn.Module")
    _check_wrappers(model)
    if isinstance(model, fx.GraphModule):
        model = model if config.inplace or exported else clone_structure(model)
        lift_functional(model)
    reading = read_graph(model)
    found = find_sites(model, config, reading)
    route = "torch.export graph" if exported else reading.route
    return _Prepared(model, found, route)


def _check_wrappers(model: nn.Module) -> None:
    advice = {
        "DistributedDataParallel": "sketch model.module first, then wrap the result",
        "DataParallel": "sketch model.module first, then wrap the result",
        "FullyShardedDataParallel": "sketch the plain model first, then wrap the result",
        "FSDPModule": "sketch the plain model first, then call fully_shard on the result",
        "OptimizedModule": "sketch the model that was compiled (model._orig_mod), then compile the result",
        "ScriptModule": "sketch the plain model first, then script or trace the result",
    }
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in advice and base.__module__.startswith("torch."):
                where = f"its part {name}" if name else "the model"
                raise WrappedModelError(f"{where} is a {base.__name__}: {advice[base.__name__]}")


def _plan(prepared: _Prepared, config: SketchConfig) -> SketchPlan:
    found = prepared.found
    plan = make_plan(found, config, prepared.route)
    if not found.sites:
        reasons = "".join(f"\n  {line.name}: {line.reason}" for line in found.skipped[:10])
        more = f"\n  and {len(found.skipped) - 10} more" if len(found.skipped) > 10 else ""
        raise NoTargetError(
            f"nothing to sketch in {type(prepared.model).__name__}: wanted an nn.Linear, nn.Conv2d, "
            f"nn.MultiheadAttention or Conv1D{reasons}{more}"
        )
    return plan


def _check_weights(found: Found) -> None:
    for site, _ in found.sites:
        for name, parameter in site.module.named_parameters():
            where = f"{site.name}.{name}" if site.name else name
            if parameter.is_meta:
                raise WeightError(f"{where} is on the meta device: load the weights before sketching")
            if not bool(torch.isfinite(parameter).all()):
                bad = int((~torch.isfinite(parameter)).sum())
                raise WeightError(f"{where} holds {bad:,} NaN or Inf among {parameter.numel():,} numbers")


def _sketch(
    found: Found, plan: SketchPlan, config: SketchConfig
) -> tuple[dict[nn.Module, nn.Module], dict[str, Fitted]]:
    """The stand-in of every dense layer that the plan sketches, and what came of each weight."""
    choices = {line.name: line.choice for line in plan.sketched if line.choice is not None}
    new: dict[nn.Module, nn.Module] = {}
    fitted: dict[str, Fitted] = {}
    for site, owner in tqdm(found.sites, desc="sketch", disable=hides_progress(config), leave=False):
        own = {name: choices[name] for name in owner.unit_names(site) if name in choices}
        if not own:
            continue
        layer, came_of_it = owner.sketch(site, own, config)
        fitted |= came_of_it
        new[site.module] = layer
        for _, other in site.tied:
            assert isinstance(owner, SharingPass)
            new[other] = owner.share(layer, other)
    return new, fitted


def _tie_again(dense: Mapping[nn.Module, nn.Module]) -> None:
    """Let dense layers share a weight where the sketched ones shared their factors."""
    first: dict[tuple[int, ...], nn.Module] = {}
    for layer, plain in dense.items():
        factors = tuple(id(p) for name, p in layer.named_parameters() if not name.endswith("bias"))
        twin = first.setdefault(tuple(sorted(factors)), plain)
        if twin is not plain and plain.weight.shape == twin.weight.shape:  # type: ignore[union-attr]
            plain.weight = twin.weight
