"""A sketched convolution: kh x kw to few channels, then 1 x 1."""

# N batch, C channels in, O channels out, R rank, H x W in, P x Q out

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from panther_compile.errors import OpError
from panther_compile.kernels import dispatch, plain
from panther_compile.kernels.factor_set import Needs
from panther_compile.ops.checks import (
    autocast,
    check_alike,
    check_bias,
    computed_dtype,
    keeps,
    kernel_mode,
    launching_on,
    size,
)


def sketched_conv2d(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """A convolution to R channels, then a 1 x 1 one; zero padding, no groups.

    Args:
        x: (N, C, H, W), any strides.
        down: (R, C, kh, kw).
        up: (O, R, 1, 1).
        bias: (O,) or None.
        stride: of `down`, along height and width; so for the next two.
        padding: numbers of zeros.
        dilation: distances between taps.

    Returns:
        y, (N, O, P, Q), in the memory format of x.

    Raises:
        OpError: a shape, dtype or device does not fit the others.
    """
    what = "sketched_conv2d"
    check_alike(what, x=x, down=down, up=up, bias=bias)
    wanted = None
    if not (x.dim() == down.dim() == 4 and x.shape[1] == down.shape[1]):
        wanted = "x (N, C, H, W) and down (R, C, kh, kw)"
    elif up.shape[1:] != (down.shape[0], 1, 1):
        wanted = f"up (O, {down.shape[0]}, 1, 1)"
    if wanted:
        raise OpError(f"{what}: x {size(x)}, down {size(down)}, up {size(up)}; wanted {wanted}")
    check_bias(what, bias, up)
    x, down, up, bias = autocast(x, down, up, bias)
    keep = keeps(x, down, up, bias)
    return _sketched_conv2d(x, down, up, bias, stride, padding, dilation, keep)[0]


def has_conv2d_kernel(x: Tensor, down: Tensor) -> bool:
    """Whether calling the operator on these, instead of plain torch, gives them a Triton kernel."""
    return _choose(x, down, computed_dtype(x)) == "fused"


def _choose(x: Tensor, down: Tensor, dtype: torch.dtype) -> str:
    if not x.is_cuda:
        return "torch"
    return dispatch.choose_conv2d(dtype, rank=down.shape[0], forced=kernel_mode())


@torch.library.custom_op("panther_compile::sketched_conv2d", mutates_args=())
def _sketched_conv2d(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    keep: bool,
) -> tuple[Tensor, Tensor]:
    precision = dispatch.precision_of(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
    forward: Any = plain.sketched_conv2d_forward
    if _choose(x, down, x.dtype) == "fused":
        from panther_compile.kernels import sketched_conv2d

        forward = sketched_conv2d.sketched_conv2d_forward
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    with launching_on(x):
        y, z = forward(x, down, up, bias, **geometry, keep=keep, precision=precision)
    layout = plain.layout_of(x)
    return y.contiguous(memory_format=layout), z.contiguous(memory_format=layout)


@_sketched_conv2d.register_fake
def _(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    keep: bool,
) -> tuple[Tensor, Tensor]:
    sizes, layout = plain.conv2d_size(x.shape, down.shape, stride, padding, dilation), plain.layout_of(x)

    def empty(count: int, channels: int) -> Tensor:
        return torch.empty((count, channels, *sizes), dtype=x.dtype, device=x.device, memory_format=layout)

    return empty(x.shape[0], up.shape[0]), empty(x.shape[0] if keep else 0, down.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, down, up, _, *geometry, _ = inputs
    ctx.geometry = dict(zip(("stride", "padding", "dilation"), geometry, strict=True))
    ctx.save_for_backward(x, down, up, output[1])
    ctx.mark_non_differentiable(output[1])


def _grad(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, down, up, z = ctx.saved_tensors
    if z.shape[0] != x.shape[0]:  # not kept
        z = torch.nn.functional.conv2d(x, down, None, **ctx.geometry)
    needs = Needs(*ctx.needs_input_grad[:4])
    found = plain.sketched_conv2d_backward(grad, x, down, up, z, **ctx.geometry, needs=needs)
    return *found, None, None, None, None


_sketched_conv2d.register_autograd(_grad, setup_context=_save)
