"""Outputs that hold boxes and chances side by side, as detectors of the YOLO family give them.

    Concat([boxes in pixels (N, 4, A), Sigmoid(classes) (N, C, A)], axis=1)

Pixels are hundreds, chances below 1: of the error of the whole, what becomes of chances is next to nothing,
and yet they are what says where anything is seen. So such an output counts as several, one a kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from torch import Tensor

from panther_compile.onnx.patterns import is_onnx

Array = TypeVar("Array", np.ndarray, Tensor)
_CHANCES = ("Sigmoid", "HardSigmoid", "Softmax")
_SAME_NUMBERS = ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_SELECTED = ("Slice", "Split", "Gather")
_OF_ALL = ("Concat", "Mul", "Max")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an output along an axis, whose entries are of one kind.

    Attributes:
        axis: which.
        start: the first entry.
        stop: the one behind the last.
        is_chance: whether they are between 0 and 1.
    """

    axis: int
    start: int
    stop: int
    is_chance: bool

    def name(self, output: str) -> str:
        """What the part is called, as NumPy would take it."""
        return f"{output}[{':, ' * self.axis}{self.start}:{self.stop}]"

    def of(self, whole: Array) -> Array:
        """The entries."""
        return whole[(*[slice(None)] * self.axis, slice(self.start, self.stop))]


Parts = Mapping[str, Sequence[Part]]
"""By the names of those outputs that have several."""


def parts_of(model: ir.Model) -> Parts:
    """The parts of a model's outputs; those of one kind, or of sizes that no file tells, are left out."""
    if not any(map(_is_joined, model.graph.outputs)):
        return {}
    outputs = ShapeInferencePass()(model.clone()).model.graph.outputs
    return {str(one.name): found for one in outputs if (found := _parts(one))}


def in_parts(results: Mapping[str, Array], parts: Parts) -> dict[str, Array]:
    """Results by name, those that have parts as these."""
    found: dict[str, Array] = {}
    for name, whole in results.items():
        found |= {one.name(name): one.of(whole) for one in parts[name]} if name in parts else {name: whole}
    return found


def _is_joined(value: ir.Value | None) -> bool:
    """Whether a Concat makes a value, in whatever shape."""
    node = None if value is None else value.producer()
    if node is None or is_onnx(node, "Concat"):
        return node is not None
    return is_onnx(node, *_SAME_NUMBERS) and _is_joined(node.inputs[0])


def _parts(output: ir.Value) -> list[Part]:
    for axis in range(1, 0 if output.shape is None else len(output.shape)):
        stretches = _stretches(output, axis)
        if stretches is None or len({is_chance for _, is_chance in stretches}) < 2:
            continue
        found, start = list[Part](), 0
        for is_chance, group in groupby(stretches, lambda one: one[1]):
            stop = start + sum(size for size, _ in group)
            found.append(Part(axis, start, stop, is_chance))
            start = stop
        return found
    return []


def _stretches(value: ir.Value | None, axis: int) -> list[tuple[int, bool]] | None:
    """How many entries along an axis, one after the other, are chances or not; None if that is not known."""
    if value is None:
        return None
    node = value.producer()
    if node is not None and is_onnx(node, "Concat") and value.shape is not None:
        joined = [_stretches(one, axis) for one in node.inputs]
        first = joined[0]
        if first is None or None in joined:
            return None
        if node.attributes["axis"].as_int() % len(value.shape) == axis:
            return [stretch for one in joined if one is not None for stretch in one]
        return first if all(one == first for one in joined) else None
    if node is not None and is_onnx(node, "Transpose") and "perm" in node.attributes:
        return _stretches(node.inputs[0], node.attributes["perm"].as_ints()[axis])
    if node is not None and is_onnx(node, "Identity", "Cast"):
        return _stretches(node.inputs[0], axis)
    if node is not None and is_onnx(node, "Reshape") and (before := _axis_before(node, axis)) is not None:
        return _stretches(node.inputs[0], before)
    size = _sizes(value).get(axis)
    return None if size is None else [(size, _is_chance(value))]


def _axis_before(node: ir.Node, axis: int) -> int | None:
    """The axis of what a Reshape reads that becomes one of its result: the second stays, or the last does."""
    before, after = node.inputs[0], node.outputs[0]
    if before is None or before.shape is None or after.shape is None:
        return None
    last = len(before.shape) - 1
    was = 1 if axis == 1 else last if axis == len(after.shape) - 1 else None
    size = _sizes(after).get(axis)
    return was if was is not None and size is not None and _sizes(before).get(was) == size else None


def _sizes(value: ir.Value) -> dict[int, int]:
    """The sizes that are known, by axis."""
    sizes = () if value.shape is None else value.shape
    return {axis: size for axis, size in enumerate(sizes) if isinstance(size, int)}


def _is_chance(value: ir.Value | None) -> bool:
    """Whether all entries are between 0 and 1, as those of a Sigmoid are."""
    node = None if value is None else value.producer()
    if node is None or is_onnx(node, *_CHANCES):
        return node is not None
    if is_onnx(node, *_OF_ALL):
        return all(map(_is_chance, node.inputs))
    return is_onnx(node, *_SAME_NUMBERS, *_SELECTED) and _is_chance(node.inputs[0])
