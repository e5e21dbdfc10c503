"""What a class that writes its own `state_dict` makes of its parameters."""

import copy
from typing import Any

from torch import Tensor, nn

_SAVE, _LOAD = "_save_to_state_dict", "_load_from_state_dict"


def saves_as_module(module: nn.Module) -> bool:
    """Whether a module saves its parameters and buffers as `nn.Module` does, and need not find them to load.

    So does the linear layer of PyTorch Geometric, whose class writes them itself. Both are tried, on nothing.
    """
    cls = type(module)
    if cls.state_dict is not nn.Module.state_dict or "state_dict" in vars(module):
        return False
    return _saves_the_same(module) and _loads_nothing(module)


def _saves_the_same(module: nn.Module) -> bool:
    if getattr(type(module), _SAVE) is nn.Module._save_to_state_dict:
        return True
    found: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    module._save_to_state_dict(found, "", False)
    nn.Module._save_to_state_dict(module, wanted, "", False)
    return found.keys() == wanted.keys() and all(_is_same(found[name], wanted[name]) for name in wanted)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    ways = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in (one, other)]
    return ways[0] == ways[1] and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _loads_nothing(module: nn.Module) -> bool:
    """Whether a module can be given a `state_dict` in which its parameters are not."""
    if getattr(type(module), _LOAD) is nn.Module._load_from_state_dict:
        return True
    try:
        copy.copy(module)._load_from_state_dict({}, "", {}, False, [], [], [])
    except (AttributeError, LookupError, TypeError):  # it reads them
        return False
    return True
