"""Which implementation serves a shape on a GPU, and what PANTHER_COMPILE_KERNEL changes."""

import itertools
from dataclasses import replace

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

H100 = dispatch.DeviceClass(692e12, 346e12, 47e12, 3.0e12, 132, 0.6, 0.5, 0.4, 8, True)


def choose(
    rows=65536,
    rank=96,
    dtype=torch.float16,
    layers=1,
    forced="auto",
    extra=0,
    features=768,
    device=H100,
    captured=False,
):
    return dispatch.choose_linear(
        device,
        dtype,
        "ieee",
        rows=rows,
        ranks=(rank,) * layers,
        features=(features, features * layers),
        extra=extra,
        captured=captured,
        forced=forced,
    )


def test_dispatch_of_linear_layers():
    assert choose() == "fused"
    assert choose(rank=256) == "torch"  # bound by arithmetic
    assert choose(rank=512, features=4096) == "torch"  # no sums for it
    assert choose(features=4096) == "torch"  # fusing saves 2 % of the traffic
    assert choose(rank=100) == choose(features=760) == "torch"  # loaded element by element
    assert choose(rows=8192) == "torch"  # too short to hide a launch
    assert choose(dtype=torch.float32) == "torch"
    assert choose(dtype=torch.float64, forced="triton") == "torch"
    assert (
        choose(rows=4) == choose(rows=4, extra=1536) == choose(rows=1, layers=3) == "torch"
    )  # as many bytes
    assert choose(rows=4, forced="triton") == choose(rows=16, forced="triton") == "decode"
    assert choose(rank=256, forced="triton") == "fused"
    assert choose(rank=257, forced="triton") == "torch"
    assert choose(rank=129, dtype=torch.float32, forced="triton") == "torch"
    assert choose(forced="torch") == choose(rows=4, layers=3, forced="torch") == "torch"
    assert choose(device=replace(H100, half_share=0.0)) == "torch"


def test_a_few_rows_in_a_captured_graph():
    assert choose(rows=1, captured=True) == choose(rows=8, layers=3, captured=True) == "decode"
    assert choose(rows=9, captured=True) == choose(rows=2, features=28672, captured=True) == "torch"
    assert choose(rows=1, features=28672, captured=True) == "decode"
    assert choose(rows=1, rank=100, captured=True) == "torch"  # loaded element by element
    assert choose(rows=1, dtype=torch.float32, captured=True) == "torch"  # not measured
    assert choose(rows=1, captured=True, device=replace(H100, decode_rows=0)) == "torch"
    assert choose(captured=True) == "fused"


def test_an_activation_that_torch_would_move_counts():
    assert choose(rank=160) == "torch"
    assert choose(rank=160, extra=2 * 768) == "fused"


def test_ranks_count_as_they_are_computed():
    assert [dispatch.padded_rank(rank) for rank in (1, 16, 17, 64, 65, 129, 256)] == [
        *(16, 16, 32, 64, 128, 192, 256)
    ]
    options = {"rows": 65536, "features": (768, 768)}
    one, other = (
        dispatch.fused_seconds(H100, torch.float16, "ieee", ranks=(rank,), **options) for rank in (193, 256)
    )
    assert one == other


def test_programs_fill_the_device_in_waves():
    """One program more than the device has multiprocessors takes another turn."""
    options = {"ranks": (256,), "features": (768, 768)}
    full, more = (
        dispatch.fused_seconds(H100, torch.float16, "ieee", rows=128 * count, **options)
        for count in (132, 133)
    )
    assert more == pytest.approx(2 * full)


def test_what_is_chosen_wins_in_bytes():
    """Wherever auto takes the kernel, it moves at least 5 % fewer bytes than two products do."""
    taken = 0
    for rank, features, rows, layers in itertools.product(
        (16, 48, 64, 96, 128, 192, 256), (256, 768, 1024, 4096), (64, 1024, 16384, 262144), (1, 3)
    ):
        if choose(rows=rows, rank=rank, features=features, layers=layers) == "fused":
            taken += 1
            x_and_y, latent = rows * features * (1 + layers), 2 * rows * rank * layers
            assert latent + (layers - 1) * rows * features > 0.04 * x_and_y
    assert taken > 10


def test_a_cpu_has_no_kernel(monkeypatch):
    monkeypatch.setenv("PANTHER_COMPILE_KERNEL", "triton")
    layer = Factors(torch.randn(3, 7), torch.randn(5, 3), None, None)
    assert not has_kernel(torch.randn(64, 7), [layer])


def test_what_was_not_measured_is_torch():
    assert dispatch.choose_conv2d(torch.float16, rank=16, forced="auto") == "torch"
    assert dispatch.choose_conv2d(torch.float16, rank=128, forced="triton") == "fused"
    assert dispatch.choose_conv2d(torch.float32, rank=129, forced="triton") == "torch"


def attend(dtype=torch.float16, width=64, forced="auto", backward=False, device=H100):
    sizes = {"head_dim": width, "columns": width}
    return dispatch.choose_attention(device, dtype, **sizes, forced=forced, backward=backward)


def test_dispatch_of_attention():
    assert attend() == attend(backward=True) == attend(width=128) == "fused"
    assert attend(width=128, backward=True) == attend(width=256, forced="triton") == "torch"  # registers
    assert attend(width=40) == "torch"
    assert attend(width=40, forced="triton") == attend(torch.float32, forced="triton") == "fused"
    assert attend(torch.float32) == attend(device=replace(H100, attention=False)) == "torch"  # not measured
    assert attend(torch.float32, width=128, forced="triton") == "torch"
    assert attend(torch.float64, forced="triton") == attend(forced="torch") == "torch"
