"""Fused sketched linear layers of one input: y = a((x downᵀ) upᵀ + b) m + r, or pivoted, with x₁ + x₂ downᵀ.

    z = x₁ + x₂ downᵀ       -> latent_tile: float32 sums, in registers; x₁ only in the pivoted form
    s = z upᵀ               -> _sketched_linear_fwd_kernel: z rounded to the type of up, sums in float32
    y = a(s + b) m + r      -> store_output: in float32, rounded once; m and r only where they are given

A program owns BLOCK_M rows and all of the rank, so z never goes to memory unless it is asked for.
Several layers of one input (q, k and v) are one launch: programs of the same rows are neighbours, so
that x is read from memory once. The rank is in PIECES of BLOCK_R columns, each with sums of its own, and so
padded to the next 64, not to the next power of two.

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
from panther_compile.kernels.autotune import Call, kind_of, tuned
from panther_compile.kernels.factor_set import Factors, FactorSet, factor_set, packed

MOST_PIECES = 4


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
def _load_down(factors, offs_k, mask_k, offs_r):
    """The tile of downᵀ of rows offs_k and columns offs_r."""
    stride_dr, stride_ds = factors.down_strides
    return tl.load(
        factors.down + offs_r[None, :] * stride_dr + offs_k[:, None] * stride_ds,
        mask=(offs_r < factors.rank)[None, :] & mask_k[:, None],
        other=0.0,
    )


@triton.jit
def _finished(z, rows_ptr, stride_xi, factors, offs_m, mask_m, offs_r):
    """A piece of z with its pivots, kept where it is to be, in the type of up."""
    if factors.pivot >= 0:
        pivots = tl.load(
            rows_ptr + (factors.pivot + offs_r)[None, :] * stride_xi,
            mask=mask_m[:, None] & (offs_r < factors.rank)[None, :],
            other=0.0,
        )
        z += pivots.to(tl.float32)
    store_latent(z, factors, offs_m, mask_m, offs_r)
    # Beyond the rank, an infinite x times the zeros of down is NaN.
    return tl.where((offs_r < factors.rank)[None, :], z, 0.0).to(factors.up.dtype.element_ty)


@triton.jit
def _rows_of_one_set(
    x_ptr,
    B,
    stride_xm,
    stride_xi,
    factors,
    row_block,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    offs_m = row_block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    mask_m = offs_m < B
    rows_ptr = x_ptr + offs_m[:, None] * stride_xm
    offs_r0 = tl.arange(0, BLOCK_R).to(tl.int64)
    offs_r1, offs_r2, offs_r3 = offs_r0 + BLOCK_R, offs_r0 + 2 * BLOCK_R, offs_r0 + 3 * BLOCK_R
    z0 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    z1, z2, z3 = z0, z0, z0
    for first in range(0, factors.inputs, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < factors.inputs
        x = tl.load(
            rows_ptr + (factors.rest + offs_k)[None, :] * stride_xi,
            mask=mask_m[:, None] & mask_k[None, :],
            other=0.0,
        )
        z0 = tl.dot(x, _load_down(factors, offs_k, mask_k, offs_r0), z0, input_precision=PRECISION)
        if PIECES > 1:
            z1 = tl.dot(x, _load_down(factors, offs_k, mask_k, offs_r1), z1, input_precision=PRECISION)
        if PIECES > 2:
            z2 = tl.dot(x, _load_down(factors, offs_k, mask_k, offs_r2), z2, input_precision=PRECISION)
        if PIECES > 3:
            z3 = tl.dot(x, _load_down(factors, offs_k, mask_k, offs_r3), z3, input_precision=PRECISION)
    z0 = _finished(z0, rows_ptr, stride_xi, factors, offs_m, mask_m, offs_r0)
    if PIECES > 1:
        z1 = _finished(z1, rows_ptr, stride_xi, factors, offs_m, mask_m, offs_r1)
    if PIECES > 2:
        z2 = _finished(z2, rows_ptr, stride_xi, factors, offs_m, mask_m, offs_r2)
    if PIECES > 3:
        z3 = _finished(z3, rows_ptr, stride_xi, factors, offs_m, mask_m, offs_r3)
    for first in range(0, factors.outputs, BLOCK_O):
        offs_o = first + tl.arange(0, BLOCK_O).to(tl.int64)
        s = tl.dot(z0, load_up(factors, offs_o, offs_r0), input_precision=PRECISION)
        if PIECES > 1:
            s = tl.dot(z1, load_up(factors, offs_o, offs_r1), s, input_precision=PRECISION)
        if PIECES > 2:
            s = tl.dot(z2, load_up(factors, offs_o, offs_r2), s, input_precision=PRECISION)
        if PIECES > 3:
            s = tl.dot(z3, load_up(factors, offs_o, offs_r3), s, input_precision=PRECISION)
        store_output(s, factors, offs_m, mask_m, offs_o, ACTIVATION)


@tuned("sketched_linear", key=["I", "O", "PIECES", "BLOCK_R", "SETS", "rows_class", "pivoted", "PRECISION"])
@triton.jit(do_not_specialize=["B", "I", "O", "rows_class", "pivoted"])
def _sketched_linear_fwd_kernel(
    x_ptr,
    B,
    I,
    O,
    rows_class,
    pivoted,
    stride_xm,
    stride_xi,
    sets,
    SETS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    program = tl.program_id(0)
    row_block = (program // SETS).to(tl.int64)
    for index in tl.static_range(SETS):
        if program % SETS == index:
            _rows_of_one_set(
                x_ptr,
                B,
                stride_xm,
                stride_xi,
                sets[index],
                row_block,
                ACTIVATION,
                PRECISION,
                PIECES,
                BLOCK_R,
                BLOCK_M,
                BLOCK_K,
                BLOCK_O,
            )


def padded_rank(rank: int) -> int:
    """The rank that the fused kernel computes: a power of two to 64, or a multiple of 64."""
    return max(16, 1 << (rank - 1).bit_length()) if rank <= 64 else -(-rank // 64) * 64


def pieces_of(rank: int) -> tuple[int, int]:
    """How the fused kernel divides a rank: how many pieces, and of how many columns."""
    padded = padded_rank(rank)
    return (1, padded) if padded <= 128 else (padded // 64, 64)


def are_aligned(x_BI: Tensor, sets: Sequence[FactorSet]) -> bool:
    """Whether all sizes, and so the rows of contiguous factors, are multiples of 16."""
    sizes = (
        size for one in sets for size in (one.rank, one.inputs, one.outputs, max(one.pivot, 0), one.rest)
    )
    return all(size % 16 == 0 for size in (x_BI.shape[1], *sizes))


def launch_sets(
    x_BI: Tensor, sets: Sequence[FactorSet], activation: str = "none", precision: str = "ieee"
) -> None:
    """Fill `out`, and `latent` where there is one, of every set, from the same x (B, I)."""
    B, I = x_BI.shape
    if B == 0:
        return
    pieces, block = pieces_of(max(one.rank for one in sets))
    assert pieces <= MOST_PIECES

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(B, meta["BLOCK_M"]) * len(sets),)

    _sketched_linear_fwd_kernel.launch(
        grid,
        Call(kind_of(x_BI.dtype, precision), pieces * block, B * len(sets), are_aligned(x_BI, sets)),
        x_BI,
        B,
        I,
        sum(one.outputs for one in sets),
        B.bit_length(),
        int(any(one.pivot >= 0 for one in sets)),  # Triton 3.6 interprets no bool
        *x_BI.stride(),
        packed(sets),
        SETS=len(sets),
        ACTIVATION=activation,
        PRECISION=precision,
        PIECES=pieces,
        BLOCK_R=block,
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
