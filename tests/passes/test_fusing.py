"""Activation, gate and residual become part of a sketched layer, where a kernel serves it."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from small_graphs import LEADING, PAIR, TRAILING, apply, three, traced
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

from panther_compile.factorization.cost import CUDA
from panther_compile.layers import SketchedLinear
from panther_compile.passes.fuse_epilogue import fuse_epilogue
from panther_compile.passes.fuse_gating import fuse_gating
from panther_compile.passes.fuse_residual import fuse_residual
from panther_compile.passes.runner import GraphPass, run_passes

pytestmark = pytest.mark.usefixtures("kernels_everywhere")

# ------------------------------------------------------------------------------------- fuse_epilogue

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh gelu": functools.partial(F.gelu, approximate="tanh"),
    "GELU": nn.GELU(),
    "tanh GELU": nn.GELU("tanh"),
    "ReLU": nn.ReLU(),
    "SiLU": nn.SiLU(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", [LEADING, TRAILING, PAIR])
@pytest.mark.parametrize("bias", [False, True])
def test_fuse_epilogue(name, form, bias):
    activation = ACTIVATIONS[name]
    modules = {"act": activation} if isinstance(activation, nn.Module) else {}
    fc = three([form] * 3, bias=bias)["q"]
    graph_module = traced(lambda m, x: (m.act if modules else activation)(m.fc(x)), fc=fc, **modules)
    fused = apply(fuse_epilogue, graph_module, torch.randn(2, 3, 32), 1)
    assert "call_module" not in [node.op for node in fused.graph.nodes]


@pytest.mark.parametrize("case", ["other function", "read twice", "hooked", "dense"])
def test_fuse_epilogue_leaves_alone(case):
    def forward(m, x):
        y = m.fc(x)
        z = torch.tanh(y) if case == "other function" else F.relu(y)
        return z + y if case == "read twice" else z

    fc = nn.Linear(32, 16) if case == "dense" else SketchedLinear(32, 16, 4)
    if case == "hooked":
        fc.down.register_forward_hook(lambda module, args, out: 2 * out)
    apply(fuse_epilogue, traced(forward, fc=fc), torch.randn(3, 32), 0)


def test_nothing_is_fused_where_no_kernel_serves(monkeypatch):
    asked = []

    def fuses(layer, rows, dtype):
        asked.append((layer.down.shape, layer.start, rows, dtype))
        return False

    monkeypatch.setattr("panther_compile.passes.sketched_calls.fuses", fuses)
    graph_module = traced(lambda m, x: F.relu(m.fc(x)), fc=three([TRAILING] * 3)["q"])
    apply(fuse_epilogue, graph_module, torch.randn(3, 32), 0)
    ShapeProp(graph_module).propagate(torch.randn(2, 3, 32))
    apply(fuse_epilogue, graph_module, torch.randn(3, 32), 0)
    assert asked == [((8, 24), 24, rows, torch.float32) for rows in (CUDA.positions, 6)]


# ------------------------------------------------------------------------ fuse_gating, fuse_residual

ALL_THREE = (fuse_epilogue, fuse_gating, fuse_residual)


def fused(forward, count, x=None, **modules):
    """The graph after activation, gate and residual were fused, and how many changes that was."""
    x = torch.randn(2, 3, 32) if x is None else x
    graph_module = traced(forward, **modules)
    wanted = graph_module(x.clone())
    ShapeProp(graph_module).propagate(x.clone())
    result = run_passes(graph_module, [GraphPass(one, exact=True) for one in ALL_THREE])
    assert result.changed == count, result.graph_module.graph
    torch.testing.assert_close(result.graph_module(x.clone()), wanted)
    return result.graph_module


def layer(width=32, form=LEADING):
    name, trailing = form
    return SketchedLinear(32, width, 6, form=name, start=26 if trailing else 0)


def calls(graph_module):
    return [node.op for node in graph_module.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", [LEADING, TRAILING, PAIR])
def test_fuse_gated_mlp_with_residual(name, form):
    activation = ACTIVATIONS[name]
    modules = {"act": activation} if isinstance(activation, nn.Module) else {}

    def forward(m, x):
        gate = (m.act if modules else activation)(m.gate(x))
        return x + m.down(gate * m.up(x))

    made = {name: layer(form=form) for name in ("gate", "up", "down")}
    graph_module = fused(forward, 3, **made, **modules)
    assert calls(graph_module) == ["call_module", "call_function", "call_function"]


@pytest.mark.parametrize("product", [operator.mul, torch.mul])
@pytest.mark.parametrize("swapped", [False, True])
def test_fuse_gating_on_either_side(swapped, product):
    def forward(m, x):
        operands = (F.silu(m.gate(x)), m.up(x))
        return product(*reversed(operands)) if swapped else product(*operands)

    (operation,) = [
        node for node in fused(forward, 2, gate=layer(), up=layer()).graph.nodes if node.op == "call_function"
    ]
    assert operation.kwargs["activation"] == "silu"


def test_fuse_gating_without_an_activation():
    fused(lambda m, x: torch.sigmoid(x) * m.fc(x), 1, fc=layer())


def test_fuse_residual_takes_one_of_two_layers():
    graph_module = fused(lambda m, x: m.a(x) + m.b(x), 1, a=layer(), b=layer(form=PAIR))
    assert calls(graph_module) == ["call_module", "call_function"]


def test_fuse_residuals_in_a_row():
    graph_module = fused(lambda m, x: x + m.a(x) + m.b(x), 2, a=layer(), b=layer())
    assert calls(graph_module) == ["call_function", "call_function"]


@pytest.mark.parametrize(
    "case", ["broadcast", "grows", "alpha", "read twice", "itself", "written between", "hooked", "wide"]
)
def test_fuse_residual_leaves_alone(case):
    def forward(m, x):
        y = m.fc(x)
        if case == "broadcast":
            return y + x[:1]
        if case == "grows":
            return m.fc(x[:1]) + x
        if case == "alpha":
            return torch.add(x, y, alpha=2)
        if case == "read twice":
            return (x + y) * y.exp()
        if case == "itself":
            return y + y
        if case == "written between":
            kept = x.clone()
            x.mul_(2.0)
            return kept + y
        return (x.double() if case == "wide" else x) + y

    fc = layer()
    if case == "hooked":
        fc.register_forward_hook(lambda module, args, out: 2 * out)
    fused(forward, 0, fc=fc)


def test_fuse_residual_leaves_alone_what_is_not_known():
    apply(ALL_THREE[2], traced(lambda m, x: x + m.fc(x), fc=layer()), torch.randn(3, 32), 0)


def test_fuse_only_on_cuda(monkeypatch):
    monkeypatch.undo()  # as it is: there is no kernel here
    graph_module = traced(lambda m, x: x + m.fc(x) * m.fc(x), fc=layer())
    ShapeProp(graph_module).propagate(torch.randn(3, 32))
    assert [one(graph_module).changed for one in ALL_THREE] == [0, 0, 0]
