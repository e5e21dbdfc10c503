"""The text of a class's own methods, read and not run."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

# What is asked of a weight without reading its values.
METADATA = frozenset({"dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"})
METADATA_CALLS = frozenset({"size", "dim", "numel", "nelement", "element_size", "is_floating_point"})


def own_functions(
    cls: type[Any], base: type[Any] = nn.Module, name: str = "forward", *, wrapped: bool = False
) -> list[ast.FunctionDef] | None:
    """The forward of a class, those that it overrides, and the methods that they name, each once.

    In all of them the first argument is called "self".

    Args:
        cls: of a module.
        base: whose own methods, and those of the classes above it, are known.
        name: of another method to begin with.
        wrapped: whether functions are read that are wrapped in others, which need not call them.

    Returns:
        None if one cannot be read: it is wrapped, was made at run time, or is in C.
    """
    try:
        return list(_functions(cls, base, name, wrapped))
    except (OSError, TypeError, SyntaxError):
        return None


def own_nodes(cls: type[Any], methods: Iterable[str] = ()) -> Iterator[ast.AST]:
    """All that is in these functions; nothing of torch's classes, which are known, or of what is not read.

    Args:
        cls: of a module.
        methods: of the class that are read beside its forward, see `methods_called`.
    """
    if not cls.__module__.startswith("torch."):
        for name in ("forward", *methods):
            for function in own_functions(cls, name=name, wrapped=True) or ():
                yield from ast.walk(function)


def methods_called(model: nn.Module) -> dict[type[Any], tuple[str, ...]]:
    """What the forwards of a model may call of its modules beside their forward, by the classes of these.

        predictions = self.altup.predict(hidden_states)  # as the layers of Gemma 3n do

    Such a method is known by its name alone, whatever it is called on.
    """
    found: dict[type[Any], tuple[str, ...]] = {type(module): () for module in model.modules()}
    while True:
        called = {name for one in found.items() for name in _called(*one)}  # type: ignore[arg-type]
        more = {cls: tuple(sorted(called & _methods(cls))) for cls in found}  # type: ignore[arg-type]
        if more == found:
            return found
        found = more


@cache
def _called(cls: type[Any], methods: tuple[str, ...]) -> frozenset[str]:
    """The names by which these functions call something of anything but the module itself."""
    functions = (node.func for node in own_nodes(cls, methods) if isinstance(node, ast.Call))
    return frozenset(
        one.attr for one in functions if isinstance(one, ast.Attribute) and not is_self(one.value)
    )


@cache
def _methods(cls: type[Any]) -> frozenset[str]:
    """The methods that a class has beside those of every module."""
    if cls.__module__.startswith("torch."):
        return frozenset()
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    named = {name for one in own for name, value in vars(one).items() if isinstance(value, FunctionType)}
    return frozenset(named.difference(dir(nn.Module)))


def parse_function(function: Any) -> ast.Module:
    """The text of a function.

    Raises:
        OSError, TypeError, SyntaxError: it cannot be read.
    """
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _functions(cls: type[Any], base: type[Any], name: str, wrapped: bool) -> Iterator[ast.FunctionDef]:
    above = cls.__mro__[: cls.__mro__.index(base)]
    waiting: list[Any] = [vars(one)[name] for one in above if name in vars(one)]
    seen = {name}
    while waiting:
        function = _function(waiting.pop(0), wrapped)
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


def _function(held: Any, wrapped: bool) -> ast.FunctionDef:
    if not wrapped and hasattr(held, "__wrapped__"):  # as of transformers' experts: another one may run
        raise TypeError(f"{held!r} is wrapped in another function")
    function = parse_function(held).body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        raise TypeError(f"{held!r} is no method")
    own = function.args.args[0].arg
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == own:
            node.id = "self"  # as most call it
    return function
