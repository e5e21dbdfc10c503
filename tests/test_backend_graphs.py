"""What torch.compile(backend="panther"), or any other, gets to see of sketched layers."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc
from panther_compile.ops.linear import sketched_linear
from panther_compile.passes import graph_default

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Gated(nn.Module):
    """SiLU(gate(x)) up(x), and a residual."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@torch.no_grad()
def gated(rank=3):
    """A model whose weights have a rank that sketching keeps."""
    model = Gated().eval()
    for layer in model.children():
        u, values, vh = torch.linalg.svd(layer.weight, full_matrices=False)
        layer.weight.copy_(u[:, :rank] * values[:rank] @ vh[:rank])
    return model


@pytest.mark.parametrize("dynamic", [False, True])
def test_activation_gate_and_residual_are_fused_where_kernels_are(dynamic, monkeypatch):
    for name in ("fuse_epilogue", "fuse_gating", "fuse_residual"):  # as on CUDA
        one = functools.partial(getattr(graph_default, name), device_type="cpu")
        monkeypatch.setattr(graph_default, name, one)
    seen = []

    def inner(graph_module, inputs):
        seen.append([node for node in graph_module.graph.nodes if node.target is sketched_linear])
        return graph_module.forward

    model, x = gated(), torch.randn(2, 5, 24)
    options = {"min_params": 0, "allow_slower": True, "inner": inner, "include": "*"}
    compiled = torch.compile(model, backend="panther", options=options, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
        (gate, down) = seen[0]
        assert (gate.kwargs["activation"], down.kwargs["residual"].op) == ("silu", "placeholder")
        assert gate.kwargs["multiplier"].op == "call_module"
        # The factors of new weights go into what was compiled before: it is fused alike.
        model.up.weight.copy_(gated().up.weight)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
    assert len(seen) == 1


def test_a_pivoted_layer_compiles_to_two_products_alone():
    layer, x = pc.SketchedLinear(16, 12, 4, form="pivoted"), torch.randn(2, 3, 16)
    targets = []

    def inner(graph_module, inputs):
        targets.extend(node.target for node in graph_module.graph.nodes if node.op == "call_function")
        return graph_module.forward

    found = torch.compile(layer, backend=inner, fullgraph=True, dynamic=True)(x)
    torch.testing.assert_close(found, layer(x))
    assert torch.addmm in targets
    assert not {operator.add, operator.iadd, torch.add} & set(targets)
    exported = {str(node.target) for node in torch.export.export(layer, (x,)).graph.nodes}
    assert "aten.addmm.default" not in exported
