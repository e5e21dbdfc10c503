"""The convolution kernel, through its launcher, against float64: see tests/oracle.py for the rule."""

import oracle
import pytest
import torch
import torch.nn.functional as F

from panther_compile.kernels import plain, sketched_conv2d
from panther_compile.kernels.sketched_conv2d import sketched_conv2d_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# in, out, rank, height, width, taps, stride, padding, dilation
GEOMETRIES = {
    "3x3": (5, 18, 3, 6, 7, (3, 3), (1, 1), (1, 1), (1, 1)),
    "1x1": (33, 17, 17, 3, 4, (1, 1), (1, 1), (0, 0), (1, 1)),
    "strided": (4, 16, 16, 8, 7, (3, 3), (2, 2), (1, 1), (1, 1)),
    "uneven": (3, 7, 2, 9, 7, (3, 2), (2, 1), (0, 2), (1, 2)),
    "stem": (3, 6, 5, 12, 11, (5, 5), (2, 2), (2, 2), (1, 1)),
}

# What asynchronous copies and the widest instructions want; for a GPU.
ALIGNED = {
    "aligned": (64, 64, 32, 28, 28, (3, 3), (1, 1), (1, 1), (1, 1)),
    "aligned, wide": (128, 256, 128, 14, 14, (3, 3), (2, 2), (1, 1), (1, 1)),
}


def make(name, dtype=torch.float32, batch=2):
    inputs, outputs, rank, height, width, taps, stride, padding, dilation = (GEOMETRIES | ALIGNED)[name]
    tensors = {
        "x": torch.randn(batch, inputs, height, width),
        "down": torch.randn(rank, inputs, *taps) / (inputs * taps[0] * taps[1]) ** 0.5,
        "up": torch.randn(outputs, rank, 1, 1) / rank**0.5,
        "bias": torch.randn(outputs),
    }
    tensors = {key: one.to(device=DEVICE, dtype=dtype) for key, one in tensors.items()}
    return tensors, {"stride": stride, "padding": padding, "dilation": dilation}


def run_both(inputs, geometry, **options):
    def reference(x, down, up, bias):
        z = F.conv2d(x, down, None, **geometry)
        return {"y": F.conv2d(z, up, bias), "z": z}

    y, z = sketched_conv2d_forward(**inputs, **geometry, keep=True, **options)
    oracle.check({"y": y, "z": z}, reference(**inputs), reference(**oracle.to_double(inputs)))
    return y


@pytest.mark.parametrize("name", GEOMETRIES)
def test_forward(name):
    inputs, geometry = make(name)
    y = run_both(inputs, geometry)
    again, none = sketched_conv2d_forward(**inputs, **geometry)
    assert torch.equal(y, again)
    assert none.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_forward_in_half_types(dtype):
    run_both(*make("strided", dtype))


@pytest.mark.parametrize("name", ["3x3", "uneven"])
def test_channels_last_stays(name):
    inputs, geometry = make(name)
    inputs["x"] = inputs["x"].to(memory_format=torch.channels_last)
    assert run_both(inputs, geometry).is_contiguous(memory_format=torch.channels_last)


def test_strided_input_and_no_bias():
    inputs, geometry = make("3x3")
    around = torch.full((2, 5, 12, 14), torch.nan, device=DEVICE)
    around[:, :, ::2, 1::2] = inputs["x"]
    inputs |= {"x": around[:, :, ::2, 1::2], "bias": None}
    run_both(inputs, geometry)


def test_no_images():
    inputs, geometry = make("3x3", batch=0)
    y, z = sketched_conv2d_forward(**inputs, **geometry, keep=True)
    assert (y.shape, z.shape) == ((0, 18, 6, 7), (0, 3, 6, 7))


def test_infinity_goes_through():
    inputs, geometry = make("3x3")
    inputs["x"][0, 0, 2, 2] = torch.inf
    y, _ = sketched_conv2d_forward(**inputs, **geometry)
    wanted, _ = plain.sketched_conv2d_forward(**inputs, **geometry)
    assert torch.equal(y.isnan(), wanted.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_configuration(dtype, each_configuration):
    for _ in each_configuration(sketched_conv2d):
        for name in (*GEOMETRIES, *ALIGNED):
            run_both(*make(name, dtype))
