"""Taps of a kernel that only ever meet padding are cut off; exact for inputs of the sizes that are noted.

Before:
    %pad : call_function[target=torch.nn.functional.pad](args = (%x, (0, 0, 31, 32)),
            kwargs = {mode: constant, value: None})
    %conv : call_module[target=conv](args = (%pad,))
After:
    %conv : call_module[target=conv](args = (%x,))

Where a kernel is longer than what it slides over, as the 64 taps of CREPE's last layer (Kim et al. 2018) are
over 8 samples, some taps are multiplied by zeros at every position. Without them the layer stores fewer
numbers, and a sketch of the same size keeps more of what counts. Padding that is the same on both sides
becomes the layer's own. The convolution must be a plain one that pads with zeros, called once. Dynamo,
`torch.export` and `ShapeProp` note sizes; where there are no notes, or sizes vary, all stays.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.passes.convolution_calls import own_convolution
from panther_compile.passes.runner import PassResult
from panther_compile.passes.sketched_calls import layout_of

_PADS: tuple[Any, ...] = (F.pad, torch._C._nn.pad)  # the second is what Dynamo records


class _Axis(NamedTuple):
    """What is left of an axis: its first tap, their number, and the padding before and after."""

    first: int
    taps: int
    before: int
    after: int


def trim_kernels(graph_module: fx.GraphModule) -> PassResult:
    """Rewrite the graph in place; counts the kernels that were cut. A copy of each is made."""
    calls = Counter(node.target for node in graph_module.graph.nodes if node.op == "call_module")
    count = 0
    for node in list(graph_module.graph.nodes):
        conv = _plain_convolution(graph_module, node, calls)
        if conv is None:
            continue
        source, pads = _padding(node.args[0], conv)
        sizes = _sizes(source)
        if sizes is None:
            continue
        axes = [_trimmed(conv, axis, sizes[axis], pads[axis]) for axis in (0, 1)]
        if all(one.taps == kernel for one, kernel in zip(axes, conv.kernel_size, strict=True)):
            continue
        graph_module.set_submodule(str(node.target), _cut(conv, axes))
        _rewire(graph_module, node, source, axes)
        count += 1
    if count:
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    return PassResult(graph_module, count)


def _plain_convolution(graph_module: fx.GraphModule, node: fx.Node, calls: Counter[Any]) -> nn.Conv2d | None:
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    conv = own_convolution(graph_module, node, calls)
    if conv is None or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return None
    return conv


def _padding(given: fx.Node, conv: nn.Conv2d) -> tuple[fx.Node, list[tuple[int, int]]]:
    """What is padded with zeros for a convolution, and how far, along height and width."""
    assert not isinstance(conv.padding, str)
    own = [(size, size) for size in conv.padding]
    if given.op != "call_function" or given.target not in _PADS:
        return given, own
    names = ("input", "pad", "mode", "value")
    call = dict(zip(names, given.args, strict=False)) | given.kwargs
    pad, mode, value = call.get("pad"), call.get("mode", "constant"), call.get("value")
    if mode != "constant" or value not in (None, 0) or not isinstance(pad, tuple | list):
        return given, own
    if len(pad) not in (2, 4) or not all(isinstance(size, int) and size >= 0 for size in pad):
        return given, own
    source = call["input"]
    assert isinstance(source, fx.Node)
    left, right, *others = (int(size) for size in pad)  # type: ignore[call-overload]
    top, bottom = others or (0, 0)
    return source, [(own[0][0] + top, own[0][1] + bottom), (own[1][0] + left, own[1][1] + right)]


def _sizes(node: fx.Node) -> tuple[int, int] | None:
    """Height and width, where they are noted and do not vary."""
    layout = layout_of(node)
    if layout is None or len(layout[1]) < 3 or not all(size.isdigit() for size in layout[1][-2:]):
        return None
    return int(layout[1][-2]), int(layout[1][-1])


def _trimmed(conv: nn.Conv2d, axis: int, size: int, pads: tuple[int, int]) -> _Axis:
    """Taps between the first and the last that meet more than padding."""
    taps, stride, dilation = conv.kernel_size[axis], conv.stride[axis], conv.dilation[axis]
    before, after = pads
    positions = (size + before + after - dilation * (taps - 1) - 1) // stride + 1
    live = [tap for tap in range(taps) if _meets_input(tap * dilation - before, stride, positions, size)]
    if not live:
        return _Axis(0, taps, before, after)
    first, left = live[0], live[-1] - live[0] + 1
    before -= first * dilation
    return _Axis(first, left, before, (positions - 1) * stride + dilation * (left - 1) + 1 - size - before)


def _meets_input(start: int, stride: int, positions: int, size: int) -> bool:
    """Whether one of `positions` places from `start` on, a stride apart, lies within the input."""
    first = max(0, -(start // stride))  # the first place at 0 or behind it
    return first < positions and start + first * stride < size


@torch.no_grad()
def _cut(conv: nn.Conv2d, axes: list[_Axis]) -> nn.Conv2d:
    rows, columns = (slice(one.first, one.first + one.taps) for one in axes)
    cut = {"kernel_size": (axes[0].taps, axes[1].taps), "padding": _own_padding(axes)}
    new = nn.Conv2d(**SketchedConv2d.geometry(conv) | cut, device="meta")
    weight = conv.weight.detach()[:, :, rows, columns].clone(memory_format=torch.contiguous_format)
    new.weight = nn.Parameter(weight, conv.weight.requires_grad)
    new.bias = conv.bias
    return new.train(conv.training)


def _own_padding(axes: list[_Axis]) -> tuple[int, int]:
    """What a layer can do itself: as much before as after, on both axes; else nothing."""
    if all(one.before == one.after >= 0 for one in axes):
        return axes[0].before, axes[1].before
    return 0, 0


def _rewire(graph_module: fx.GraphModule, node: fx.Node, source: fx.Node, axes: list[_Axis]) -> None:
    """Give the convolution its source, padded, or cut where the padding is negative."""
    height, width = axes
    pads = (width.before, width.after, height.before, height.after)
    if _own_padding(axes) == (0, 0) and any(pads):
        with graph_module.graph.inserting_before(node):
            source = graph_module.graph.call_function(F.pad, (source, pads))
    node.args = (source,)
