"""Gradients of sketched linear layers of one input, y = a(s) m + r with s = z upᵀ + b, z = x₁ + x₂ downᵀ.

    gs = gy m a'(s), gm = gy a(s)        -> _epilogue_grad_kernel: s is computed again, never stored
    gz = gs up
    gx = Σ over layers of gz down, added to columns x₂, and gz itself, added to columns x₁
           one layer                     -> the forward kernel on the transposed factors: gz stays on chip
           several layers                -> _latent_grad_kernel, then _input_grad_kernel: every gx is
                                            written once, not read and added to
    gup = gsᵀ z, gbias = Σ gs, gdown = gzᵀ x₂   -> _weight_grad_kernel, parts summed in a fixed order

Types and strides: see sketched_linear.py. Sums in float32; gs and gz are rounded to the type of x.
"""

# B rows, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from panther_compile.kernels.activations import activate, activation_slope
from panther_compile.kernels.autotune import Call, kind_of, tuned
from panther_compile.kernels.factor_set import Factors, LinearGrads, Needs, factor_set, packed
from panther_compile.kernels.sketched_linear import latent_tile, launch_sets, load_up, store_latent

_PROGRAMS = 256  # about two for each multiprocessor of an A100 or H100
_MAX_SPLITS = 32


@tuned("product", key=["rows_class", "outputs", "rank", "PRECISION"])
@triton.jit(do_not_specialize=["B", "rows_class", "outputs", "rank"])
def _epilogue_grad_kernel(
    grad_ptr,
    multiplier_grad_ptr,
    B,
    rows_class,
    outputs,
    rank,
    stride_gm,
    stride_go,
    factors,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks = tl.cdiv(factors.outputs, BLOCK_N)
    offs_m = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_o = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_o = offs_m < B, offs_o < factors.outputs
    mask = mask_m[:, None] & mask_o[None, :]
    stride_zm, stride_zr = factors.latent_strides
    s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, factors.rank, BLOCK_K):
        offs_r = first + tl.arange(0, BLOCK_K).to(tl.int64)
        z = tl.load(
            factors.latent + offs_m[:, None] * stride_zm + offs_r[None, :] * stride_zr,
            mask=mask_m[:, None] & (offs_r < factors.rank)[None, :],
            other=0.0,
        )
        s = tl.dot(z, load_up(factors, offs_o, offs_r), s, input_precision=PRECISION)
    if factors.bias is not None:
        s += tl.load(factors.bias + offs_o, mask=mask_o, other=0.0).to(tl.float32)[None, :]
    grad = tl.load(
        grad_ptr + offs_m[:, None] * stride_gm + offs_o[None, :] * stride_go, mask=mask, other=0.0
    ).to(tl.float32)
    stride_ym, stride_yo = factors.out_strides
    out_offs = offs_m[:, None] * stride_ym + offs_o[None, :] * stride_yo
    if multiplier_grad_ptr is not None:  # laid out as gs is
        multiplier_grad = (grad * activate(s, ACTIVATION)).to(multiplier_grad_ptr.dtype.element_ty)
        tl.store(multiplier_grad_ptr + out_offs, multiplier_grad, mask=mask)
    if factors.multiplier is not None:
        stride_mm, stride_mo = factors.multiplier_strides
        rows_ptr = factors.multiplier + offs_m[:, None] * stride_mm
        grad *= tl.load(rows_ptr + offs_o[None, :] * stride_mo, mask=mask, other=0.0).to(tl.float32)
    grad *= activation_slope(s, ACTIVATION)
    tl.store(factors.out + out_offs, grad.to(factors.out.dtype.element_ty), mask=mask)


@tuned("product", key=["rows_class", "max_rank", "itemsize", "SETS", "PRECISION"])
@triton.jit(do_not_specialize=["B", "rows_class", "max_rank", "itemsize"])
def _latent_grad_kernel(
    grads,
    grad_strides,
    B,
    rows_class,
    max_rank,
    itemsize,
    sets,
    SETS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks = tl.cdiv(max_rank, BLOCK_N)
    offs_m = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < B
    for index in tl.static_range(SETS):
        if tl.program_id(1) == index:
            stride_gm, stride_go = grad_strides[index]
            z = latent_tile(
                grads[index],
                stride_gm,
                stride_go,
                sets[index],
                offs_m,
                mask_m,
                offs_r,
                BLOCK_K,
                PRECISION,
            )
            store_latent(z, sets[index], offs_m, mask_m, offs_r)


@tuned("product", key=["rows_class", "I", "max_rank", "SETS", "PRECISION"])
@triton.jit(do_not_specialize=["B", "rows_class", "max_rank"])
def _input_grad_kernel(
    gx_ptr,
    B,
    I,
    rows_class,
    max_rank,
    stride_xm,
    stride_xi,
    sets,
    SETS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks = tl.cdiv(I, BLOCK_N)
    offs_m = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_i = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < B
    gx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for index in tl.static_range(SETS):
        factors = sets[index]
        stride_zm, stride_zr = factors.latent_strides
        stride_dr, stride_ds = factors.down_strides
        offs_s = offs_i - factors.rest
        mask_s = (offs_s >= 0) & (offs_s < factors.inputs)
        rows_ptr = factors.latent + offs_m[:, None] * stride_zm
        for first in range(0, factors.rank, BLOCK_K):
            offs_r = first + tl.arange(0, BLOCK_K).to(tl.int64)
            mask_r = offs_r < factors.rank
            gz = tl.load(
                rows_ptr + offs_r[None, :] * stride_zr,
                mask=mask_m[:, None] & mask_r[None, :],
                other=0.0,
            )
            down = tl.load(
                factors.down + offs_r[:, None] * stride_dr + offs_s[None, :] * stride_ds,
                mask=mask_r[:, None] & mask_s[None, :],
                other=0.0,
            )
            gx = tl.dot(gz, down, gx, input_precision=PRECISION)
        if factors.pivot >= 0:
            offs_p = offs_i - factors.pivot
            mask_p = (offs_p >= 0) & (offs_p < factors.rank)
            gx += tl.load(
                rows_ptr + offs_p[None, :] * stride_zr,
                mask=mask_m[:, None] & mask_p[None, :],
                other=0.0,
            ).to(tl.float32)
    tl.store(
        gx_ptr + offs_m[:, None] * stride_xm + offs_i[None, :] * stride_xi,
        gx.to(gx_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_i < I)[None, :],
    )


@tuned("weight_grad", key=["rows_class", "M", "N", "PRECISION"])
@triton.jit(do_not_specialize=["B", "splits", "rows_class"])
def _weight_grad_kernel(
    a_ptr,
    b_ptr,
    parts_ptr,
    sums_ptr,
    B,
    M,
    N,
    splits,
    rows_class,
    stride_ab,
    stride_am,
    stride_bb,
    stride_bn,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Part `split` of aᵀ b (M, N) over the rows of a (B, M), b (B, N), and of the sums of a."""
    split = tl.program_id(1)
    blocks = tl.cdiv(N, BLOCK_N)
    offs_m = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(split * BLOCK_K, B, splits * BLOCK_K):
        offs_b = first + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_b = offs_b < B
        a = tl.load(
            a_ptr + offs_m[:, None] * stride_am + offs_b[None, :] * stride_ab,
            mask=mask_m[:, None] & mask_b[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + offs_b[:, None] * stride_bb + offs_n[None, :] * stride_bn,
            mask=mask_b[:, None] & mask_n[None, :],
            other=0.0,
        )
        product = tl.dot(a, b, product, input_precision=PRECISION)
        sums += tl.sum(a.to(tl.float32), axis=1)
    part = split.to(tl.int64) * M + offs_m
    tl.store(parts_ptr + part[:, None] * N + offs_n[None, :], product, mask=mask_m[:, None] & mask_n[None, :])
    if tl.program_id(0) % blocks == 0:
        tl.store(sums_ptr + part, sums, mask=mask_m)


def epilogue_grad(
    grad_BO: Tensor,
    latent_BR: Tensor,
    layer: Factors,
    activation: str,
    multiplier: Tensor | None,
    needs: Needs,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor | None]:
    """Gradients (B, O) of s and, where it is wanted, of the multiplier, from that of y and from z."""
    (B, O), rank = grad_BO.shape, latent_BR.shape[1]
    out = torch.empty(B, O, dtype=grad_BO.dtype, device=grad_BO.device)
    multiplier_grad = torch.empty_like(out) if multiplier is not None and needs.multiplier else None
    if B:
        factors = factor_set(layer.down, layer.up, layer.bias, out, latent_BR, multiplier=multiplier)
        _epilogue_grad_kernel.launch(
            _tiles(B, O),
            Call(kind_of(grad_BO.dtype, precision), width=2),
            grad_BO,
            multiplier_grad,
            B,
            B.bit_length(),
            O,
            rank,
            *grad_BO.stride(),
            factors,
            ACTIVATION=activation,
            PRECISION=precision,
        )
    return out, multiplier_grad


def input_grad(
    grads: Sequence[Tensor], layers: Sequence[Factors], in_features: int, precision: str = "ieee"
) -> tuple[Tensor, list[Tensor]]:
    """The gradient gx (B, I), and gz (B, R) of every layer, which may be a slice of gx."""
    B, (dtype, device) = grads[0].shape[0], (grads[0].dtype, grads[0].device)
    gx = torch.empty(B, in_features, dtype=dtype, device=device)
    if len(layers) == 1:
        (layer,), (grad,) = layers, grads
        rank, width = layer.down.shape
        if layer.start is None:
            gz = torch.empty(B, rank, dtype=dtype, device=device)
        else:
            gz = gx[:, layer.start : layer.start + rank]
        out = gx[:, layer.rest : layer.rest + width]
        launch_sets(grad, [factor_set(layer.up.t(), layer.down.t(), None, out, gz)], "none", precision)
        return gx, [gz]

    gzs = [torch.empty(B, one.down.shape[0], dtype=dtype, device=device) for one in layers]
    if B == 0:
        return gx, gzs
    transposed = [
        factor_set(one.up.t(), one.down.t(), None, gx, gz) for one, gz in zip(layers, gzs, strict=True)
    ]
    sets = [
        factor_set(one.down, one.up, None, gx, gz, pivot=one.start, rest=one.rest)
        for one, gz in zip(layers, gzs, strict=True)
    ]
    max_rank = max(one.rank for one in sets)
    sizes = {"SETS": len(sets), "PRECISION": precision}
    rows = B.bit_length()
    strides = tuple(grad.stride() for grad in grads)
    call = Call(kind_of(dtype, precision))
    tiles = _tiles(B, max_rank, len(sets))
    _latent_grad_kernel.launch(
        tiles, call, tuple(grads), strides, B, rows, max_rank, dtype.itemsize, tuple(transposed), **sizes
    )
    _input_grad_kernel.launch(
        _tiles(B, in_features), call, gx, B, in_features, rows, max_rank, *gx.stride(), packed(sets), **sizes
    )
    return gx, gzs


def weight_grad(a_BM: Tensor, b_BN: Tensor, precision: str = "ieee") -> tuple[Tensor, Tensor]:
    """The product aᵀ b (M, N), and the sums (M,) of the columns of a, in the type of a."""
    (B, M), N = a_BM.shape, b_BN.shape[1]
    # Enough programs for the device where the product is small; a power of 2 spares compilations.
    tiles = triton.cdiv(M, 64) * triton.cdiv(N, 64)
    splits = min(max(1, _PROGRAMS // tiles), triton.cdiv(max(B, 1), 32), _MAX_SPLITS)
    splits = 1 << (splits.bit_length() - 1)
    parts = torch.empty(splits, M, N, dtype=torch.float32, device=a_BM.device)
    sums = torch.empty(splits, M, dtype=torch.float32, device=a_BM.device)
    strides = (*a_BM.stride(), *b_BN.stride())
    call = Call(kind_of(a_BM.dtype, precision))
    _weight_grad_kernel.launch(
        _tiles(M, N, splits),
        call,
        a_BM,
        b_BN,
        parts,
        sums,
        B,
        M,
        N,
        splits,
        B.bit_length(),
        *strides,
        PRECISION=precision,
    )
    return parts.sum(0).to(a_BM.dtype), sums.sum(0).to(a_BM.dtype)


def sketched_linear_backward(
    grads: Sequence[Tensor],
    x_BI: Tensor,
    layers: Sequence[Factors],
    latents: Sequence[Tensor],
    *,
    activation: str = "none",
    multiplier: Tensor | None = None,
    needs: Needs,
    precision: str = "ieee",
) -> tuple[Tensor | None, list[LinearGrads]]:
    """Gradients of x and of every layer from those of the outputs (B, O); latents as kept (B, R)."""
    gmultiplier = None
    if activation != "none" or multiplier is not None:
        (grad,), (latent,), (layer,) = grads, latents, layers
        grad, gmultiplier = epilogue_grad(grad, latent, layer, activation, multiplier, needs, precision)
        grads = [grad]
    gx, gzs = None, None
    if needs.x or needs.down:
        gx, gzs = input_grad(grads, layers, x_BI.shape[1], precision)
    found = []
    for index, (layer, grad, latent) in enumerate(zip(layers, grads, latents, strict=True)):
        gdown = gup = gbias = None
        if needs.up:
            gup, gbias = weight_grad(grad, latent, precision)
        elif needs.bias and layer.bias is not None:
            gbias = grad.sum(0)
        if needs.down and gzs is not None:
            others = x_BI.narrow(1, layer.rest, layer.down.shape[1])
            gdown, _ = weight_grad(gzs[index], others, precision)
        found.append(LinearGrads(gdown, gup, gbias if layer.bias is not None else None, gmultiplier))
    return gx if needs.x else None, found


def _tiles(rows: int, columns: int, sets: int = 1) -> Any:
    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"]), sets

    return grid
