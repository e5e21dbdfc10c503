"""The attention kernels, through their launchers, against float64: see tests/oracle.py for the rule."""

import oracle
import pytest
import torch

from panther_compile.kernels import random_feature_attention, random_feature_attention_backward, reference
from panther_compile.kernels.random_feature_attention import favor_attention_forward
from panther_compile.kernels.random_feature_attention_backward import favor_attention_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
# Where the same launchers are called, and what is causal runs more kernels.
CAUSAL_ABOVE_ALL = pytest.mark.parametrize(
    "causal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["both", "causal"]
)
# queries, keys, head_dim, columns of v, features; chunks are of 16
SHAPES = [(37, 37, 8, 9, 17), (16, 16, 16, 16, 16), (5, 33, 8, 9, 17), (33, 5, 3, 20, 17)]
SMALL = (19, 19, 8, 9, 17)


def make(queries, keys, head_dim, columns, features, *, dtype=torch.float32, masked=True, scale=1.0, heads=1):
    batch = 2 // heads
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(batch, 1, keys)
    mask[-1, :, keys // 2 :] = -torch.inf
    inputs = {
        "q": torch.randn(batch, heads, queries, head_dim) * scale,
        "k": torch.randn(batch, heads, keys, head_dim) * scale,
        "v": torch.randn(batch, heads, keys, columns),
        "directions_MD": reference.favor_directions(features, head_dim, generator),
        "key_mask": mask.expand(batch, heads, keys) if masked else None,
    }
    return {name: None if one is None else one.to(device=DEVICE, dtype=dtype) for name, one in inputs.items()}


def run_both(inputs, causal):
    """Outputs and gradients of kernels, held to the reference."""
    found = {"y0": favor_attention_forward(*inputs.values(), causal=causal)}
    grad = torch.randn_like(found["y0"])
    grads = favor_attention_backward(grad, *inputs.values(), causal=causal)
    found |= {f"grad of {name}": one for name, one in zip("qkv", grads, strict=True)}

    def in_float32(**given):
        """Plain PyTorch as the layer has it: half types are widened."""
        wide = {
            name: None if one is None else one.to(torch.promote_types(one.dtype, torch.float32))
            for name, one in given.items()
        }
        return reference.favor_attention(**wide, causal=causal).to(given["v"].dtype)

    # The order of the features changes nothing but the rounding.
    plains = []
    for _ in range(4):
        order = torch.randperm(len(inputs["directions_MD"]), device=DEVICE)
        shuffled = {**inputs, "directions_MD": inputs["directions_MD"][order]}
        plains.append(oracle.with_gradients(in_float32, shuffled, ("q", "k", "v"), (grad,)))
    if DEVICE == "cuda" and found["y0"].dtype != torch.float32:
        with oracle.products_of_a_gpu("tf32"):
            plains.append(oracle.with_gradients(in_float32, inputs, ("q", "k", "v"), (grad,)))
    exact = oracle.with_gradients(in_float32, oracle.to_double(inputs), ("q", "k", "v"), (grad,))
    oracle.check(found, oracle.worst(plains, exact), exact)
    return found


@CAUSAL
@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SHAPES[1:])], ids=str
)
def test_kernels(shape, causal):
    run_both(make(*shape), causal)


@CAUSAL_ABOVE_ALL
def test_without_a_mask(causal):
    run_both(make(*SMALL, masked=False), causal)


@CAUSAL_ABOVE_ALL
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16], ids=["fp16", "bf16"]
)
def test_half_types(causal, dtype):
    run_both(make(*SMALL, dtype=dtype), causal)


@CAUSAL_ABOVE_ALL
def test_same_bits_again(causal):
    inputs = make(*SMALL)
    first, second = (favor_attention_forward(*inputs.values(), causal=causal) for _ in range(2))
    assert torch.equal(first, second)


@CAUSAL_ABOVE_ALL
def test_strided_inputs(causal):
    inputs = make(*SMALL, heads=2)
    for name in "qkv":
        # (N, L, H, D) seen as (N, H, L, D), amid NaN: what a projection gives.
        one = inputs[name].transpose(1, 2)
        around = torch.full((*one.shape[:-1], 2 * one.shape[-1]), torch.nan, device=DEVICE)
        around[..., ::2] = one
        inputs[name] = around[..., ::2].transpose(1, 2)
    run_both(inputs, causal)


@CAUSAL_ABOVE_ALL
def test_large_logits_stay_finite(causal):
    inputs = make(*SMALL, scale=30.0)
    y = favor_attention_forward(*inputs.values(), causal=causal)
    grads = favor_attention_backward(torch.randn_like(y), *inputs.values(), causal=causal)
    assert all(one.isfinite().all() for one in (y, *grads))


@CAUSAL_ABOVE_ALL
def test_hidden_keys_have_no_influence(causal):
    inputs = make(*SMALL)
    y = favor_attention_forward(*inputs.values(), causal=causal)
    hidden = inputs["key_mask"].isneginf()
    inputs["k"][hidden], inputs["v"][hidden] = 50.0, -7.0
    assert torch.equal(favor_attention_forward(*inputs.values(), causal=causal), y)
    grads = favor_attention_backward(torch.randn_like(y), *inputs.values(), causal=causal)
    assert grads[1][hidden].eq(0).all()
    assert grads[2][hidden].eq(0).all()


@CAUSAL_ABOVE_ALL
def test_nothing_visible_gives_zero(causal):
    inputs = make(*SMALL)
    inputs["key_mask"] = torch.full_like(inputs["v"][..., 0], -torch.inf)
    y = favor_attention_forward(*inputs.values(), causal=causal)
    grads = favor_attention_backward(torch.randn_like(y), *inputs.values(), causal=causal)
    assert all(one.eq(0).all() for one in (y, *grads))


@CAUSAL
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_empty(queries, keys, causal):
    inputs = make(queries, keys, 4, 4, 8, masked=False)
    y = favor_attention_forward(*inputs.values(), causal=causal)
    assert y.shape == (2, 1, queries, 4)
    assert y.eq(0).all()
    grads = favor_attention_backward(torch.randn_like(y), *inputs.values(), causal=causal)
    assert all(one.eq(0).all() for one in grads)


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("shape", [(300, 40, 200), (300, 64, 256), (8500, 64, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_configuration(causal, dtype, shape, each_configuration):
    """The longest has enough rows for chunks of 128."""
    length, head_dim, features = shape
    for _ in each_configuration(random_feature_attention, random_feature_attention_backward):
        run_both(make(length, length, head_dim, head_dim, features, dtype=dtype, scale=0.5), causal)


@pytest.mark.gpu
def test_the_scans_give_the_same_bits_every_time():
    """Their chunks are rewritten in place: a warp that reads too late gives other numbers now and then."""
    inputs = make(8192, 8192, 64, 64, 256, heads=2)
    grad = torch.randn_like(inputs["v"])

    def run():
        y = favor_attention_forward(*inputs.values(), causal=True)
        return [y, *favor_attention_backward(grad, *inputs.values(), causal=True)]

    first = run()
    for _ in range(50):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))
