"""Layers that a forward asks the type of: what stands for one of them is of another.

    for layer in self.layers:
        x = layer(x).relu() if isinstance(layer, nn.Linear) else layer(x)

The text of the forward is read, and that of the methods that it calls, of other modules too; nothing is run.
"""

import ast
from collections.abc import Iterator
from functools import cache

from torch import nn

from panther_compile.models.source import is_self, methods_called, own_nodes

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Question = tuple[tuple[str, ...] | None, str]
"""The path from the module to what is asked, None if that is any of its layers, and the name of the type."""


def asked_types(model: nn.Module) -> dict[nn.Module, str]:
    """Why layers have to stay of their type, of those whose type a module around them asks."""
    found: dict[nn.Module, str] = {}
    methods = methods_called(model)
    for module in model.modules():
        for path, kind in _questions(type(module), methods[type(module)]):  # type: ignore[arg-type]
            for layer in _meant(module, path):
                if kind in _type_names(layer):
                    asks = f"forward of {type(module).__name__} asks whether it is of the type {kind}"
                    found.setdefault(layer, asks)
    return found


def _type_names(layer: nn.Module) -> set[str]:
    """The names of its type and of those above, below `nn.Module`, which sketched layers are too."""
    above = type(layer).__mro__
    return {one.__name__ for one in above[: above.index(nn.Module)]}


def _meant(module: nn.Module, path: tuple[str, ...] | None) -> Iterator[nn.Module]:
    """What is at the path, and in it, or all that the module holds."""
    found: object = module
    for name in path or ():
        found = found._modules.get(name) if isinstance(found, nn.Module) else None
    if isinstance(found, nn.Module):
        if path:
            yield found
        if not path or isinstance(found, _CONTAINERS):
            yield from _held(found)


def _held(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a module, and those of the containers among them."""
    for part in module.children():
        yield part
        if isinstance(part, _CONTAINERS):
            yield from _held(part)


@cache
def _questions(cls: type[nn.Module], methods: tuple[str, ...]) -> tuple[Question, ...]:
    """What the forward of a class and some methods of it ask."""
    return tuple(dict.fromkeys(question for node in own_nodes(cls, methods) for question in _asked(node)))


def _asked(node: ast.AST) -> Iterator[Question]:
    """Questions `isinstance(layer, kind)`, `type(layer) is kind` and `layer.__class__ == kind`.

    Those of several kinds, sketched layers among them, have the same answer for what stands for one.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        if len(node.args) == 2:
            kinds = list(_names(node.args[1]))
            if not any(kind.startswith("Sketched") for kind in kinds):
                yield from ((_path(node.args[0]), kind) for kind in kinds)
    elif isinstance(node, ast.Compare):
        for left, right in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
            asked = _typed(left)
            if asked is not None:
                yield from ((_path(asked), kind) for kind in _names(right))


def _typed(node: ast.expr) -> ast.expr | None:
    """What an expression is the type of."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
        return node.args[0] if len(node.args) == 1 else None
    return node.value if isinstance(node, ast.Attribute) and node.attr == "__class__" else None


def _names(node: ast.expr) -> Iterator[str]:
    """The names of the types that an expression lists."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        for one in node.elts:
            yield from _names(one)
    elif isinstance(node, ast.BinOp):  # Linear | Conv2d
        yield from _names(node.left)
        yield from _names(node.right)
    elif isinstance(node, ast.Name | ast.Attribute):
        yield node.id if isinstance(node, ast.Name) else node.attr


def _path(node: ast.expr) -> tuple[str, ...] | None:
    """The names from the module to what is asked, up to an index; None if it is no attribute of it."""
    names: list[str] = []
    while not is_self(node):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Subscript):
            names.clear()
        else:
            return None
        node = node.value
    return tuple(reversed(names))
