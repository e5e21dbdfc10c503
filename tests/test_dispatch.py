"""Which implementation serves a shape on a GPU, and what PANTHER_COMPILE_KERNEL changes."""

import itertools

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

H100 = dispatch.DeviceClass(linear=True, attention=True)


def choose(
    rows=65536,
    rank=64,
    dtype=torch.float16,
    layers=1,
    forced="auto",
    features=768,
    device=H100,
    captured=True,
):
    return dispatch.choose_linear(
        device,
        dtype,
        rows=rows,
        ranks=(rank,) * layers,
        features=(features, features * layers),
        captured=captured,
        forced=forced,
    )


def test_what_is_forced():
    assert choose(rows=4, forced="triton") == choose(rows=16, forced="triton") == "decode"
    assert choose(rank=256, forced="triton") == choose(captured=False, forced="triton") == "fused"
    assert choose(rank=257, forced="triton") == "torch"
    assert choose(rank=129, dtype=torch.float32, forced="triton") == "torch"
    assert choose(dtype=torch.float64, forced="triton") == "torch"
    assert choose(forced="torch") == choose(rows=4, layers=3, forced="torch") == "torch"


def test_a_launch_that_is_not_captured_takes_longer_than_it_saves():
    for rows, layers in itertools.product((1, 16, 65536), (1, 3)):
        assert choose(rows=rows, layers=layers) != "torch"
        assert choose(rows=rows, layers=layers, captured=False) == "torch"


def test_a_few_rows():
    assert choose(rows=1) == choose(rows=16, layers=3) == choose(rows=1, features=28672) == "decode"
    assert choose(rows=1, dtype=torch.float32) == "decode"
    assert choose(rows=17) == choose(rows=2, features=28672) == "torch"


def test_many_rows():
    assert choose() == choose(rows=16384, rank=48) == "fused"
    assert choose(rows=8192) == choose(rank=32) == choose(rank=80) == choose(features=512) == "torch"
    assert choose(rows=512, rank=192, layers=3) == choose(rank=16, features=256, layers=2) == "fused"
    assert choose(rank=208, layers=3) == choose(features=2048, layers=3) == "torch"


@pytest.mark.parametrize("rows", [1, 65536])
def test_what_was_not_measured_of_linear_layers_is_torch(rows):
    assert choose(rows=rows, rank=52) == "torch"  # loaded element by element
    assert choose(rows=rows + 1, dtype=torch.float32) == "torch"
    assert choose(rows=rows, device=dispatch.DeviceClass()) == "torch"


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("forced", dispatch.MODES)
def test_the_quick_question_says_no_only_where_the_long_one_does(captures, forced, monkeypatch):
    monkeypatch.setattr(dispatch, "is_capturing", lambda: captures)
    answers = {choose(rows=rows, captured=captures, forced=forced) for rows in (1, 65536)}
    assert dispatch.is_left_to_torch(forced) == (answers == {"torch"})


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
    assert attend(torch.float32) == attend(device=dispatch.DeviceClass()) == "torch"  # not measured
    assert attend(torch.float32, width=128, forced="triton") == "torch"
    assert attend(torch.float64, forced="triton") == attend(forced="torch") == "torch"
