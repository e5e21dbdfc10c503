"""Put new modules in the place of old ones: in a copy of the model, or in the model itself."""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigError, ConfigTypeError, first_line
from panther_compile.models.written_weights import written_parameters
from panther_compile.names import dotted

Replacements = Mapping[nn.Module, nn.Module]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_COPIED_EMPTY = (dict, OrderedDict, set)
_SCALARS = (bool, int, float, str, type(None))
_PACKED = 65_536  # integers of a tensor, from which on they are taken for a quantized weight


def copied(make: Callable[[nn.Module], nn.Module], model: nn.Module, advice: str = "") -> nn.Module:
    """What `make` copies of a model.

    Raises:
        ConfigTypeError: it cannot be copied; the message ends with the advice.
    """
    try:
        return make(model)
    # Whatever the model holds copies itself in its own way, and may raise anything.
    except Exception as error:
        raise ConfigTypeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {first_line(error)}){advice}"
        ) from error


def copy_with(model: nn.Module, new: Replacements) -> nn.Module:
    """A deep copy in which every reference to an old module leads to its replacement.

    References in lists, dicts and other Python objects follow too, and the old modules' tensors are
    never copied. A bias that others share with an old module is shared with its replacement.
    """
    memo: dict[int, Any] = {id(old): replacement for old, replacement in new.items()}
    # deepcopy refuses what autograd computed, such as the weight that pruning masks.
    memo |= {id(t): t.detach().clone() for t in held_tensors(model) if not t.is_leaf}
    for old_bias, new_bias, replacement in _biases(new):
        shared = memo.setdefault(id(old_bias), new_bias)
        _put_parameter(replacement, new_bias, shared)
    result: nn.Module = copy.deepcopy(model, memo)
    for old, replacement in new.items():
        held = {name: vars(old)[name] for name in _HOOKS if vars(replacement)[name] is vars(old)[name]}
        vars(replacement).update(copy.deepcopy(held, memo))
    for replacement in new.values():  # what it shares with the model, as a configuration, follows too
        for module in replacement.modules():
            held = vars(module)
            held.update({name: memo[id(one)] for name, one in held.items() if id(one) in memo})
    return result


def share_hooks(old: nn.Module, replacement: nn.Module) -> None:
    """Have a replacement run the hooks of the calls of a module; a copy of the model has copies of them."""
    vars(replacement).update({name: vars(old)[name] for name in _HOOKS})


def replace_inside(model: nn.Module, new: Replacements) -> nn.Module:
    """Replace the old modules in the model itself; returns the model, or what replaces it.

    Submodules are replaced wherever they are registered, and in the lists, tuples and dicts that modules
    hold as plain attributes. The replacements take the biases themselves over, with their new values, so that
    what shares one still does.
    """
    for old_bias, new_bias, replacement in _biases(new):
        with torch.no_grad():
            old_bias.copy_(new_bias)
        _put_parameter(replacement, new_bias, old_bias)
    if model in new:
        return new[model]
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and child in new:
                module._modules[name] = new[child]
        for name, value in list(module.__dict__.items()):
            if name != "_modules" and isinstance(value, list | tuple | dict | nn.Module):
                replaced = _replaced(value, new, set())
                if replaced is not value:
                    module.__dict__[name] = replaced
    return model


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a module holds: parameters, buffers, and attributes, also in lists and dicts."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)
    yield from (tensor for *_, tensor in _plain_tensors(model))


def check_plain_tensors(model: nn.Module) -> None:
    """Check that what a model holds besides parameters and buffers has numbers.

    Products of a tensor with one on the meta device are of whatever lies in memory. Left out are parameters,
    as recurrent layers list them anew when they are called, and what hooks make ahead of a call.

    Raises:
        ConfigError: a tensor is on the meta device.
    """
    for module, name, tensor in _plain_tensors(model):
        made = isinstance(tensor, nn.Parameter) or bool(module._forward_pre_hooks)
        if tensor.is_meta and tensor.numel() and not made:
            raise ConfigError(
                f"{name} of the skeleton is on the meta device, and no parameter or buffer, whose numbers "
                "would be loaded: make the skeleton on another device, or register it as a buffer"
            )


def _plain_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Tensors that are attributes of modules, also in lists and dicts, with the module and their name."""
    for prefix, module in model.named_modules():
        for name, one in vars(module).items():
            if name in ("_parameters", "_buffers") or type(one) in _SCALARS:
                continue
            several = one.values() if isinstance(one, dict) else one
            for tensor in several if isinstance(one, dict | list | tuple) else (one,):
                if isinstance(tensor, Tensor):
                    yield module, dotted(prefix, name), tensor


def warn_of_functions(model: nn.Module, advice: str, *, stacklevel: int) -> None:
    """Warn of attributes that are functions and hold modules of a model that is to be copied.

    A copy has the same functions: `lambda x: self.fc(x)` calls the layers of the model that was copied, and
    so does `self.encode = torch.compile(self.encode)`. Methods are copied with their module.

    Args:
        model: that is to be copied.
        advice: what else to do about it, at the end of the warning.
        stacklevel: of the warning, 1 being who calls this.
    """
    own = set(model.modules())
    for prefix, module in model.named_modules():
        for name, one in vars(module).items():
            if name == "_compiled_call_impl":  # of `module.compile()`, which torch leaves out of copies
                continue
            if isinstance(one, FunctionType) and not own.isdisjoint(_held_modules(one)):
                compiled = hasattr(one, "_torchdynamo_orig_callable")
                remedy = "compile it in the copy" if compiled else "make it a method"
                warnings.warn(
                    f"{prefix}.{name}".removeprefix(".")
                    + f" of {type(model).__name__} is a function that holds modules of it, and in a copy "
                    f"goes on calling these, not what replaces them: {remedy}{advice}",
                    stacklevel=stacklevel + 1,
                )


def _held_modules(function: FunctionType) -> Iterator[nn.Module]:
    """Modules that a function holds, also by methods and functions that it was made of, as decorators do."""
    left, seen = [function], {id(function)}
    while left:
        cells = (cell for cell in left.pop().__closure__ or () if cell != CellType())
        for one in (cell.cell_contents for cell in cells):
            held = one.__self__ if isinstance(one, MethodType) else one
            if isinstance(held, nn.Module):
                yield held
            elif isinstance(held, FunctionType) and id(held) not in seen:
                seen.add(id(held))
                left.append(held)


def copies_of_empty(model: nn.Module) -> dict[int, Any]:
    """A memo of copies of the empty dicts and sets of modules, most of them tables of hooks.

    For one layer `copy.deepcopy` spends more time on these than on all the rest.
    """
    return {
        id(held): type(held)()
        for module in model.modules()
        for held in vars(module).values()
        if type(held) in _COPIED_EMPTY and not held
    }


def written_tensors(model: nn.Module, held: Iterable[Tensor] | None = None) -> Iterator[Tensor]:
    """Tensors that a run of a module may write into, as a cache or a count of its calls.

    Of parameters they are tables whose rows are renormalized as they are read, and those that a forward says
    it writes to. Packed weights are none, as many integers of one tensor are taken for.

    Args:
        model: that may be run.
        held: its `held_tensors`, where they are known.
    """
    for tensor in held_tensors(model) if held is None else held:
        floats = tensor.is_floating_point() or tensor.is_complex()
        if not isinstance(tensor, nn.Parameter) and (floats or tensor.numel() < _PACKED):
            yield tensor
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield module.weight
    yield from written_parameters(model)


def _biases(new: Replacements) -> Iterator[tuple[nn.Parameter, nn.Parameter, nn.Module]]:
    """(old bias, new bias, replacement) wherever both have one, of one type."""
    for old, replacement in new.items():
        old_bias, new_bias = getattr(old, "bias", None), getattr(replacement, "bias", None)
        if not isinstance(old_bias, nn.Parameter) or not isinstance(new_bias, nn.Parameter):
            continue
        if old_bias.dtype == new_bias.dtype:
            yield old_bias, new_bias, replacement


def _put_parameter(module: nn.Module, present: nn.Parameter, wanted: nn.Parameter) -> None:
    """Put a parameter in the place of another, wherever the module or a part of it holds that one."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is present:
                part._parameters[name] = wanted


def _replaced(value: Any, new: Replacements, seen: set[int]) -> Any:
    """The value with old modules replaced; lists and dicts, which may hold themselves, change in place."""
    if isinstance(value, nn.Module):
        return new.get(value, value)
    if isinstance(value, list | dict):
        if id(value) in seen:
            return value
        seen.add(id(value))
    if isinstance(value, list):
        for place, item in enumerate(value):
            replaced = _replaced(item, new, seen)
            if replaced is not item:
                value[place] = replaced
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            replaced = _replaced(item, new, seen)
            if replaced is not item:
                value[key] = replaced
    elif type(value) is tuple:
        items = tuple(_replaced(item, new, seen) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value
