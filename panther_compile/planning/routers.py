"""Routers: linear layers that score experts, whose sketches would send tokens elsewhere."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

from panther_compile.layers.matrix_stacks import is_stack

ROUTER = "router of experts: left alone unless included"
_LEVELS = 3  # above a layer, where its experts are looked for: `mlp.gate.wg` beside `mlp.experts`


def is_router(model: nn.Module, name: str, outputs: int) -> bool:
    """Whether a layer has as many outputs as there are experts beside it, or beside what it is a part of.

    Experts are modules of one type in a list or a dictionary, or matrices in 3-D parameters of one module.

    Args:
        model: that holds the layer.
        name: of the layer.
        outputs: how many features it gives.
    """
    keys = name.split(".")
    for place in range(len(keys) - 1, max(-1, len(keys) - 1 - _LEVELS), -1):
        beside = model.get_submodule(".".join(keys[:place])).named_children()
        if any(outputs in _counts(child) for key, child in beside if key != keys[place]):
            return True
    return False


def _counts(module: nn.Module) -> Iterator[int]:
    """How many experts a module has, or the modules in it."""
    for one in (module, *module.children()):
        parts = list(one.children())
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and len({type(part) for part in parts}) == 1:
            yield len(parts)
        # Kernels of one axis are no matrices.
        if not isinstance(one, _ConvNd) and not type(one).__module__.startswith("torch."):
            yield from {len(stack) for stack in one._parameters.values() if is_stack(stack)}
