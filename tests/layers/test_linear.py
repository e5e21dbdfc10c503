"""SketchedLinear and SketchedConv1D against the dense layer they stand for."""

import copy
import io
import json
import pickle

import pytest
import torch
from layers.linears import EPS, FORMS, IN, LEADING, OUT, RANK, build, dense_weight, factors, reference
from torch import nn

from panther_compile.errors import ConfigError, ConfigTypeError, FactoredWeightError, RankError, WeightError
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear

# ------------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [IN - 1, IN + 1, 2 * IN])
def test_other_numbers_of_features_are_refused(form, features):
    layer, x = build(form), torch.randn(5, features, dtype=torch.float64)
    example = torch.randn(5, IN, dtype=torch.float64)
    free = torch.export.Dim.AUTO
    exported = torch.export.export(layer, (example,), dynamic_shapes=({0: free, 1: free},)).module()
    for call in (layer, exported):
        with pytest.raises((RuntimeError, AssertionError)):
            call(x)
    layer.down.register_forward_hook(lambda *_: None)  # factors that have to be called
    with pytest.raises(RuntimeError):
        layer(x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_product(form, leading, bias):
    layer = build(form, bias=bias)
    x = torch.randn(*leading, IN, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*leading, OUT)
    torch.testing.assert_close(y, reference(layer, x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", list(EPS))
def test_forward_in_every_dtype(form, dtype):
    layer = build(form, dtype=dtype)
    x = torch.randn(40, IN).to(dtype)
    y = layer(x).detach()
    assert y.dtype == dtype
    wanted = reference(layer, x)
    assert float((y.double() - wanted).norm() / wanted.norm()) < EPS[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_forward_of_inputs_that_are_not_contiguous(form):
    layer = build(form)
    x = torch.randn(IN, 3, 2, dtype=torch.float64).permute(2, 1, 0)
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("form", FORMS)
def test_wrong_width_is_an_error(form):
    with pytest.raises((RuntimeError, IndexError)):
        build(form)(torch.randn(4, 2 * IN, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    layer = build(form, in_features=7, out_features=5, rank=2)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_half_type(form, dtype):
    layer = build(form, dtype=torch.float32)
    x = torch.randn(8, IN)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    wanted = reference(layer, x)
    assert float((y.double() - wanted).norm() / wanted.norm()) < EPS[dtype]


# ----------------------------------------------------------------------------------------- building


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16), (1, 9), (9, 1)])
def test_full_rank_is_the_dense_layer_within_rounding(dtype, shape):
    dense = nn.Linear(*shape, dtype=dtype)
    layer = SketchedLinear.from_dense(dense, rank=min(shape))
    weight = dense.weight.detach().double()
    limit = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, EPS[dtype])
    assert float((dense_weight(layer) - weight).norm() / weight.norm()) < limit
    assert torch.equal(layer.bias, dense.bias)


@pytest.mark.parametrize("form", ["auto", "pivoted", "pair"])
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8, 1.0])
def test_ratio_is_respected(form, dtype, shape, ratio):
    dense = nn.Linear(*shape, dtype=dtype)
    layer = SketchedLinear.from_dense(dense, ratio=ratio, form=form)
    stored = layer.stored_numbers - shape[1]
    assert stored <= ratio * dense.weight.numel()
    assert stored == sum(t.numel() for t in layer.state_dict().values()) - shape[1]
    if form != "auto":
        assert layer.form == form


@pytest.mark.parametrize("rank", [1, 5, 20])
@pytest.mark.parametrize("form", ["pair", "pivoted"])
def test_error_is_that_of_the_truncated_svd(rank, form):
    dense = nn.Linear(40, 30, dtype=torch.float64)
    layer = SketchedLinear.from_dense(dense, rank=rank, form=form)
    values = torch.linalg.svdvals(dense.weight.detach())
    error = (dense_weight(layer) - dense.weight.detach()).norm()
    best = float(values[rank:].norm())
    assert best * (1 - 1e-6) < float(error) < best * (1 + (1e-6 if form == "pair" else 0.01))


def test_ratio_one_keeps_nearly_everything_of_a_square_weight():
    dense = nn.Linear(40, 40, dtype=torch.float64)
    layer = SketchedLinear.from_dense(dense, ratio=1.0)
    assert (layer.form, layer.rank) == ("pivoted", 39)


def test_auto_takes_a_pair_at_full_rank_only():
    left, right = factors("leading", rank=OUT)
    layer = SketchedLinear.from_factors(left, right, None, dtype=torch.float64)
    assert layer.form == "pair"
    assert torch.equal(layer.up.weight, left)
    with pytest.raises(RankError, match="wanted below full rank"):
        SketchedLinear.from_factors(left, right, None, form="pivoted", dtype=torch.float64)
    left, right = factors("leading", rank=OUT - 1)
    assert SketchedLinear.from_factors(left, right, None, dtype=torch.float64).form == "pivoted"


def test_a_rank_deficient_product_is_kept():
    left, right = factors("leading")
    right[1] = right[0]
    layer = SketchedLinear.from_factors(left, right, None, dtype=torch.float64)
    assert layer.form == "pivoted"
    torch.testing.assert_close(dense_weight(layer), left @ right)


def test_a_zero_weight_gives_zero():
    dense = nn.Linear(20, 20, bias=False)
    nn.init.zeros_(dense.weight)
    assert not dense_weight(SketchedLinear.from_dense(dense, rank=4)).any()


def test_seed_decides_the_randomized_factors():
    dense = nn.Linear(40, 40)
    made = [SketchedLinear.from_dense(dense, rank=4, method="randomized", seed=s) for s in (0, 0, 1)]
    assert torch.equal(made[0].up.weight, made[1].up.weight)
    assert not torch.equal(made[0].up.weight, made[2].up.weight)


def test_building_draws_none_of_the_users_random_numbers():
    dense = nn.Linear(40, 40)
    before = torch.get_rng_state()
    SketchedLinear.from_dense(dense, rank=4)
    SketchedLinear.from_dense(dense, rank=4, method="randomized", form="pair")
    assert torch.equal(torch.get_rng_state(), before)


def test_dense_layer_is_untouched():
    dense = nn.Linear(40, 40)
    before = copy.deepcopy(dense.state_dict())
    layer = SketchedLinear.from_dense(dense, ratio=0.5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert all(torch.equal(dense.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, ConfigError),
        ({"rank": 4, "ratio": 0.5}, ConfigError),
        ({"ratio": 0.0}, ConfigError),
        ({"ratio": 1.5}, ConfigError),
        ({"ratio": float("nan")}, ConfigError),
        ({"ratio": "half"}, ConfigTypeError),
        ({"ratio": True}, ConfigTypeError),
        ({"ratio": 1e-3}, RankError),
        ({"rank": 0}, RankError),
        ({"rank": 21}, RankError),
        ({"rank": 2.0}, RankError),
        ({"rank": True}, RankError),
        ({"rank": 4, "form": "triple"}, ConfigError),
        ({"rank": 4, "method": "magic"}, ConfigError),
    ],
)
def test_from_dense_refuses(options, error):
    with pytest.raises(error):
        SketchedLinear.from_dense(nn.Linear(20, 20), **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_from_dense_refuses_a_bad_weight(value):
    dense = nn.Linear(20, 20)
    with torch.no_grad():
        dense.weight[3, 4] = value
    with pytest.raises(WeightError):
        SketchedLinear.from_dense(dense, rank=4)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rank": 9}, RankError),
        ({"rank": 8, "form": "pivoted"}, RankError),
        ({"rank": 2, "form": "auto"}, ConfigError),
        ({"rank": 2, "form": "pivoted", "start": 3}, ConfigError),
        ({"rank": 2, "start": 6}, ConfigError),
    ],
)
def test_constructor_refuses(options, error):
    with pytest.raises(error):
        SketchedLinear(8, 12, **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weight_grad", [True, False])
@pytest.mark.parametrize("bias_grad", [True, False])
def test_mode_and_requires_grad_come_from_the_dense_layer_and_go_back(training, weight_grad, bias_grad):
    dense = nn.Linear(20, 20).train(training)
    dense.weight.requires_grad_(weight_grad)
    dense.bias.requires_grad_(bias_grad)
    layer = SketchedLinear.from_dense(dense, ratio=0.5)
    assert all(module.training is training for module in layer.modules())
    assert layer.down.weight.requires_grad is layer.up.weight.requires_grad is weight_grad
    assert layer.bias.requires_grad is bias_grad
    back = layer.to_dense()
    assert back.training is training
    assert (back.weight.requires_grad, back.bias.requires_grad) == (weight_grad, bias_grad)


# -------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_to_dense_multiplies_out(form, bias):
    layer = build(form, bias=bias)
    dense = layer.to_dense()
    assert type(dense) is nn.Linear
    assert torch.equal(dense.weight, dense_weight(layer))
    assert (dense.bias is None) is not bias
    if bias:
        assert torch.equal(dense.bias, layer.bias)
        assert dense.bias is not layer.bias


@pytest.mark.parametrize("form", FORMS)
def test_to_dense_rounds_once(form):
    layer = build(form, dtype=torch.bfloat16)
    dense = layer.to_dense()
    assert torch.equal(dense.weight, dense_weight(layer).bfloat16())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_spec_rebuilds_the_layer_through_json(form, bias):
    layer = build(form, bias=bias)
    spec = json.loads(json.dumps(layer.sketch_spec()))
    twin = SketchedLinear(**spec, dtype=torch.float64, device="meta").to_empty(device="cpu")
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(5, IN, dtype=torch.float64)
    assert torch.equal(twin(x), layer(x))
    assert twin.sketch_spec() == layer.sketch_spec()


def test_state_dict_names():
    assert list(build("leading").state_dict()) == ["down.weight", "up.weight", "up.bias"]
    assert list(build("pair", bias=False).state_dict()) == ["down.weight", "up.weight"]


@pytest.mark.parametrize("form", FORMS)
def test_deepcopy_and_pickle(form):
    layer = build(form).eval()
    layer.down.weight.requires_grad_(False)
    x = torch.randn(5, IN, dtype=torch.float64)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)
    for twin in twins:
        assert torch.equal(twin(x), layer(x))
        assert not twin.training
        assert not twin.down.weight.requires_grad
        with torch.no_grad():
            twin.up.weight.zero_()
    assert layer.up.weight.any()


@pytest.mark.parametrize("form", FORMS)
def test_moves_and_casts_like_any_module(form):
    layer = build(form)
    layer.half()
    assert layer.weight.dtype == torch.float16
    assert layer.to("meta").up.weight.is_meta


# ------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_counts(form, bias):
    layer = build(form, bias=bias)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert layer.stored_numbers == sum(t.numel() for t in tensors)
    dense = layer.to_dense()
    assert layer.dense_numbers == sum(p.numel() for p in dense.parameters())
    assert layer.dense_macs == IN * OUT
    coupled = 0 if form == "pair" else RANK * RANK
    assert layer.macs == RANK * (IN + OUT) - coupled
    assert (layer.scheme, layer.ranks) == ("pair" if form == "pair" else "pivoted", (RANK,))


def test_repr_is_faithful():
    layer = build("leading")
    share = layer.stored_numbers / (IN * OUT + OUT)
    wanted = f"in_features={IN}, out_features={OUT}, rank={RANK}, bias=True, form=pivoted, stored={share:.3f}"
    assert layer.extra_repr() == wanted
    assert "bias=False, form=pair" in repr(build("pair", bias=False))


@pytest.mark.parametrize("form", FORMS)
def test_weight_is_the_product_and_read_only(form):
    layer = build(form)
    torch.testing.assert_close(layer.weight + 0, dense_weight(layer), rtol=1e-12, atol=1e-12)
    with pytest.raises(FactoredWeightError, match="cannot be set"):
        layer.weight = nn.Parameter(torch.zeros(OUT, IN))


# ------------------------------------------------------------------------------------------- Conv1D


def conv1d(in_features, out_features, dtype=torch.float64):
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = kind(out_features, in_features).to(dtype)
    nn.init.normal_(layer.bias)
    nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("form", ["pair", "pivoted"])
@pytest.mark.parametrize("shape", [(20, 14), (14, 20)])
def test_conv1d_twin(form, shape):
    dense = conv1d(*shape)
    layer = SketchedConv1D.from_dense(dense, rank=5, form=form)
    x = torch.randn(2, 3, shape[0], dtype=torch.float64)
    linear = SketchedLinear.from_factors(*layer.factors(), layer.bias, form="pair", dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-10, atol=1e-10)
    assert (layer.nf, layer.nx) == (dense.nf, dense.nx)
    assert layer.weight.shape == dense.weight.shape
    torch.testing.assert_close(layer.weight + 0, linear.weight.t() + 0, rtol=1e-12, atol=1e-12)
    back = layer.to_dense()
    assert type(back) is type(dense)
    torch.testing.assert_close(back(x), layer(x), rtol=1e-10, atol=1e-10)


def test_conv1d_at_full_rank_is_the_dense_layer():
    dense = conv1d(14, 20)
    layer = SketchedConv1D.from_dense(dense, rank=14)
    x = torch.randn(5, 14, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-9, atol=1e-9)


def test_conv1d_to_dense_draws_no_random_numbers():
    layer = SketchedConv1D.from_dense(conv1d(14, 20), rank=4)
    before = torch.get_rng_state()
    layer.to_dense()
    assert torch.equal(torch.get_rng_state(), before)
