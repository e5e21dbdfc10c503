"""Layers of Panther (pawX) as layers of ours: exactly, and then no larger than what they span.

With L terms of rank k, d₂ inputs and d₁ outputs

    SKLinear      y = 1/(2L) Σᵢ (x S1ᵢ U1ᵢ + x U2ᵢ S2ᵢ) + b     U1, S2 (L, k, d₁), S1, U2 (L, d₂, k)
                  W = [U1ᵢᵀ .. S2ᵢᵀ ..]/(2L) [S1ᵢᵀ; ..; U2ᵢᵀ; ..]  one pair of rank 2 L k
    SKConv2d      y = 1/(2L) Σⱼ U1ⱼᵀ (x ∗ S1ⱼ) + b             U1 (2L, k, d₁), S1 (2L k, d₂, kh, kw)
                  a kh x kw convolution to 2 L k channels, then 1 x 1

A product of rank 2 L k on paper may have a smaller one. It is cut where its singular values are rounding,
stored in the pivoted form, or multiplied out where that stores less. `RandMultiHeadAttention` holds dense
projections and an estimate of softmax attention. Its weights come in for the exact one that it estimates.
"""

# O out_features, I in_features, R rank
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from panther_compile.errors import CheckpointMismatchError, ConfigTypeError, NoTargetError
from panther_compile.layers import SketchedConv2d, SketchedLinear
from panther_compile.layers.base import take_over
from panther_compile.models.substitute import copied, copy_with
from panther_compile.records import keep_record

Model = TypeVar("Model", bound=nn.Module)
_ATTENTION = {"Wq", "Wk", "Wv", "W0"}
_ATTENTION_BIAS = {"Wq": "bq", "Wk": "bk", "Wv": "bv", "W0": "b0"}


def import_panther(source: nn.Module | Mapping[str, Tensor], skeleton: nn.Module | None = None) -> nn.Module:
    """A model with sketched layers in the place of Panther's, which need not be installed.

        >>> model = pc.import_panther(model_with_sklinear)
        >>> model = pc.import_panther(torch.load("panther.pt"), DenseModel())

    Args:
        source: a model that holds Panther's layers, which is not changed; or its state dict.
        skeleton: with a state dict, the dense model that Panther's tuner changed; it may be on the meta
            device, and is not changed.

    Returns:
        A copy of the model, or of the skeleton, in which each SKLinear is a `SketchedLinear` and each
        SKConv2d a `SketchedConv2d` that computes the same; or dense, where that stores less. A
        RandMultiHeadAttention in a model stays, as it is called in another way; in a state dict it becomes
        the skeleton's own attention.

    Raises:
        NoTargetError: there is no layer of Panther.
        ConfigTypeError: a state dict comes without a skeleton, or a model with one.
        CheckpointMismatchError: the skeleton lacks a layer, or has it in another size; a layer is of a
            version of Panther that is not known.
    """
    if isinstance(source, nn.Module):
        if skeleton is not None:
            raise ConfigTypeError("skeleton= goes with a state dict; the model given has all its layers")
        return _import_model(source)
    if not isinstance(skeleton, nn.Module):
        raise ConfigTypeError(f"a state dict needs skeleton=, the dense model; got {type(skeleton).__name__}")
    return _import_state(source, skeleton)


def _import_model(model: nn.Module) -> nn.Module:
    new: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if {"S1s", "U1s"} <= set(tensors):
            like = _dense_conv2d(module) if tensors["S1s"].dim() == 4 else None
            new[module] = _imported(tensors, name, like)
            new[module].train(module.training)
    if not new:
        raise NoTargetError(f"{type(model).__name__} holds no SKLinear or SKConv2d")
    result = copied(lambda given: copy_with(given, new), model)
    keep_record(result, None)
    return result


def _import_state(state: Mapping[str, Tensor], skeleton: nn.Module) -> nn.Module:
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        owner, _, leaf = key.rpartition(".")
        layers.setdefault(owner, {})[leaf] = tensor
    sketches = {name: held for name, held in layers.items() if {"S1s", "U1s"} <= set(held)}
    attentions = {name: held for name, held in layers.items() if set(held) >= _ATTENTION}
    if not sketches and not attentions:
        raise NoTargetError("the state dict holds no tensors of SKLinear, SKConv2d or RandMultiHeadAttention")
    theirs = {*sketches, *attentions}
    rest = {key: value for key, value in state.items() if key.rpartition(".")[0] not in theirs}
    new: dict[nn.Module, nn.Module] = {}
    for name, held in sketches.items():
        old = _layer(skeleton, name, nn.Linear if held["S1s"].dim() == 3 else nn.Conv2d)
        layer = _imported(held, name, old if isinstance(old, nn.Conv2d) else None)
        sizes = [_size(x) for x in (layer, old)]
        if sizes[0] != sizes[1]:
            raise CheckpointMismatchError(
                f"{name} is {sizes[0]} in the state dict, the skeleton has {sizes[1]}"
            )
        new[old] = layer.train(old.training)
    for name, held in attentions.items():
        rest |= _attention_state(name, held, _layer(skeleton, name, nn.MultiheadAttention))
    result = copied(lambda given: copy_with(given, new), skeleton)
    names = {module: name for name, module in result.named_modules()}
    for layer in new.values():
        rest |= {f"{names[layer]}.{key}": value for key, value in layer.state_dict().items()}
    try:
        result.load_state_dict({key: value.detach().clone() for key, value in rest.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointMismatchError(f"the state dict does not fit the skeleton: {error}") from error
    keep_record(result, None)
    return result


def _layer(skeleton: nn.Module, name: str, kind: type[nn.Module]) -> Any:
    try:
        found = skeleton.get_submodule(name)
    except AttributeError as error:
        raise CheckpointMismatchError(f"the skeleton has no layer {name!r}") from error
    if not isinstance(found, kind):
        raise CheckpointMismatchError(
            f"{name} is a {type(found).__name__} in the skeleton, wanted an nn.{kind.__name__}"
        )
    return found


def _size(layer: Any) -> tuple[int, int]:
    what = "channels" if hasattr(layer, "in_channels") else "features"
    return getattr(layer, f"in_{what}"), getattr(layer, f"out_{what}")


def _imported(held: Mapping[str, Tensor], name: str, like: nn.Conv2d | None) -> nn.Module:
    """The layer of Panther's tensors; `like` gives a convolution its geometry."""
    left, right, shape = _pair(held, name)
    bias = held.get("bias")
    first = held["S1s"]
    left, right = _shrunk(left, right, first.dtype)
    (outputs, rank), inputs = left.shape, right.shape[1]
    new: Any
    if like is not None:
        like = _conv2d(like, shape, outputs, bias, first)
        saves = rank * (outputs + inputs) < outputs * inputs and rank <= min(outputs, inputs)
        kernels = (right.unflatten(1, shape), left[..., None, None])
        if saves:
            return SketchedConv2d.from_kernels("channel", kernels, like)
        with torch.no_grad():
            like.weight.copy_((left @ right).unflatten(1, shape))
        return like
    if rank * (outputs + inputs - rank) < outputs * inputs:
        new = SketchedLinear.from_factors(left, right, bias, dtype=first.dtype, device=first.device)
    else:
        new = nn.utils.skip_init(
            nn.Linear, inputs, outputs, bias=bias is not None, dtype=first.dtype, device=first.device
        )
        with torch.no_grad():
            new.weight.copy_(left @ right)
            if bias is not None:
                new.bias.copy_(bias)
    new.requires_grad_(True)
    return new


def _pair(held: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Factors (O, R) and (R, I) in float64, and the shape that I is of."""
    tensors = {key: value.detach().double() for key, value in held.items() if key[0] in "SU"}
    s1, u1 = tensors["S1s"], tensors["U1s"]
    terms = len(u1)
    if s1.dim() == 4 and "S2s" not in tensors and len(s1) == u1.shape[0] * u1.shape[1]:
        return u1.flatten(0, 1).t() / terms, s1.flatten(1), tuple(s1.shape[1:])
    s2: Any = tensors.get("S2s")
    u2: Any = tensors.get("U2s")
    known = s1.dim() == 3 and s2 is not None and u2 is not None
    if known and (u2.shape, s2.shape) == (s1.shape, u1.shape):
        left = torch.cat([u1.flatten(0, 1), s2.flatten(0, 1)]).t() / (2 * terms)
        right = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in (s1, u2)])
        return left, right, (right.shape[1],)
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    raise CheckpointMismatchError(
        f"{name} is a layer of a Panther that is not known: its tensors are {shapes}"
    )


def _shrunk(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of the same product, of the rank that it has but for rounding in the type it was stored in."""
    basis_O, core_O = torch.linalg.qr(left)
    basis_I, core_I = torch.linalg.qr(right.t())
    u, values, vh = torch.linalg.svd(core_O @ core_I.t())
    rounding = torch.finfo(dtype).eps * max(len(left), right.shape[1]) ** 0.5 * values[0]
    rank = max(1, int((values > rounding).sum()))
    return basis_O @ (u[:, :rank] * values[:rank]), vh[:rank] @ basis_I.t()


def _dense_conv2d(module: Any) -> nn.Conv2d:
    """A convolution of the geometry of an SKConv2d."""
    return nn.Conv2d(
        module.in_channels,
        module.out_channels,
        module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        device="meta",
    )


def _conv2d(
    like: nn.Conv2d, shape: tuple[int, ...], outputs: int, bias: Tensor | None, values: Tensor
) -> nn.Conv2d:
    """A convolution of the geometry of another, with a bias, of the type and on the device of a tensor."""
    inputs, *kernel = shape
    made = nn.utils.skip_init(
        nn.Conv2d,
        inputs,
        outputs,
        tuple(kernel),
        stride=like.stride,
        padding=like.padding,
        bias=bias is not None,
        dtype=values.dtype,
        device=values.device,
    )
    take_over(made, like, True)
    if bias is not None:
        with torch.no_grad():
            made.bias.copy_(bias)
    return made


def _attention_state(name: str, held: Mapping[str, Tensor], old: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The tensors of an attention under the names of `nn.MultiheadAttention`."""
    if old.in_proj_weight is None or (old.in_proj_bias is None) != (held.get("bq") is None):
        raise CheckpointMismatchError(f"{name}: the skeleton's attention has other projections")
    three = ("Wq", "Wk", "Wv")
    state = {
        f"{name}.in_proj_weight": torch.cat([held[key] for key in three]),
        f"{name}.out_proj.weight": held["W0"],
    }
    if held.get("bq") is not None:
        state[f"{name}.in_proj_bias"] = torch.cat([held[_ATTENTION_BIAS[key]] for key in three])
        state[f"{name}.out_proj.bias"] = held["b0"]
    return state
