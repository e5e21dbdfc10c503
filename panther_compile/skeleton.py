"""Sketched models without weights: what a model would be after `sketchify`, for predictions."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from panther_compile.config import Selector, SketchConfig, check_is_module
from panther_compile.errors import ConfigError, NoTargetError
from panther_compile.kinds.parts import empty_site, replacements_of
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.models.substitute import copy_with
from panther_compile.planning.own_weights import lifted, lower_own_weights
from panther_compile.planning.plan import make_plan
from panther_compile.planning.sites import find_sites
from panther_compile.planning.trace import read_graph

Model = TypeVar("Model", bound=nn.Module)


def sketch_skeleton(model: Model, ratio: float | Mapping[Selector, float] = 0.5, **options: Any) -> Model:
    """The model that `sketchify` would make, on the meta device: its shapes, and no numbers.

    Spectra are not known without weights, so ranks are divided as `plan_sketch` does for the same model.

        >>> part = pc.partition_model(pc.sketch_skeleton(model, ratio=0.5), example, devices=512)

    Args:
        model: on the meta device; left as it is.
        ratio: stored numbers of the replaced layers over their dense count, in (0, 1], or by selector.
        **options: the fields of `SketchConfig`.

    Raises:
        ConfigError: the model holds weights, or an option is not what is wanted.
        ConfigTypeError: the model is no `nn.Module`.
        NoTargetError: nothing in the model can be sketched.
    """
    check_is_module("model", model)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ConfigError(
                f"{name} is on {parameter.device}; a skeleton is made of a model on the meta device, and "
                "sketchify sketches one with weights"
            )
    config = SketchConfig(ratio=ratio, **options)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        dense = lifted(model)
        reading = read_graph(dense)
        found = find_sites(dense, config, reading)
        plan = make_plan(found, config, reading.route)
        choices = plan.choices
        if not choices:
            raise NoTargetError(f"nothing to sketch in {type(model).__name__}; plan_sketch says why")
        new: dict[nn.Module, nn.Module] = {}
        for site, owner in found.sites:
            layer = empty_site(site, owner, choices, config)
            if layer is not None:
                new |= replacements_of(site, owner, layer)
        made = copy_with(dense, new)
        lower_own_weights(made)
    turn_off_nested_tensors(made)
    return made  # type: ignore[return-value]
