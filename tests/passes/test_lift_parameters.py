"""Weights among a graph's inputs become its own, each in the way in which it is read."""

import pytest
import torch
import torch.nn.functional as F
from compiled import close
from torch import nn

from panther_compile.passes.lift_parameters import lift_parameters

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Tied(nn.Module):
    """An autoencoder that decodes by the weight that it encodes by."""

    def __init__(self, features, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, 3) @ torch.randn(3, hidden) / features**0.5)
        self.inner, self.outer = nn.Parameter(torch.randn(hidden)), nn.Parameter(torch.randn(features))
        self.fc = nn.Linear(features, features)

    def forward(self, x):
        hidden = torch.tanh(torch.addmm(self.inner, x, self.weight))
        return self.fc(F.linear(hidden, self.weight, self.outer))


def lifted(model, *inputs):
    """The inputs that the lifted graph of a model is left with."""
    found = []

    def look(graph_module, values):
        result = lift_parameters(graph_module, values).graph_module
        found.extend(str(node.target) for node in result.graph.nodes if node.op == "placeholder")
        return graph_module.forward

    with torch.no_grad():
        torch.compile(model, backend=look, fullgraph=True)(*inputs)
    return found


@pytest.mark.parametrize("hidden", [32, 48])
def test_a_weight_read_both_ways_round_stays_an_input(hidden):
    model, x = Tied(32, hidden), torch.randn(4, 32)
    assert lifted(model, x) == ["L_self_parameters_weight_", "L_x_"]
    torch._dynamo.reset()
    options = {"inner": "eager", "min_params": 0, "allow_slower": True, "ratio": 0.9}
    fast = torch.compile(model, backend="panther", options=options)
    with torch.no_grad():
        model.fc.weight.copy_(torch.randn(32, 3) @ torch.randn(3, 32) / 32**0.5)
        close(fast(x), model(x))
        model.weight.mul_(2.0)
        close(fast(x), model(x))


def test_a_weight_read_by_addmm_alone_is_held_the_other_way_round():
    weight, bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
    x = torch.randn(3, 6)
    found = []

    def look(graph_module, values):
        found.append(lift_parameters(graph_module, values).graph_module)
        return graph_module.forward

    with torch.no_grad():
        wanted = torch.compile(lambda x: torch.addmm(bias, x, weight), backend=look)(x)
    (graph_module,) = found
    assert [tuple(p.shape) for p in graph_module.parameters() if p.dim() > 1] == [(4, 6)]
    assert torch.addmm not in {node.target for node in graph_module.graph.nodes}
    close(graph_module(x), wanted)
