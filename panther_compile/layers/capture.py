"""Whether a graph is being captured, and by whom; asked in one way of torch 2.11 to 2.13.

The Dynamo of torch 2.11 holds `torch.compiler.is_exporting()` for true whatever it does, and that torch says
False to `is_compiling()` while AOTAutograd traces what a backend was given.
"""

import torch
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
