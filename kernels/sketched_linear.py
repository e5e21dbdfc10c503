"""Fused sketched linear layers of one input: y = a((x downᵀ) upᵀ + b) m + r, or pivoted, with x₁ + x₂ downᵀ.

    z = x₁ + x₂ downᵀ       -> latent_tile: float32 sums, in registers; x₁ only in the pivoted form
    s = z upᵀ               -> _sketched_linear_fwd_kernel: z rounded to the type of up, sums in float32
    y = a(s + b) m + r      -> store_output: in float32, rounded once; m and r only where they are given

A program owns BLOCK_M rows and all of the rank, so z never goes to memory unless it is asked for.
Several layers of one input (q, k and v) are one launch: programs of the same rows are neighbours, so
that x is read from memory once. With SPLITS programs to the rows of a layer each computes z again.

x (B, I), down (R, S), up (O, R), m and r (B, O): float32, float16 or bfloat16, all the same, any strides.
Form: Zhao et al., "Pivoting Factorization", ICML 2025, https://arxiv.org/abs/2501.19090.
"""

# B rows, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from panther_compile.kernels.activations import activate
from panther_compile.kernels.autotune import configs_for
from panther_compile.kernels.factor_set import Factors, FactorSet, factor_set, packed


@triton.jit
def latent_tile(
    x_ptr,
    stride_xm,
    stride_xi,
    factors,
    offs_m,
    mask_m,
    offs_r,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tile z = x₁ + x₂ downᵀ of rows offs_m and columns offs_r (int64), in float32."""
    stride_dr, stride_ds = factors.down_strides
    mask_r = offs_r < factors.rank
    rows_ptr = x_ptr + offs_m[:, None] * stride_xm
    z = tl.zeros((offs_m.shape[0], offs_r.shape[0]), tl.float32)
    for first in range(0, factors.inputs, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < factors.inputs
        x = tl.load(
            rows_ptr + (factors.rest + offs_k)[None, :] * stride_xi,
            mask=mask_m[:, None] & mask_k[None, :],
            other=0.0,
        )
        down = tl.load(
            factors.down + offs_r[None, :] * stride_dr + offs_k[:, None] * stride_ds,
            mask=mask_r[None, :] & mask_k[:, None],
            other=0.0,
        )
        z = tl.dot(x, down, z, input_precision=PRECISION)
    if factors.pivot >= 0:
        pivots = tl.load(
            rows_ptr + (factors.pivot + offs_r)[None, :] * stride_xi,
            mask=mask_m[:, None] & mask_r[None, :],
            other=0.0,
        )
        z += pivots.to(tl.float32)
    return z


@triton.jit
def store_latent(z, factors, offs_m, mask_m, offs_r):
    """Write a tile of z where the set keeps it, if it does."""
    if factors.latent is not None:
        stride_zm, stride_zr = factors.latent_strides
        tl.store(
            factors.latent + offs_m[:, None] * stride_zm + offs_r[None, :] * stride_zr,
            z.to(factors.latent.dtype.element_ty),
            mask=mask_m[:, None] & (offs_r < factors.rank)[None, :],
        )


@triton.jit
def store_output(s, factors, offs_m, mask_m, offs_o, ACTIVATION: tl.constexpr):
    """Make y of a tile of z upᵀ, and write it."""
    stride_ym, stride_yo = factors.out_strides
    mask_o = offs_o < factors.outputs
    mask = mask_m[:, None] & mask_o[None, :]
    if factors.bias is not None:
        s += tl.load(factors.bias + offs_o, mask=mask_o, other=0.0).to(tl.float32)[None, :]
    y = activate(s, ACTIVATION)
    if factors.multiplier is not None:
        stride_mm, stride_mo = factors.multiplier_strides
        rows_ptr = factors.multiplier + offs_m[:, None] * stride_mm
        y *= tl.load(rows_ptr + offs_o[None, :] * stride_mo, mask=mask, other=0.0).to(tl.float32)
    if factors.residual is not None:
        stride_rm, stride_ro = factors.residual_strides
        rows_ptr = factors.residual + offs_m[:, None] * stride_rm
        y += tl.load(rows_ptr + offs_o[None, :] * stride_ro, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        factors.out + offs_m[:, None] * stride_ym + offs_o[None, :] * stride_yo,
        y.to(factors.out.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def load_up(factors, offs_o, offs_r):
    """The tile of upᵀ of rows offs_r and columns offs_o."""
    stride_uo, stride_ur = factors.up_strides
    return tl.load(
        factors.up + offs_o[None, :] * stride_uo + offs_r[:, None] * stride_ur,
        mask=(offs_o < factors.outputs)[None, :] & (offs_r < factors.rank)[:, None],
        other=0.0,
    )


@triton.jit
def _rows_of_one_set(
    x_ptr,
    B,
    stride_xm,
    stride_xi,
    factors,
    row_block,
    split,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLITS: tl.constexpr,
):
    offs_m = row_block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    mask_m = offs_m < B
    offs_r = tl.arange(0, BLOCK_R).to(tl.int64)
    z = latent_tile(x_ptr, stride_xm, stride_xi, factors, offs_m, mask_m, offs_r, BLOCK_K, PRECISION)
    if split == 0:
        store_latent(z, factors, offs_m, mask_m, offs_r)
    # Beyond the rank, an infinite x times the zeros of down is NaN.
    z = tl.where((offs_r < factors.rank)[None, :], z, 0.0).to(factors.up.dtype.element_ty)
    for first in range(split * BLOCK_O, factors.outputs, SPLITS * BLOCK_O):
        offs_o = first + tl.arange(0, BLOCK_O).to(tl.int64)
        s = tl.dot(z, load_up(factors, offs_o, offs_r), input_precision=PRECISION)
        store_output(s, factors, offs_m, mask_m, offs_o, ACTIVATION)


@triton.autotune(
    configs=configs_for("sketched_linear"), key=["I", "BLOCK_R", "SETS", "rows_class", "PRECISION"]
)
@triton.jit(do_not_specialize=["I", "rows_class"])
def _sketched_linear_fwd_kernel(
    x_ptr,
    B,
    I,
    rows_class,
    stride_xm,
    stride_xi,
    sets,
    SETS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLITS: tl.constexpr,
):
    program = tl.program_id(0)
    row_block = (program // (SETS * SPLITS)).to(tl.int64)
    split = program // SETS % SPLITS
    for index in tl.static_range(SETS):
        if program % SETS == index:
            _rows_of_one_set(
                x_ptr,
                B,
                stride_xm,
                stride_xi,
                sets[index],
                row_block,
                split,
                ACTIVATION,
                PRECISION,
                BLOCK_R,
                BLOCK_M,
                BLOCK_K,
                BLOCK_O,
                SPLITS,
            )


def launch_sets(
    x_BI: Tensor, sets: Sequence[FactorSet], activation: str = "none", precision: str = "ieee"
) -> None:
    """Fill `out`, and `latent` where there is one, of every set, from the same x (B, I)."""
    B, I = x_BI.shape
    if B == 0:
        return

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(B, meta["BLOCK_M"]) * meta["SPLITS"] * len(sets),)

    _sketched_linear_fwd_kernel[grid](
        x_BI,
        B,
        I,
        B.bit_length(),
        *x_BI.stride(),
        packed(sets),
        SETS=len(sets),
        ACTIVATION=activation,
        PRECISION=precision,
        BLOCK_R=max(16, triton.next_power_of_2(max(one.rank for one in sets))),
    )


def empty_sets(
    x_BI: Tensor,
    layers: Sequence[Factors],
    keep: bool,
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], list[FactorSet]]:
    """Outputs (B, O), latents (B, R), or (0, R) unless they are kept, and the sets that name them."""
    B = x_BI.shape[0]
    outs = [torch.empty(B, one.up.shape[0], dtype=x_BI.dtype, device=x_BI.device) for one in layers]
    latents = [
        torch.empty(B if keep else 0, one.down.shape[0], dtype=x_BI.dtype, device=x_BI.device)
        for one in layers
    ]
    assert len(layers) == 1 or (multiplier is None and residual is None)
    sets = [
        factor_set(
            one.down,
            one.up,
            one.bias,
            out,
            latent if keep else None,
            pivot=one.start,
            rest=one.rest,
            multiplier=multiplier,
            residual=residual,
        )
        for one, out, latent in zip(layers, outs, latents, strict=True)
    ]
    return outs, latents, sets


def sketched_linear_forward(
    x_BI: Tensor,
    layers: Sequence[Factors],
    *,
    activation: str = "none",
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
    keep: bool = False,
    precision: str = "ieee",
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs (B, O) of every layer, and the latents (B, R) if they are kept, else (0, R).

    Only a single layer can have a multiplier and a residual, (B, O) both.
    """
    outs, latents, sets = empty_sets(x_BI, layers, keep, multiplier, residual)
    launch_sets(x_BI, sets, activation, precision)
    return outs, latents
