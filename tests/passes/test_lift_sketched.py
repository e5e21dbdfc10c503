"""Layers that Dynamo took apart are put together again, and only those."""

import pytest
import torch
from drawn_graphs import drawn, shown
from torch import nn
from torch.nn.utils import parametrize

from panther_compile.layers import SketchedConv1D, SketchedLinear
from panther_compile.passes.default import CLEAN_UP
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.passes.lift_parameters import lift_parameters
from panther_compile.passes.lift_sketched import lift_sketched
from panther_compile.passes.runner import GraphPass, run_passes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Owner(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class One(nn.Module):
    def __init__(self, fc):
        super().__init__()
        self.fc = fc

    def forward(self, x):
        return self.fc(x)


def graphs_of(model, *inputs, dynamic=False):
    """Each graph that Dynamo makes for the inputs: normalized but for the pass, its result, the count."""
    found = []

    def backend(graph_module, values):
        lift = GraphPass(lambda graph: lift_parameters(graph, values), exact=True)
        normal = run_passes(graph_module, [lift, GraphPass(lift_functional, exact=True)]).graph_module
        before = shown(normal)
        result = lift_sketched(normal)
        result.graph_module.recompile()
        clean = run_passes(result.graph_module, CLEAN_UP).graph_module
        kept = [node.target for node in clean.graph.nodes if node.op == "placeholder"]
        names = [node.target for node in graph_module.graph.nodes if node.op == "placeholder"]
        found.append((before, clean, result.changed))
        return lambda *args: clean(*(value for name, value in zip(names, args, strict=True) if name in kept))

    compiled = torch.compile(model.eval(), backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(compiled(x), model(x))
    return found


def one_graph(model, *inputs, dynamic=False):
    (graph,) = graphs_of(model, *inputs, dynamic=dynamic)
    return graph


def pivoted(inputs=16, outputs=12, rank=4, start=0, **options):
    return SketchedLinear(inputs, outputs, rank, form="pivoted", start=start, **options)


def test_docstring():
    model = One(pivoted())
    before, after, changed = one_graph(model, torch.randn(2, 5, 16))
    assert changed == 1
    assert set(drawn("lift_sketched", "Before")) <= set(before), before
    assert set(drawn("lift_sketched", "After")) <= set(shown(after)), shown(after)
    assert after.fc.down.weight is model.fc.down.weight
    assert after.fc.up.bias is model.fc.up.bias
    assert after.fc.sketch_spec() == model.fc.sketch_spec()
    assert not after.fc.training


@pytest.mark.parametrize("layer", [
    lambda bias: pivoted(bias=bias),
    lambda bias: pivoted(start=12, bias=bias),
    lambda bias: SketchedLinear(16, 12, 4, bias=bias),
    lambda bias: SketchedConv1D(16, 12, 4, bias=bias),
    lambda bias: SketchedConv1D(16, 12, 4, bias=bias, form="pivoted", start=12),
])  # fmt: skip
@pytest.mark.parametrize(
    ("shape", "bias"),
    [
        ((16,), False),
        ((2, 5, 16), True),
        pytest.param((16,), True, marks=pytest.mark.slow),
        pytest.param((2, 5, 16), False, marks=pytest.mark.slow),
        *(pytest.param((3, 16), bias, marks=pytest.mark.slow) for bias in (False, True)),
    ],
)
def test_each_form_at_each_shape(layer, bias, shape):
    model = Owner(fc=layer(bias))
    _, after, changed = one_graph(model, torch.randn(shape))
    assert changed == 1
    assert [node.target for node in after.graph.nodes if node.op == "call_module"] == ["fc"]
    assert after.fc.sketch_spec() == model.fc.sketch_spec()


def test_sizes_that_vary():
    _, after, changed = one_graph(
        Owner(a=pivoted(), b=SketchedLinear(12, 16, 4)),
        torch.randn(2, 5, 16),
        torch.randn(3, 7, 16),
        dynamic=True,
    )
    assert changed == 2
    assert not any(node.target == "reshape" for node in after.graph.nodes)


def test_layers_that_share_a_factor_keep_sharing_it():
    q, k = pivoted(), pivoted(outputs=16)
    k.down = q.down

    class Shared(Owner):
        def forward(self, x):
            return self.q(x), self.k(x)

    _, after, changed = one_graph(Shared(q=q, k=k), torch.randn(3, 16))
    assert changed == 2
    assert after.q.down.weight is after.k.down.weight is q.down.weight
    assert after.k.up.weight is k.up.weight


def test_what_is_written_in_place_stays():
    class Writes(One):
        def forward(self, x):
            y = self.fc(x)
            x.mul_(2.0)
            return y + x

    before = torch.randn(3, 16)
    model = Writes(pivoted(16, 16)).eval()
    with torch.no_grad():
        wanted = model(before.clone())
    found = []

    def backend(graph_module, values):
        normal = lift_functional(lift_parameters(graph_module, values).graph_module).graph_module
        found.append(lift_sketched(normal))
        return graph_module.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(before.clone())
    (result,) = found
    result.graph_module.recompile()
    assert result.changed == 1
    assert torch.equal(result.graph_module(before.clone())[0], wanted)


def test_a_layer_called_twice_is_one_module():
    class Twice(Owner):
        def forward(self, x):
            return self.fc(self.fc(x))

    _, after, changed = one_graph(Twice(fc=pivoted(16, 16)), torch.randn(3, 16))
    assert changed == 2
    assert [node.target for node in after.graph.nodes if node.op == "call_module"] == ["fc", "fc"]


def test_a_latent_that_a_hook_reads_or_changes_leaves_the_layer_apart():
    read, changed = SketchedLinear(16, 12, 4), SketchedLinear(12, 16, 4)
    kept = []
    read.down.register_forward_hook(lambda module, args, out: kept.append(out))
    changed.down.register_forward_hook(lambda module, args, out: 2 * out)
    assert one_graph(Owner(a=read, b=changed), torch.randn(3, 16))[2] == 0


def test_hooks_of_the_layer_itself_stay_around_it():
    layer = pivoted()
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    assert one_graph(Owner(fc=layer), torch.randn(3, 16))[2] == 1


def test_parametrized_factors_leave_the_layer_apart():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layers = {"a": pivoted(16, 16), "b": SketchedLinear(16, 16, 4)}
    for layer in layers.values():
        parametrize.register_parametrization(layer.down, "weight", Doubled())
    assert one_graph(Owner(**layers), torch.randn(3, 16))[2] == 0


def test_the_same_operations_outside_a_sketched_layer_are_nobodys():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(12, 4, bias=False), nn.Linear(4, 12)

        def forward(self, x):
            pivots, others = x.reshape(-1, 16).split_with_sizes((4, 12), -1)
            y = self.up(torch.addmm(pivots, others, self.down.weight.t()))
            return y.reshape(*x.shape[:-1], 12)

    pair = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 12))
    assert one_graph(Same(), torch.randn(2, 3, 16))[2] == 0
    assert one_graph(pair, torch.randn(2, 3, 16))[2] == 0


def test_an_overridden_forward_is_left_apart():
    class Scaled(SketchedLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert one_graph(Owner(fc=Scaled(16, 12, 4)), torch.randn(3, 16))[2] == 0
