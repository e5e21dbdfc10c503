"""Places where the small model is held against its teacher: hidden states, by the names of modules.

Of a model with repeated blocks (children of an `nn.ModuleList` or `nn.Sequential` that hold sketched layers)
these are the outputs of the blocks, else those of the sketched layers themselves.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batches import Call, run_dense
from panther_compile.models.outputs import named_tensors

MOST = 12
"""Landmarks of a model with more blocks than this are thinned out, the last one kept."""

_TRIED = 16  # calls, at most, to find what is reached in some alone

Hidden = dict[str, list[Tensor]]
"""What came out of each landmark, one tensor for each time that it was called."""


def find_landmarks(small: nn.Module, teacher: nn.Module, calls: Sequence[Call]) -> tuple[str, ...]:
    """Names of the modules that give tensors alike in both models, in the order of the small one.

    Args:
        small: the sketched model.
        teacher: the dense one.
        calls: of both; more than the first is run only where modules are reached by some alone.
    """
    layers = tuple(name for name, module in small.named_modules() if isinstance(module, SketchedLayer))
    for names in (tuple(_blocks(small)), layers):
        there = [name for name in names if name and _holds(teacher, name)]
        alike = _alike(small, teacher, there, calls[:_TRIED])
        if alike:
            return tuple(_thinned([name for name in there if name in alike]))
    return ()


def _alike(small: nn.Module, teacher: nn.Module, names: Sequence[str], calls: Sequence[Call]) -> set[str]:
    """Names that give tensors of equal shapes, but for rows, in the first of the calls that reaches them."""
    alike, waiting = set[str](), list(names)
    for call in calls:
        with torch.no_grad(), watched(small, waiting) as ours, watched(teacher, waiting) as theirs:
            run_dense(small, call)
            run_dense(teacher, call)
        alike |= {name for name in waiting if ours[name] and _of_a_row(ours[name]) == _of_a_row(theirs[name])}
        waiting = [name for name in waiting if not ours[name]]
        if not waiting:
            break
    return alike


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[Hidden]:
    """Collect the first floating tensor of each output of the named modules, while the context is open."""
    hidden: Hidden = {name: [] for name in names}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: object, output: Any) -> None:
            found = next(named_tensors(output), None)
            if found is not None:
                hidden[name].append(found[1])

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the outermost children of lists that hold sketched layers; lists in lists are opened."""
    in_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not any(isinstance(part, SketchedLayer) for part in child.modules()):
            continue
        if in_list and not isinstance(child, nn.ModuleList | nn.Sequential):
            yield path
        elif not isinstance(child, SketchedLayer):
            yield from _blocks(child, f"{path}.")


def _holds(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _of_a_row(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in tensors]


def shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """The shape of each tensor."""
    return [tensor.shape for tensor in tensors]


def _thinned(names: Sequence[str]) -> list[str]:
    """Some of the names, at most MOST, evenly spread, the last one among them."""
    count = min(MOST, len(names))
    return [names[(place + 1) * len(names) // count - 1] for place in range(count)]
