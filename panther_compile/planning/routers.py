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
    above = [model]
    for key in keys[:-1]:  # a module may hide its parts from attribute access
        above.append(dict(above[-1].named_children())[key])
    for parent, own in list(zip(above, keys, strict=True))[-_LEVELS:]:
        beside = (child for key, child in parent.named_children() if key != own)
        if any(outputs in _counts(child) for child in beside):
            return True
    return False


def expert_counts(model: nn.Module) -> frozenset[int]:
    """How many experts modules of a model may have, which tells of most layers that they are no routers.

    One is not among them: there is no choice to be made.
    """
    return frozenset(count for module in model.modules() for count in _counts(module) if count > 1)


def _counts(module: nn.Module) -> Iterator[int]:
    """How many experts a module has, or the modules in it."""
    for one in (module, *module.children()):
        parts = list(one.children())
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and len({type(part) for part in parts}) == 1:
            yield len(parts)
        # Kernels of one axis are no matrices.
        if not isinstance(one, _ConvNd) and not type(one).__module__.startswith("torch."):
            yield from {len(stack) for stack in one._parameters.values() if is_stack(stack)}
