"""More than 2^31 elements, where an address in 32 bits would wrap: the last rows are as those alone."""

import pytest
import torch

from panther_compile.kernels import decode_linear, reference, sketched_linear, sketched_linear_backward
from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.kernels.random_feature_attention import favor_attention_forward
from panther_compile.kernels.random_feature_attention_backward import favor_attention_backward
from panther_compile.kernels.sketched_conv2d import sketched_conv2d_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 2**31
TAIL = 128
pytestmark = pytest.mark.gpu


def draw(*shape):
    return torch.randn(shape, device=DEVICE, dtype=torch.float16)


def layer(inputs, outputs, rank, start=None):
    width = inputs if start is None else inputs - rank
    return Factors(draw(rank, width), draw(outputs, rank) / rank**0.5, draw(outputs), start)


@pytest.mark.parametrize("start", [None, 0, 2048 - 64])
def test_linear(start):
    x = draw(LIMIT // 2048 + TAIL, 2048)
    one, needs = layer(2048, 256, 64, start), Needs(down=False, up=False, bias=False)
    results = []
    for rows in (x, x[-TAIL:].clone()):
        (y,), (z,) = sketched_linear.sketched_linear_forward(rows, [one], keep=True)
        gx, _ = sketched_linear_backward.sketched_linear_backward([y], rows, [one], [z], needs=needs)
        results.append((y[-TAIL:], gx[-TAIL:]))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("rows", [1, 5])
def test_decode(rows):
    x, one = draw(rows, 512), layer(512, LIMIT // 1024 + TAIL, 1024)
    last = Factors(one.down, one.up[-TAIL:].clone(), one.bias[-TAIL:].clone(), None)
    (y,), _ = decode_linear.decode_linear_forward(x, [one])
    (wanted,), _ = decode_linear.decode_linear_forward(x, [last])
    torch.testing.assert_close(y[:, -TAIL:], wanted)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution(layout):
    x = draw(LIMIT // (64 * 56 * 56) + 1, 64, 56, 56).contiguous(memory_format=layout)
    down, up = draw(16, 64, 3, 3) / 24, draw(64, 16, 1, 1) / 4
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    y, _ = sketched_conv2d_forward(x, down, up, None, **geometry)
    wanted, _ = sketched_conv2d_forward(x[-1:].clone(), down, up, None, **geometry)
    torch.testing.assert_close(y[-1:], wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    heads, length, width, features = 16, 4096, 64, 32
    w = reference.favor_directions(features, width, torch.Generator().manual_seed(0)).to(DEVICE)
    batch = LIMIT // (heads * length * width) + 1
    q, k, v = (0.5 * draw(batch, heads, length, width) for _ in range(3))
    results = []
    for inputs in ((q, k, v), (q[-1:].clone(), k[-1:].clone(), v[-1:].clone())):
        y = favor_attention_forward(*inputs, w.half(), None, causal=causal)
        grads = favor_attention_backward(y, *inputs, w.half(), None, causal=causal)
        results.append([one[-1:] for one in (y, *grads)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)  # other chunks, other sums
