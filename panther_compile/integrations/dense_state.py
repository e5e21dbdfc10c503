"""State dicts of a dense model in a sketched one: of a sibling that was trained on, or that has another head.

A sketched layer holds W ≈ L R. For the dense weight W' of the sibling R is kept, with all that data had
chosen it by, and L is fitted to W' in the least squares; where the weight W that was sketched is known, only
to what changed:

    L' = W' Rᵀ (R Rᵀ)⁻¹                L' = L + (W' - W) Rᵀ (R Rᵀ)⁻¹
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.errors import CheckpointMismatchError, ConfigTypeError
from panther_compile.kinds.registry import kind_of
from panther_compile.layers import SketchedEmbedding, SketchedLayer, SketchedLinear
from panther_compile.layers.base import check_factors, sketched_layers
from panther_compile.names import dotted, owner_of
from panther_compile.planning.sites import check_module


def project_state_dict(
    model: nn.Module, dense: Mapping[str, Tensor], *, base: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The state dict of a sketched model that is closest to a dense one, its input factors kept.

        >>> state = pc.project_state_dict(small, fine_tuned.state_dict(), base=model.state_dict())
        >>> small.load_state_dict(state)

    Args:
        model: a result of `sketchify`; it is not changed.
        dense: state dict of a model of the architecture that was sketched.
        base: of the very model that was sketched; what changed since is added to what the sketch holds, its
            biases, norms and layers that are dense included. Without it the sketch follows `dense` alone:
            what data had chosen the output factors and biases by is lost.

    Raises:
        ConfigTypeError: the model is no module, or a state dict is no mapping.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
        NoTargetError: the model holds no sketched layer.
        CheckpointMismatchError: a tensor is missing, has another shape, or is of a layer that cannot follow
            (a narrow layer, a convolution); it is named.
        WeightError: the factors are quantized or sharded.
    """
    check_module(model)
    _check_state(dense, "dense")
    if base is not None:
        _check_state(base, "base")
    layers = sketched_layers(model, "load the state dict as it is")
    check_factors(model, "project a state dict onto the model")
    names = {module: name for name, module in model.named_modules()}
    state = dict(model.state_dict())
    inside = _inside(names[layer] for layer in layers)
    for name, own in state.items():
        if not name.startswith(inside):
            if isinstance(own, Tensor):
                state[name] = _moved(own, _of_shape(dense, name, own.shape), base, name)
            else:  # the extra state of a module may be anything
                state[name] = _found(dense, name)
    for layer in layers:
        name = names[layer]
        old = {} if base is None else _weights(layer, name, base)
        parts = _weights(layer, name, dense)
        for path, (part, weight, bias) in parts.items():
            before = old[path][1:] if path in old else (None, None)
            _follow(part, path, weight, before[0], state)
            if bias is not None:
                own = dotted(path, "bias" if isinstance(part, nn.Linear) else "up.bias")
                state[own] = _since(state[own], bias, before[1])
        for key, value in layer.named_parameters():  # that an attention appends, or experts hold besides
            own = dotted(name, key)
            if not own.startswith(_inside(parts)):
                first, _, rest = key.partition(".")
                theirs = dotted(name, rest if first in layer.no_factors else key)
                state[own] = _moved(value.detach(), _of_shape(dense, theirs, value.shape), base, theirs)
    return state


def _inside(names: Iterable[str]) -> tuple[str, ...]:
    """What names of tensors within some modules begin with."""
    return tuple(f"{name}." if name else "" for name in names)


def _moved(own: Tensor, dense: Tensor, base: Mapping[str, Tensor] | None, name: str) -> Tensor:
    """A tensor that is no factor: the dense one, or what the sketch holds and what changed since."""
    old = None if base is None else base.get(name)
    if not isinstance(old, Tensor) or old.shape != own.shape:  # of another head
        return dense
    if name.rpartition(".")[2] == "running_var" and not torch.equal(own, old.to(own)):
        dense, old = dense.to(own), old.to(own)  # times what it grew by, as it may not fall below 0
        return torch.where(old > 0, own * (dense / old), dense)
    return _since(own, dense, old)


def _since(own: Tensor, dense: Tensor, old: Tensor | None) -> Tensor:
    """What the sketch holds and what changed since; the dense tensor where the sketch holds the old one."""
    if old is None or not own.is_floating_point() or torch.equal(own, old.to(own)):
        return dense
    return (own.double() + dense.to(own.device).double() - old.to(own.device).double()).to(own)


def _check_state(given: object, name: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigTypeError(f"{name} is a {type(given).__name__}, wanted what state_dict() gave")


def _found(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise CheckpointMismatchError(f"the dense state dict has no {name}")
    return state[name]


def _of_shape(state: Mapping[str, Any], name: str, shape: Any) -> Tensor:
    value = _found(state, name)
    if not isinstance(value, Tensor) or value.shape != shape:
        given = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise CheckpointMismatchError(f"{name} is {given} in the dense state dict, wanted {tuple(shape)}")
    return value


def _weights(
    layer: SketchedLayer, name: str, state: Mapping[str, Tensor]
) -> dict[str, tuple[nn.Module, Tensor, Tensor | None]]:
    """The parts of a layer by their names, and the dense weight (O, I) and bias that each stands for."""
    dense = layer.to_dense()
    for own, parameter in list(dense.named_parameters()):
        held = _of_shape(state, dotted(name, own), parameter.shape)
        setattr(*owner_of(dense, own), nn.Parameter(held, requires_grad=False))
    found: dict[str, tuple[nn.Module, Tensor, Tensor | None]] = {}
    for suffix, plain in kind_of(dense).parts(dense).items():
        path, part = dotted(name, suffix), layer.get_submodule(suffix)
        view = kind_of(plain).view(plain)
        if isinstance(view, str) or not isinstance(part, SketchedLinear | SketchedEmbedding | nn.Linear):
            raise CheckpointMismatchError(
                f"{path} is a {type(part).__name__}, which cannot follow a dense weight, as one pair of "
                "factors can: sketchify the dense model instead"
            )
        found[path] = part, *view.weight_and_bias()
    return found


def _follow(part: nn.Module, path: str, weight: Tensor, old: Tensor | None, state: dict[str, Tensor]) -> None:
    """Put the output factor that follows a dense weight (O, I), or its change, into the state."""
    if isinstance(part, nn.Linear):
        own = dotted(path, "weight")
        state[own] = _since(state[own], weight, old)
        return
    changed = None if old is None else weight.double() - old.double()
    assert isinstance(part, SketchedLinear | SketchedEmbedding)
    left, right = (factor.detach().double() for factor in part.factors())
    aim = weight.double() if changed is None else changed
    # X R = aim in the least squares; by QR, as R Rᵀ squares the condition
    fitted = torch.linalg.lstsq(right.t(), aim.to(right.device).t()).solution.t()
    fitted = fitted if changed is None else left + fitted
    own = dotted(path, "codes" if isinstance(part, SketchedEmbedding) else "up", "weight")
    # In the pivoted form R is [1 C], up to the order of its columns: the output factor is L itself.
    state[own] = fitted.to(state[own])
