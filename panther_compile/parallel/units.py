"""Units of a model: the parts that `fully_shard` gathers, and that are computed again, one at a time.

    of a module tree     blocks of a list, and modules of at most 1 / 8 of the bytes, as high as they come
    of a stage's graph   consecutive nodes, cut where few values are alive, of even bytes: `graph_units.py`

A unit has the parameters that only it reads; those that several read (tied embeddings) stay with what holds
the units. What is computed again finds what it was given, and what it kept, as they were: no such unit writes
a tensor that others made, and nobody else writes, after it, one that it read or made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from panther_compile.errors import ConfigError
from panther_compile.names import dotted
from panther_compile.parallel.writes import Write, writes_of

# A unit holds at most this share of the parameters' bytes, where the model can be divided so far.
SHARE = 1 / 8
# Less than this part of that is left to the unit or the model around it.
_TINY = 1 / 16


@dataclass(frozen=True, slots=True)
class Unit:
    """A module of the user's tree.

    Attributes:
        name: of the module.
        bytes: of the parameters under it.
        is_whole: whether no other unit is inside.
        is_repeatable: whether it can be computed again from what it was given.
    """

    name: str
    bytes: int
    is_whole: bool
    is_repeatable: bool


def find_module_units(
    model: nn.Module, graph_module: fx.GraphModule, names: Sequence[str] | None = None
) -> list[Unit]:
    """Modules of a model's tree to be units, in the order in which they run.

    Args:
        model: the user's.
        graph_module: of `capture`, whose nodes say which modules they ran in.
        names: of modules, to be units in place of those that are found.

    Raises:
        ConfigError: a name is no module's, or another module reads its parameters too.
    """
    nodes = list(graph_module.graph.nodes)
    ran = _ran_in(nodes)
    reads = _reads(model, nodes)
    writes = writes_of(nodes)
    total = _bytes(model)
    limit = total * SHARE
    found: list[Unit] = []

    def is_closed(name: str, module: nn.Module) -> bool:
        """Whether the module ran once, and nothing else reads its parameters."""
        if name not in ran:
            return False
        places = ran[name]
        return all(reads.get(id(parameter), set()) <= places for parameter in module.parameters())

    def visit(name: str, module: nn.Module) -> int:
        """Find units in a module; bytes that they take."""
        size = _bytes(module)
        closed = bool(name) and is_closed(name, module)
        if not size or (closed and size < limit * _TINY):
            return 0
        if closed and (size <= limit or (size <= total / 2 and _is_block(model, name, module))):
            found.append(_unit(name, size, ran[name], writes, is_whole=True))
            return size
        taken = sum(visit(dotted(name, key), child) for key, child in module.named_children())
        if closed and size - taken > limit * _TINY:
            found.append(_unit(name, size, ran[name], writes, is_whole=not taken))
            return size
        return taken

    if names is None:
        visit("", model)
    modules = dict(model.named_modules())
    for name in names or ():
        if name not in modules:
            raise ConfigError(f"units names {name!r}, which is no module of the model")
        if not is_closed(name, modules[name]):
            raise ConfigError(f"units names {name!r}, which does not run once, or shares parameters")
        is_whole = not any(other.startswith(f"{name}.") for other in names or ())
        size = _bytes(modules[name])
        found.append(_unit(name, size, ran[name], writes, is_whole=is_whole))
    order = {unit.name: (min(ran[unit.name]), -len(ran[unit.name])) for unit in found}
    return sorted(found, key=lambda unit: order[unit.name])


def _unit(name: str, size: int, places: set[int], writes: Sequence[Write], *, is_whole: bool) -> Unit:
    outside = any(_crosses(write, places) for write in writes)
    return Unit(name, size, is_whole, not outside)


def _crosses(write: Write, places: set[int]) -> bool:
    """Whether a unit writes a tensor made outside, or one that it read or made is written later outside."""
    if write.place in places:
        return write.base not in places
    return write.place > max(places) and (write.base in places or not places.isdisjoint(write.readers))


def _is_block(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a module is one of several in a list, and has no such list inside."""

    def lists_several(other: nn.Module) -> bool:
        held = [child for child in other.children() if next(child.parameters(), None) is not None]
        return isinstance(other, (nn.ModuleList, nn.Sequential)) and len(held) > 1

    parent = model.get_submodule(name.rpartition(".")[0])
    return lists_several(parent) and not any(map(lists_several, module.modules()))


def _ran_in(nodes: Sequence[fx.Node]) -> dict[str, set[int]]:
    """Modules that ran once -> the places of their nodes."""
    ran: dict[str, set[int]] = {}
    again: set[str] = set()
    for place, node in enumerate(nodes):
        if not node.op.startswith("call"):
            continue
        for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
            if "@" in str(key) or "@" in name:
                again.add(name.partition("@")[0])
            ran.setdefault(name, set()).add(place)
        if node.op == "call_module":
            ran.setdefault(str(node.target), set()).add(place)
            if len(ran[str(node.target)]) > 1:
                again.add(str(node.target))
    for name in again:
        ran = {
            other: places
            for other, places in ran.items()
            if other != name and not other.startswith(f"{name}.")
        }
    return ran


def _reads(model: nn.Module, nodes: Sequence[fx.Node]) -> dict[int, set[int]]:
    """Parameter -> places of the nodes that read it."""
    places = {node: place for place, node in enumerate(nodes)}
    owned = dict(model.named_parameters(remove_duplicate=False))
    reads: dict[int, set[int]] = {}
    for node in nodes:
        if node.op == "get_attr" and str(node.target) in owned:
            held = reads.setdefault(id(owned[str(node.target)]), set())
            held |= {places[user] for user in node.users}
        if node.op == "call_module":
            for parameter in model.get_submodule(str(node.target)).parameters():
                reads.setdefault(id(parameter), set()).add(places[node])
    return reads


def _bytes(module: nn.Module) -> int:
    """Bytes of the parameters under a module."""
    return sum(parameter.nbytes for parameter in module.parameters())
