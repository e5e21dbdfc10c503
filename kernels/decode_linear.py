"""Sketched linear layers of one input for a few rows (decoding): every weight is read once, by many.

    p_k = x₂[:, k] down[:, k]ᵀ            -> _decode_latent_kernel: one program for R-block, split k of S
    y = a((x₁ + Σ_k p_k) upᵀ + b) m + r   -> _decode_output_kernel: one program for each O-block

The fused kernel would run as one program here. Two launches read the weights from all of the device
instead, and do so for q, k and v together. The splits p_k are float32 and summed in a fixed order: the
same call gives the same bits. Sums in float32; z is rounded to the type of up. Types and strides: see
sketched_linear.py. The idea is split-K of Osama et al., https://arxiv.org/abs/2301.03598.
"""

# B rows, 1 to 16, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from panther_compile.kernels.autotune import configs_for
from panther_compile.kernels.factor_set import Factors, packed
from panther_compile.kernels.sketched_linear import empty_sets, load_up, store_latent, store_output

MAX_ROWS = 16
_SPLITS = 4


@triton.jit
def _multiply(a, b, acc, GEMV: tl.constexpr, PRECISION: tl.constexpr):
    """Add a (16, K) times b (K, N) to acc; with GEMV only the first row of `a` counts."""
    if GEMV:
        # As a sum, not sixteen: `a` is (1, K) here.
        row = tl.sum(tl.trans(a).to(tl.float32) * b.to(tl.float32), axis=0)
        return acc + row[None, :]
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _decode_latent_set(
    x_ptr,
    B,
    stride_xm,
    stride_xi,
    factors,
    parts_ptr,
    stride_pk,
    stride_pm,
    block,
    split,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    stride_dr, stride_ds = factors.down_strides
    offs_m = tl.arange(0, ROWS).to(tl.int64)
    offs_r = block * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_m, mask_r = offs_m < B, offs_r < factors.rank
    part = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first in range(split * BLOCK_K, factors.inputs, SPLITS * BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < factors.inputs
        x = tl.load(
            x_ptr + offs_m[:, None] * stride_xm + (factors.rest + offs_k)[None, :] * stride_xi,
            mask=mask_m[:, None] & mask_k[None, :],
            other=0.0,
        )
        down = tl.load(
            factors.down + offs_r[None, :] * stride_dr + offs_k[:, None] * stride_ds,
            mask=mask_r[None, :] & mask_k[:, None],
            other=0.0,
        )
        part = _multiply(x, down, part, ROWS == 1, PRECISION)
    tl.store(
        parts_ptr + split * stride_pk + offs_m[:, None] * stride_pm + offs_r[None, :],
        part,
        mask=mask_m[:, None] & mask_r[None, :],
    )


@triton.autotune(configs=configs_for("decode_latent"), key=["I", "max_rank", "SETS", "ROWS", "PRECISION"])
@triton.jit(do_not_specialize=["I", "max_rank"])
def _decode_latent_kernel(
    x_ptr,
    B,
    I,
    max_rank,
    stride_xm,
    stride_xi,
    sets,
    parts,
    stride_pk,
    stride_pm,
    SETS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    for index in tl.static_range(SETS):
        if tl.program_id(1) == index and block * BLOCK_N < sets[index].rank:
            _decode_latent_set(
                x_ptr,
                B,
                stride_xm,
                stride_xi,
                sets[index],
                parts[index],
                stride_pk,
                stride_pm,
                block,
                split,
                ROWS,
                SPLITS,
                PRECISION,
                BLOCK_N,
                BLOCK_K,
            )


@triton.jit
def _decode_output_set(
    x_ptr,
    B,
    stride_xm,
    stride_xi,
    factors,
    parts_ptr,
    stride_pk,
    stride_pm,
    block,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_m = tl.arange(0, ROWS).to(tl.int64)
    offs_o = block * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_m = offs_m < B
    s = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first in range(0, factors.rank, BLOCK_K):
        offs_r = first + tl.arange(0, BLOCK_K).to(tl.int64)
        mask = mask_m[:, None] & (offs_r < factors.rank)[None, :]
        z = tl.zeros((ROWS, BLOCK_K), tl.float32)
        for split in tl.static_range(SPLITS):
            part_ptr = parts_ptr + split * stride_pk + offs_m[:, None] * stride_pm + offs_r[None, :]
            z += tl.load(part_ptr, mask=mask, other=0.0)
        if factors.pivot >= 0:
            column = (factors.pivot + offs_r)[None, :]
            z += tl.load(x_ptr + offs_m[:, None] * stride_xm + column * stride_xi, mask=mask, other=0.0).to(
                tl.float32
            )
        if block == 0:
            store_latent(z, factors, offs_m, mask_m, offs_r)
        z = z.to(factors.up.dtype.element_ty)
        s = _multiply(z, load_up(factors, offs_o, offs_r), s, ROWS == 1, PRECISION)
    store_output(s, factors, offs_m, mask_m, offs_o, ACTIVATION)


@triton.autotune(
    configs=configs_for("decode_output"), key=["max_rank", "max_outputs", "SETS", "ROWS", "PRECISION"]
)
@triton.jit(do_not_specialize=["max_rank", "max_outputs"])
def _decode_output_kernel(
    x_ptr,
    B,
    max_rank,
    max_outputs,
    stride_xm,
    stride_xi,
    sets,
    parts,
    stride_pk,
    stride_pm,
    ACTIVATION: tl.constexpr,
    SETS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    for index in tl.static_range(SETS):
        if tl.program_id(1) == index and block * BLOCK_N < sets[index].outputs:
            _decode_output_set(
                x_ptr,
                B,
                stride_xm,
                stride_xi,
                sets[index],
                parts[index],
                stride_pk,
                stride_pm,
                block,
                ACTIVATION,
                ROWS,
                SPLITS,
                PRECISION,
                BLOCK_N,
                BLOCK_K,
            )


def decode_linear_forward(
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
    B, I = x_BI.shape
    assert B <= MAX_ROWS
    outs, latents, sets = empty_sets(x_BI, layers, keep, multiplier, residual)
    if B == 0:
        return outs, latents
    max_rank, max_outputs = max(one.rank for one in sets), max(one.outputs for one in sets)
    parts_GKBR = torch.empty(len(sets), _SPLITS, B, max_rank, dtype=torch.float32, device=x_BI.device)
    parts = tuple(parts_GKBR.unbind())
    strides = (*x_BI.stride(), packed(sets), parts, parts_GKBR.stride(1), parts_GKBR.stride(2))
    rows = 1 if B == 1 else MAX_ROWS  # a matrix unit takes sixteen, or none
    shared = {"SETS": len(sets), "ROWS": rows, "SPLITS": _SPLITS, "PRECISION": precision}

    def latent_grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(max_rank, meta["BLOCK_N"]) * _SPLITS, len(sets)

    def output_grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(max_outputs, meta["BLOCK_N"]), len(sets)

    _decode_latent_kernel[latent_grid](x_BI, B, I, max_rank, *strides, **shared)
    _decode_output_kernel[output_grid](
        x_BI, B, max_rank, max_outputs, *strides, ACTIVATION=activation, **shared
    )
    return outs, latents
