"""Low-rank branches beside quantized layers."""

import copy

import pytest
import torch
from torch import fx, nn

import panther_compile as pc
from panther_compile.errors import (
    CheckpointMismatchError,
    ConfigError,
    ConfigTypeError,
    DataError,
    NoTargetError,
    RankError,
    SelectorError,
    TeacherMismatchError,
    WeightError,
)


class Rounded(torch.Tensor):
    """A weight in whole multiples of a scale for each row, as a quantizer has it."""

    @staticmethod
    def __new__(cls, codes, scale):
        weight = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        weight.codes, weight.scale = codes, scale
        return weight

    def __init__(self, codes, scale):
        super().__init__()

    def dequantize(self):
        return self.codes * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, meta, size, stride):
        return cls(tensors["codes"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        plain = [one.dequantize() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Coded(nn.Module):
    """A linear layer of its own class, whose weight has another shape."""

    def __init__(self, dense, bits):
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        codes, scale = codes_of(dense.weight, bits)
        self.register_buffer("qweight", codes.flatten())
        self.register_buffer("scale", scale)
        self.bias = dense.bias

    def forward(self, x):
        weight = self.qweight.view(self.out_features, self.in_features) * self.scale
        return nn.functional.linear(x, weight, self.bias)


def codes_of(weight, bits):
    weight = weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scale).round().to(torch.int8), scale


def rounded(model, bits=3, form="tensor"):
    """A copy whose linear layers are rounded, in one of three forms."""
    low = copy.deepcopy(model)
    for name, layer in list(low.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        if form == "module":
            low.set_submodule(name, Coded(layer, bits))
            continue
        weight = Rounded(*codes_of(layer.weight, bits))
        weight = weight if form == "tensor" else weight.dequantize()
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return low


class Blocks(nn.Module):
    """Residual blocks, as a transformer's feed-forward part."""

    def __init__(self, width=24, depth=2):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Blocks().eval()


def drawn(count=12, rows=64, seed=1):
    """Batches whose features are of very different size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(0, -2, 24)
    mix = torch.randn(24, 24, generator=torch.Generator().manual_seed(5))
    return [torch.randn(rows, 24, generator=generator) * sizes @ mix for _ in range(count)]


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def numbers(model):
    return {name: value.clone() for name, value in model.state_dict().items() if type(value) is torch.Tensor}


@pytest.mark.parametrize("form", ["tensor", "plain", "module"])
@pytest.mark.parametrize("data", [True, False])
def test_closer_on_held_out_data(model, form, data):
    low = rounded(model, form=form)
    before, dense_before = numbers(low), numbers(model)
    better = pc.add_residual(low, model, rank=4, data=drawn() if data else None)
    x = torch.cat(drawn(4, seed=9))
    with torch.no_grad():
        assert error(better(x), model(x)) < (0.7 if data else 0.95) * error(low(x), model(x))
    assert type(better) is Blocks
    assert isinstance(better.ups[0], pc.ResidualLinear)
    assert not any(isinstance(layer, pc.ResidualLinear) for layer in low.modules())
    for was, now in ((before, numbers(low)), (dense_before, numbers(model))):
        assert all(torch.equal(was[name], now[name]) for name in was)
    report = pc.residual_report(better)
    assert [row.rank for row in report.rows] == [4] * 4
    if data:
        assert report.kept
        assert report.after.share < report.before.share
        assert str(report).startswith("outputs: ")
    assert report.branch_bytes == sum(4 * (4 * (24 + 48) + bias + 32) for bias in (48, 24, 48, 24))
    assert report.stored_bytes == report.quantized_bytes + report.branch_bytes


@pytest.mark.parametrize("data", [True, False])
def test_exact_where_the_residual_has_the_rank(model, data):
    """A weight that lacks a matrix of rank 2: a branch of rank 2 puts it back."""
    low = copy.deepcopy(model)
    with torch.no_grad():
        for layer in low.ups:
            layer.weight.add_(torch.randn(48, 2) @ torch.randn(2, 24))
    better = pc.add_residual(low, model, rank=2, data=drawn() if data else None)
    x = torch.cat(drawn(4, seed=9))
    with torch.no_grad():
        assert error(low(x), model(x)) > 0.1
        assert error(better(x), model(x)) < (1e-3 if data else 1e-5)
        assert error(better.ups[0].weight, model.ups[0].weight) < 1e-2
    assert [row.name for row in pc.residual_report(better).rows] == ["ups.0", "ups.1"]


class Frames(nn.Module):
    """Gives more frames of some inputs, as text to speech does; once it is rounded, more still."""

    def __init__(self):
        super().__init__()
        self.lasts, self.out, self.more = nn.Linear(24, 24), nn.Linear(24, 24), 2

    def forward(self, x):
        frames = 4 + (self.more if float(x[0, 0]) > 0 else 0)
        return self.out(self.lasts(x).expand(frames, *x.shape).relu())


def test_layers_that_are_given_other_lengths_beside_rounded_weights():
    torch.manual_seed(0)
    model, data = Frames().eval(), drawn(rows=16)
    low = rounded(model)
    low.more = 3
    assert [low(x).shape == model(x).shape for x in data].count(True) == 6
    better = pc.add_residual(low, model, rank=8, data=data)
    x = torch.cat([one for one in data if float(one[0, 0]) <= 0])
    with torch.no_grad():
        assert error(better(x), model(x)) < 0.5 * error(low(x), model(x))


def test_data_is_closer_than_weights_alone(model):
    low, x = rounded(model), torch.cat(drawn(4, seed=9))
    with torch.no_grad():
        by_data, by_weights = (
            error(pc.add_residual(low, model, rank=4, data=data)(x), model(x)) for data in (drawn(), None)
        )
    assert by_data < 0.9 * by_weights


def test_budget_is_spread_by_what_layers_lose(model):
    low = rounded(model, 3)
    coarse = rounded(model, 2)
    low.ups[1] = coarse.ups[1]
    for data in (drawn(), None):
        better = pc.add_residual(low, model, budget=1.0, data=data)
        report = pc.residual_report(better)
        ranks = {row.name: row.rank for row in report.rows}
        assert ranks["ups.1"] == max(ranks.values()) > min(ranks.values())
        factors = sum(row.branch_bytes for row in report.rows)
        assert factors <= sum(row.quantized_bytes for row in report.rows)  # biases counted


def test_a_budget_for_more_than_all_ranks(model):
    for data in (drawn(), None):
        better = pc.add_residual(rounded(model, 3), model, budget=1000.0, data=data)
        layers = [module for module in better.modules() if isinstance(module, pc.ResidualLinear)]
        assert all(layer.rank == min(layer.in_features, layer.out_features) for layer in layers)


def test_a_budget_holds_the_biases_too(model):
    low = rounded(model, 3)
    stored = sum(row.quantized_bytes for row in pc.residual_report(pc.add_residual(low, model, rank=1)).rows)
    for percent in range(60, 140, 4):
        better = pc.add_residual(low, model, budget=percent / 100)
        assert pc.residual_report(better).branch_bytes <= percent / 100 * stored


def test_branches_that_bring_nothing_are_left_out():
    """Their bias makes up for the mean of what they are fitted to, and the fourth batch is its opposite."""
    model = nn.Sequential(nn.Linear(24, 24)).eval()
    low, mean = rounded(model, 4), 10 * torch.randn(24)
    data = [sign * mean + torch.randn(64, 24) for sign in (1, 1, 1, -1, 1)]
    with pytest.warns(pc.SketchQualityWarning, match="no closer"):
        same = pc.add_residual(low, model, rank=1, data=data)
    assert not any(isinstance(layer, pc.ResidualLinear) for layer in same.modules())
    assert torch.equal(same(data[0]), low(data[0]))
    report = pc.residual_report(same)
    assert not report.kept
    assert report.stored_bytes == report.quantized_bytes
    assert "left out" in str(report)


def test_inplace_and_a_model_that_is_one_layer():
    dense = nn.Linear(16, 8)
    low = rounded(nn.Sequential(dense))[0]
    better = pc.add_residual(low, dense, rank=8, inplace=True)
    assert better.quantized is low
    x = torch.randn(5, 16)
    assert error(better(x), dense(x)) < 1e-5
    model = nn.Sequential(dense)
    low = rounded(model)
    assert pc.add_residual(low, model, rank=2, data=[torch.randn(8, 16)] * 5, inplace=True) is low


def test_a_copied_graph_keeps_its_report():
    model = nn.Sequential(nn.Linear(24, 24))
    better = pc.add_residual(fx.symbolic_trace(rounded(model)), model, rank=2)
    assert pc.residual_report(copy.deepcopy(better)) == pc.residual_report(better)


def test_layers_that_no_batch_reaches_stay(model):
    model.unused = nn.Linear(24, 24)
    low = rounded(model)
    better = pc.add_residual(low, model, rank=4, data=drawn())
    assert type(better.unused) is nn.Linear
    assert {row.name: row.rank for row in pc.residual_report(better).rows}["unused"] == 0


def test_state_dict_and_branches_alone(model):
    low = rounded(model, form="module")
    better = pc.add_residual(low, model, rank=4, data=drawn())
    saved = better.state_dict()
    branches = {name: one for name, one in saved.items() if ".up." in name or ".down." in name}
    x = drawn(1)[0]
    for state in (saved, branches):
        again = pc.load_residual(low, state)
        assert torch.equal(again(x), better(x))
    again.load_state_dict(saved)
    assert torch.equal(copy.deepcopy(again)(x), better(x))
    with pytest.raises(NoTargetError):
        pc.residual_report(again)
    with pytest.raises(
        NoTargetError, match=f"; {len(low.ups) + len(low.downs)} have a branch beside them already"
    ):
        pc.add_residual(better, model, rank=1)


def test_branches_can_be_trained_and_compiled(model):
    low = rounded(model)
    better = pc.add_residual(low, model, rank=4)
    better(drawn(1)[0]).square().mean().backward()
    assert better.ups[0].up.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "options", "wanted", "says"),
    [
        (None, {}, ConfigError, "either rank= or budget="),
        (None, {"rank": 4, "budget": 0.1}, ConfigError, "either rank= or budget="),
        (None, {"budget": "0.1"}, ConfigTypeError, "a str"),
        (None, {"budget": 0.0}, ConfigError, "above 0"),
        (None, {"budget": 1e-4}, ConfigError, "holds no branch of rank 8"),
        (None, {"rank": 25}, RankError, "ups.0: rank=25, wanted an integer in 1..24"),
        (None, {"rank": 0}, RankError, "1..24"),
        (None, {"rank": 2.5}, RankError, "1..24"),
        (None, {"rank": 4, "include": "head"}, SelectorError, "include: 'head' matches none of the 4"),
        (None, {"rank": 4, "exclude": "*"}, NoTargetError, "leave no quantized layer"),
        ("same", {"rank": 4}, NoTargetError, "no linear layer of Blocks differs"),
        ("wide", {"rank": 4}, TeacherMismatchError, r"ups\.0 is .* in the dense model"),
        ("text", {"rank": 4}, ConfigTypeError, "a str, wanted an nn.Module"),
    ],
)
def test_bad_input(model, change, options, wanted, says):
    low = {"same": model, "wide": rounded(Blocks(32)), "text": "model"}.get(change, rounded(model))
    with pytest.raises(wanted, match=says):
        pc.add_residual(low, model, **options)


@pytest.mark.parametrize("place", [1, 4])
def test_a_bad_batch_is_named_by_its_place_in_the_data(model, place):
    data = drawn(6)
    data[place][0, 0] = torch.inf
    with pytest.raises(DataError, match=f"batch {place} of the data: NaN or Inf reaches"):
        pc.add_residual(rounded(model), model, rank=4, data=data)


def test_bad_state_dicts(model):
    low = rounded(model)
    saved = pc.add_residual(low, model, rank=2).state_dict()
    with pytest.raises(CheckpointMismatchError, match="no branch"):
        pc.load_residual(low, model.state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"no layer 'ups\.1'"):
        pc.load_residual(rounded(Blocks(depth=1)), saved)
    with pytest.raises(CheckpointMismatchError, match="24 inputs and 48 outputs"):
        pc.load_residual(rounded(Blocks(32)), saved)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("down.weight", lambda one: one[:1]),
        ("down.weight", lambda one: one.flatten()),
        ("up.weight", lambda one: one.flatten()),
        ("up.bias", lambda one: one[:2]),
        ("up.weight", lambda one: one.numpy()),
        ("up.bias", None),
    ],
)
def test_branches_whose_tensors_do_not_fit_together(model, part, change):
    low = rounded(model)
    saved = pc.add_residual(low, model, rank=2).state_dict()
    key = f"ups.0.{part}"
    one = saved.pop(key)
    with pytest.raises(CheckpointMismatchError, match=r"ups\.0\.up\.weight, .* wanted tensors of \(O, r\)"):
        pc.load_residual(low, saved if change is None else saved | {key: change(one)})


@pytest.mark.parametrize("form", ["tensor", "plain", "module"])
def test_branches_of_other_quantized_weights_are_refused(model, form):
    saved = pc.add_residual(rounded(model, form=form), model, rank=2).state_dict()
    torch.manual_seed(1)
    for low in (rounded(model, bits=8, form=form), rounded(Blocks(), form=form)):
        with pytest.raises(CheckpointMismatchError, match=r"weight of ups\.0 is another than the one"):
            pc.load_residual(low, saved)
    pc.load_residual(rounded(model, form="module"), saved)
    half = pc.add_residual(low := rounded(model, form="plain"), model, rank=2).bfloat16()
    assert half.ups[0].made_for.dtype is torch.int32
    pc.load_residual(low.bfloat16(), half.state_dict())
    older = {name: value for name, value in saved.items() if not name.endswith("made_for")}
    again = pc.load_residual(rounded(model, form=form), older)
    again.load_state_dict(older)


def test_a_branch_without_a_device_is_on_the_default_one() -> None:
    layer = pc.ResidualLinear(nn.Linear(6, 4), 6, 4, 2)
    assert {one.device.type for one in layer.parameters()} == {"cpu"}
    assert torch.equal(layer(torch.ones(3, 6)), layer.quantized(torch.ones(3, 6)))


class Scaled(nn.Module):
    """Whole numbers that are held as floats, beside scales."""

    def __init__(self, of):
        super().__init__()
        self.in_features, self.out_features, self.bias = of.in_features, of.out_features, of.bias
        self.scale = nn.Parameter(of.weight.detach().abs().amax(1, keepdim=True) / 3)
        self.weight = nn.Parameter((of.weight.detach() / self.scale).round())

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


class RoundedAtEachCall(nn.Linear):
    def __init__(self, of):
        super().__init__(of.in_features, of.out_features, of.bias is not None)
        self.load_state_dict(of.state_dict())

    def forward(self, x):
        scale = self.weight.abs().amax() / 3
        return nn.functional.linear(x, (self.weight / scale).round() * scale, self.bias)


@pytest.mark.parametrize("form", [Scaled, RoundedAtEachCall])
@pytest.mark.parametrize("data", [True, False])
def test_weights_that_are_not_what_a_layer_multiplies_by(model, form, data):
    low = copy.deepcopy(model)
    for name, layer in list(low.named_modules()):
        if isinstance(layer, nn.Linear):
            low.set_submodule(name, form(layer).eval())
    better = pc.add_residual(low, model, rank=16, data=drawn() if data else None)
    x = torch.cat(drawn(seed=7))
    assert error(better(x), model(x)) < 0.9 * error(low(x), model(x))


def test_a_quantized_model_in_another_dtype_than_the_dense_one(model):
    low = rounded(model, form="plain").bfloat16()
    better = pc.add_residual(low, model, rank=16)
    x = torch.cat(drawn(seed=7))
    found = better(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert error(found.float(), model(x)) < 0.9 * error(low(x.bfloat16()).float(), model(x))


def test_a_layer_in_two_places_that_a_quantizer_made_two_of():
    dense = nn.Sequential(layer := nn.Linear(24, 24), nn.ReLU(), layer)
    low = copy.deepcopy(dense)
    low[2] = copy.deepcopy(low[0])
    better = pc.add_residual(rounded(low, form="plain"), dense, rank=4)
    assert [row.name for row in pc.residual_report(better).rows] == ["0", "2"]


@pytest.mark.parametrize("which", ["quantized", "dense"])
def test_weights_that_are_not_there(model, which):
    low = rounded(model, form="plain")
    given = {"quantized": low, "dense": model} | {which: copy.deepcopy(model).to("meta")}
    with pytest.raises(WeightError, match=f"of the {which} model is on the meta device"):
        pc.add_residual(given["quantized"], given["dense"], rank=4)


def test_weights_that_are_not_finite(model):
    low = rounded(model, form="plain")
    low.ups[1].weight[0, 0] = float("nan")
    with pytest.raises(WeightError, match=r"ups.1.*NaN"):
        pc.add_residual(low, model, rank=4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layers_behind_a_mask_that_the_fast_path_packs():
    """Torch packed the rows of padded texts into a nested tensor, which fits refuse."""
    torch.manual_seed(0)
    dense = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
    quantized = copy.deepcopy(dense)
    weight = quantized.layers[0].linear1.weight
    weight.data = (weight * 8).round() / 8
    padding = torch.arange(6) >= torch.tensor([[6], [4], [3], [6]])
    data = [(torch.randn(4, 6, 32), None, padding) for _ in range(6)]
    better = pc.add_residual(quantized, dense, rank=16, data=data)
    dense_out, low, high = (model(*data[0])[~padding] for model in (dense, quantized, better))
    assert (high - dense_out).norm() < 0.9 * (low - dense_out).norm()
