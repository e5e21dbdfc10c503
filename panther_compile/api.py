"""The public verbs: each one a few stages, called in order."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from panther_compile.config import Selector, SketchConfig, SketchOptions, check_type
from panther_compile.errors import WrappedModelError
from panther_compile.kinds.match import is_adapter
from panther_compile.kinds.plain_form import note_origin
from panther_compile.layers.base import check_factors, outermost, sketched_layers
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.layers.nested_tensors import turn_on_nested_tensors
from panther_compile.models.batches import Data
from panther_compile.models.substitute import replace_inside, share_hooks, warn_of_functions
from panther_compile.models.surroundings import undisturbed
from panther_compile.names import owner_of
from panther_compile.planning.own_weights import lower_own_weights
from panther_compile.planning.ratio_search import Evaluate, check_search, measured
from panther_compile.planning.recipe import check_recipe
from panther_compile.planning.sites import check_module
from panther_compile.records import (
    SketchPlan,
    keep_record,
)
from panther_compile.reporting.ratio_curve import RatioCurve
from panther_compile.sketching import (
    check_data,
    check_example,
    copy_model,
    fit,
    learn,
    learn_and_make,
    plan_sites,
    prepare,
    put_in_place,
    read_config,
    search,
)

Model = TypeVar("Model", bound=nn.Module)


def sketchify(
    model: Model,
    ratio: float | Mapping[Selector, float] | None = None,
    *,
    plan: SketchPlan | None = None,
    data: Data | str | None = None,
    max_drop: float | None = None,
    evaluate: Evaluate | None = None,
    resume: str | PathLike[str] | None = None,
    example_inputs: Any = None,
    config: SketchConfig | None = None,
    **options: Unpack[SketchOptions],
) -> Model:
    """Replace the linear, convolution and attention layers of a model by sketched ones.

    A second call on a sketched model sketches what is still dense, and leaves the rest as it is.

    Args:
        model: any `nn.Module`. An `fx.GraphModule` or a `torch.export.ExportedProgram` has its functional
            calls (`F.linear`, `F.conv2d`) sketched too; the latter gives a GraphModule back.
        ratio: stored numbers of the replaced layers over their dense count, in (0, 1]; 0.5 unless given.
        plan: in place of a ratio: what is sketched, by which scheme and at which rank, of `plan_sketch`, of
            `sketch_report(other).plan` or `SketchPlan.from_json`; its ranks may have been edited.
        data: inputs of the model, without labels, to fit the layers to: a loader, a list of batches or one
            batch, or a function that calls the model. A few hundred samples of what the model will be used
            for keep it much closer to itself than the weights alone can tell. The model runs on them in eval
            mode; in the result, batch norms have the statistics of what reaches them there. "model": inputs
            that are made up, as they are without data where `synthetic` says.
        max_drop: in place of a ratio: how far the score may fall below the dense model's, in its own units.
            The smallest ratio that keeps it is searched for, with at most 7 evaluations of smaller models;
            `sketch_report(result).curve` has what was measured.
        evaluate: with `max_drop`: gives the score of a model, higher is better. It runs in eval mode.
        resume: a folder, made if missing, to keep what was learnt from `data` and each fitted layer in; a
            later call with the same model, data and options goes on from there. Ratios may share one.
        example_inputs: with `objective="latency"`: a batch as the model will be given it, on which layers and
            the model are timed; a tensor, a tuple of arguments or a mapping of keywords. Default: the first
            batch of data.
        config: options, in place of the defaults; ratio and options given beside it count instead of its own.
        **options: the fields of `SketchConfig`.

    Returns:
        A model of the user's own class, with the layers replaced. `model` itself is untouched, unless
        `inplace=True` was asked for; then it is what is returned, or its replacement if it is a layer itself.

    Raises:
        ConfigError, ConfigTypeError: an option, or the model, is not what is wanted; or it cannot be copied.
        RankError: a rank of the plan is out of range.
        EvaluateError, RatioSearchError: evaluate raised or gave no number; no ratio is within max_drop.
        ResumeError: the folder is of another run, or cannot be used.
        DataError: the data holds no batch, cannot be read to its end, or leads to NaN.
        NoTargetError: nothing in the model can be sketched; the message says why.
        WeightError: a weight holds NaN or Inf, or has no data.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
    """
    config = read_config(ratio, options, config)
    check_search(ratio is not None, max_drop, evaluate)
    check_data(config, data, resume, example_inputs)
    if plan is not None:
        check_recipe(plan, ratio, max_drop, config)
    prepared = prepare(model, config, example_inputs, recipe=plan)
    ranks_alone = data is not None and not config.narrow  # else data may show layers that can be narrowed
    if (ranks_alone or not prepared.found.sites) and evaluate is None and plan is None:
        plan_sites(prepared, config)  # says that nothing can be sketched before the model is run
    dense_score = None if evaluate is None else measured(evaluate, prepared.given, "the dense model")
    if evaluate is None or max_drop is None or dense_score is None:
        learnt, made = learn_and_make(prepared, config, data, resume, example_inputs)
    else:
        learnt = learn(prepared, config, data, resume, example_inputs)
        made = search(learnt, RatioCurve((), dense_score, max_drop, None), evaluate)
    return put_in_place(model, learnt, made)  # type: ignore[return-value]


def plan_sketch(
    model: nn.Module,
    ratio: float | Mapping[Selector, float] | None = None,
    *,
    example_inputs: Any = None,
    config: SketchConfig | None = None,
    **options: Unpack[SketchOptions],
) -> SketchPlan:
    """What `sketchify` would do with the same arguments, layer by layer, and why; changes nothing.

    Works on models on the meta device too, whose errors are unknown, unless layers are to be timed: to time
    the whole model, it is sketched too, as without data.

    Args:
        model: see `sketchify`, and so for the ratio and the options.
        ratio: stored numbers of the replaced layers over their dense count, in (0, 1].
        example_inputs: with `objective="latency"`, a batch to time layers and model on.
        config: options, in place of the defaults.
        **options: the fields of `SketchConfig`.

    Raises:
        ConfigError, ConfigTypeError, NoTargetError, WrappedModelError: see `sketchify`.
        WeightError: a weight holds NaN or Inf, or has no data to be timed with.
    """
    config = read_config(ratio, options, config)
    check_example(config, example_inputs, None)
    prepared = prepare(model, config, example_inputs, meta_allowed=example_inputs is None)
    if example_inputs is None:
        return plan_sites(prepared, config)
    with undisturbed():
        return fit(prepared, config, None).plan


def densify(model: Model, *, inplace: bool = False) -> Model:
    """Multiply the factors out: ordinary layers again, with the outputs and the hooks of the sketched ones.

    Hooks on factors and on their tensors go with them. A layer that made its weight in each call, as weight
    norm does, becomes a plain one, which the model's class does not bring back: it finds no weight under the
    names of weight norm, and makes another weight, without a word, of one that a forward of the layer's own
    standardizes or scales (as in BiT and NFNets). So `save_pretrained` refuses it, and its `state_dict` must
    not be loaded into that class. Save the sketch, not what is densified.

    Args:
        model: a model with sketched layers.
        inplace: change the model given, in place of a copy.

    Raises:
        ConfigTypeError: the model is no `nn.Module`, or cannot be copied; or `inplace` is no bool.
        NoTargetError: the model holds no sketched layer.
        WeightError: a factor was quantized or sharded, or is on disk, and cannot be multiplied out.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile; or a factor, or a narrow layer,
            carries an adapter of PEFT.
    """
    check_module(model)
    check_type("inplace", inplace, bool)
    _check_unadapted(model)
    check_factors(model, "densify the model")
    if not inplace:
        warn_of_functions(model, ", or give inplace=True", stacklevel=2)
    with undisturbed():
        dense: dict[nn.Module, nn.Module] = {
            layer: layer.to_dense() for layer in sketched_layers(model, advice="")
        }
        _tie_again(dense)
        for layer, plain in dense.items():
            share_hooks(layer, plain)
            note_origin(layer, plain)
        result = replace_inside(model, dense) if inplace else copy_model(model, dense)
        lower_own_weights(result)
    turn_on_nested_tensors(result)
    keep_record(result, None)
    return result  # type: ignore[return-value]


def _check_unadapted(model: nn.Module) -> None:
    """Raise WrappedModelError if a factor carries an adapter, which multiplying out would lose.

    So does one around a narrow layer, which works between the features that are kept.
    """
    for name, module in model.named_modules():
        if is_adapter(module) and isinstance(getattr(module, "base_layer", None), NarrowLinear):
            raise WrappedModelError(
                f"{name} is a narrow layer with a PEFT adapter, which works between the features that are "
                "kept: call merge_and_unload() first"
            )
    for layer in outermost(model):
        if any(is_adapter(part) for part in layer.modules()):
            raise WrappedModelError(
                f"a factor of a {type(layer).__name__} carries a PEFT adapter: call merge_and_unload() first"
            )


def _tie_again(dense: Mapping[nn.Module, nn.Module]) -> None:
    """Let dense layers share weights where the sketched ones shared their factors."""
    first: dict[tuple[int, ...], nn.Module] = {}
    for layer, plain in dense.items():
        factors = tuple(id(p) for name, p in layer.named_parameters() if not name.endswith("bias"))
        twin = first.setdefault(tuple(sorted(factors)), plain)
        theirs = dict(twin.named_parameters())
        for name, mine in list(plain.named_parameters()):
            other = theirs.get(name)
            if other is None or other is mine or name.endswith("bias") or other.shape != mine.shape:
                continue
            if mine.is_meta or torch.equal(mine, other):
                setattr(*owner_of(plain, name), other)
