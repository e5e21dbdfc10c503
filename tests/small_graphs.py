"""Graphs of a few nodes, for the tests of the graph passes."""

import torch
from torch import fx, nn

from panther_compile.layers import SketchedLinear
from panther_compile.passes.runner import GraphPass, run_passes
from panther_compile.planning.trace import SketchTracer


class Model(nn.Module):
    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.compute = forward

    def forward(self, x):
        return self.compute(self, x)


def traced(forward, **modules):
    model = Model(forward, **modules)
    return fx.GraphModule(model, SketchTracer().trace(model)).eval()


def apply(one, graph_module, x, count):
    """Run a pass that is exact, and check its count."""
    wanted = graph_module(x.clone())
    result = run_passes(graph_module, [GraphPass(one, exact=True)])
    assert result.changed == count
    torch.testing.assert_close(result.graph_module(x.clone()), wanted)
    return result.graph_module


def three(forms, ranks=(8, 6, 10), bias=True):
    """Layers 32 -> 16 called q, k and v."""
    made = [
        SketchedLinear(32, 16, rank, bias=bias, form=form, start=32 - rank if trailing else 0)
        for rank, (form, trailing) in zip(ranks, forms, strict=True)
    ]
    return dict(zip("qkv", made, strict=True))


LEADING, TRAILING, PAIR = ("pivoted", False), ("pivoted", True), ("pair", False)
