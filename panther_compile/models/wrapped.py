"""The user's model within what torch has wrapped around it, and around its parts."""

import copy
import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The model as torch.compile, DataParallel or DistributedDataParallel was given it, its parts too.

    A module with a part that is wrapped is copied, but for its parameters, buffers and other parts: the
    names of what it holds are then those of the plain model. Without any the result is the model itself.
    """
    if not any(_is_wrapper(module) for module in model.modules()):
        return model
    return _unwrapped(model, {})


def _unwrapped(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in known:
        plain = module
        while _is_wrapper(plain):
            inner = (
                plain.module if isinstance(plain, DataParallel | DistributedDataParallel) else plain._orig_mod
            )
            assert isinstance(inner, nn.Module)
            plain = inner
        parts = {n: None if part is None else _unwrapped(part, known) for n, part in plain._modules.items()}
        if any(parts[n] is not part for n, part in plain._modules.items()):
            plain = copy.copy(plain)
            vars(plain)["_modules"] = parts
        known[module] = plain
    return known[module]


def _is_wrapper(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # without it no model is compiled
    compiled = () if dynamo is None else (dynamo.OptimizedModule,)
    return isinstance(module, (*compiled, DataParallel, DistributedDataParallel))
