"""SketchedMultiheadAttention against nn.MultiheadAttention.

The dense layers have weights of rank 5, so that a sketch of rank 5 is exact and every option can be
compared to rounding.
"""

import copy
import itertools
import json
import pickle
import warnings

import pytest
import torch
from thinned import thinned
from torch import nn

from panther_compile.errors import ConfigError, LayerError, RankError, WeightError
from panther_compile.layers.attention import (
    PROJECTIONS,
    SketchedMultiheadAttention,
    projection_weights,
)
from panther_compile.layers.linear import SketchedLinear

N, L, S, E, H, RANK = 2, 5, 7, 24, 4, 5
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def _one_thread():
    """Nothing here is large enough for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_dense(dtype=torch.float64, heads=H, **options):
    layer = nn.MultiheadAttention(E, heads, dtype=dtype, **options)
    with torch.no_grad():
        for weight, bias in projection_weights(layer).values():
            left = torch.randn(E, RANK, dtype=torch.float64)
            right = torch.randn(RANK, weight.shape[1], dtype=torch.float64)
            weight.copy_(left @ right / RANK**0.5 * 0.3)
            if bias is not None:
                bias.copy_(torch.randn_like(bias) * 0.3)
    return layer


def sketch(dense, **options):
    layer = SketchedMultiheadAttention.from_dense(dense, rank=RANK, **options)
    assert all(isinstance(getattr(layer, name), SketchedLinear) for name in PROJECTIONS)
    return layer


def make_inputs(layer, *, batched=True, self_attention=False, dtype=torch.float64, batch=N):
    def tensor(length, width):
        shape = (length, width) if not batched else (batch, length, width)
        x = torch.randn(shape, dtype=dtype)
        return x.transpose(0, 1).contiguous() if batched and not layer.batch_first else x

    if self_attention:
        return (tensor(S, E),) * 3
    return tensor(L, E), tensor(S, layer.kdim), tensor(S, layer.vdim)


def random_mask(*shape):
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False  # something is always visible
    return mask


def as_float(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def make_masks(kind, length, keys, batched):
    """The masks of a call, by a name like 'padding-bool attn3-float'."""
    masks = {}
    for word in kind.split():
        what, _, type_ = word.partition("-")
        if what == "causal":
            masks["attn_mask"] = torch.ones(length, keys).triu(1).bool()
            masks["is_causal"] = True
            continue
        batch = N if batched else 1
        shape = {"padding": (N, keys), "attn2": (length, keys), "attn3": (batch * H, length, keys)}
        mask = random_mask(*shape[what])
        if what == "padding" and not batched:
            mask = mask[0]
        if type_ == "float":
            mask = as_float(mask) + torch.randn(mask.shape, dtype=torch.float64)
        masks["key_padding_mask" if what == "padding" else "attn_mask"] = mask
    return masks


def run(layer, inputs, seed=0, **call):
    torch.manual_seed(seed)
    return layer(*inputs, **call)


def assert_same(dense, sketched, inputs, *, grad=True, **call):
    results = []
    for layer in (dense, sketched):
        leaves = {id(x): x.clone().requires_grad_(grad) for x in inputs}
        out, weights = run(layer, [leaves[id(x)] for x in inputs], **call)
        grads = []
        if grad:
            loss = out.sin().sum() + (0 if weights is None else weights.cos().sum())
            learned = [p for p in (layer.bias_k, layer.bias_v) if p is not None]
            grads = list(torch.autograd.grad(loss, [*leaves.values(), *learned]))
        results.append((out, weights, grads))
    (out, weights, grads), (out2, weights2, grads2) = results
    assert out.shape == out2.shape
    assert (weights is None) == (weights2 is None)
    torch.testing.assert_close(out2, out, **TIGHT)
    torch.testing.assert_close(grads2, grads, **TIGHT)
    if weights is not None:
        torch.testing.assert_close(weights2, weights, **TIGHT)


LAYERS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False, "batch_first": True},
    "kdim_vdim": {"kdim": 20, "vdim": 12},
    "kdim_only": {"kdim": 20, "batch_first": True, "bias": False},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero_attn": {"add_zero_attn": True},
    "both_extra": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 16},
}
MASKS = [
    "",
    "padding-bool",
    "padding-float",
    "attn2-bool",
    "attn2-float",
    "attn3-bool",
    "attn3-float",
    "padding-bool attn2-bool",
    "padding-float attn3-float",
    "padding-bool attn3-bool",
    "causal",
    "causal padding-bool",
]
WEIGHTS = [
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
]


@pytest.mark.parametrize("masks", thinned(MASKS, 5))  # none, one of each shape
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_equals_dense(options, masks):
    dense = make_dense(**options)
    sketched = sketch(dense)
    calls = [(True, False), (False, False)]
    if dense.kdim == dense.vdim == E:
        calls.append((True, True))
    for (batched, self_attention), weights in itertools.product(calls, WEIGHTS):
        inputs = make_inputs(dense, batched=batched, self_attention=self_attention)
        call = make_masks(masks, S if self_attention else L, S, batched) | weights
        assert_same(dense.train(), sketched.train(), inputs, **call)
        with torch.no_grad():  # where torch takes its fast path
            assert_same(dense.eval(), sketched.eval(), inputs, grad=False, **call)


@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["fused", "weights"])
@pytest.mark.parametrize("options", [LAYERS["plain"], LAYERS["both_extra"]], ids=["plain", "extra"])
def test_dropout_draws_what_torch_draws(options, weights):
    dense = make_dense(dropout=0.4, **options)
    sketched = sketch(dense)
    inputs = make_inputs(dense)
    assert_same(dense, sketched, inputs, key_padding_mask=random_mask(N, S), **weights)
    first, second = (run(sketched, inputs, seed=seed)[0] for seed in (0, 1))
    assert not torch.equal(first, second)
    dense.eval(), sketched.eval()
    assert_same(dense, sketched, inputs, **weights)
    assert torch.equal(run(sketched, inputs, seed=0)[0], run(sketched, inputs, seed=1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["fused", "weights"])
def test_dtypes(dtype, weights):
    exact = make_dense(batch_first=True)
    inputs = make_inputs(exact)
    weights = weights | {"key_padding_mask": random_mask(N, S)}
    wanted = exact(*inputs, **weights)[0].detach()
    dense = copy.deepcopy(exact).to(dtype)
    sketched = sketch(dense, form="pair")
    results = [layer(*(x.to(dtype) for x in inputs), **weights)[0] for layer in (dense, sketched)]
    assert all(result.dtype == dtype for result in results)
    dense_error, error = (
        float((result.detach().double() - wanted).norm() / wanted.norm()) for result in results
    )
    assert error <= 3 * dense_error + torch.finfo(dtype).eps


@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["fused", "weights"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}], ids=["plain", "bias_kv"])
def test_autocast(options, weights):
    dense = make_dense(torch.float32, **options)
    sketched = sketch(dense, form="pair")
    inputs = make_inputs(dense, dtype=torch.float32)
    call = weights | {"key_padding_mask": random_mask(N, S)}
    exact = dense(*inputs, **call)[0]
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = (layer(*inputs, **call)[0] for layer in (dense, sketched))
    assert found.dtype == wanted.dtype
    assert (found - exact).norm() <= 3 * (wanted - exact).norm()


@pytest.mark.parametrize("weights", WEIGHTS, ids=["fused", "average", "heads"])
def test_empty_batch(weights):
    layer = sketch(make_dense(batch_first=True))
    inputs = make_inputs(layer, batch=0)
    for masks in ({}, {"key_padding_mask": torch.zeros(0, S, dtype=torch.bool)}):
        out, found = layer(*inputs, **weights, **masks)
        assert out.shape == (0, L, E)
        if weights["need_weights"]:
            heads = () if weights.get("average_attn_weights", True) else (H,)
            assert found.shape == (0, *heads, L, S)


def test_rows_without_a_visible_key():
    dense = make_dense(batch_first=True)
    sketched = sketch(dense)
    inputs = make_inputs(dense)
    mask = torch.zeros(N, S, dtype=torch.bool)
    mask[1] = True
    for weights in WEIGHTS:
        wanted, found = (layer(*inputs, key_padding_mask=mask, **weights) for layer in (dense, sketched))
        torch.testing.assert_close(found, wanted, equal_nan=True, **TIGHT)
    out, _ = sketched(*inputs, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(out[1], sketched.out_proj.bias.expand(L, E))


WRONG = {
    "4-D query": {"query": (1, N, L, E)},
    "2-D key": {"key": (S, E)},
    "embedding": {"query": (N, L, E + 1)},
    "key and value": {"value": (N, S + 1, E)},
    "batch": {"query": (1, L, E)},
    "key width": {"key": (N, S, 2 * E), "value": (N, S, 2 * E)},
    "padding 1-D": {"key_padding_mask": (S,)},
    "padding batch": {"key_padding_mask": (N + 1, S)},
    "padding length": {"key_padding_mask": (N, S + 1)},
    "attn 4-D": {"attn_mask": (1, 1, L, S)},
    "attn 2-D": {"attn_mask": (L, S + 1)},
    "attn 3-D": {"attn_mask": (N, L, S)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_shapes_raise_as_in_torch(wrong):
    dense = make_dense(batch_first=True)
    sketched = sketch(dense)
    shapes = {"query": (N, L, E), "key": (N, S, E), "value": (N, S, E)} | wrong
    tensors = {
        name: torch.zeros(shape, dtype=torch.bool if "mask" in name else torch.float64)
        for name, shape in shapes.items()
    }
    errors = []
    for layer in (dense, sketched):
        with pytest.raises((AssertionError, RuntimeError)) as raised:
            layer(**tensors)
        errors.append(raised.type)
    assert errors[0] is errors[1]


def test_causal_hint_needs_a_mask_and_wrong_dtypes_are_refused():
    dense = make_dense()
    for layer in (dense, sketch(dense)):
        inputs = make_inputs(dense)
        with pytest.raises(RuntimeError, match="attn_mask"):
            layer(*inputs, is_causal=True)
        with pytest.raises(AssertionError, match="key_padding_mask"):
            layer(*inputs, key_padding_mask=torch.zeros(N, S, dtype=torch.int64))
        with pytest.warns(UserWarning, match="mismatched"):
            layer(
                *inputs,
                key_padding_mask=torch.zeros(N, S, dtype=torch.bool),
                attn_mask=torch.zeros(L, S, dtype=torch.float64),
            )


def test_nested_input_is_refused():
    layer = sketch(make_dense(torch.float32, batch_first=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(4, E)])
    with pytest.raises(LayerError, match="use_nested_tensor"):
        layer(x, x, x)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_equals_its_dense_form(options, dtype):
    dense = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    sketched = SketchedMultiheadAttention.from_dense(dense, rank=7).eval()
    again = sketched.to_dense()
    assert type(again) is nn.MultiheadAttention
    assert not again.training
    inputs = make_inputs(dense, dtype=dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else TIGHT
    torch.testing.assert_close(sketched(*inputs), again(*inputs), **tolerance)
    with torch.no_grad():
        assert (sketched(*inputs)[0] - dense.eval()(*inputs)[0]).norm() > 1e-3


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_spec_rebuilds_the_layer(options):
    dense = make_dense(dropout=0.1, **options)
    rank = {"q_proj": RANK, "out_proj": 3}
    sketched = SketchedMultiheadAttention.from_dense(dense, rank=rank, form="pair").eval()
    spec = json.loads(json.dumps(sketched.sketch_spec()))
    assert spec["k_proj"] is None
    rebuilt = SketchedMultiheadAttention(**spec, dtype=torch.float64).eval()
    assert rebuilt.sketch_spec() == sketched.sketch_spec()
    rebuilt.load_state_dict(sketched.state_dict())
    inputs = make_inputs(dense)
    assert torch.equal(rebuilt(*inputs)[0], sketched(*inputs)[0])
    meta = SketchedMultiheadAttention(**spec, device="meta", dtype=torch.float64).eval()
    assert all(tensor.is_meta for tensor in [*meta.parameters(), *meta.buffers()])
    assert meta(*(x.to("meta") for x in inputs))[0].shape == inputs[0].shape
    meta.load_state_dict(sketched.state_dict(), assign=True)
    assert torch.equal(meta(*inputs)[0], sketched(*inputs)[0])


@pytest.mark.parametrize("attention", ["exact", "favor"])
def test_deepcopy_and_pickle(attention):
    dense = make_dense(batch_first=True, add_bias_kv=True)
    sketched = sketch(dense, attention=attention, features=16)
    inputs = make_inputs(dense)
    wanted = sketched(*inputs)[0]
    for twin in (copy.deepcopy(sketched), pickle.loads(pickle.dumps(sketched))):
        assert torch.equal(twin(*inputs)[0], wanted)
        with torch.no_grad():
            twin.bias_k.add_(1.0)
    assert torch.equal(sketched(*inputs)[0], wanted)


def test_from_dense_leaves_the_dense_layer_alone():
    dense = make_dense()
    before = copy.deepcopy(dense.state_dict())
    rank = {"q_proj": RANK}
    sketched = SketchedMultiheadAttention.from_dense(dense, rank=rank)
    with torch.no_grad():
        for tensor in sketched.parameters():
            tensor.add_(1.0)
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, before[name])
    # The projections left dense own their numbers: no view of in_proj_weight is saved three times.
    weight = sketched.k_proj.weight
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def test_modes_are_taken_over():
    dense = make_dense().eval().requires_grad_(False)
    sketched = SketchedMultiheadAttention.from_dense(dense, rank={"q_proj": RANK})
    assert not any(module.training for module in sketched.modules())
    assert not any(parameter.requires_grad for parameter in sketched.parameters())
    again = sketched.to_dense()
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_ratio_bounds_each_weight_and_falls_back_to_dense():
    dense = make_dense(torch.float32, kdim=20)
    for ratio in (0.3, 0.5, 0.8):
        sketched = SketchedMultiheadAttention.from_dense(dense, ratio=ratio)
        for name, (weight, _) in projection_weights(dense).items():
            stored = getattr(sketched, name).stored_numbers - E
            assert stored <= ratio * weight.numel()
    kept = SketchedMultiheadAttention.from_dense(dense, rank=20, form="pair")
    assert all(type(getattr(kept, name)) is nn.Linear for name in PROJECTIONS)
    inputs = make_inputs(dense, dtype=torch.float32)
    torch.testing.assert_close(kept(*inputs), dense(*inputs))


def test_wrong_options_are_refused():
    dense = make_dense()
    from_dense = SketchedMultiheadAttention.from_dense
    with pytest.raises(ConfigError, match="either"):
        from_dense(dense)
    with pytest.raises(ConfigError, match="q_porj"):
        from_dense(dense, rank={"q_porj": 3})
    with pytest.raises(ConfigError, match="attention"):
        from_dense(dense, rank=3, attention="linear")
    with pytest.raises(ConfigError, match="features"):
        from_dense(dense, rank=3, attention="favor", features=0)
    with pytest.raises(RankError):
        from_dense(dense, rank=E + 1)
    with torch.no_grad():
        dense.in_proj_weight[E] = torch.nan
    with pytest.raises(WeightError):
        from_dense(dense, rank=3)
    from_dense(dense, rank={"q_proj": 3})
    with pytest.raises(LayerError, match="multiple"):
        SketchedMultiheadAttention(E, 5)
    parts = {name: nn.Linear(E, E) for name in PROJECTIONS}
    with pytest.raises(LayerError, match="k_proj"):
        SketchedMultiheadAttention.from_projections(
            nn.MultiheadAttention(E, H), parts | {"k_proj": nn.Linear(E + 1, E)}
        )
    with pytest.raises(LayerError, match="bias"):
        SketchedMultiheadAttention.from_projections(
            nn.MultiheadAttention(E, H), parts | {"v_proj": nn.Linear(E, E, bias=False)}
        )


def test_from_projections_takes_modules_as_they_are():
    dense = make_dense(torch.float32, batch_first=True).eval()
    parts = {name: nn.Linear(E, E) for name in PROJECTIONS}
    for name, (weight, bias) in projection_weights(dense).items():
        parts[name].load_state_dict({"weight": weight, "bias": bias})
    state = torch.get_rng_state()
    layer = SketchedMultiheadAttention.from_projections(dense, parts)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(getattr(layer, name) is parts[name] for name in PROJECTIONS)
    inputs = make_inputs(dense, dtype=torch.float32)
    torch.testing.assert_close(layer(*inputs), dense(*inputs))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_attributes_of_the_dense_layer(options):
    dense = make_dense(**options)
    sketched = sketch(dense)
    names = ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first")
    for name in (*names, "add_zero_attn"):
        assert getattr(sketched, name) == getattr(dense, name), name
    assert not sketched._qkv_same_embed_dim
    for name in ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"):
        wanted, found = getattr(dense, name), getattr(sketched, name)
        assert (wanted is None) == (found is None), name
        if wanted is not None:
            assert found.shape == wanted.shape
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found + 0, wanted + 0, **TIGHT)
    for name, (weight, bias) in projection_weights(dense).items():
        projection = getattr(sketched, name)
        torch.testing.assert_close(projection.weight + 0, weight + 0, **TIGHT)
        assert bias is None or torch.equal(projection.bias, bias)
        if name != "out_proj":
            assert getattr(sketched, f"{name}_weight").shape == weight.shape


def test_repr_shows_what_is_there():
    dense = make_dense(add_bias_kv=True)
    sketched = sketch(dense, attention="favor", features=8, feature_seed=3)
    text = sketched.extra_repr()
    for part in ("embed_dim=24", "num_heads=4", "add_bias_kv=True", "features=8", "feature_seed=3"):
        assert part in text
    share = sketched.stored_numbers / sum(p.numel() for p in dense.parameters())
    assert f"stored={share:.3f}" in text


def test_export_and_compile():
    dense = make_dense(torch.float32, batch_first=True).eval()
    sketched = sketch(dense)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = sketched

        def forward(self, x, mask):
            return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]

    x, mask = torch.randn(N, S, E), random_mask(N, S)
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2)
    program = torch.export.export(
        Block(), (x, mask), dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length})
    )
    x, mask = torch.randn(3, 11, E), random_mask(3, 11)
    wanted = dense(x, x, x, key_padding_mask=mask)[0]
    torch.testing.assert_close(program.module()(x, mask), wanted, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(Block(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), wanted, rtol=1e-4, atol=1e-5)
