"""Which implementation serves a shape on a GPU, and what PANTHER_COMPILE_KERNEL changes."""

import pytest
import torch

from panther_compile.errors import OpError
from panther_compile.kernels import dispatch
from panther_compile.ops import Factors, has_kernel
from panther_compile.ops.checks import kernel_mode


def test_an_unknown_kernel_mode_is_refused(monkeypatch):
    assert kernel_mode() == "auto"
    monkeypatch.setenv("PANTHER_COMPILE_KERNEL", "cuda")
    with pytest.raises(OpError, match="PANTHER_COMPILE_KERNEL='cuda'"):
        kernel_mode()


# Which implementation, on a GPU

A100 = dispatch.DeviceClass(200.0, 100.0, 12.5, 3456)


def choose(rows=8192, rank=64, dtype=torch.float16, layers=1, forced="auto", extra=False):
    return dispatch.choose_linear(
        A100,
        dtype,
        "ieee",
        rows=rows,
        ranks=(rank,) * layers,
        features=(1024, 1024 * layers),
        extra=extra,
        forced=forced,
    )


def test_dispatch_of_linear_layers():
    assert choose() == "fused"
    assert choose(rank=512) == "torch"  # bound by arithmetic
    assert choose(rows=512) == "torch"  # too few programs
    assert choose(dtype=torch.float32) == "torch"
    assert choose(dtype=torch.float64, forced="triton") == "torch"
    assert choose(rows=4) == "torch"  # two launches either way
    assert choose(rows=4, extra=True) == choose(rows=1, layers=3) == "decode"
    assert choose(rows=4, forced="triton") == "decode"
    assert choose(rank=512, forced="triton") == "fused"
    assert choose(rank=513, forced="triton") == "torch"
    assert choose(forced="torch") == choose(rows=4, layers=3, forced="torch") == "torch"


def test_a_cpu_has_no_kernel(monkeypatch):
    monkeypatch.setenv("PANTHER_COMPILE_KERNEL", "triton")
    layer = Factors(torch.randn(3, 7), torch.randn(5, 3), None, None)
    assert not has_kernel(torch.randn(64, 7), [layer])


def test_dispatch_of_convolutions_and_attention():
    sizes = {"positions": 10**5, "channels": (256, 256), "forced": "auto"}
    assert dispatch.choose_conv2d(A100, torch.float16, "ieee", rank=16, taps=9, **sizes) == "fused"
    assert dispatch.choose_conv2d(A100, torch.float16, "ieee", rank=128, taps=9, **sizes) == "torch"
    forced = {**sizes, "forced": "triton"}
    assert dispatch.choose_conv2d(A100, torch.float16, "ieee", rank=128, taps=9, **forced) == "fused"
    assert dispatch.choose_attention(torch.float16, head_dim=64, columns=64, forced="auto") == "fused"
    assert dispatch.choose_attention(torch.float16, head_dim=256, columns=64, forced="auto") == "torch"
    assert dispatch.choose_attention(torch.float64, head_dim=64, columns=64, forced="triton") == "torch"
