"""Sketched linear layers of one input for a few rows (decoding): every weight is read once, by many.

    p_k = x₂[:, k] down[:, k]ᵀ      -> _decode_latent_kernel: one program for R-block, split k of S
    z = x₁ + Σ_k p_k                -> _decode_sum_kernel, in a fixed order; without splits the first does it
    y = a(z upᵀ + b) m + r          -> _decode_output_kernel: one program for each O-block

The fused kernel would run as one program here. These launches read the weights from all of the device
instead, and do so for q, k and v together, in some PROGRAMS of them. For one row products are summed in
registers and over threads once, at the end; for more, on tensor cores. Loads are asynchronous, three deep.
Sums in float32; z is rounded to the type of up. Types and strides: see sketched_linear.py.

From compute capability 9.0 on, a launch begins while the one ahead of it ends (programmatic dependent
launch): on an H200 that takes a tenth to a fifth off the time of one row. The first launch begins as
any does, so nothing that was written before it, such as new weights, is read too early.

The idea is split-K of Osama et al., https://arxiv.org/abs/2301.03598.
"""

# B rows, 1 to 16, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from panther_compile.kernels.autotune import Call, compute_capability, kind_of, tuned
from panther_compile.kernels.factor_set import Factors, packed
from panther_compile.kernels.sketched_linear import empty_sets, load_up, store_latent, store_output

MAX_ROWS = 16
PROGRAMS = 528  # four for each multiprocessor of an H100
_MOST_SPLITS = 16
_SPLIT_COLUMNS = 512  # at least so many to a split
_SUM_COLUMNS = {1: 128, MAX_ROWS: 32}  # of z to a program, by rows


@triton.jit
def _sums(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Zeros to add products to: for one row (K, N) of them, for more (ROWS, N)."""
    if ROWS == 1:
        return tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    else:
        return tl.zeros((ROWS, BLOCK_N), tl.float32)


@triton.jit
def _multiply(a, b, acc, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Add a (ROWS, K) times b (K, N) to the sums."""
    if ROWS == 1:
        return acc + tl.trans(a).to(tl.float32) * b.to(tl.float32)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _summed(acc, ROWS: tl.constexpr):
    """The sums as (ROWS, N)."""
    if ROWS == 1:
        return tl.sum(acc, axis=0)[None, :]
    else:
        return acc


@triton.jit
def _store_z(z, x_ptr, stride_xm, stride_xi, factors, offs_m, mask_m, offs_r):
    """Add the pivots x₁ to a tile of x₂ downᵀ, where there are any, and write it as the latent."""
    if factors.pivot >= 0:
        z += tl.load(
            x_ptr + offs_m[:, None] * stride_xm + (factors.pivot + offs_r)[None, :] * stride_xi,
            mask=mask_m[:, None] & (offs_r < factors.rank)[None, :],
            other=0.0,
        ).to(tl.float32)
    store_latent(z, factors, offs_m, mask_m, offs_r)


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
    acc = _sums(ROWS, BLOCK_N, BLOCK_K)
    for first in tl.range(split * BLOCK_K, factors.inputs, SPLITS * BLOCK_K, num_stages=3):
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
        acc = _multiply(x, down, acc, ROWS, PRECISION)
    part = _summed(acc, ROWS)
    if SPLITS == 1:
        _store_z(part, x_ptr, stride_xm, stride_xi, factors, offs_m, mask_m, offs_r)
    else:
        tl.store(
            parts_ptr + split * stride_pk + offs_m[:, None] * stride_pm + offs_r[None, :],
            part,
            mask=mask_m[:, None] & mask_r[None, :],
        )


@tuned("decode_latent", key=["I", "max_rank", "SETS", "ROWS", "SPLITS", "PRECISION"])
@triton.jit(do_not_specialize=["B", "I", "max_rank"])
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
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
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
def _decode_sum_kernel(
    x_ptr,
    B,
    stride_xm,
    stride_xi,
    sets,
    parts,
    stride_pk,
    stride_pm,
    SETS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.arange(0, ROWS).to(tl.int64)
    offs_r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_m = offs_m < B
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for index in tl.static_range(SETS):
        if tl.program_id(1) == index:
            mask = mask_m[:, None] & (offs_r < sets[index].rank)[None, :]
            z = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for split in tl.static_range(SPLITS):
                part_ptr = parts[index] + split * stride_pk + offs_m[:, None] * stride_pm + offs_r[None, :]
                z += tl.load(part_ptr, mask=mask, other=0.0)
            _store_z(z, x_ptr, stride_xm, stride_xi, sets[index], offs_m, mask_m, offs_r)


@triton.jit
def _decode_output_set(
    B,
    factors,
    block,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    stride_zm, stride_zr = factors.latent_strides
    offs_m = tl.arange(0, ROWS).to(tl.int64)
    offs_o = block * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_m = offs_m < B
    s = _sums(ROWS, BLOCK_N, BLOCK_K)
    if OVERLAP:
        gdc_wait()
    for first in tl.range(0, factors.rank, BLOCK_K, num_stages=3):
        offs_r = first + tl.arange(0, BLOCK_K).to(tl.int64)
        z = tl.load(
            factors.latent + offs_m[:, None] * stride_zm + offs_r[None, :] * stride_zr,
            mask=mask_m[:, None] & (offs_r < factors.rank)[None, :],
            other=0.0,
        )
        s = _multiply(z, load_up(factors, offs_o, offs_r), s, ROWS, PRECISION)
    store_output(_summed(s, ROWS), factors, offs_m, mask_m, offs_o, ACTIVATION)


@tuned("decode_output", key=["max_rank", "max_outputs", "SETS", "ROWS", "PRECISION"])
@triton.jit(do_not_specialize=["B", "max_rank", "max_outputs"])
def _decode_output_kernel(
    B,
    max_rank,
    max_outputs,
    sets,
    ACTIVATION: tl.constexpr,
    SETS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    for index in tl.static_range(SETS):
        if tl.program_id(1) == index and block * BLOCK_N < sets[index].outputs:
            _decode_output_set(B, sets[index], block, ACTIVATION, ROWS, OVERLAP, PRECISION, BLOCK_N, BLOCK_K)


def splits_of(columns: int, inputs: int) -> int:
    """How many programs share a sum over inputs, a power of 2, where so many columns come out of it."""
    wanted = min(PROGRAMS * 8 / columns, inputs / _SPLIT_COLUMNS, _MOST_SPLITS)
    return 1 << max(0, math.ceil(math.log2(max(wanted, 1))))


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
    outs, latents, sets = empty_sets(x_BI, layers, keep=True, multiplier=multiplier, residual=residual)
    if B == 0:
        return outs, latents
    max_rank, max_outputs = max(one.rank for one in sets), max(one.outputs for one in sets)
    splits = splits_of(len(sets) * max_rank, max(one.inputs for one in sets))
    parts_GKBR = torch.empty(len(sets), splits, B, max_rank, dtype=torch.float32, device=x_BI.device)
    parts = tuple(parts_GKBR.unbind())
    strides = (*x_BI.stride(), packed(sets), parts, parts_GKBR.stride(1), parts_GKBR.stride(2))
    rows = 1 if B == 1 else MAX_ROWS  # a matrix unit takes sixteen, or none
    overlap = compute_capability() >= 90
    shared = {"SETS": len(sets), "ROWS": rows, "OVERLAP": overlap}
    behind = {"launch_pdl": True} if overlap else {}  # an option that not every backend of Triton knows

    def latent_grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(max_rank, meta["BLOCK_N"]) * splits, len(sets)

    def output_grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(max_outputs, meta["BLOCK_N"]), len(sets)

    kind = kind_of(x_BI.dtype, precision)
    latent_call, output_call = (Call(kind, rows, len(sets) * width) for width in (max_rank, max_outputs))
    _decode_latent_kernel.launch(
        latent_grid, latent_call, x_BI, B, I, max_rank, *strides, SPLITS=splits, PRECISION=precision, **shared
    )
    if splits > 1:
        columns = _SUM_COLUMNS[rows]
        grid = triton.cdiv(max_rank, columns), len(sets)
        _decode_sum_kernel[grid](x_BI, B, *strides, SPLITS=splits, BLOCK_N=columns, **shared, **behind)
    _decode_output_kernel.launch(
        output_grid,
        output_call,
        B,
        max_rank,
        max_outputs,
        packed(sets),
        ACTIVATION=activation,
        PRECISION=precision,
        **shared,
        **behind,
    )
    return outs, latents if keep else [z[:0] for z in latents]
