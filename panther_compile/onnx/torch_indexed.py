"""ONNX operators that read or write what indices point to, in torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from panther_compile.onnx.torch_cells import UnknownOperatorError

_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def gathered(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a Gather node."""
    x, index = inputs
    axis = given.get("axis", 0) % x.dim()
    index = torch.where(index < 0, index + x.shape[axis], index)
    found = x.index_select(axis, index.reshape(-1).long())
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def gathered_nd(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a GatherND node."""
    x, index = inputs
    if given.get("batch_dims", 0):
        raise UnknownOperatorError("GatherND with batch_dims is not known here")
    return x[tuple(index.movedim(-1, 0).long())]


def scattered(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a ScatterElements node."""
    x, index, new = inputs
    axis, how = given.get("axis", 0), given.get("reduction", "none")
    index = torch.where(index < 0, index + x.shape[axis], index).long()
    if how == "none":
        return x.scatter(axis, index, new)
    return x.scatter_reduce(axis, index, new, _REDUCED[how])


def scattered_nd(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a ScatterND node."""
    x, index, new = inputs
    how = given.get("reduction", "none")
    if how not in ("none", "add"):
        raise UnknownOperatorError(f"ScatterND that reduces by {how} is not known here")
    return x.index_put(tuple(index.movedim(-1, 0).long()), new, accumulate=how == "add")


def one_hot(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a OneHot node; numbers that are no class are off everywhere."""
    index, depth, (off, on) = inputs
    count, axis = int(depth), given.get("axis", -1)
    classes = torch.arange(count)
    index = torch.where(index < 0, index + count, index)
    return torch.where(index.unsqueeze(-1) == classes, on, off).movedim(-1, axis)
