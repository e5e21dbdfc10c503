"""The text of a class's own methods, read and not run."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

# What is asked of a weight without reading its values.
METADATA = frozenset({"dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"})
METADATA_CALLS = frozenset({"size", "dim", "numel", "nelement", "element_size", "is_floating_point"})


def own_functions(cls: type[Any], base: type[Any] = nn.Module) -> list[ast.FunctionDef] | None:
    """The forward of a class, those that it overrides, and the methods that they name, each once.

    In all of them the first argument is called "self".

    Args:
        cls: of a module.
        base: whose own methods, and those of the classes above it, are known.

    Returns:
        None if one cannot be read: it is wrapped, was made at run time, or is in C.
    """
    try:
        return list(_functions(cls, base))
    except (OSError, TypeError, SyntaxError):
        return None


def own_nodes(cls: type[Any]) -> Iterator[ast.AST]:
    """All that is in these functions; nothing of torch's classes, which are known, or of what is not read."""
    if not cls.__module__.startswith("torch."):
        for function in own_functions(cls) or ():
            yield from ast.walk(function)


def parse_function(function: Any) -> ast.Module:
    """The text of a function.

    Raises:
        OSError, TypeError, SyntaxError: it cannot be read.
    """
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _functions(cls: type[Any], base: type[Any]) -> Iterator[ast.FunctionDef]:
    above = cls.__mro__[: cls.__mro__.index(base)]
    waiting: list[Any] = [vars(one)["forward"] for one in above if "forward" in vars(one)]
    seen = {"forward"}
    while waiting:
        function = _function(waiting.pop(0))
        yield function
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and is_self(node.value) and node.attr not in seen:
                seen.add(node.attr)
                method = inspect.getattr_static(cls, node.attr, None)
                if isinstance(method, FunctionType) and method is not getattr(base, node.attr, None):
                    waiting.append(method)


def is_self(node: ast.AST) -> bool:
    """Whether an expression is the module itself."""
    return isinstance(node, ast.Name) and node.id == "self"


def is_question(node: ast.AST) -> bool:
    """Whether an attribute is read that a tensor has without its values."""
    asked = METADATA | METADATA_CALLS
    return isinstance(node, ast.Attribute) and node.attr in asked and isinstance(node.ctx, ast.Load)


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, in the order of the text."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)


def _function(held: Any) -> ast.FunctionDef:
    if hasattr(held, "__wrapped__"):  # as of transformers' experts: another implementation may run
        raise TypeError(f"{held!r} is wrapped in another function")
    function = parse_function(held).body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        raise TypeError(f"{held!r} is no method")
    own = function.args.args[0].arg
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == own:
            node.id = "self"  # as most call it
    return function
