"""Names of what a module holds, as paths with dots."""

from collections.abc import Container, Sequence
from typing import Any

from torch import nn


def dotted(*parts: str) -> str:
    """The path through some names; the model itself has none."""
    return ".".join(filter(None, parts))


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the attribute of a name, and the last part of the name."""
    owner, _, leaf = name.rpartition(".")
    return root.get_submodule(owner), leaf


def attribute(root: nn.Module, name: str) -> Any:
    """The attribute of a name: a parameter, a buffer, a constant."""
    return getattr(*owner_of(root, name))


def is_parameter(root: nn.Module, name: str) -> bool:
    """Whether the attribute of a name is a parameter, and no buffer or constant."""
    return isinstance(attribute(root, name), nn.Parameter)


def free_name(root: nn.Module, stem: str) -> str:
    """A name that a module has no attribute of: the stem, or the first of stem_1, stem_2, ..."""
    name, number = stem, 1
    while hasattr(root, name):
        name, number = f"{stem}_{number}", number + 1
    return name


def is_persistent(root: nn.Module, name: str) -> bool:
    """Whether a state dict holds a buffer."""
    owner, leaf = owner_of(root, name)
    return leaf not in owner._non_persistent_buffers_set


def leave_out_of_state(root: nn.Module, name: str) -> None:
    """Let no state dict hold a buffer."""
    owner, leaf = owner_of(root, name)
    owner._non_persistent_buffers_set.add(leaf)


def holder_of(modules: Container[str], name: str) -> str:
    """The closest module to a weight of a plan: of its own name, or one that holds it as a parameter."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def stack_name(names: Sequence[str]) -> str:
    """The name of several weights as one matrix, one below the other."""
    return " + ".join(names)
