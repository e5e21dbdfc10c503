"""Taps that only meet padding are cut off, and nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
from small_graphs import Model
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import panther_compile as pc
from panther_compile.passes.trim_kernels import trim_kernels


def noted(forward, x, **modules):
    torch.manual_seed(0)
    graph_module = fx.symbolic_trace(Model(forward, **modules).eval())
    ShapeProp(graph_module).propagate(x)
    return graph_module


def check(graph_module, x, changed):
    wanted = graph_module(x)
    result = trim_kernels(graph_module)
    assert result.changed == changed
    torch.testing.assert_close(result.graph_module(x), wanted)
    return result.graph_module


def test_a_kernel_longer_than_its_input():
    x = torch.randn(2, 3, 8, 1)
    model = noted(lambda m, x: m.conv(F.pad(x, (0, 0, 31, 32))), x, conv=nn.Conv2d(3, 5, (64, 1)))
    trimmed = check(model, x, 1)
    assert (trimmed.conv.kernel_size, trimmed.conv.padding) == ((15, 1), (7, 0))
    assert not any(node.op == "call_function" for node in trimmed.graph.nodes)


@pytest.mark.parametrize("stride", [(1, 1), (3, 2)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 0, 2), (0, 3, 0, 0)])
def test_every_geometry(stride, dilation, pads):
    x = torch.randn(2, 4, 5, 6)
    padding = tuple(half * size for half, size in zip((6, 5), dilation, strict=True))
    conv = nn.Conv2d(4, 6, (13, 11), stride, padding, dilation, groups=2)
    model = noted(lambda m, x: m.conv(F.pad(x, pads)), x, conv=conv)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), [conv.weight])
    used = [gradient.abs().amax((0, 1, other)).nonzero().flatten() for other in (3, 2)]
    wanted = tuple(int(taps[-1] - taps[0]) + 1 for taps in used)
    trimmed = check(model, x, int(wanted != conv.kernel_size))
    assert trimmed.conv.kernel_size == wanted


@pytest.mark.parametrize("case", ["no sizes", "short", "circular", "value", "called twice", "hooked", "read"])
def test_what_is_left_alone(case):
    x = torch.randn(2, 3, 4, 4)
    sizes: dict = {"kernel_size": 3, "padding": 1} if case == "short" else {"kernel_size": 9, "padding": 4}
    if case == "circular":
        sizes |= {"padding_mode": "circular"}
    if case == "value":
        sizes["padding"] = 0
    conv = nn.Conv2d(3, 3, **sizes)
    if case == "hooked":
        conv.register_forward_hook(lambda module, args, out: 2 * out)
    forward = {
        "value": lambda m, x: m.conv(F.pad(x, (4, 4, 4, 4), value=1.0)),
        "called twice": lambda m, x: m.conv(m.conv(x)),
        "read": lambda m, x: m.conv(x) * m.conv.weight.norm(),
    }.get(case, lambda m, x: m.conv(x))
    model = noted(forward, x, conv=conv)
    if case == "no sizes":
        model = fx.symbolic_trace(model)
    check(model, x, 0)


def test_padding_that_others_read_too():
    x = torch.randn(2, 3, 4, 4)

    def forward(m, x):
        padded = F.pad(x, (4, 4, 4, 4))
        return m.conv(padded).sum() + padded.square().sum()

    check(noted(forward, x, conv=nn.Conv2d(3, 3, 9)), x, 1)


def test_before_sketchify():
    x = torch.randn(2, 32, 4, 4)
    model = noted(lambda m, x: m.conv(x), x, conv=nn.Conv2d(32, 32, 9, padding=4))
    trimmed = check(model, x, 1)
    small = pc.sketchify(trimmed, 0.5, min_params=0, allow_slower=True, progress=False)
    assert small.conv.kernel_size == (7, 7)
    assert small(x).shape == (2, 32, 4, 4)
