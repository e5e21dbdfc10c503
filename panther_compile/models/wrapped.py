"""The user's model within what torch has wrapped around it."""

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """What torch.compile, DataParallel or DistributedDataParallel was given, or the model itself."""
    dynamo = sys.modules.get("torch._dynamo")  # without it no model is compiled
    compiled = () if dynamo is None else (dynamo.OptimizedModule,)
    while isinstance(model, (*compiled, DataParallel, DistributedDataParallel)):
        inner = model._orig_mod if isinstance(model, compiled) else model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model
