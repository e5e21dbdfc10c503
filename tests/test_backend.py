"""torch.compile(model, backend="panther"): sketched models as they are, dense ones sketched on the way."""

import copy
import logging
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from compiled import close, graphs
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import panther_compile as pc
from panther_compile.errors import BackendError, ConfigError
from panther_compile.passes.runner import GraphPass, PassResult

SKETCH = {"min_params": 0, "allow_slower": True}
OPTIONS = {"inner": "eager", **SKETCH}
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """A convolution with its norm, three layers of one input, a functional call, and a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(24)
        self.q, self.k, self.v = nn.Linear(24, 32), nn.Linear(24, 32, bias=False), nn.Linear(24, 32)
        self.out = nn.Linear(32, 24)
        self.head = nn.Linear(24, 5)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.out(self.q(x) * F.linear(x, self.k.weight) + F.gelu(self.v(x))))


@torch.no_grad()
def low_rank(model, rank=3):
    """Cut the weights of the linear layers down to a rank, so that sketching them is exact."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and min(module.weight.shape) > 2 * rank:
            u, values, vh = torch.linalg.svd(module.weight, full_matrices=False)
            module.weight.copy_(u[:, :rank] * values[:rank] @ vh[:rank])
    return model.eval()


def net():
    return low_rank(Net())


def compiled_net(model, **options):
    options = OPTIONS | {"exclude": nn.Conv2d} | options
    return torch.compile(model, backend="panther", options=options, fullgraph=True)


# ------------------------------------------------------------------------------------- registration


@pytest.mark.slow
def test_torch_finds_it_without_an_import():
    code = (
        "import sys, torch\n"
        "assert 'panther' in torch._dynamo.list_backends(), torch._dynamo.list_backends()\n"
        "assert 'panther_compile' not in sys.modules\n"
        "model = torch.nn.Linear(8, 8)\n"
        "with torch.no_grad():\n"
        "    torch.compile(model, backend='panther', options={'inner': 'eager'})(torch.ones(2, 8))\n"
        "assert 'panther_compile.backend.panther' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"rati": 0.5},
            "BackendError",
            "unknown option rati; the options of .* are allow_slower",
        ),
        ({"inplace": True}, "BackendError", "inplace: for sketchify alone"),
        (
            {"inner": "indcutor"},
            "BackendError",
            "inner='indcutor', wanted a backend .*inductor",
        ),
        ({"inner": "panther"}, "BackendError", "wanted another backend"),
        ({"passes": [len]}, "BackendError", "wanted a GraphPass"),
        ({"passes": None}, "BackendError", "passes=None, wanted a sequence of GraphPass"),
        ({"ratio": 2.0}, "ConfigError", r"ratio=2.0, wanted a number in \(0, 1\]"),
    ],
)
def test_a_wrong_option_is_told_to_the_user(options, kind, message):
    compiled = torch.compile(nn.Linear(8, 8), backend="panther", options=options)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=f"{kind}: .*{message}") as caught:
        compiled(torch.ones(2, 8))
    assert isinstance(caught.value.inner_exception, BackendError | ConfigError)


def test_a_mode_is_refused():
    compiled = torch.compile(nn.Linear(8, 8), backend="panther", mode="max-autotune")
    with pytest.raises(BackendCompilerFailed, match="BackendError: mode='max-autotune'"):
        compiled(torch.ones(2, 8))


# --------------------------------------------------------------------------------------- dense model


def test_a_dense_model_is_sketched_without_touching_it():
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []

    def inner(graph_module, inputs):
        seen.extend(type(module).__name__ for module in graph_module.modules())
        return graph_module.forward

    x = torch.randn(3, 4, 8, 8)
    with torch.no_grad():
        close(compiled_net(model, inner=inner)(x), model(x))
    assert {"SketchedLinear", "Linear", "Conv2d"} <= set(seen)
    assert "BatchNorm2d" not in seen
    assert not {"SketchedLinear"} & {type(module).__name__ for module in model.modules()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_result_is_that_of_sketchify_on_a_graph():
    model = nn.Sequential(
        nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 32)
    ).eval()
    x = torch.randn(5, 32)
    small = pc.sketchify(model, 0.4, progress=False, **SKETCH)
    with torch.no_grad():
        close(torch.compile(model, backend="panther", options={**OPTIONS, "ratio": 0.4})(x), small(x), 1e-5)


def test_a_function_on_parameters_of_nobody():
    weight, bias = nn.Parameter(torch.randn(32, 4) @ torch.randn(4, 48)), nn.Parameter(torch.randn(32))

    def function(x):
        return F.linear(x, weight, bias).tanh() * 2

    x = torch.randn(5, 48)
    with torch.no_grad():
        close(torch.compile(function, backend="panther", options=OPTIONS)(x), function(x))


def test_a_weight_that_changes_in_place_needs_no_recompilation():
    model = net()
    x = torch.randn(3, 4, 8, 8)
    compiled = compiled_net(model)
    with torch.no_grad():
        close(compiled(x), model(x))
        model.q.weight.mul_(2.0)
        model.norm.running_mean.add_(1.0)
        close(compiled(x), model(x))
        model.q.bias.add_(1.0)
        close(compiled(x), model(x))
    assert graphs() == 1


def test_load_state_dict_gives_the_output_of_the_new_weights():
    model, other = net(), net()
    x = torch.randn(3, 4, 8, 8)
    compiled = compiled_net(model)
    with torch.no_grad():
        compiled(x)
        model.load_state_dict(other.state_dict())
        close(compiled(x), other(x))
        for batch in (5, 7):
            x = torch.randn(batch, 4, 8, 8)
            close(compiled(x), other(x))


def test_a_weight_that_is_replaced():
    model = net()
    x = torch.randn(3, 4, 8, 8)
    compiled = compiled_net(model)
    with torch.no_grad():
        compiled(x)
        model.out.weight = nn.Parameter(3.0 * model.out.weight)
        close(compiled(x), model(x))
        model.out.weight.data = model.out.weight.data / 2
        close(compiled(x), model(x))
        close(compiled(x), model(x))


class TwoOfOne(nn.Module):
    """Two layers of one input, and a third."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.out(self.q(x) * self.v(x))


def test_weights_that_the_graph_holds_as_they_are_need_nothing_new(caplog):
    model = pc.sketchify(TwoOfOne().eval(), ratio=0.5, include="*", min_params=0, allow_slower=True)
    model.v = copy.deepcopy(model.q)
    model.v.down = model.q.down
    x = torch.randn(2, 64)
    compiled = torch.compile(model, backend="panther", options=OPTIONS, fullgraph=True)

    def times_factorized():
        close(compiled(x), model(x))
        return len([record for record in caplog.records if "factorizing again" in record.message])

    with torch.no_grad(), caplog.at_level(logging.INFO, "panther_compile"):
        assert times_factorized() == 0
        model.out.up.weight.mul_(2.0)
        assert times_factorized() == 0
        model.out.up.weight.data = model.out.up.weight.data + 1.0
        assert times_factorized() == 0
        model.q.down.weight.mul_(2.0)
        assert times_factorized() == 0
        model.out.up.weight = nn.Parameter(3.0 * model.out.up.weight)
        assert times_factorized() == 1


def test_a_product_that_sketched_layers_share_is_computed_once():
    model = pc.sketchify(TwoOfOne().eval(), ratio=0.5, include="*", min_params=0, allow_slower=True)
    model.v = copy.deepcopy(model.q)
    model.v.down = model.q.down
    called = []

    def inner(graph_module, inputs):
        called.extend(node.target for node in graph_module.graph.nodes if node.op == "call_module")
        return graph_module.forward

    x = torch.randn(2, 64)
    with torch.no_grad():
        close(torch.compile(model, backend="panther", options={"inner": inner})(x), model(x))
    assert sorted(called) == ["out", "q.down", "q.up", "v.up"]


def test_blocks_compiled_one_by_one_keep_their_own_weights():
    blocks = [low_rank(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))) for _ in range(3)]
    compiled = [torch.compile(block, backend="panther", options=OPTIONS) for block in blocks]
    x = torch.randn(5, 24)
    with torch.no_grad():
        for _ in range(2):
            for fast, block in zip(compiled, blocks, strict=True):
                close(fast(x), block(x))


def test_factors_are_found_again_when_shapes_change(caplog):
    model = net()
    compiled = compiled_net(model)
    with torch.no_grad(), caplog.at_level(logging.INFO, "panther_compile"):
        compiled(torch.randn(3, 4, 8, 8))
        first = len(caplog.records)
        for batch in (5, 7, 9):
            x = torch.randn(batch, 4, 8, 8)
            close(compiled(x), model(x))
    assert graphs() == 2  # the second one is dynamic
    assert first
    assert not [record for record in caplog.records if "factorizing again" in record.message]


def test_a_model_in_training_is_refused_with_advice():
    model = Net()
    compiled = compiled_net(model)
    with pytest.raises(BackendCompilerFailed, match=r"the model is dense .*sketchify\(model\)"):
        compiled(torch.randn(3, 4, 8, 8))


@pytest.mark.parametrize(
    "on", [torch.enable_grad, lambda: torch.inference_mode(False)], ids=["enable_grad", "inference_mode"]
)
def test_gradients_that_the_model_turns_on_itself_are_training(on):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            with on():
                return self.second(torch.tanh(self.first(x)))

    model, x = Energy(), torch.randn(3, 32)
    compiled = torch.compile(model, backend="panther", options=OPTIONS)
    with torch.no_grad():
        with pytest.raises(BackendCompilerFailed, match="nothing inside that turns gradients on"):
            compiled(x)
        low_rank(model.requires_grad_(False))
        close(compiled(x), model(x))


def test_frozen_weights_and_small_graphs_may_have_gradients_on():
    model = low_rank(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))).requires_grad_(False)
    x = torch.randn(5, 24, requires_grad=True)
    compiled = torch.compile(model, backend="panther", options=OPTIONS)
    close(compiled(x), model(x))
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    close(found, wanted)
    trained = nn.Linear(4, 4)
    torch.compile(trained, backend="panther", options={"inner": "eager"})(torch.ones(2, 4)).sum().backward()
    assert trained.weight.grad is not None


@pytest.mark.parametrize("mode", [pytest.param(torch.no_grad, marks=pytest.mark.slow), torch.inference_mode])
def test_both_ways_to_infer_and_autocast(mode):
    model = net()
    compiled, x = compiled_net(model), torch.randn(3, 4, 8, 8)
    with mode():
        close(compiled(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            close(compiled(x).float(), model(x).float(), 5e-2)


def test_ratio_one_sketches_nothing():
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)).eval()
    x = torch.randn(5, 24)
    with torch.no_grad():
        found = torch.compile(model, backend="panther", options={**OPTIONS, "ratio": 1.0})(x)
        assert torch.equal(found, model(x))


def test_an_output_head_stays_dense():
    model = nn.Linear(128, 64).eval()
    x = torch.randn(5, 128)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="panther", options=OPTIONS)(x), model(x))
        asked = torch.compile(
            model, backend="panther", options={**OPTIONS, "include": nn.Linear, "ratio": 0.3}
        )
        assert not torch.allclose(asked(x), model(x), rtol=1e-3)


def test_an_output_head_with_a_bias_of_its_own_stays_dense():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(48, 48), nn.Linear(48, 96, bias=False)
            self.register_buffer("added", torch.randn(96))

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.head(x) + self.added.to(x.device)

    model, x = Headed().eval(), torch.randn(3, 48)
    with torch.no_grad():
        close(torch.compile(model, backend="panther", options=OPTIONS)(x), model(x), tolerance=1e-6)


def test_the_users_pass_sees_sketched_layers():
    seen = []

    def look(graph_module):
        calls = [node for node in graph_module.graph.nodes if node.op == "call_module"]
        seen.extend(type(graph_module.get_submodule(node.target)).__name__ for node in calls)
        return PassResult(graph_module, 0)

    with torch.no_grad():
        compiled_net(net(), passes=[GraphPass(look, exact=True)])(torch.randn(3, 4, 8, 8))
    assert "SketchedLinear" in seen


# ------------------------------------------------------------------------------------ sketched model


def test_a_sketched_model_trains_as_in_eager():
    small = pc.sketchify(Net(), 0.5, progress=False, **SKETCH)
    compiled = torch.compile(small, backend="panther", options={"inner": "aot_eager"}, fullgraph=True)
    x = torch.randn(3, 4, 8, 8)
    gradients = []
    for model in (small, compiled):
        small.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in small.parameters()])
    close(gradients[1], gradients[0])


@pytest.mark.slow
def test_a_sketched_model_recompiles_as_often_as_the_dense_one():
    model = Net().eval()
    found = []
    for each, backend in ((model, "eager"), (pc.sketchify(model, 0.5, progress=False, **SKETCH), "panther")):
        torch._dynamo.reset()
        counters.clear()
        options = {"options": {"inner": "eager"}} if backend == "panther" else {}
        compiled = torch.compile(each, backend=backend, fullgraph=True, **options)
        with torch.no_grad():
            for batch in (2, 3, 5, 8):
                x = torch.randn(batch, 4, 8, 8)
                close(compiled(x), each(x))
        found.append(graphs())
    assert found == [2, 2]


def test_layers_beside_sketched_ones_stay_dense():
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48)).eval()
    small = pc.sketchify(model, 0.5, exclude="2", progress=False, **SKETCH)
    x = torch.randn(5, 24)
    with torch.no_grad():
        close(torch.compile(small, backend="panther", options=OPTIONS)(x), small(x), 1e-6)


class Broken(nn.Module):
    """A sketched layer, and a dense one in a graph of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return x + F.relu(self.third(F.relu(self.second(x))))


@pytest.mark.parametrize(
    ("training", "way"),
    [
        (False, "function"),
        (True, "method"),
        pytest.param(False, "method", marks=pytest.mark.slow),
        pytest.param(True, "function", marks=pytest.mark.slow),
    ],
)
def test_a_part_without_sketched_layers_of_a_sketched_model_stays_dense(way, training):
    small = pc.sketchify(Broken(), 0.5, include="first", **SKETCH)
    x = torch.randn(3, 64)
    options = {"inner": "eager"} | SKETCH
    if way == "function":
        compiled = torch.compile(small, backend="panther", options=options)
    else:
        compiled = small
        small.compile(backend="panther", options=options)
    with torch.set_grad_enabled(training):
        close(compiled(x), small.forward(x), tolerance=1e-6)
    assert graphs() == 2


def test_attention_and_lazy_weights_break_no_graph():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            x = x.to(self.fc.weight.dtype)
            x, _ = self.attention(x, x, x, need_weights=False)
            return self.fc(x)

    small = pc.sketchify(Reader().eval(), 0.5, progress=False, **SKETCH)
    x = torch.randn(2, 7, 32)
    compiled = torch.compile(small, backend="panther", options={"inner": "aot_eager"}, fullgraph=True)
    with torch.no_grad():
        close(compiled(x), small(x))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_dense_model_with_inductor_new_weights_and_shapes():
    model, other = net(), net()
    compiled = compiled_net(model, inner="inductor")
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 4, 8, 8)
            close(compiled(x), model(x))
        model.load_state_dict(other.state_dict())
        close(compiled(x), other(x))
