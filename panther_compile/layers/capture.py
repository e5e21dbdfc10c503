"""Whether a graph is being captured, and by whom; asked in one way of torch 2.11 to 2.13.

The Dynamo of torch 2.11 holds `torch.compiler.is_exporting()` for true whatever it does, and that torch says
False to `is_compiling()` while AOTAutograd traces what a backend was given.
"""

from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext


def is_compiling() -> bool:
    """Whether `torch.compile` captures a graph; a strict export, the work of Dynamo too, counts as that."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return TracingContext.try_get() is not None


def is_exporting() -> bool:
    """Whether `torch.export` captures a graph, which goes on to other compilers."""
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()


def is_captured() -> bool:
    """Whether any of them captures a graph."""
    return is_compiling() or is_exporting()


def kept_whole(layer: nn.Module, first: Any, *others: Any) -> Any:
    """The node that calls a layer where `torch.fx` traces a model that holds it; None anywhere else.

    A tracer keeps the layers of torch.nn whole. What stands in the place of one is kept whole too, since no
    tracer can follow its forward.

    Args:
        layer: whose forward is called.
        first: argument of it.
        others: arguments behind that.
    """
    if not isinstance(first, fx.Proxy) or not isinstance(first.tracer, fx.Tracer):
        return None
    path = first.tracer.path_of_module(layer)
    return first.tracer.create_proxy("call_module", path, (first, *others), {}) if path else None
