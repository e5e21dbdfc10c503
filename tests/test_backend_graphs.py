"""What torch.compile(backend="panther"), or any other, gets to see of sketched layers."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc
from panther_compile.backend.panther import panther
from panther_compile.ops.linear import sketched_linear

SKETCH = {"min_params": 0, "allow_slower": True}

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
@pytest.mark.usefixtures("kernels_everywhere")
def test_activation_gate_and_residual_are_fused_where_kernels_are(dynamic):
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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("kernels_everywhere")
def test_a_model_that_was_sketched_before_is_fused_alike(dynamic):
    seen = []

    def inner(graph_module, inputs):
        seen.extend(node.kwargs for node in graph_module.graph.nodes if node.target is sketched_linear)
        return graph_module.forward

    model, x = gated(), torch.randn(2, 5, 24)
    small = pc.sketchify(model, min_params=0, allow_slower=True, include="*")
    compiled = torch.compile(small, backend="panther", options={"inner": inner}, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), small(x), rtol=1e-4, atol=1e-5)
        small.up.up.weight.mul_(3.0)
        torch.testing.assert_close(compiled(x), small(x), rtol=1e-4, atol=1e-5)
    (gate, down) = seen
    assert (gate["activation"], gate["multiplier"].op) == ("silu", "call_module")
    assert down["residual"].op == "placeholder"


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


@pytest.mark.parametrize("way", ["module", "function", "unflattened"])
def test_an_exported_sketched_model_is_not_sketched_further(way):
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)).eval()
    small, x = pc.sketchify(model, 0.5, progress=False, **SKETCH), torch.randn(5, 48)
    program = torch.export.export(small, (x,))
    exported = program.module() if way != "unflattened" else torch.export.unflatten(program)
    called = (lambda x: exported(x)) if way == "function" else exported
    with torch.no_grad():
        fast = torch.compile(called, backend="panther", options={"inner": "eager"} | SKETCH)
        torch.testing.assert_close(fast(x), small(x))


def test_a_part_beside_an_exported_sketched_model_stays_dense():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            small = pc.sketchify(nn.Sequential(nn.Linear(48, 48), nn.ReLU()).eval(), 0.5, **SKETCH)
            self.body = torch.export.export(small, (torch.randn(3, 48),)).module()
            self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

        def forward(self, x):
            x = self.body(x)
            torch._dynamo.graph_break()
            return x + self.second(F.relu(self.first(x)))

    model, x = Head(), torch.randn(3, 48)
    with torch.no_grad():
        fast = torch.compile(model, backend="panther", options={"inner": "eager"} | SKETCH)
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fused_kernels_behind_inductor_on_a_gpu(kernel, dtype, monkeypatch):
    monkeypatch.setenv("PANTHER_COMPILE_KERNEL", kernel)
    torch._dynamo.reset()
    small = pc.sketchify(gated().to("cuda", dtype), min_params=0, allow_slower=True, include="*")
    compiled = torch.compile(small, backend=panther)  # itself: `make gpu` installs nothing
    tolerance = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    with torch.no_grad():
        for rows in (1, 16, 300, 5000):
            x = torch.randn(rows, 24, device="cuda", dtype=dtype)
            torch.testing.assert_close(compiled(x), small(x), rtol=tolerance, atol=tolerance)
