"""Layers whose weight a forward writes to: a sketch has factors in its place, and the write would be lost.

    for block_id, block in enumerate(self.blocks):
        block.attention.output.weight.div_(2 ** (block_id // 6))  # as RWKV does in the first call

The text of the forward is read, and that of the methods that it calls, of other modules too; nothing is run.
"""

import ast
from collections.abc import Iterator
from functools import cache

from torch import nn

from panther_compile.models.source import is_self, methods_called, own_nodes

_ANY = "*"  # at an index
_NO_WRITES = frozenset({"requires_grad_", "share_memory_"})

Written = tuple[bool, tuple[str, ...], str]
"""Whether the path begins at the module itself, the path to a layer, and the name of its parameter."""


def written_weights(model: nn.Module) -> dict[nn.Module, str]:
    """Why layers have to stay as they are, of those whose weight or bias a module around them writes to."""
    found: dict[nn.Module, str] = {}
    for layer, name, writer in _writes(model):
        found.setdefault(layer, f"forward of {type(writer).__name__} writes to its {name}")
    return found


def written_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a run of a model may write to."""
    for layer, name, _ in _writes(model):
        parameter = layer._parameters[name]
        if parameter is not None:
            yield parameter


def _writes(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Layers, the name of a parameter of theirs that is written to, and the module that does it."""
    methods = methods_called(model)
    for module in model.modules():
        for from_self, path, name in _written(type(module), methods[type(module)]):  # type: ignore[arg-type]
            for layer in _meant(module, from_self, path):
                if name in layer._parameters:
                    yield layer, name, module


def _meant(module: nn.Module, from_self: bool, path: tuple[str, ...]) -> Iterator[nn.Module]:
    """What is at a path from the module; what is at the end of one, where nobody knows where it begins."""
    for name, layer in module.named_modules(remove_duplicate=False):
        names = name.split(".") if name else []
        behind = names if from_self else names[len(names) - len(path) :]
        if len(behind) == len(path) and all(map(_fits, path, behind)):
            yield layer


def _fits(wanted: str, name: str) -> bool:
    return wanted in (_ANY, name)


@cache
def _written(cls: type[nn.Module], methods: tuple[str, ...]) -> tuple[Written, ...]:
    """What the forward of a class and some methods of it write to."""
    places = (_place(target) for node in own_nodes(cls, methods) for target in _targets(node))
    return tuple(dict.fromkeys(one for one in places if one is not None))


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What `w.mul_(2)`, `init.normal_(w)`, `w *= 2`, `w[0] = 1` and `w = other` write to."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES:
            yield node.func.value
            if ast.unparse(node.func.value).endswith("init"):
                yield from node.args[:1]
    elif isinstance(node, ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        yield from node.targets


def _place(node: ast.expr) -> Written | None:
    """The parameter that an expression is, or is a part of, if it is an attribute of something."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    if not isinstance(node, ast.Attribute):
        return None
    name, names = node.attr, list[str]()
    node = node.value
    while isinstance(node, ast.Attribute | ast.Subscript):
        names.append(node.attr if isinstance(node, ast.Attribute) else _index(node.slice))
        node = node.value
    return is_self(node), tuple(reversed(names)), name


def _index(node: ast.expr) -> str:
    """The name of a part in a list or dictionary of modules."""
    return str(node.value) if isinstance(node, ast.Constant) else _ANY
