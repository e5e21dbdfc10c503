"""A batch of one replica is divided into the microbatches that the partition was made for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from panther_compile.errors import BatchError
from panther_compile.partition import TensorSpec


def check_batch(values: Sequence[Tensor], specs: Sequence[TensorSpec], count: int) -> list[Tensor]:
    """The inputs of the first stage, each with the rows of all microbatches, contiguous.

    A tensor of the example's own shape is no part of the batch (a table of positions, a causal mask): every
    microbatch gets it.

    Args:
        values: as the model is called, (count * rows, ...) each.
        specs: of one microbatch, (rows, ...) each.
        count: of microbatches.

    Raises:
        BatchError: a batch of another size, or none at all.
    """
    batch, divided = [], False
    for value, spec in zip(values, specs, strict=True):
        shape = tuple(value.shape)
        if shape == spec.shape and count > 1:
            if not shape:
                raise BatchError(
                    f"{spec.name} is a number, not a batch: {count} microbatches cannot share it"
                )
            batch.append(torch.cat([value] * count))
        elif shape[:1] == tuple(rows * count for rows in spec.shape[:1]) and shape[1:] == spec.shape[1:]:
            batch.append(value.contiguous())
            divided = True
        else:
            raise BatchError(_explain(spec.name, shape, spec.shape, count))
    if values and not divided:
        raise BatchError(_explain(specs[0].name, tuple(values[0].shape), specs[0].shape, count))
    return batch


def _explain(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], count: int) -> str:
    rows = shape[0] if shape else 0
    if wanted and shape[1:] == wanted[1:]:
        remainder = f", and {rows} is not divisible by {count}" if rows % count else ""
        return (
            f"{name} has a batch of {rows}; the partition was made for {count} microbatches of {wanted[0]}, "
            f"{count * wanted[0]} in all{remainder}"
        )
    return (
        f"{name} has the shape {shape}; the partition was made for {count} microbatches of the shape {wanted}"
    )


def divide(tree: Any, count: int) -> list[Any]:
    """A target of any structure, its tensors divided along their first dimension.

    Args:
        tree: tensors of (count * rows, ...), and other values, which each microbatch gets.
        count: of microbatches.
    """
    leaves, spec = pytree.tree_flatten(tree)
    parts: list[list[Any]] = [[] for _ in range(count)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not leaf.ndim or leaf.shape[0] % count:
                raise BatchError(
                    f"the target has the shape {tuple(leaf.shape)}; its first dimension must be divisible by "
                    f"the {count} microbatches"
                )
            chunks: Sequence[Any] = leaf.chunk(count)
        else:
            chunks = [leaf] * count
        for part, chunk in zip(parts, chunks, strict=True):
            part.append(chunk)
    return [pytree.tree_unflatten(part, spec) for part in parts]


def merge(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Outputs of all microbatches, one after the other along the first dimension.

    Args:
        parts: for each microbatch its tensors, (rows, ...) each; numbers, of no dimension, are averaged.
    """
    return [
        torch.cat(column) if column[0].ndim else torch.stack(column).float().mean().to(column[0].dtype)
        for column in map(list, zip(*parts, strict=True))
    ]
