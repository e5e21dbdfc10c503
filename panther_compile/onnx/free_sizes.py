"""Sizes that a caller of `export_onnx` wants free: whether they are so in the graph that torch made.

Where torch cannot leave a size free as `torch.export.Dim` asks, its exporter fixes it, and says nothing.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from panther_compile.errors import ConfigError, OnnxExportError
from panther_compile.models.batches import Call


def asked_free(model: nn.Module, example: Call, shapes: Any) -> list[tuple[Tensor, int]]:
    """The axes of inputs that have to be free; what torch refuses by itself is left to it.

    Args:
        model: to be exported.
        example: its inputs.
        shapes: `dynamic_shapes` of `torch.export.export`.

    Raises:
        ConfigError: an input has no such axis.
    """
    if not isinstance(shapes, Mapping | Sequence) or isinstance(shapes, str):
        return []
    try:
        given = inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments
    except TypeError:  # the model cannot be called so either
        return []
    return list(_free(given if isinstance(shapes, Mapping) else tuple(given.values()), shapes))


def _free(given: Any, shapes: Any) -> Iterator[tuple[Tensor, int]]:
    if isinstance(given, Tensor) and isinstance(shapes, Mapping):
        for axis, size in shapes.items():
            if type(axis) is not int or not -given.dim() <= axis < given.dim():
                raise ConfigError(
                    f"dynamic_shapes names axis {axis!r} of an input of shape {tuple(given.shape)}, wanted "
                    f"an integer below {given.dim()}"
                )
            if _is_free(size):
                yield given, axis
    elif isinstance(given, Tensor) and isinstance(shapes, list | tuple):
        yield from ((given, axis) for axis, size in enumerate(shapes) if _is_free(size))
    elif isinstance(given, Mapping) and isinstance(shapes, Mapping):
        for key in given.keys() & shapes.keys():
            yield from _free(given[key], shapes[key])
    elif isinstance(given, list | tuple) and isinstance(shapes, list | tuple):
        for one, shape in zip(given, shapes, strict=False):
            yield from _free(one, shape)


def _is_free(size: Any) -> bool:
    """Whether it stands for a size that varies; torch may fix one that is left to it."""
    return size is not None and not isinstance(size, int) and size not in (Dim.AUTO, Dim.STATIC)


def check_free(
    asked: Sequence[tuple[Tensor, int]], tensors: Sequence[Tensor], inputs: Sequence[ir.Value]
) -> None:
    """Look whether sizes are free in a graph.

    Args:
        asked: see `asked_free`.
        tensors: the example inputs, in order.
        inputs: of the graph, in the same order.

    Raises:
        OnnxExportError: one is fixed.
    """
    place = {id(tensor): number for number, tensor in enumerate(tensors)}
    for tensor, axis in asked:
        one = inputs[place[id(tensor)]]
        if one.shape is not None and isinstance(size := one.shape[axis], int):
            cause = "the model takes no other size, or its code makes a Python number of it"
            if size == 1:  # torch reads what broadcasts for one that always does
                cause += ", or torch takes the 1 for one that always broadcasts: give an example of 2 there"
            raise OnnxExportError(
                f"dynamic_shapes wants axis {axis} of {one.name!r} free, and torch has fixed it at {size}: "
                f"{cause}"
            )


def declared_bounds(shapes: Any) -> frozenset[int]:
    """The smallest and largest sizes that a caller gives to free ones.

    Args:
        shapes: see `asked_free`.
    """
    leaves = pytree.tree_leaves(shapes, is_leaf=lambda one: isinstance(one, Dim))
    return frozenset(
        bound
        for one in leaves
        for bound in (getattr(one, "min", None), getattr(one, "max", None))
        if isinstance(bound, int) and not isinstance(bound, bool)
    )
