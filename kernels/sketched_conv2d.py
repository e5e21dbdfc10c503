"""Fused sketched convolution: a kh x kw convolution to R channels, then a 1 x 1 one: y = up(down(x)) + b.

    z[n, r, p, q] = Σ_{i, j, c} down[r, c, i, j] x[n, c, p·sh - ph + i·dh, q·sw - pw + j·dw]
    y[n, o, p, q] = Σ_r up[o, r] z[n, r, p, q] + b[o]          -> _sketched_conv2d_fwd_kernel

An implicit product: a program owns BLOCK_P output positions and all of the rank, gathers the taps as it
goes and multiplies z by up while it is in registers. There is no fused gradient of x: each z enters it
at kh kw positions that other programs own, so the backward is cuDNN's for `down` (see plain.py).

x, down, up: float32, float16 or bfloat16, all the same; x of any strides, zero padding, no groups. Sums
in float32; z is rounded to the type of up. y has the memory format of x.
"""

# N batch, C channels in, O channels out, R rank, H x W in, P x Q out

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from panther_compile.kernels.autotune import Call, kind_of, tuned
from panther_compile.kernels.plain import conv2d_size, layout_of


@tuned("sketched_conv2d", key=["channels", "O", "BLOCK_R", "KH", "KW", "PRECISION"])
@triton.jit(do_not_specialize=["positions"])
def _sketched_conv2d_fwd_kernel(
    x_ptr,
    down_ptr,
    up_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    positions,
    channels,
    H,
    W,
    P,
    Q,
    O,
    rank,
    x_strides,
    down_strides,
    up_strides,
    y_strides,
    z_strides,
    stride,
    padding,
    dilation,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    offs_p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_p = offs_p < positions
    n, p, q = offs_p // (P * Q), offs_p // Q % P, offs_p % Q
    offs_r = tl.arange(0, BLOCK_R).to(tl.int64)
    mask_r = offs_r < rank
    z = tl.zeros((BLOCK_P, BLOCK_R), tl.float32)
    for tap in range(KH * KW):
        h = p * stride[0] - padding[0] + tap // KW * dilation[0]
        w = q * stride[1] - padding[1] + tap % KW * dilation[1]
        inside = mask_p & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        pixel_ptr = x_ptr + n * x_strides[0] + h * x_strides[2] + w * x_strides[3]
        tap_ptr = down_ptr + tap // KW * down_strides[2] + tap % KW * down_strides[3]
        for first in range(0, channels, BLOCK_K):
            offs_c = first + tl.arange(0, BLOCK_K).to(tl.int64)
            mask_c = offs_c < channels
            x = tl.load(
                pixel_ptr[:, None] + offs_c[None, :] * x_strides[1],
                mask=inside[:, None] & mask_c[None, :],
                other=0.0,
            )
            down = tl.load(
                tap_ptr + offs_c[:, None] * down_strides[1] + offs_r[None, :] * down_strides[0],
                mask=mask_c[:, None] & mask_r[None, :],
                other=0.0,
            )
            z = tl.dot(x, down, z, input_precision=PRECISION)
    if z_ptr is not None:
        place = n * z_strides[0] + p * z_strides[2] + q * z_strides[3]
        tl.store(
            z_ptr + place[:, None] + offs_r[None, :] * z_strides[1],
            z.to(z_ptr.dtype.element_ty),
            mask=mask_p[:, None] & mask_r[None, :],
        )
    # Beyond the rank, an infinite x times the zeros of down is NaN.
    z = tl.where(mask_r[None, :], z, 0.0).to(up_ptr.dtype.element_ty)
    place = n * y_strides[0] + p * y_strides[2] + q * y_strides[3]
    for first in range(0, O, BLOCK_O):
        offs_o = first + tl.arange(0, BLOCK_O).to(tl.int64)
        mask_o = offs_o < O
        up = tl.load(
            up_ptr + offs_r[:, None] * up_strides[1] + offs_o[None, :] * up_strides[0],
            mask=mask_r[:, None] & mask_o[None, :],
            other=0.0,
        )
        y = tl.dot(z, up, input_precision=PRECISION)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs_o, mask=mask_o, other=0.0).to(tl.float32)[None, :]
        tl.store(
            y_ptr + place[:, None] + offs_o[None, :] * y_strides[1],
            y.to(y_ptr.dtype.element_ty),
            mask=mask_p[:, None] & mask_o[None, :],
        )


def sketched_conv2d_forward(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    keep: bool = False,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """The output (N, O, P, Q), and the latent (N, R, P, Q) if it is kept, else (0, R, P, Q).

    Args:
        x: (N, C, H, W).
        down: (R, C, kh, kw).
        up: (O, R, 1, 1).
        bias: (O,), contiguous, or None.
        stride: along height and width, as the next two.
        padding: with zeros.
        dilation: of the taps.
        keep: whether the latent is wanted.
        precision: "ieee" or "tf32", of float32 products.
    """
    (N, C, H, W), (R, _, KH, KW), O = x.shape, down.shape, up.shape[0]
    P, Q = conv2d_size(x.shape, down.shape, stride, padding, dilation)
    layout = layout_of(x)
    factory: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "memory_format": layout}
    y = torch.empty((N, O, P, Q), **factory)
    z = torch.empty((N if keep else 0, R, P, Q), **factory)
    positions = N * P * Q
    if positions == 0:
        return y, z

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(positions, meta["BLOCK_P"]),)

    block = max(16, triton.next_power_of_2(R))
    _sketched_conv2d_fwd_kernel.launch(
        grid,
        Call(kind_of(x.dtype, precision), block, positions),
        x,
        down,
        up,
        bias,
        y,
        z if keep else None,
        positions,
        C,
        H,
        W,
        P,
        Q,
        O,
        R,
        x.stride(),
        down.stride(),
        up.stride(),
        y.stride(),
        z.stride(),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        KH=KH,
        KW=KW,
        PRECISION=precision,
        BLOCK_R=block,
    )
    return y, z
