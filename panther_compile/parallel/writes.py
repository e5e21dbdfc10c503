"""What operations of a graph write in place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

# What may give back what it was given, and does not say so: dropout of nothing, casts to what it is.
_GIVES_BACK = frozenset(
    f"aten::{name}"
    for name in (
        *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "type_as"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors"),
    )
)


@dataclass(frozen=True, slots=True)
class Write:
    """A tensor written in place.

    Attributes:
        base: place of the node that made it.
        place: of the node that writes it.
        readers: places of the nodes that read it, or a view of it.
    """

    base: int
    place: int
    readers: set[int]


def writes_of(nodes: Sequence[fx.Node]) -> list[Write]:
    """What is written in place, parameters aside, in order."""
    places = {node: place for place, node in enumerate(nodes)}
    readers: dict[fx.Node, set[int]] = {}
    for node in nodes:
        for given in node.all_input_nodes:
            readers.setdefault(viewed(given), set()).add(places[node])
    found = []
    for node in nodes:
        for base in map(viewed, written(node)):
            if base.op != "get_attr":
                found.append(Write(places[base], places[node], readers[base]))
    return found


def written(node: fx.Node) -> Iterator[fx.Node]:
    """What an operation writes in place, or views of it."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            several = value if isinstance(value, (list, tuple)) else (value,)
            yield from (one for one in several if isinstance(one, fx.Node))


def viewed(node: fx.Node) -> fx.Node:
    """The node that made the tensor which a node is, or is a view of."""
    while _is_view(node):
        given = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        if not isinstance(given, fx.Node):
            break
        node = given
    return node


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function":
        return False
    if schema is None:
        return "getitem" in str(node.target)
    return schema.name in _GIVES_BACK or any(result.alias_info is not None for result in schema.returns)
