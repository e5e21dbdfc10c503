"""Routers: linear layers that score experts, whose sketches would send tokens elsewhere."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from panther_compile.layers.matrix_stacks import is_stack

ROUTER = "router of experts: left alone unless included"
_LEVELS = 3  # above a layer, where its experts are looked for: `mlp.gate.wg` beside `mlp.experts`


def is_router(model: nn.Module, name: str, outputs: int, inputs: int) -> bool:
    """Whether a layer has as many outputs as there are experts beside it, or beside what it is a part of.

    Experts are modules of one form in a list or a dictionary, or matrices in 3-D parameters of one module.
    Where they are deep in what is beside the layer, that is not deep itself: the last layer of a head is no
    router of the blocks of a decoder beside it. A parameter of (features, heads, features of a head), as in
    XLNet, holds no experts: it has more matrices than these rows or columns, and the layer reads neither.

    Args:
        model: that holds the layer.
        name: of the layer.
        outputs: how many features it gives.
        inputs: how many it takes.
    """
    keys = name.split(".")
    above = [model]
    for key in keys[:-1]:  # a module may hide its parts from attribute access
        above.append(dict(above[-1].named_children())[key])
    for depth, (parent, own) in enumerate(list(zip(above, keys, strict=True))[: -_LEVELS - 1 : -1], 1):
        beside = [child for key, child in parent.named_children() if key != own]
        if depth < _LEVELS:
            beside += [part for child in beside for part in child.children()]
        if any(outputs in _counts(one, inputs) for one in beside):
            return True
    return False


def expert_counts(model: nn.Module) -> frozenset[int]:
    """How many experts modules of a model may have, which tells of most layers that they are no routers.

    One is not among them: there is no choice to be made.
    """
    return frozenset(count for module in model.modules() for count in _counts(module) if count > 1)


def _counts(module: nn.Module, inputs: int | None = None) -> Iterator[int]:
    """How many experts a module holds itself, that a layer of so many inputs may choose from."""
    parts = list(module.children())
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len({_form(part) for part in parts}) == 1:
        yield len(parts)
    # Kernels of one axis are no matrices.
    if not isinstance(module, _ConvNd) and not type(module).__module__.startswith("torch."):
        stacks = [stack for stack in module._parameters.values() if is_stack(stack)]
        yield from {len(one) for one in stacks if inputs is None or _may_be_experts(one.shape, inputs)}


def _may_be_experts(stack: Sequence[int], inputs: int) -> bool:
    """Whether these are as few as experts are, or read or give what a router beside them reads."""
    count, *matrix = stack
    return count <= max(matrix) or inputs in matrix


def _form(part: nn.Module) -> tuple[object, ...]:
    """What experts have in common: their type, and what they take; single layers give as much too.

    Layers of an MLP differ in that, and so do those that bring maps of several sizes to one.
    """
    held = [one.shape for one in part.parameters() if not isinstance(one, UninitializedTensorMixin)]
    return type(part), *(held if not part._modules else [one[1:] for one in held if len(one) > 1][:1])
