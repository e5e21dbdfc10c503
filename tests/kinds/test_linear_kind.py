"""nn.Linear and Conv1D as kinds: what they claim, plan and make."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.kinds.registry import find_kind, kind_of
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.records import Choice

CONFIG = SketchConfig(progress=False)
OPTIONS = {"min_params": 0, "include": "*", "progress": False, "allow_slower": True}


def conv1d(in_features, out_features):
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(out_features, in_features)
    nn.init.normal_(layer.bias)
    return layer


def sketch(module, ratio=0.5, config=CONFIG, name="fc"):
    unit = kind_of(module).unit(name, module, energies=True)
    candidate = unit.candidates[0]
    rank = candidate.largest_rank(int(ratio * unit.dense_numbers) - unit.bias_numbers)
    stored = candidate.numbers(rank) + unit.bias_numbers
    choice = Choice(candidate.scheme, rank, (rank,), stored, candidate.error(rank))
    return *kind_of(module).sketch(name, module, choice, config), choice


def test_kinds():
    assert kind_of(nn.Linear(2, 2)).matches(nn.Linear(2, 2)) == "Linear"
    assert kind_of(conv1d(2, 2)).matches(conv1d(2, 2)) == "Conv1D"
    assert find_kind(nn.Bilinear(2, 2, 2)) is None


def test_why_not():
    assert kind_of(nn.Linear(2, 2)).why_not(nn.Linear(2, 2)) is None
    assert kind_of(conv1d(2, 2)).why_not(conv1d(2, 2)) is None
    hooked = conv1d(2, 2)
    hooked.register_forward_hook(lambda *args: None)
    assert "hooks" in kind_of(hooked).why_not(hooked)


@pytest.mark.parametrize("bias", [True, False])
def test_unit_of_a_linear_layer(bias):
    module = nn.Linear(10, 6, bias=bias)
    unit = kind_of(module).unit("fc", module, energies=True)
    assert (unit.name, unit.shape) == ("fc", (6, 10))
    assert unit.dense_numbers == sum(p.numel() for p in module.parameters())
    assert unit.bias_numbers == (6 if bias else 0)
    values = torch.linalg.svdvals(module.weight.detach().double())
    assert unit.candidates[0].error(2) == pytest.approx(float(values[2:].norm() / values.norm()))


def test_unit_of_conv1d_is_that_of_its_transpose():
    module = conv1d(10, 6)
    unit = kind_of(module).unit("fc", module, energies=True)
    assert unit.shape == (6, 10)
    weight, _ = kind_of(module).view(module).weight_and_bias()
    assert weight.shape == (6, 10)


def test_spectra_only_where_wanted_and_to_be_had():
    module = nn.Linear(10, 6)
    unit = kind_of(module).unit("fc", module, energies=False)
    assert unit.candidates[0].energies is None
    module = nn.Linear(10, 6, device="meta")
    unit = kind_of(module).unit("fc", module, energies=True)
    assert unit.candidates[0].energies is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (48, 48)])
def test_stays_within_the_choice_and_near_the_error_it_promised(dtype, shape):
    module = nn.Linear(*shape, dtype=dtype)
    layer, fitted, choice = sketch(module)
    assert type(layer) is SketchedLinear
    assert layer.stored_numbers <= choice.stored_numbers
    assert fitted.ranks == (layer.rank,)
    assert fitted.scheme == layer.form
    left, right = (factor.detach().double() for factor in layer.factors())
    weight = module.weight.detach().double()
    error = float((weight - left @ right).norm() / weight.norm())
    assert layer.rank == choice.rank
    assert choice.error * 0.999 < error < choice.error * 1.02
    assert fitted.error == pytest.approx(error, rel=0.2)  # an estimate by 16 probes


def test_conv1d_becomes_its_twin():
    module = conv1d(40, 60)
    layer, _, choice = sketch(module)
    assert type(layer) is SketchedConv1D
    assert layer.stored_numbers <= choice.stored_numbers
    x = torch.randn(3, 40)
    relative = (layer(x) - module(x)).detach().norm() / module(x).detach().norm()
    assert float(relative) < 1.5 * choice.error


def test_result_hangs_on_seed_and_name_alone():
    module = nn.Linear(60, 40)
    config = SketchConfig(method="randomized", seed=3, progress=False)
    torch.manual_seed(1)
    first, _, _ = sketch(module, config=config)
    torch.manual_seed(2)
    second, _, _ = sketch(module, config=config)
    other_name, _, _ = sketch(module, config=config, name="other")
    assert torch.equal(first.up.weight, second.up.weight)
    assert not torch.equal(first.up.weight, other_name.up.weight)


def test_mode_and_requires_grad_are_carried():
    module = nn.Linear(60, 40).eval()
    module.weight.requires_grad_(False)
    layer, _, _ = sketch(module)
    assert not layer.training
    assert not layer.down.weight.requires_grad
    assert not layer.up.weight.requires_grad
    assert layer.bias.requires_grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [nn.Linear, conv1d])
def test_sharing_gives_the_same_factors_and_an_own_bias(make, bias):
    module, other = make(60, 40), make(60, 40)
    other.weight = module.weight
    if make is nn.Linear and not bias:
        other.bias = None
    layer, _, _ = sketch(module)
    twin = kind_of(module).share(layer, other.eval())
    assert type(twin) is type(layer)
    assert twin.down.weight is layer.down.weight
    assert twin.up.weight is layer.up.weight
    assert not twin.training
    x = torch.randn(3, 60)
    wanted = layer(x) - layer.bias + (0 if other.bias is None else other.bias)
    torch.testing.assert_close(twin(x), wanted, rtol=1e-4, atol=1e-5)
    if other.bias is not None:
        assert torch.equal(twin.bias, other.bias)
        assert twin.bias is not other.bias


def test_sharing_a_trailing_slice_keeps_where_it_starts():
    module, other = nn.Linear(40, 40), nn.Linear(40, 40)
    with torch.no_grad():
        module.weight[:, :9] = module.weight[:, :1].clone()
    other.weight = module.weight
    layer, _, _ = sketch(module)
    twin = kind_of(module).share(layer, other)
    assert twin.start == layer.start == 40 - layer.rank


def test_what_can_share():
    linear, turned = nn.Linear(2, 2), conv1d(2, 2)
    assert kind_of(linear).can_share(linear, nn.Linear(2, 2))
    assert kind_of(turned).can_share(turned, conv1d(2, 2))
    assert not kind_of(linear).can_share(linear, turned)
    assert not kind_of(linear).can_share(linear, nn.Embedding(2, 2))


def test_tied_layers_of_a_model_are_planned_once_and_share():
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    model[2].weight = model[0].weight
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert small[0].up.weight is small[2].up.weight
    assert small[0].down.weight is small[2].down.weight
    assert torch.equal(small[2].bias, model[2].bias)
    assert len(pc.plan_sketch(model, 0.5, **OPTIONS).layers) == 1


def test_graph_stays_as_it_is():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(40, 40), nn.ReLU()))
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert str(small.graph) == str(model.graph)
    assert type(small.get_submodule("0")) is SketchedLinear


def test_a_forward_of_its_own_that_computes_the_same():
    module = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    for bias in (True, False):
        dense = module.FalconLinear(40, 60, bias=bias)
        small = pc.sketchify(nn.Sequential(dense, nn.Tanh()), 0.5, **OPTIONS)
        assert type(small[0]) is SketchedLinear
        x = torch.randn(3, 40)
        torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-4, atol=1e-5)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * (x @ self.weight.T) + self.bias


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.linear(x, self.weight, self.bias.relu())


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x) if self.training else x)


class Pair(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias), x


class Residual(nn.Linear):
    def forward(self, x):
        return x + nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("make", [Scaled, Counted, Noisy, Pair, Residual])
def test_what_another_forward_multiplies_by_is_sketched_and_the_forward_stays(make):
    dense, x = make(48, 48).eval(), torch.randn(3, 48)
    small = pc.sketchify(nn.Sequential(dense), 0.5, **OPTIONS)[0]
    assert type(small) is make
    assert type(small.weight.layer) is SketchedLinear
    wanted = make(48, 48).eval()
    wanted.load_state_dict(pc.densify(nn.Sequential(small))[0].state_dict())
    torch.testing.assert_close(small(x), wanted(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wanted.bias, dense.bias)


class Distances(nn.Linear):
    def forward(self, x):
        return torch.cdist(x, self.weight) + self.bias


def test_another_forward_says_why_not():
    with pytest.raises(pc.PantherError, match=r"0: Distances overrides Linear\.forward"):
        pc.sketchify(nn.Sequential(Distances(40, 60), nn.Tanh()).eval(), 0.5, **OPTIONS)


class Called(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class CalledAndEqualized(Called):
    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


@pytest.mark.parametrize("make", [Called, CalledAndEqualized])
def test_a_call_of_its_own_is_a_reason(make):
    with pytest.raises(pc.PantherError, match=f"0: {make.__name__} overrides Linear"):
        pc.sketchify(nn.Sequential(make(40, 60), nn.Tanh()).eval(), 0.5, **OPTIONS)
