"""SketchedLinear with factors that are more than nn.Linear, in graphs and in the compiler."""

import copy

import pytest
import torch
from layers.linears import FORMS, IN, OUT, RANK, build
from torch import fx, nn
from torch.nn.utils import parametrize, prune

from panther_compile.layers.base import SketchedLayer
from panther_compile.planning.trace import SketchTracer

# ------------------------------------------------------------- factors that are more than nn.Linear


class Doubled(nn.Module):
    """What an adapter or a quantizer puts in the place of a factor."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def test_a_weight_that_was_put_back_behind_its_bias():
    layer, x = build("leading"), torch.randn(3, IN, dtype=torch.float64)
    wanted = layer(x)
    prune.l1_unstructured(layer.up, "weight", amount=0.0)
    prune.remove(layer.up, "weight")
    assert list(layer.up._parameters) == ["bias", "weight"]
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("start", ["leading", "trailing"])
def test_hooks_on_a_factor_run_and_the_result_is_that_of_the_plain_path(start):
    layer = build(start)
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    plain = layer(x)
    seen = []
    for factor in (layer.down, layer.up):
        handle = factor.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
        torch.testing.assert_close(layer(x), plain, rtol=1e-12, atol=1e-12)
        handle.remove()
    assert seen == [RANK, OUT]
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("kind", ["pre", "backward", "backward_pre"])
def test_every_kind_of_hook_runs(kind):
    layer, seen = build("leading"), []
    register = {
        "pre": layer.down.register_forward_pre_hook,
        "backward": layer.down.register_full_backward_hook,
        "backward_pre": layer.down.register_full_backward_pre_hook,
    }[kind]
    register(lambda *args: seen.append(True))
    layer(torch.randn(3, IN, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert seen == [True]


def test_a_forward_put_on_a_factor_is_called():
    """As accelerate does when it offloads or spreads a model."""
    layer = build("leading")
    x = torch.randn(3, IN, dtype=torch.float64)
    plain, original = layer(x), layer.up.forward
    layer.up.forward = lambda z: original(z) + 1
    torch.testing.assert_close(layer(x), plain + 1)


def test_replaced_and_parametrized_factors_are_called():
    x = torch.randn(3, IN, dtype=torch.float64)
    layer = build("leading", bias=False)
    plain = layer(x)
    layer.up = Doubled(layer.up)
    torch.testing.assert_close(layer(x), 2 * plain)

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer = build("leading", bias=False)
    plain = layer(x)
    parametrize.register_parametrization(layer.up, "weight", Twice())
    torch.testing.assert_close(layer(x), 2 * plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamically_quantized_factors_work():
    layer = build("leading", dtype=torch.float32).eval()
    x = torch.randn(6, IN)
    plain = layer(x)
    if not torch.backends.quantized.supported_engines:
        pytest.skip("no quantized engine")
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(layer), {nn.Linear}, torch.qint8)
    assert type(quantized.down) is not nn.Linear
    assert torch.equal(quantized(x), quantized.up(x[:, :RANK] + quantized.down(x[:, RANK:])))
    assert 0 < float((quantized(x) - plain).detach().norm() / plain.detach().norm()) < 0.05


# ---------------------------------------------------------------------------------- graphs, compiler


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.fc = build(form, dtype=torch.float32)

    def forward(self, x):
        return torch.relu(self.fc(x)) + self.fc.weight.sum()


@pytest.mark.parametrize("form", FORMS)
def test_is_a_leaf_of_our_tracer_and_transparent_to_torchs(form):
    model = nn.Sequential(build(form), nn.ReLU())
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    leafy = SketchTracer().trace(model)
    assert [n.target for n in leafy.nodes if n.op == "call_module"] == ["0", "1"]
    assert torch.equal(fx.GraphModule(model, leafy)(x), model(x))
    through = fx.symbolic_trace(model)
    targets = [n.target for n in through.graph.nodes if n.op == "call_module"]
    assert targets == ["0.down", "0.up", "1"]
    torch.testing.assert_close(through(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_exports_with_any_batch(form):
    model, x = Model(form), torch.randn(4, 3, IN)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}})
    y = torch.randn(7, 3, IN)
    torch.testing.assert_close(program.module()(y), model(y))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(form, backend):
    torch._dynamo.reset()
    model, x = Model(form), torch.randn(4, 3, IN)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_is_a_sketched_layer():
    assert isinstance(build(), SketchedLayer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(7, IN), (IN,)])
@pytest.mark.parametrize("replaced", [False, True])
def test_sparse_inputs(form, shape, replaced):
    layer = build(form)
    if replaced:
        layer.down = nn.Sequential(layer.down)
    x = torch.randn(shape, dtype=torch.float64).relu()
    found, wanted = layer(x.to_sparse()), layer(x)
    torch.testing.assert_close(found, wanted)
    if x.dim() == 2:
        torch.testing.assert_close(layer(x.to_sparse_csr()), wanted)
    for parameter in layer.parameters():
        gradients = [
            torch.autograd.grad(one.sum(), parameter, retain_graph=True)[0] for one in (found, wanted)
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("form", FORMS)
def test_jagged_rows_are_compiled(form):
    layer = build(form)
    rows = [torch.randn(count, IN, dtype=torch.float64) for count in (5, 3)]
    found = torch.compile(layer, backend="eager", fullgraph=True)(
        torch.nested.nested_tensor(rows, layout=torch.jagged)
    )
    for one, row in zip(found.unbind(), rows, strict=True):
        torch.testing.assert_close(one, layer(row))
