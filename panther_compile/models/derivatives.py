"""Models that differentiate in their forward, as those of molecules do, whose forces are a gradient.

    positions.requires_grad_()
    energy = self.net(positions)
    forces = -torch.autograd.grad(energy, positions, create_graph=self.training)[0]

They run with gradients only. In eval mode they keep no graph of what they differentiated, so that the
result cannot be differentiated once more, which fitting and healing do.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from panther_compile.models.source import own_nodes

NO_GRADIENT = RuntimeError, AssertionError
"""What a backward ends in: an operator has none, a change in place, or a part that wants training mode."""


def differentiates(model: nn.Module) -> bool:
    """Whether the text of a forward in the model asks for gradients of an input."""
    classes: set[Any] = {type(module) for module in model.modules()}
    return any(map(_differentiates, classes))


@contextmanager
def gradients_for(model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Let a model that differentiates run where gradients are off; where they are on its graph is kept.

    Gives a function of its result: what is to be handed on, without a graph where gradients are off.
    """
    if not differentiates(model):
        yield _as_it_is
    elif torch.is_grad_enabled():
        with _KeptGraphs():
            yield _as_it_is
    else:
        with torch.enable_grad():
            yield _without_graph


@cache
def _differentiates(cls: type[Any]) -> bool:
    return any(_asks_for_gradients(node) for node in own_nodes(cls))


def _asks_for_gradients(node: ast.AST) -> bool:
    """Whether a call is `x.requires_grad_()`, `torch.autograd.grad(...)` or `torch.enable_grad()`."""
    called = getattr(node, "func", None)
    if not isinstance(node, ast.Call) or not isinstance(called, ast.Attribute):
        return False
    if called.attr == "grad":
        return ast.unparse(called.value).endswith("autograd")
    if called.attr == "requires_grad_":
        return not any(isinstance(one, ast.Constant) and one.value is False for one in ast.walk(node))
    return called.attr == "enable_grad"


class _KeptGraphs(TorchFunctionMode):  # type: ignore[misc]
    """Whatever `torch.autograd.grad` gives can be differentiated again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            kwargs = kwargs | {"create_graph": True, "retain_graph": True}
        return func(*args, **kwargs)


def _as_it_is(result: Any) -> Any:
    return result


def _without_graph(result: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, result)
