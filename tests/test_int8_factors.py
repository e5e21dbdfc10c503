"""prepare_int8: the same function in factors that int8 costs little."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import panther_compile as pc
from panther_compile.errors import WeightError
from panther_compile.factorization.balance import balanced, pays_in_int8
from panther_compile.int8_factors import pair_kernels, rounded_layers
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.narrow import NarrowLinear


def rounded(tensor, axis=None):
    """Symmetric int8, a scale for the tensor or for each row."""
    largest = tensor.abs().max() if axis is None else tensor.abs().amax(axis, keepdim=True)
    scale = largest / 127
    return (tensor / scale).round() * scale


@torch.no_grad()
def int8_error(layer, x):
    """Relative error of a sketched layer whose weights and activations are rounded."""
    wanted = layer(x)
    if layer.form == "pair":
        latent = rounded(x) @ rounded(layer.down.weight, 1).T
    else:
        pivots = x[:, layer.start : layer.start + layer.rank]
        others = torch.cat([x[:, : layer.start], x[:, layer.start + layer.rank :]], 1)
        latent = pivots + rounded(others) @ rounded(layer.down.weight, 1).T
    found = rounded(latent) @ rounded(layer.up.weight, 1).T + layer.bias
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def inputs():
    """Correlated features, one of them large, as behind a LayerNorm of a transformer."""
    torch.manual_seed(0)
    directions = torch.linalg.qr(torch.randn(96, 96)).Q
    x = torch.randn(512, 96) * torch.linspace(0.02, 1, 96) ** 2 @ directions
    x[:, 5] *= 4
    return x / x.std()


@pytest.fixture
def small(sketched):
    return copy.deepcopy(sketched)


@pytest.fixture(scope="module")
def sketched(inputs):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 1024), nn.ReLU(), nn.Linear(1024, 96)).eval()
    return pc.sketchify(model, 0.5, data=inputs.split(64), min_params=0, allow_slower=True, narrow=False)


def test_balanced_factors_give_the_same_matrix_and_even_latents(inputs):
    left, right = torch.randn(40, 16).double(), torch.randn(16, 96).double()
    covariance = (inputs.T @ inputs).double() / len(inputs)
    new_left, new_right = balanced(left, right, covariance)
    assert torch.allclose(new_left @ new_right, left @ right, atol=1e-9)
    # What a feature is rounded by, squared, and what comes out of it.
    power = (new_right @ covariance @ new_right.T).diagonal()
    sent = new_left.square().sum(0)
    assert torch.allclose(power, sent, rtol=1e-6)
    before = (right @ covariance @ right.T).diagonal()
    assert power.max() / power.mean() < before.max() / before.mean()


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_a_matrix_of_lower_rank_is_balanced(rank):
    left, right = torch.randn(20, rank).double(), torch.randn(rank, 30).double()
    left, right = torch.cat([left, left], 1), torch.cat([right, right], 0)  # half of it says nothing new
    found = torch.linalg.multi_dot(balanced(left, right))
    assert torch.allclose(found, left @ right, atol=1e-8)


def test_outputs_stay_and_int8_costs_less(small, inputs):
    even = pc.prepare_int8(small, inputs.split(64))
    assert torch.allclose(even(inputs), small(inputs), atol=1e-4)
    pairs = rounded_layers(even)
    assert [layer.form for layer in pairs] == ["pair"] * len(pairs)
    before, after = next(
        (layer, even.get_submodule(name))
        for name, layer in small.named_modules()
        if isinstance(layer, SketchedLinear)
    )
    assert isinstance(after, SketchedLinear)
    assert int8_error(after, inputs) < 0.7 * int8_error(before, inputs)


def test_the_model_given_is_untouched(small, inputs):
    state = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    pc.prepare_int8(small, inputs.split(64))
    assert [layer.form for layer in rounded_layers(small)] == ["pivoted"] * len(rounded_layers(small))
    assert all(torch.equal(tensor, small.state_dict()[name]) for name, tensor in state.items())


def test_a_rank_that_does_not_pay_is_multiplied_out(inputs):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96)).eval()
    small = pc.sketchify(model, 0.9, include="*", min_params=0, allow_slower=True)
    even = pc.prepare_int8(small)
    assert not rounded_layers(even)
    assert torch.allclose(even(inputs), small(inputs), atol=1e-5)


def test_factors_of_narrow_layers(inputs):
    torch.manual_seed(3)
    inner = SketchedLinear.from_dense(nn.Linear(96, 800), rank=24)
    slow = SketchedLinear.from_dense(nn.Linear(800, 96), rank=90)
    model = nn.Sequential(
        pc.NarrowLinear.around(inner, nn.Linear(96, 1024), side="out", heads=1, padded=False),
        nn.ReLU(),
        pc.NarrowLinear.around(slow, nn.Linear(1024, 96), side="in", heads=1, padded=False),
    ).eval()
    even = pc.prepare_int8(model, [inputs])
    assert torch.allclose(even(inputs), model(inputs), atol=1e-4)
    assert even[0].narrow.form == "pair"
    assert type(even[2].narrow) is nn.Linear
    assert (even[0].ranks, even[2].ranks) == ((800, 24), (800,))
    assert even[2].sketch_spec()["factors"] is None


def test_what_pays():
    assert pays_in_int8(384, 1536, 152)  # 1.6 times as fast, measured
    assert not pays_in_int8(384, 384, 160)  # as fast as dense at 144, measured


def test_a_shared_input_factor_stays_shared(inputs):
    model = nn.ModuleList(nn.Linear(96, 1024) for _ in range(2))
    first, second = (SketchedLinear.from_dense(layer, rank=16) for layer in model)
    second.down = first.down

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            return self.first(x) + self.second(x)

    both = Both().eval()
    second.start = first.start
    even = pc.prepare_int8(both, [inputs])
    assert even.first.down is even.second.down
    assert torch.allclose(even(inputs), both(inputs), atol=1e-4)


def test_inplace_and_saved(small, inputs, tmp_path):
    wanted = small(inputs)
    assert pc.prepare_int8(small, inputs.split(64), inplace=True) is small
    assert torch.allclose(small(inputs), wanted, atol=1e-4)
    pc.save_sketched(small, tmp_path / "saved")
    fresh = nn.Sequential(nn.Linear(96, 1024), nn.ReLU(), nn.Linear(1024, 96))
    assert torch.equal(pc.load_sketched(fresh, tmp_path / "saved").eval()(inputs), small(inputs))
    assert "pair" in str(pc.sketch_report(small))


def test_errors(small, inputs):
    with pytest.raises(pc.errors.NoTargetError, match="no sketched layer"):
        pc.prepare_int8(nn.Linear(4, 4))
    with pytest.raises(pc.errors.DataError, match="NaN"):
        pc.prepare_int8(small, [inputs * float("nan")])
    with pytest.raises(pc.errors.ConfigTypeError):
        pc.prepare_int8("model")


def test_kernels_of_one_pixel_become_pairs_or_dense():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(256, 256, 1, stride=2, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 1)
    ).eval()
    options = {"include": "*", "min_params": 0, "allow_slower": True, "narrow": False, "progress": False}
    small = pc.sketchify(model, {"0": 0.3, "2": 0.9}, synthetic=False, **options)
    assert [layer.scheme for layer in (small[0], small[2])] == ["pivoted"] * 2
    paired = pair_kernels(small)
    assert paired[0].scheme == "channel"
    assert paired[0].ranks == small[0].ranks
    assert type(paired[2]) is nn.Conv2d
    x = torch.randn(2, 256, 7, 7)
    torch.testing.assert_close(paired(x), small(x), rtol=0, atol=1e-5)
    assert small[0].scheme == "pivoted"
    assert pair_kernels(model) is model


def test_weights_that_were_made_by_something_are_loaded_as_they_are(tmp_path):
    def build():
        model = nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 64)
        )
        weight_norm(model[2])
        return model.eval()

    options = {"narrow": False, "min_params": 0, "allow_slower": True}
    small = pc.prepare_int8(pc.sketchify(build(), {"0": 0.4, "2": 0.9}, **options))
    assert type(small[2]) is nn.Linear  # no faster as two products
    pc.save_sketched(small, tmp_path)
    skeleton = build()
    again = pc.load_sketched(skeleton, tmp_path)
    x = torch.randn(3, 128)
    assert torch.equal(again(x), small(x))
    assert parametrize.is_parametrized(skeleton[2])


def test_matrices_that_are_dense_again_are_a_parameter_again():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 64, 64) / 8)

        def forward(self, x):
            return torch.bmm(x, self.w)

    torch.manual_seed(0)
    model = Mixed().eval()
    small = pc.sketchify(model, 0.5, min_params=0, allow_slower=True, include="*")
    ready = pc.prepare_int8(small)
    assert list(ready.state_dict()) == ["w"]
    x = torch.randn(4, 3, 64)
    torch.testing.assert_close(ready(x), small(x))


def test_where_features_alone_were_left_out_there_is_nothing_to_do():
    layer = NarrowLinear(8, 4, 6, side="in")
    model = nn.Sequential(layer).eval()
    ready = pc.prepare_int8(model)
    x = torch.randn(3, 8)
    assert torch.equal(ready(x), model(x))


@pytest.mark.parametrize(
    ("value", "says"), [("nan", r"0\.down\.weight holds 1 NaN or Inf"), ("meta", "meta device")]
)
def test_factors_that_are_not_numbers(small, value, says):
    if value == "meta":
        small = small.to("meta")
    else:
        small[0].down.weight.data[0, 0] = float("nan")
    with pytest.raises(WeightError, match=says):
        pc.prepare_int8(small)
