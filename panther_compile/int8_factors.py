"""A sketched model made ready for int8: the same function, in factors that lose little by rounding."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from panther_compile.config import check_type
from panther_compile.factorization.balance import balanced, pays_in_int8
from panther_compile.factorization.pivot import from_pivoted
from panther_compile.layers.base import check_factors, is_plain, outermost, sketched_layers, take_over
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.narrow import inner_layer
from panther_compile.models.batches import Call, Data, check_rows, kept_positions, record_calls, run_dense
from panther_compile.models.substitute import copy_with, replace_inside
from panther_compile.models.surroundings import eval_mode, undisturbed
from panther_compile.models.watched import inputs_seen
from panther_compile.planning.own_weights import lower_own_weights
from panther_compile.planning.sites import check_module

Model = TypeVar("Model", bound=nn.Module)


def prepare_int8(model: Model, data: Data | None = None, *, inplace: bool = False) -> Model:
    """Write the factors of sketched linear layers so that int8 costs them little; outputs stay the same.

    The pivoted form becomes a plain pair of the same rank whose latent is even (`factorization/balance.py`),
    which stores r² numbers more. A layer that multiplies no faster as two int8 products than as one is
    multiplied out. Nothing is quantized yet: `torchao.quantization.quantize_` does that, or
    `export_onnx(..., then="int8")`, which calls this itself.

    Args:
        model: with sketched layers. Attention, LSTMs and experts are left as they are, and narrow layers that
            are dense but for the features left out.
        data: batches as for `sketchify`; the latents are even for them. Without, for inputs of equal power.
        inplace: change the model given, in place of a copy.

    Raises:
        ConfigTypeError: the model is no `nn.Module`, `inplace` no bool, or the data none of what is taken.
        DataError: there is no batch, the model cannot run one, or NaN or Inf comes of it.
        NoTargetError: the model holds no sketched layer.
        WeightError: a factor was quantized or sharded, is on the meta device, or holds NaN or Inf.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
    """
    check_module(model)
    check_type("inplace", inplace, bool)
    sketched_layers(model)
    check_factors(model, "call prepare_int8", numbers=True)
    layers = rounded_layers(model)
    with undisturbed():
        seen = {} if data is None else _covariances(model, layers, record_calls(model, data))
        new: dict[nn.Module, nn.Module] = {}
        for group in _sharing(layers):
            new |= _rewritten(group, next((seen[one] for one in group if one in seen), None))
        result = replace_inside(model, new) if inplace else copy_with(model, new)
        lower_own_weights(result)
    return result  # type: ignore[return-value]


def rounded_layers(model: nn.Module) -> list[SketchedLinear]:
    """The layers that `prepare_int8` writes anew, those within narrow ones too."""
    return [
        layer
        for layer in map(inner_layer, outermost(model))
        if isinstance(layer, SketchedLinear)
        and is_plain(layer.down, nn.Linear)
        and is_plain(layer.up, nn.Linear)
    ]


def without_bases(model: Model) -> Model:
    """A copy in which kernels that are made of a basis at each call are dense, which int8 is as fast with.

    The model itself if it has none such. Outputs stay the same.
    """
    new: dict[nn.Module, nn.Module] = {
        layer: layer.to_dense() for layer in outermost(model) if layer.multiplies_out
    }
    return copy_with(model, new) if new else model  # type: ignore[return-value]


def pair_kernels(model: Model) -> Model:
    """A copy in which 1 x 1 kernels in the pivoted form are plain pairs, or dense if int8 is as fast so.

    What convolutions that will be in int8 need; the model itself if it has none such. Outputs stay the same.
    """
    new: dict[nn.Module, nn.Module] = {
        layer: _rewritten_kernel(layer)
        for layer in outermost(model)
        if isinstance(layer, SketchedConv2d)
        and layer.scheme == "pivoted"
        and is_plain(layer.down, nn.Conv2d)
        and is_plain(layer.up, nn.Conv2d)
    }
    return copy_with(model, new) if new else model  # type: ignore[return-value]


@torch.no_grad()
def _rewritten_kernel(layer: SketchedConv2d) -> nn.Module:
    """A pair, or a dense layer."""
    dense = layer.to_dense()
    assert isinstance(dense, nn.Conv2d)
    left, right = from_pivoted(
        layer.up.weight.double().flatten(1), layer.down.weight.double().flatten(1), layer.start
    )
    if not pays_in_int8(layer.out_channels, layer.in_channels, len(right)):
        return dense
    kernels = tuple(factor[..., None, None] for factor in balanced(left, right))
    return SketchedConv2d.from_kernels("channel", kernels[::-1], dense)


def _sharing(layers: Iterable[SketchedLinear]) -> list[list[SketchedLinear]]:
    """The layers by their input factor, which several may have in common."""
    groups: dict[int, list[SketchedLinear]] = {}
    for layer in layers:
        groups.setdefault(id(layer.down.weight), []).append(layer)
    return list(groups.values())


@torch.no_grad()
def _rewritten(group: list[SketchedLinear], covariance: Tensor | None) -> dict[nn.Module, nn.Module]:
    """A pair for each layer of one input factor, which stays one; or dense layers."""
    first = group[0]
    lefts = {id(layer.up.weight): layer.factors()[0] for layer in group}  # one of several tied layers
    outputs = [len(left) for left in lefts.values()]
    if not all(pays_in_int8(count, first.in_features, first.rank) for count in outputs):
        return _multiplied_out(group)
    left, right = balanced(torch.cat(list(lefts.values())), first.factors()[1], covariance)
    parts = dict(zip(lefts, left.split(outputs), strict=True))
    new: dict[nn.Module, nn.Module] = {}
    for layer in group:
        weight = layer.up.weight
        pair = type(layer).from_stored(
            parts[id(weight)], right, layer.bias, start=None, dtype=weight.dtype, device=weight.device
        )
        take_over(pair, layer, weight.requires_grad)
        for old, twin in new.items():
            assert isinstance(old, SketchedLinear)
            assert isinstance(twin, SketchedLinear)
            pair.down = twin.down
            if old.up.weight is weight:
                pair.up.weight = twin.up.weight
        new[layer] = pair
    return new


def _multiplied_out(group: list[SketchedLinear]) -> dict[nn.Module, nn.Module]:
    """Dense layers, of one weight where the sketched ones had both factors in common."""
    new: dict[nn.Module, nn.Module] = {layer: layer.to_dense() for layer in group}
    first: dict[int, nn.Module] = {}
    for layer in group:
        dense = new[layer]
        dense.weight = first.setdefault(id(layer.up.weight), dense).weight
    return new


@torch.no_grad()
def _covariances(
    model: nn.Module, layers: Iterable[SketchedLinear], calls: list[Call]
) -> dict[SketchedLinear, Tensor]:
    """E[x xᵀ] (I, I), float64, of what reaches each layer that runs; padding does not count."""
    sums: dict[SketchedLinear, Tensor] = {}
    kept: Tensor | None = None
    running: Call | None = None

    def add(layer: nn.Module, given: Tensor) -> None:
        assert isinstance(layer, SketchedLinear)
        x = given.detach()
        if kept is not None and x.shape[:2] == kept.shape:
            x = x[kept.to(x.device)]
        rows = x.reshape(-1, layer.in_features).float()
        assert running is not None
        check_rows(rows, type(layer).__name__, running)
        product = (rows.T @ rows).double() / max(len(rows), 1)
        sums[layer] = sums[layer] + product if layer in sums else product

    with inputs_seen(layers, add), eval_mode(model):
        for running in calls:
            kept = kept_positions(model, running)
            run_dense(model, running)
    return sums
