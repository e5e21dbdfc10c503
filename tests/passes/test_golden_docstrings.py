"""The graphs before and after, in the docstring of each graph pass, are what the pass does."""

import pytest
import torch
import torch.nn.functional as F
from drawn_graphs import drawn, shown
from small_graphs import Model
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from panther_compile.layers import SketchedLinear
from panther_compile.passes.drop_dead_code import drop_dead_code
from panther_compile.passes.fold_batchnorm import fold_batchnorm
from panther_compile.passes.fuse_epilogue import fuse_epilogue
from panther_compile.passes.fuse_gating import fuse_gating
from panther_compile.passes.fuse_residual import fuse_residual
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.passes.lift_parameters import lift_parameters
from panther_compile.passes.merge_shared_inputs import merge_shared_inputs
from panther_compile.passes.runner import GraphPass, run_passes
from panther_compile.passes.trim_kernels import trim_kernels
from panther_compile.planning.trace import SketchTracer


def traced(model):
    return fx.GraphModule(model, SketchTracer().trace(model)).eval()


def functional(model, x):
    return F.linear(x, model.fc.weight, model.fc.bias)


def sketched(form):
    return SketchedLinear(16, 12, 4, form=form)


CASES = {
    "lift_functional": (lift_functional, Model(functional, fc=nn.Linear(6, 4))),
    "fold_batchnorm": (
        fold_batchnorm,
        Model(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)),
    ),
    "trim_kernels": (
        trim_kernels,
        Model(lambda m, x: m.conv(F.pad(x, (0, 0, 31, 32))), conv=nn.Conv2d(3, 4, (64, 1))),
    ),
    "merge_shared_inputs": (
        lambda graph: merge_shared_inputs(graph, device_type="cpu"),
        Model(lambda m, x: m.q(x) + m.k(x), q=sketched("pair"), k=sketched("pair")),
    ),
    "fuse_epilogue": (
        fuse_epilogue,
        Model(lambda m, x: F.gelu(m.fc(x)), fc=sketched("pivoted")),
    ),
    "fuse_gating": (
        fuse_gating,
        Model(lambda m, x: F.silu(m.gate(x)) * m.up(x), gate=sketched("pivoted"), up=sketched("pair")),
    ),
    "fuse_residual": (
        fuse_residual,
        Model(lambda m, x: x + m.fc(x), fc=SketchedLinear(16, 16, 4, form="pivoted")),
    ),
    "drop_dead_code": (
        drop_dead_code,
        Model(lambda m, x: torch.relu((m.fc(x), m.spare(x))[0]), fc=nn.Linear(6, 4), spare=nn.Linear(6, 4)),
    ),
}
SHAPES = {"fold_batchnorm": (2, 3, 8, 8), "trim_kernels": (2, 3, 8, 1)} | dict.fromkeys(
    ("merge_shared_inputs", "fuse_epilogue", "fuse_gating", "fuse_residual"), (2, 5, 16)
)
# What has to run first.
BEFORE = {"fuse_gating": fuse_epilogue}


@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("name", CASES)
def test_docstring(name):
    one, model = CASES[name]
    graph_module = traced(model)
    x = torch.randn(SHAPES.get(name, (2, 6)))
    wanted = graph_module(x)
    ShapeProp(graph_module).propagate(x)
    if name in BEFORE:
        graph_module = run_passes(graph_module, [GraphPass(BEFORE[name], exact=True)]).graph_module
    before = shown(graph_module)
    assert set(drawn(name, "Before")) <= set(before), before
    result = run_passes(graph_module, [GraphPass(one, exact=True)])
    assert result.changed
    after = shown(result.graph_module)
    assert set(drawn(name, "After")) <= set(after), after
    assert not (set(drawn(name, "Before")) - set(drawn(name, "After"))) & set(after)
    torch.testing.assert_close(result.graph_module(x), wanted)


def test_docstring_of_lift_parameters():
    found = []

    def backend(graph_module, inputs):
        found.append((shown(graph_module), lift_parameters(graph_module, inputs)))
        return graph_module.forward

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x):
            return self.fc(x)

    torch._dynamo.reset()
    model, x = Owner().eval(), torch.randn(2, 6)
    with torch.no_grad():
        wanted = torch.compile(model, backend=backend)(x)
        ((before, result),) = found
        assert set(drawn("lift_parameters", "Before")) <= set(before), before
        assert set(drawn("lift_parameters", "After")) <= set(shown(result.graph_module))
        assert result.changed == 2
        assert torch.equal(result.graph_module(x)[0], wanted)
    assert result.graph_module.fc.weight is model.fc.weight
    torch._dynamo.reset()
