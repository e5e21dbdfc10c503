"""Layers fitted to data, for the graphs that Dynamo makes of one model.

A graph may be a part of the model, hold the sizes of the call it was traced from, and take its inputs in an
order of its own; data are inputs of the model. So the model itself is fitted, once for all its graphs and as
`sketchify` fits it, and each graph takes the layers of the weights that it holds.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, fx, nn
from torch._dynamo import OptimizedModule

from panther_compile.api import sketchify
from panther_compile.calibration.batches import Data
from panther_compile.config import selectors
from panther_compile.errors import NoTargetError
from panther_compile.factor_cache import Snapshot
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.linear import SketchedLinear
from panther_compile.passes.runner import PassResult
from panther_compile.passes.sketch_linear import weight_and_bias

_log = logging.getLogger(__name__)

# Of a layer: where its weight (O, I) or kernel and its bias are, and what else its kind has.
_Identity = tuple[Any, ...]


def model_being_called() -> nn.Module | None:
    """The model given to `torch.compile` whose call is being compiled now, found among the callers.

    None if what is compiled is a function.
    """
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, OptimizedModule):
            model: nn.Module = caller._orig_mod
            return model
        if isinstance(caller, nn.Module) and caller._compiled_call_impl is not None:  # model.compile()
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


@dataclass(frozen=True, slots=True)
class _Fit:
    """The fitted layers of a model whose weights have not changed since."""

    snapshot: Snapshot
    data: Data
    options: Mapping[str, Any]
    layers: Mapping[_Identity, SketchedLayer]

    def is_of(self, model: nn.Module, data: Data, options: Mapping[str, Any]) -> bool:
        same = self.data is data and self.options == options
        return same and self.snapshot.matches(_versioned(model))


class ModelFits:
    """The last fit of each model, forgotten with it."""

    def __init__(self) -> None:
        self._fits: WeakKeyDictionary[nn.Module, _Fit] = WeakKeyDictionary()

    def put_into(
        self, graph_module: fx.GraphModule, *, model: nn.Module, data: Data, options: Mapping[str, Any]
    ) -> PassResult:
        """Replace dense layers of a graph by those of the model, in place; approximate. Counts the layers.

        Args:
            graph_module: of which the layers hold the model's own weights.
            model: is fitted unless that was done before; it is left as it is.
            data: its inputs, see `batches.Data`.
            options: of `sketchify`.

        Raises:
            DataError, ConfigTypeError: see `sketchify`.
        """
        fit = self._fits.get(model)
        if fit is None or not fit.is_of(model, data, options):
            layers = dict(_fitted(model, data, options))
            fit = _Fit(Snapshot(_versioned(model)), data, options, layers)
            self._fits[model] = fit
        new = {
            name: fit.layers.get(_identity(module))
            for name, module in graph_module.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        }
        found = {name: layer for name, layer in new.items() if layer is not None}
        for name, layer in found.items():
            graph_module.set_submodule(name, layer)
        return PassResult(graph_module, len(found))


def _fitted(
    model: nn.Module, data: Data, options: Mapping[str, Any]
) -> Iterator[tuple[_Identity, SketchedLayer]]:
    """The sketched layers that `sketchify` makes, by the dense ones that they stand for."""
    excluded = selectors(options.get("exclude"))
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        excluded = (*excluded, nn.MultiheadAttention)  # one operation to Dynamo: no layer of a graph
    try:
        # Narrow layers come in twos, one of which may be in a frame that Dynamo leaves alone.
        small = sketchify(model, data=data, **{**options, "exclude": excluded, "narrow": False})
    except NoTargetError as error:
        _log.info("%s", error)
        return
    for name, dense in model.named_modules(remove_duplicate=False):
        layer = small.get_submodule(name)
        if isinstance(layer, SketchedLinear | SketchedConv2d) and not isinstance(dense, SketchedLayer):
            yield _identity(dense), layer


def _versioned(model: nn.Module) -> list[Tensor]:
    """The weights that tell when they are changed: no inference tensors."""
    return [weight for weight in model.parameters() if not weight.is_inference()]


def _identity(layer: nn.Module) -> _Identity:
    """Equal for two layers that compute the same from the same tensors."""
    geometry: tuple[object, ...] = ()
    if isinstance(layer, nn.Conv2d):
        weight, bias = layer.weight, layer.bias
        geometry = layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode
    else:
        weight, bias = weight_and_bias(layer)
    return _place(weight), None if bias is None else _place(bias), geometry


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
