"""Functional calls become module calls: the same graph, bit for bit the same outputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import panther_compile as pc
from panther_compile.passes.lift_functional import lift_functional


class Bilinear(nn.Module):
    """A weight and a bias used by a functional call, next to a layer used as a module."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.linear(x, self.fc.weight, self.fc.bias))


class Bare(nn.Module):
    """Parameters of the model itself."""

    def __init__(self, bias=True):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))
        self.b = nn.Parameter(torch.randn(4)) if bias else None

    def forward(self, x):
        return F.linear(x, self.w, self.b)


class Convolution(nn.Module):
    def __init__(self, options, *, groups=1, bias=True, by_name=False):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=groups, bias=bias)
        self.options, self.by_name = options, by_name

    def forward(self, x):
        if self.by_name:
            return F.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias, **self.options)
        return F.conv2d(x, self.conv.weight, self.conv.bias, **self.options)


def graph_text(module):
    return [line.strip() for line in str(module.graph).splitlines() if line.strip().startswith("%")]


def linear_case(by_name, bias):
    class Case(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=bias)

        def forward(self, x):
            if by_name:
                return F.linear(weight=self.fc.weight, bias=self.fc.bias, input=x)
            return F.linear(x, self.fc.weight, self.fc.bias)

    return Case()


def check(traced, *inputs, count, kinds):
    """Lift, and compare with the outputs before; the parameters stay the very same."""
    before = traced(*inputs)
    held = {id(p) for p in traced.parameters()}
    assert lift_functional(traced).changed == count
    assert torch.equal(traced(*inputs), before)
    assert {id(p) for p in traced.parameters()} <= held
    called = [traced.get_submodule(n.target) for n in traced.graph.nodes if n.op == "call_module"]
    assert [type(module) for module in called] == kinds
    traced.graph.lint()
    return called


# -------------------------------------------------------------------------------------------- golden


def test_golden_symbolic_trace():
    traced = fx.symbolic_trace(Bilinear())
    assert graph_text(traced) == [
        "%x : [num_users=1] = placeholder[target=x]",
        "%fc_weight : [num_users=1] = get_attr[target=fc.weight]",
        "%fc_bias : [num_users=1] = get_attr[target=fc.bias]",
        "%linear : [num_users=1] = call_function[target=torch._C._nn.linear]"
        "(args = (%x, %fc_weight, %fc_bias), kwargs = {})",
        "%head : [num_users=1] = call_module[target=head](args = (%linear,), kwargs = {})",
    ]
    assert lift_functional(traced).changed == 1
    assert graph_text(traced) == [
        "%x : [num_users=1] = placeholder[target=x]",
        "%fc : [num_users=1] = call_module[target=fc](args = (%x,), kwargs = {})",
        "%head : [num_users=1] = call_module[target=head](args = (%fc,), kwargs = {})",
    ]


def test_golden_export():
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    module = torch.export.export(model, (torch.randn(2, 6),)).module()
    wanted = [
        "get_attr[target=0.weight]",
        "get_attr[target=0.bias]",
        "call_function[target=torch.ops.aten.linear.default]",
    ]
    text = "\n".join(graph_text(module))
    assert all(part in text for part in wanted)
    assert lift_functional(module).changed == 1
    text = "\n".join(graph_text(module))
    assert not any(part in text for part in wanted)
    assert "call_module[target=0](args = (%" in text
    assert type(module.get_submodule("0")) is nn.Linear


# -------------------------------------------------------------------------------- arguments, outputs


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(by_name, bias):
    model = linear_case(by_name, bias)
    names = list(model.state_dict())
    traced = fx.symbolic_trace(model)
    (layer,) = check(traced, torch.randn(2, 3, 6), count=1, kinds=[nn.Linear])
    assert list(traced.state_dict()) == names
    assert layer.weight is traced.fc.weight


CONVOLUTIONS = [
    {},
    {"stride": 2},
    {"stride": (2, 1), "padding": 1},
    {"padding": (0, 2), "dilation": (1, 2)},
    {"padding": "same"},
    {"padding": "valid", "stride": 2},
    {"groups": 2, "padding": 1},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("by_name", [False, True])
def test_conv2d(options, by_name):
    model = Convolution(options, groups=options.get("groups", 1), bias=by_name, by_name=by_name)
    names = set(model.state_dict())
    traced = fx.symbolic_trace(model)
    check(traced, torch.randn(2, 4, 7, 8), count=1, kinds=[nn.Conv2d])
    assert set(traced.state_dict()) == names


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_exported_conv2d(options):
    x = torch.randn(2, 4, 7, 8)
    model = Convolution(options, groups=options.get("groups", 1))
    module = torch.export.export(model, (x,)).module()
    before, names = module(x), set(module.state_dict())
    assert lift_functional(module).changed == 1
    assert torch.equal(module(x), before)
    assert set(module.state_dict()) == names
    assert type(module.conv) is nn.Conv2d


def test_unbatched_conv2d():
    check(fx.symbolic_trace(Convolution({})), torch.randn(4, 7, 8), count=1, kinds=[nn.Conv2d])


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_of_the_root_move_into_a_new_layer(bias):
    traced = fx.symbolic_trace(Bare(bias))
    check(traced, torch.randn(2, 6), count=1, kinds=[nn.Linear])
    names = ["w_linear.weight", "w_linear.bias"] if bias else ["w_linear.weight"]
    assert list(traced.state_dict()) == names


def test_a_bias_of_another_owner():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            return F.linear(x, self.a.weight, self.b.bias)

    traced = fx.symbolic_trace(Crossed())
    check(traced, torch.randn(2, 6), count=1, kinds=[nn.Linear])


# ------------------------------------------------------------------------------------------- sharing


def test_one_weight_called_twice_is_one_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            x = F.linear(x, self.fc.weight, self.fc.bias)
            return F.linear(x, self.fc.weight, self.fc.bias)

    traced = fx.symbolic_trace(Twice())
    first, second = check(traced, torch.randn(2, 6), count=2, kinds=[nn.Linear] * 2)
    assert first is second
    assert list(traced.state_dict()) == ["fc.weight", "fc.bias"]


def test_a_functional_call_and_a_module_call_are_one_layer():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return self.fc(F.linear(x, self.fc.weight, self.fc.bias))

    first, second = check(fx.symbolic_trace(Both()), torch.randn(2, 6), count=1, kinds=[nn.Linear] * 2)
    assert first is second


def test_one_weight_with_and_without_its_bias_is_two_layers_with_one_weight():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return F.linear(F.linear(x, self.fc.weight), self.fc.weight, self.fc.bias)

    first, second = check(fx.symbolic_trace(Two()), torch.randn(2, 6), count=2, kinds=[nn.Linear] * 2)
    assert first is not second
    assert first.weight is second.weight
    assert (first.bias is None, second.bias is None) == (True, False)


def test_one_kernel_with_two_strides_is_two_layers_with_one_weight():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.randn(4, 4, 3, 3))

        def forward(self, x):
            return F.conv2d(F.conv2d(x, self.k, padding=1), self.k, stride=2)

    first, second = check(fx.symbolic_trace(Two()), torch.randn(2, 4, 9, 9), count=2, kinds=[nn.Conv2d] * 2)
    assert first.weight is second.weight


def test_a_weight_that_is_read_otherwise_too_stays_where_it_is():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 6))

        def forward(self, ids):
            return F.linear(F.embedding(ids, self.table), self.table)

    traced = fx.symbolic_trace(Tied())
    (layer,) = check(traced, torch.tensor([1, 2]), count=1, kinds=[nn.Linear])
    assert layer.weight is traced.table


# ----------------------------------------------------------------------------------- what is left alone


class Reparametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))
        self.v = nn.Parameter(torch.randn(6))
        self.register_buffer("fixed", torch.randn(4, 6))
        self.which = "scaled"

    def forward(self, x):
        if self.which == "scaled":
            return F.linear(x, self.w * 2)
        if self.which == "vector":
            return F.linear(x, self.v)
        return F.linear(x, self.fixed)


@pytest.mark.parametrize("which", ["scaled", "vector", "buffer"])
def test_left_alone(which):
    model = Reparametrized()
    model.which = which
    traced = fx.symbolic_trace(model)
    text = str(traced.graph)
    check(traced, torch.randn(2, 6), count=0, kinds=[])
    assert str(traced.graph) == text


class ComputedBias(nn.Module):
    """As BEiT: queries and values have a bias, keys have none."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 12, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(4)) for _ in range(2))

    def forward(self, x):
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        return F.linear(x, self.qkv.weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exported", [False, True])
def test_a_computed_bias_is_added_behind_the_layer(exported, dtype):
    model, x = ComputedBias(), torch.randn(3, 6)
    traced = torch.export.export(model, (x,)).module() if exported else fx.symbolic_trace(model)
    assert lift_functional(traced).changed == 1
    assert type(traced.qkv) is nn.Linear
    assert traced.qkv.bias is None
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found, wanted = traced(x), model(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert model.q_bias.grad is not None


def test_an_argument_that_is_computed_is_left_alone():
    class Dynamic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3)

        def forward(self, x, stride):
            return F.conv2d(x, self.conv.weight, None, stride)

    traced = fx.symbolic_trace(Dynamic())
    assert lift_functional(traced).changed == 0


class Linear(nn.Linear):
    """Has the name, and so the repr, of torch's own, and computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("hooked", [False, True])
def test_an_owner_that_computes_more_is_not_called(hooked):
    class Borrowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6) if hooked else Linear(6, 6)
            if hooked:
                self.fc.register_forward_hook(lambda module, args, out: 2 * out)

        def forward(self, x):
            return self.fc(x) + F.linear(x, self.fc.weight, self.fc.bias)

    class Leafy(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, nn.Linear)

    model = Borrowing()
    traced = fx.GraphModule(model, Leafy().trace(model))
    check(traced, torch.randn(2, 6), count=1, kinds=[type(model.fc), nn.Linear])


def test_a_name_that_is_taken():
    model = Bare()
    model.w_linear = nn.ReLU()
    graph_module = fx.symbolic_trace(model)
    graph_module.w_linear = nn.ReLU()
    check(graph_module, torch.randn(2, 6), count=1, kinds=[nn.Linear])
    assert type(graph_module.w_linear) is nn.ReLU


# ------------------------------------------------------------------------------ metadata, original


def test_metadata_and_mode_are_kept():
    traced = fx.symbolic_trace(Bilinear().eval()).eval()
    for node in traced.graph.nodes:
        node.meta["tag"] = node.name
    lift_functional(traced)
    lifted = next(node for node in traced.graph.nodes if node.target == "fc")
    assert lifted.meta["tag"] == "linear"
    assert not traced.fc.training


def test_sketchify_does_not_touch_the_users_graph():
    traced = fx.symbolic_trace(Bilinear())
    text, names = str(traced.graph), list(traced.state_dict())
    x = torch.randn(2, 6)
    before = traced(x)
    small = pc.sketchify(traced, 0.8, min_params=0, include="*", progress=False, allow_slower=True)
    assert str(traced.graph) == text
    assert list(traced.state_dict()) == names
    assert torch.equal(traced(x), before)
    assert type(small.fc).__name__ == "SketchedLinear"


def test_gradients_and_frozen_parameters_are_kept():
    model = Bilinear()
    model.fc.weight.requires_grad_(False)
    traced = fx.symbolic_trace(model)
    lift_functional(traced)
    traced(torch.randn(2, 6)).sum().backward()
    assert traced.fc.weight.grad is None
    assert model.fc.bias.grad is not None


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
def test_products_that_decompositions_make_of_linear_layers(shape):
    torch.manual_seed(0)
    first, last = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
    model, x = nn.Sequential(first, nn.ReLU(), last, nn.Linear(6, 6), first).eval(), torch.randn(shape)
    graph_module = torch.export.export(model, (x,)).run_decompositions().module()
    assert lift_functional(graph_module).changed == 4
    layers = [one for one in graph_module.modules() if isinstance(one, nn.Linear)]
    assert sorted(one.bias is None for one in layers) == [False, False, True]
    assert not any(node.op == "get_attr" for node in graph_module.graph.nodes)
    torch.testing.assert_close(graph_module(x), model(x))


class ByWeights(nn.Module):
    """Linear layers that are not called: their weights are multiplied by, each way of turning one over."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x):
        first, second, third, fourth, fifth = (layer.weight for layer in self.layers)
        x = torch.matmul(x, first.T) + self.layers[0].bias
        return x @ second.t() @ third.mT @ fourth.transpose(0, 1) @ fifth.permute(1, 0) @ fifth


def test_products_by_turned_weights_that_code_writes():
    torch.manual_seed(0)
    model, x = ByWeights().eval(), torch.randn(2, 3, 6)
    graph_module = torch.export.export(model, (x,)).module()
    assert lift_functional(graph_module).changed == 5
    assert len([one for one in graph_module.modules() if isinstance(one, nn.Linear)]) == 5
    torch.testing.assert_close(graph_module(x), model(x))


class OtherProducts(nn.Module):
    """Products that are no linear layers: by the weight itself, with another sum, scaled."""

    def __init__(self):
        super().__init__()
        self.weight, self.rows = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        aten = torch.ops.aten
        y = aten.mm.default(x, self.weight)
        y = y + aten.addmm.default(self.rows, x, aten.t.default(self.weight))
        y = y + aten.addmm.default(y, x, aten.t.default(self.weight))
        y = y + aten.addmm.default(self.rows[0], x, aten.t.default(self.weight))
        return y + aten.mm.default(x, aten.permute.default(self.weight, [0, 1]))


def test_other_products_stay():
    graph_module = fx.symbolic_trace(OtherProducts())
    assert lift_functional(graph_module).changed == 0
