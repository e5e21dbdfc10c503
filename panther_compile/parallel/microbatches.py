"""A batch of one replica is divided into microbatches; the last may be short.

    rows of the batch      0 1 | 2 3 | 4 5 | 6 7        four microbatches of two, as the example had
    the last of an epoch   0 1 | 2 3 | 4 . | . .        graphs: rows are repeated to fill it, no loss is taken
                           0 | 1 | 2 | 3 4              the user's own module: it takes any number of rows
                           0 1                          as many as the example had: one microbatch

Each microbatch has a share of the loss, so that the sum is that of one process over all rows, or all tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from panther_compile.errors import BatchError
from panther_compile.partition import TensorSpec

# A dtype -> those whose every number it has.
_HOLDS = {
    torch.int64: {torch.uint8, torch.int8, torch.int16, torch.int32},
    torch.int32: {torch.uint8, torch.int8, torch.int16},
    torch.float64: {torch.float16, torch.bfloat16, torch.float32},
    torch.float32: {torch.float16, torch.bfloat16},
}


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a replica.

    Attributes:
        values: in the order of the graph's inputs.
        steps: for each, entries of its first dimension that make a row; 0 where every microbatch gets all.
        sizes: rows of each microbatch that count.
        width: rows that a microbatch is filled up to; 0 where the module takes any number.
    """

    values: tuple[Tensor, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    width: int

    @property
    def rows(self) -> int:
        """Rows that count."""
        return sum(self.sizes)

    @property
    def is_filled_up(self) -> bool:
        """Whether some microbatch has rows that do not count."""
        return bool(self.width) and self.rows < self.width * len(self.sizes)

    def microbatches(self) -> Iterator[list[Tensor]]:
        """Inputs of each microbatch, contiguous."""
        start = 0
        for size in self.sizes:
            yield [
                self._take(value, step, start, size) if step else value
                for value, step in zip(self.values, self.steps, strict=True)
            ]
            start += size

    def joined(self) -> list[Tensor]:
        """Each input with the rows of all microbatches one after the other."""
        if all(self.steps) and not self.is_filled_up:
            return [value.contiguous() for value in self.values]
        return [torch.cat(column) for column in zip(*self.microbatches(), strict=True)]

    def _take(self, value: Tensor, step: int, start: int, size: int) -> Tensor:
        first, last = start * step, (start + max(size, self.width)) * step
        if last <= value.shape[0]:
            return value[first:last].contiguous()
        # Rows of the batch fill it up: the model knows what to do with their values.
        return value[torch.arange(first, last, device=value.device) % value.shape[0]]


@dataclass(frozen=True, slots=True)
class Share:
    """What the loss of one microbatch is taken of.

    Attributes:
        target: of the rows that count.
        rows: that count; None for all.
        weight: factor of the loss.
    """

    target: Any
    rows: int | None
    weight: float | Tensor


def read_batch(
    values: Sequence[Tensor],
    specs: Sequence[TensorSpec],
    count: int,
    *,
    any_shape: bool = False,
    any_dtype: bool = True,
) -> Batch:
    """The inputs of the first stage.

    A tensor of the example's own shape beside others with more rows is no part of the batch (a table of
    positions, a causal mask): every microbatch gets it.

    Args:
        values: as the model is called, (count * rows, ...) each, or fewer rows.
        specs: of one microbatch, (rows, ...) each.
        count: of microbatches.
        any_shape: whether what runs takes other shapes than the example's, and any number of rows.
        any_dtype: whether it takes other dtypes; else what the example's dtype can hold is made of that.

    Raises:
        BatchError: a batch that is too large, of other shapes or dtypes, or none at all.
    """
    if not any_dtype:
        values = [_as_planned(value, spec) for value, spec in zip(values, specs, strict=True)]
    is_own = [tuple(value.shape) == spec.shape for value, spec in zip(values, specs, strict=True)]
    if count > 1:
        for value, spec in zip(values, specs, strict=True):
            if not value.ndim and not spec.shape:
                raise BatchError(
                    f"{spec.name} is a number, not a batch: {count} microbatches cannot share it"
                )
    if count == 1 or all(is_own):
        # One microbatch: what has as many rows as the first input is the batch.
        is_own = [
            own and spec.shape[:1] != specs[0].shape[:1] for own, spec in zip(is_own, specs, strict=True)
        ]
    held = [spec.shape[0] for spec, own in zip(specs, is_own, strict=True) if not own and spec.shape]
    width = gcd(*held)
    steps, found = [], set()
    for value, spec, own in zip(values, specs, is_own, strict=True):
        if own:
            steps.append(0)
            continue
        shape, wanted = tuple(value.shape), spec.shape
        step = wanted[0] // width if wanted else 0
        fits = len(shape) == len(wanted) > 0 and shape[0] > 0 and shape[0] % step == 0
        if not fits or (not any_shape and (shape[1:] != wanted[1:] or shape[0] > count * wanted[0])):
            raise BatchError(_explain(spec.name, shape, wanted, count))
        steps.append(step)
        found.add(shape[0] // step)
    if len(found) > 1:
        counts = ", ".join(
            f"{spec.name} {tuple(value.shape)}" for value, spec in zip(values, specs, strict=True)
        )
        raise BatchError(f"the inputs have different numbers of rows: {counts}")
    if not found:
        return Batch(tuple(values), tuple(steps), (0,) * count, 0)
    rows = found.pop()
    if any_shape:
        # With as many rows as the example's, nobody can tell a table of its shape from rows: left whole.
        pieces = 1 if rows == width and len(values) > 1 else min(count, rows)
        sizes = tuple(rows * (place + 1) // pieces - rows * place // pieces for place in range(pieces))
        return Batch(tuple(values), tuple(steps), sizes, 0)
    sizes = tuple(min(width, max(0, rows - place * width)) for place in range(count))
    return Batch(tuple(values), tuple(steps), sizes, width)


def _as_planned(value: Tensor, spec: TensorSpec) -> Tensor:
    """The same numbers in the example's dtype, which is what other stages wait for."""
    wanted = spec.torch_dtype
    if value.dtype is not wanted and value.dtype not in _HOLDS.get(wanted, ()):
        given = str(value.dtype).removeprefix("torch.")
        raise BatchError(f"{spec.name} is {given}, and the partition was made for {spec.dtype}: convert it")
    return value.to(wanted)


def _explain(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], count: int) -> str:
    if wanted and shape[1:] == wanted[1:]:
        return (
            f"{name} has a batch of {shape[0]}; the partition was made for {count} microbatches of "
            f"{wanted[0]}, {count * wanted[0]} in all, or fewer for the last batch"
        )
    return (
        f"{name} has the shape {shape}; the partition was made for {count} microbatches of the shape {wanted}"
    )


def divide_target(tree: Any, batch: Batch) -> list[Any]:
    """A target of any structure, its tensors divided along their first dimension.

    Args:
        tree: tensors with a multiple of the batch's rows, and other values, which each microbatch gets.
        batch: that the target belongs to.

    Raises:
        BatchError: a tensor cannot be divided as the batch is.
    """
    leaves, spec = pytree.tree_flatten(tree)
    parts: list[list[Any]] = [[] for _ in batch.sizes]
    rows, count = batch.rows, len(batch.sizes)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            chunks: Sequence[Any] = [leaf] * count
        elif leaf.ndim and rows and leaf.shape[0] % rows == 0:
            chunks = leaf.split([size * (leaf.shape[0] // rows) for size in batch.sizes])
        elif (
            leaf.ndim and not batch.is_filled_up and leaf.shape[0] % count == 0 and len(set(batch.sizes)) == 1
        ):
            chunks = leaf.chunk(count)
        else:
            raise BatchError(
                f"the target has the shape {tuple(leaf.shape)}; its first dimension must be divisible by "
                f"the {rows or count} {'rows' if rows else 'microbatches'} of the batch"
            )
        for part, chunk in zip(parts, chunks, strict=True):
            part.append(chunk)
    return [pytree.tree_unflatten(part, spec) for part in parts]


def take_rows(outputs: Sequence[Tensor], rows: int | None, width: int) -> list[Tensor]:
    """The rows of outputs that count.

    Args:
        outputs: of one microbatch; those whose first dimension is no multiple of its rows are left whole.
        rows: that count; None for all.
        width: rows of the microbatch.
    """
    if rows is None:
        return list(outputs)
    return [
        tensor[: rows * (tensor.shape[0] // width)]
        if tensor.ndim and tensor.shape[0] % width == 0
        else tensor
        for tensor in outputs
    ]


def merge(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Outputs of all microbatches, one after the other along the first dimension.

    Args:
        parts: for each microbatch its tensors, (rows, ...) each; numbers, of no dimension, are averaged.
    """
    return [
        torch.cat(column) if column[0].ndim else torch.stack(column).float().mean().to(column[0].dtype)
        for column in map(list, zip(*parts, strict=True))
    ]
