"""Whether features go one way only, by the text of the model's own code.

Data shows the paths that it takes. Another input may take another one:

    h = self.up(x)
    if flag:                          # the data never set it
        return self.other(h)          # given fewer features than it was made for
    return self.down(self.act(h))

The code between the call of a layer that writes features and the call of the one that reads them is looked
at, in the class that holds both and in those of the modules on the way. Where a condition there decides which
layer is called, or where that code cannot be read, another path is taken to be possible.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType

from torch import fx, nn

from panther_compile.layers.base import SketchedLayer
from panther_compile.models.source import parse_function
from panther_compile.planning.coupled import Coupling

_TENSORS = ("weight", "bias", "in_features", "out_features")  # of a layer, read without a call of it
_CACHES = ("past", "cache")  # in the names of arguments that hold what the layer itself wrote before
_CONDITIONS = (ast.If, ast.IfExp, ast.While, ast.Try, ast.Match, ast.BoolOp)

Place = tuple[int, int]


def goes_one_way(model: nn.Module, coupling: Coupling) -> bool:
    """Whether only the reader of a coupling can be given what its writers write.

    Where features pass head by head, also whether it can be given nothing else; another reader can pick those
    that it reads.

    Args:
        model: holds the layers under their names.
        coupling: of layers that the data shows to be coupled.
    """
    return all(_leads_there(model, writer, coupling.reader, coupling.padded) for writer in coupling.writers)


def _leads_there(model: nn.Module, writer: str, reader: str, alone: bool) -> bool:
    one, other = writer.split("."), reader.split(".")
    shared = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    holders = [model.get_submodule(".".join(one[:place])) for place in range(shared + 1)]
    if any(isinstance(module, fx.GraphModule) for module in holders) or isinstance(
        holders[-1], SketchedLayer
    ):
        return True  # a graph has one path, and so has attention that is made of its parts
    both = holders[-1]
    for path, after in ((one, True), (other, False)):
        for place in range(shared + 1, len(path)):
            owner = model.get_submodule(".".join(path[:place]))
            if not _is_chain(owner) and not _passes(owner, path[place], after):
                return False
    return _is_chain(both) or _between(both, one[shared], other[shared], alone)


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _passes(owner: nn.Module, child: str, after: bool) -> bool:
    """Whether no condition after the call of a child, or before it, decides which layer is called."""
    found = _find(owner, child)
    if found is None:
        return False
    text, mention = found
    for condition in text.conditions:
        if mention in ast.walk(condition):
            if not after:
                return False
        elif (_start(condition) > _start(mention)) == after and text.decides(condition):
            return False
    return True


def _between(owner: nn.Module, writer: str, reader: str, alone: bool) -> bool:
    """The same between the calls of two children; of the second, if it is to read nothing else."""
    found, other = _find(owner, writer), _find(owner, reader)
    if found is None or other is None or found[0].function is not other[0].function:
        return False
    text, mention = found
    (there,) = text.mentions(reader)
    end, features = text.end_of_call(there), text.names_from(mention, there)
    for condition in text.conditions:
        inside, ways = set(ast.walk(condition)), text.ways(condition)
        if there in inside:
            if mention not in inside or any((mention in way) != (there in way) for way in ways):
                return False
        elif mention in inside:
            others = [node for way in ways if mention not in way for node in way]
            if alone and (text.calls_layer(others) or text.reads_argument(others)):
                return False
        elif _start(condition) > end:
            if text.reads(inside, features):
                return False
        elif _start(condition) > _start(mention):
            if text.decides(condition) or text.lets_out(inside, features):
                return False
            if alone and any(map(text.is_replaced, inside)):
                return False
    return True


def _find(owner: nn.Module, child: str) -> "tuple[_Text, ast.AST] | None":
    """The one place where the code of a module speaks of a child; None if there are others, or none."""
    found = [
        (text, mention)
        for text in _texts(owner)
        if text.function.__name__ != "__init__"
        for mention in text.mentions(child)
    ]
    return found[0] if len(found) == 1 else None


def _texts(owner: nn.Module) -> "Iterator[_Text]":
    """The methods of a module that its own classes define."""
    for name in dir(type(owner)):
        function = inspect.getattr_static(type(owner), name)
        if isinstance(function, FunctionType) and function is not getattr(nn.Module, name, None):
            yield _Text(owner, function)


@dataclass(frozen=True)
class _Text:
    """The code of a method of a module."""

    owner: nn.Module
    function: FunctionType

    @cached_property
    def tree(self) -> ast.AST:
        try:
            return parse_function(self.function)
        except (OSError, TypeError, SyntaxError):  # typed into a shell, or made by a program
            return ast.Module([], [])

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def arguments(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)

    @property
    def conditions(self) -> list[ast.AST]:
        return [node for node in ast.walk(self.tree) if isinstance(node, _CONDITIONS)]

    def mentions(self, child: str) -> Iterator[ast.AST]:
        """Places where a child is read, but for its tensors."""
        return (node for node in ast.walk(self.tree) if self._child(node) == child)

    def _child(self, node: ast.AST) -> str | None:
        """The name of what is read of the module itself, if it is not read for its tensors."""
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            return None
        parent = self.parents[node]
        if isinstance(parent, ast.Attribute) and parent.attr in _TENSORS:
            return None
        return node.attr if self.arguments[:1] == [node.value.id] else None

    def ways(self, condition: ast.AST) -> list[set[ast.AST]]:
        """All that may run, or not, for each outcome of a condition."""
        groups: list[Sequence[ast.AST]]
        if isinstance(condition, ast.IfExp):
            groups = [[condition.body], [condition.orelse]]
        elif isinstance(condition, ast.If | ast.While):
            groups = [condition.body, condition.orelse]
        elif isinstance(condition, ast.Try):
            handled = [one for handler in condition.handlers for one in handler.body]
            groups = [condition.body, handled, condition.orelse, condition.finalbody]
        elif isinstance(condition, ast.Match):
            groups = [case.body for case in condition.cases]
        else:
            assert isinstance(condition, ast.BoolOp)
            groups = [condition.values[1:]]
        return [{node for one in group for node in ast.walk(one)} for group in groups]

    def end_of_call(self, mention: ast.AST) -> Place:
        """The place where the call of what is mentioned ends."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and node.func is mention]
        return max((_end(node) for node in calls), default=_end(mention))

    def names_from(self, mention: ast.AST, there: ast.AST) -> set[str]:
        """The variables that hold what a layer wrote, when another has read it."""
        names: set[str] = set()
        for node in sorted(self._assignments, key=_start):
            value = list(ast.walk(node.value))
            written = {
                one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)
            }
            if there in value:
                return names - written
            if mention in value or self.reads(value, names):
                names |= written
        return names

    @cached_property
    def _assignments(self) -> list[ast.Assign]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]

    @staticmethod
    def reads(nodes: Iterable[ast.AST], names: set[str]) -> bool:
        """Whether one of these variables is read among nodes."""
        return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names for n in nodes)

    def lets_out(self, nodes: Iterable[ast.AST], names: set[str]) -> bool:
        """Whether one of these variables is returned among nodes, or kept elsewhere than in a variable."""
        for node in nodes:
            if isinstance(node, ast.Return):
                return True
            kept = isinstance(node, ast.Assign) and not all(
                isinstance(one, ast.Name | ast.Tuple) for one in node.targets
            )
            if (kept or isinstance(node, ast.Expr)) and self.reads(ast.walk(node.value), names):  # type: ignore[attr-defined]
                return True
        return False

    def decides(self, condition: ast.AST) -> bool:
        """Whether it decides if a layer is called."""
        return any(self.calls_layer(way) for way in self.ways(condition))

    def calls_layer(self, nodes: Iterable[ast.AST], depth: int = 0) -> bool:
        """Whether a layer of the module is called among these, by itself or by another method."""
        for node in nodes:
            name = self._child(node)
            held = getattr(self.owner, name, None) if name is not None else None
            if isinstance(held, nn.Module):
                if any(map(_maps_features, held.modules())):
                    return True
            elif inspect.ismethod(held) and depth < 3:
                if not isinstance(held.__func__, FunctionType) or getattr(nn.Module, held.__name__, None):
                    continue
                text = _Text(self.owner, held.__func__)
                if text.calls_layer(list(ast.walk(text.tree)), depth + 1):
                    return True
        return False

    def reads_argument(self, nodes: Sequence[ast.AST]) -> bool:
        """Whether features may come from the caller."""
        return any(isinstance(node, ast.Name) and self._is_given(node.id) for node in nodes)

    def is_replaced(self, node: ast.AST) -> bool:
        """Whether an argument takes the place of a value."""
        return (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and self._is_given(node.value.id)
        )

    def _is_given(self, name: str) -> bool:
        return name in self.arguments[1:] and not any(word in name for word in _CACHES)


def _maps_features(module: nn.Module) -> bool:
    sizes = [parameter.dim() for parameter in module.parameters(recurse=False)]
    return max(sizes, default=0) > 1 and not isinstance(module, nn.Embedding)


def _start(node: ast.AST) -> Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
