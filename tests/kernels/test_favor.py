"""FAVOR+ attention against exact softmax attention and against its own definition."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from panther_compile.errors import LayerError
from panther_compile.kernels.reference import (
    favor_attention,
    favor_directions,
    favor_features,
    favor_weights,
)
from panther_compile.layers.attention import SketchedMultiheadAttention

N, H, S, D, M = 2, 3, 40, 8, 64
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _one_thread():
    """Nothing here is large enough for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def directions(features=M, head_dim=D, seed=0):
    return favor_directions(features, head_dim, torch.Generator().manual_seed(seed))


def make_qkv(queries=S, keys=S, scale=1.0, dtype=torch.float64):
    q, k = (torch.randn(N, H, length, D, dtype=dtype) * scale for length in (queries, keys))
    return q, k, torch.randn(N, H, keys, D + 1, dtype=dtype)


def softmax_attention(q, k, v, key_mask=None, causal=False):
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if key_mask is not None:
        logits = logits + key_mask[..., None, :]
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).bool().triu(1), -torch.inf)
    return logits.softmax(-1) @ v


def defined_attention(q, k, v, w, key_mask=None, causal=False):
    """The definition, feature by feature and weight by weight, without any shift."""

    def phi(x):
        x = x / x.shape[-1] ** 0.25
        return torch.exp(x @ w.mT.to(x) - (x**2).sum(-1, keepdim=True) / 2) / math.sqrt(len(w))

    weights = torch.einsum("...lm,...sm->...ls", phi(q), phi(k))
    if key_mask is not None:
        weights = weights * key_mask.exp()[..., None, :]
    if causal:
        weights = weights * torch.ones_like(weights).tril()
    return torch.einsum("...ls,...sv->...lv", weights, v) / weights.sum(-1, keepdim=True)


def padding():
    """-inf at the last ten keys of the second sequence, and an additive bias elsewhere."""
    mask = torch.randn(N, 1, S, dtype=torch.float64)
    mask[1, :, -10:] = -torch.inf
    return mask


def test_directions_are_orthogonal_in_blocks_and_normal_in_length():
    w = directions(features=3 * D - 2)
    assert w.shape == (3 * D - 2, D)
    for block in w.split(D):
        gram = block @ block.T
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-4)
    many = directions(features=8000)
    torch.testing.assert_close(many.T @ many / len(many), torch.eye(D), rtol=0, atol=0.06)
    lengths = many.norm(dim=1)
    assert float(lengths.square().mean()) == pytest.approx(D, rel=0.05)
    assert float(lengths.square().var()) == pytest.approx(2 * D, rel=0.15)  # chi-squared


def test_features_estimate_the_exponential_without_bias():
    q, k = torch.randn(2, 60, D, dtype=torch.float64) * 0.7
    w = directions(features=80_000).double()
    estimate = (favor_features(q, w) + favor_features(k, w)).exp().mean(-1)
    wanted = ((q * k).sum(-1) / math.sqrt(D)).exp()
    assert float((estimate / wanted - 1).abs().mean()) < 0.02


def test_orthogonal_directions_have_the_smaller_error():
    q, k, v = make_qkv(scale=0.3)
    wanted = softmax_attention(q, k, v)

    def error(w):
        return float((favor_attention(q, k, v, w.double()) - wanted).square().mean())

    orthogonal = sum(error(directions(16, seed=seed)) for seed in range(50))
    independent = sum(error(torch.randn(16, D)) for _ in range(50))
    assert orthogonal < 0.9 * independent


@pytest.mark.parametrize("causal", [False, True])
def test_converges_to_softmax_attention(causal):
    q, k, v = make_qkv(scale=0.3)
    mask = padding()
    wanted = softmax_attention(q, k, v, mask, causal)
    errors = []
    for features in (16, 256, 4096):
        found = favor_attention(q, k, v, directions(features).double(), mask, causal=causal)
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert errors[2] < 0.01
    assert errors[1] < errors[0] / 2  # by 1/sqrt(M), a quarter
    assert errors[2] < errors[1] / 2


@pytest.mark.parametrize("chunk", [1, 7, 40, 128])
@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_is_what_the_definition_says(causal, masked, chunk):
    q, k, v = make_qkv()
    w, mask = directions().double(), padding() if masked else None
    found = favor_attention(q, k, v, w, mask, causal=causal, chunk=chunk)
    torch.testing.assert_close(found, defined_attention(q, k, v, w, mask, causal), **TIGHT)
    weights = favor_weights(q, k, w, mask, causal=causal)
    torch.testing.assert_close(weights @ v, found, **TIGHT)
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, H, S, dtype=torch.float64))


@pytest.mark.parametrize(("queries", "keys"), [(5, 40), (40, 5), (1, 1)])
def test_causal_with_other_lengths(queries, keys):
    q, k, v = make_qkv(queries, keys)
    w = directions().double()
    found = favor_attention(q, k, v, w, causal=True, chunk=4)
    torch.testing.assert_close(found, defined_attention(q, k, v, w, causal=True), **TIGHT)


def test_causal_in_float32_over_several_chunks():
    torch.manual_seed(1)
    q, k, v = make_qkv(500, 500, dtype=torch.float32)
    w = directions(256)
    found = favor_attention(q, k, v, w, causal=True)
    wanted = defined_attention(*(x.double() for x in (q, k, v, w)), causal=True)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("causal", "scale"), [(False, 5.0), (False, 100.0), (True, 5.0), (True, 100.0)])
def test_large_logits_neither_overflow_nor_vanish(causal, scale):
    q, k, v = (x.requires_grad_() for x in make_qkv(scale=scale, dtype=torch.float32))
    out = favor_attention(q, k, v, directions(), causal=causal)
    out.sum().backward()
    for tensor in (out, q.grad, k.grad, v.grad):
        assert tensor.isfinite().all()
    if not causal or scale == 5.0:
        # The weights still sum to 1. With `causal`, one feature may come to nothing under a key
        # that is later in the same chunk; at a hundred times the usual logits, all may.
        ones = favor_attention(q, k, torch.ones_like(v), directions(), causal=causal)
        torch.testing.assert_close(ones, torch.ones_like(ones))


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_hidden_keys_have_no_influence(causal):
    q, k, v = make_qkv()
    w, mask = directions().double(), padding()
    hidden = mask.isneginf().expand(N, H, S)
    wanted = favor_attention(q, k, v, w, mask, causal=causal)
    k, v = k.clone(), v.clone()
    k[hidden], v[hidden] = 50.0, -7.0
    found = favor_attention(q, k, v, w, mask, causal=causal)
    assert torch.equal(found, wanted)
    nothing = favor_attention(q, k, v, w, torch.full_like(mask, -torch.inf), causal=causal)
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_gradients(causal):
    q, k, v = (x[:1, :1, :9].requires_grad_() for x in make_qkv())
    w, mask = directions(16).double(), torch.randn(1, 1, 9, dtype=torch.float64)
    mask[..., 4] = -torch.inf

    def run(q, k, v):
        return favor_attention(q, k, v, w, mask, causal=causal, chunk=4)

    assert torch.autograd.gradcheck(run, (q, k, v))


# In the layer


E = H * D


def make_layer(dense=None, **options):
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64) if dense is None else dense
    rank = {"q_proj": E // 2}
    return SketchedMultiheadAttention.from_dense(
        dense, rank=rank, **({"attention": "favor", "features": M} | options)
    )


def make_x(dtype=torch.float64):
    return torch.randn(N, S, E, dtype=dtype) / 2


@pytest.mark.parametrize("need_weights", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layer_converges_to_the_exact_layer(need_weights):
    exact = make_layer(attention="exact")
    x = make_x()
    mask = torch.zeros(N, S, dtype=torch.bool)
    mask[1, -10:] = True
    call = {"key_padding_mask": mask, "need_weights": need_weights}
    with torch.no_grad():
        wanted = exact(x, x, x, **call)
        found = make_layer(features=20_000)(x, x, x, **call)
    assert float((found[0] - wanted[0]).norm() / wanted[0].norm()) < 0.05
    if need_weights:
        assert found[1].shape == (N, S, S)
        assert found[1][1, :, -10:].eq(0).all()
        assert float((found[1] - wanted[1]).norm() / wanted[1].norm()) < 0.05


def test_output_does_not_depend_on_asking_for_weights():
    layer = make_layer(nn.MultiheadAttention(E, H, dropout=0.5, dtype=torch.float64))
    x = make_x().transpose(0, 1)
    for train in (False, True):
        layer.train(train)
        results = []
        for need_weights in (True, False):
            torch.manual_seed(3)
            results.append(layer(x, x, x, need_weights=need_weights)[0])
        torch.testing.assert_close(*results, **TIGHT)


def test_dropout_keeps_the_mean():
    layer = make_layer(nn.MultiheadAttention(E, H, dropout=0.3, batch_first=True))
    x = make_x(torch.float32)[:1]
    with torch.no_grad():
        mean = torch.stack([layer.train()(x, x, x)[0] for _ in range(600)]).mean(0)
        wanted = layer.eval()(x, x, x)[0]
    assert not torch.equal(layer.train()(x, x, x)[0], wanted)
    assert float((mean - wanted).norm() / wanted.norm()) < 0.05


def causal_mask(type_):
    mask = torch.ones(S, S).triu(1).bool()
    return mask if type_ == "bool" else torch.zeros(S, S, dtype=torch.float64).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("type_", ["bool", "float"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_masks_are_recognised(type_, need_weights):
    layer = make_layer()
    x = make_x()
    mask = causal_mask(type_)
    hinted = layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    plain = layer(x, x, x, attn_mask=mask, need_weights=need_weights)
    stacked = mask.expand(N * H, S, S)
    full = layer(x, x, x, attn_mask=stacked, need_weights=need_weights)
    torch.testing.assert_close(hinted, plain)
    torch.testing.assert_close(full, plain)
    later = x.clone()
    later[:, 20:] += 1.0
    moved = layer(later, later, later, attn_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(moved[0][:, :20], plain[0][:, :20], **TIGHT)
    open_mask = torch.zeros_like(mask)
    torch.testing.assert_close(layer(x, x, x, attn_mask=open_mask)[0], layer(x, x, x)[0])


def test_other_masks_are_refused():
    layer = make_layer()
    x = make_x()
    mask = causal_mask("bool")
    mask[3, 2] = True
    with pytest.raises(LayerError, match="linear-time"):
        layer(x, x, x, attn_mask=mask)
    extra = make_layer(nn.MultiheadAttention(E, H, add_zero_attn=True, dtype=torch.float64))
    extra(x, x, x)
    square = x[:, :N]
    with pytest.raises(LayerError, match="add_zero_attn"):
        extra(square, square, square, attn_mask=causal_mask("bool")[:N, :N])


def test_seed_decides_the_features():
    x = make_x()
    first, again, other = (make_layer(feature_seed=seed)(x, x, x)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    layer = make_layer(feature_seed=1)
    spec = json.loads(json.dumps(layer.sketch_spec()))
    rebuilt = SketchedMultiheadAttention(**spec, dtype=torch.float64)
    assert torch.equal(rebuilt.favor.directions, layer.favor.directions)
    rebuilt.load_state_dict(layer.state_dict())
    assert torch.equal(rebuilt(x, x, x)[0], first)
    assert layer.stored_numbers == sum(t.numel() for t in layer.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_and_autocast_compute_in_float32(dtype):
    dense = nn.MultiheadAttention(E, H, batch_first=True)
    x = make_x(torch.float32)
    wide = make_layer(dense, features=512, form="pair")
    wanted = wide(x, x, x)[0]
    half = copy.deepcopy(wide).to(dtype)(*(x.to(dtype),) * 3)
    assert half[0].dtype == dtype
    assert half[1].dtype == dtype
    assert float((half[0].float() - wanted).norm() / wanted.norm()) < 0.1
    with torch.autocast("cpu", torch.bfloat16):
        found = wide(x, x, x)[0]
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.1


def test_layer_gradients_and_meta_and_export():
    layer = make_layer(nn.MultiheadAttention(E, H, batch_first=True)).eval()
    x = make_x(torch.float32).requires_grad_()
    call = {"attn_mask": causal_mask("bool"), "is_causal": True, "need_weights": False}
    layer(x, x, x, **call)[0].sum().backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    program = torch.export.export(layer, (x.detach(),) * 3, call)
    out = layer(x, x, x, **call)[0]
    torch.testing.assert_close(program.module()(x, x, x, **call)[0], out)
    meta = SketchedMultiheadAttention(**layer.sketch_spec(), device="meta")
    assert meta(*(x.detach().to("meta"),) * 3)[0].shape == x.shape
