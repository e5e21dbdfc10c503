"""Gradients of random-feature attention, in time linear in the length; nothing kept but the inputs.

With φ_i = exp(log_q_i + T_c - r_i) / total_i, which sums to 1 over the keys, and g_i, δ_i = -g_i · y_i:

    dlog_q_i = φ_i * (S_c g_i + norm_c δ_i + Σ_{j of c, j <= i} (g_i · v_j + δ_i) ψ_j)
    Q_c      = Σ_queries of c φ_i [g_i, δ_i]             -> _favor_query_grad_kernel writes both
    R_c      = Σ_{c' > c} exp(T_c - T_c') Q_c'           -> _favor_reverse_scan_kernel, or the sum over all
    dlog_k_j = ψ_j * (R_c [v_j, 1] + Σ_{i of c, i >= j} (g_i · v_j + δ_i) φ_i),   ψ_j = exp(log_k_j - T_c)
    dv_j     = ψ_j · R_c + Σ_{i of c, i >= j} (φ_i · ψ_j) g_i      -> _favor_key_grad_kernel
    dq       = (dlog_q w - (Σ_m dlog_q) q') / D^(1/4), dk likewise

Every exponential is 1 or below but φ, which the quotient's threshold bounds. The same states, shifts and
types as in random_feature_attention.py; the directions and the mask get no gradient.
"""

# N batch, H heads, L queries, S keys, D head_dim, V columns of v, M features, C chunks

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from panther_compile.kernels.autotune import tuned
from panther_compile.kernels.random_feature_attention import (
    States,
    key_shift,
    key_states,
    load_directions,
    load_rows,
    load_states,
    log_features,
    mask_strides,
    outputs_from,
    sizes_of,
    store_rows,
)


@triton.jit
def _query_side(g_ptr, y_ptr, rows_ptr, g_strides, y_strides, n, h, heads, offs_c, queries, offs_v, V):
    """Rows g, δ, r and total; beyond the last query r is infinite, which makes φ 0."""
    g = load_rows(g_ptr, g_strides, n, h, offs_c, queries, offs_v, V).to(tl.float32)
    y = load_rows(y_ptr, y_strides, n, h, offs_c, queries, offs_v, V).to(tl.float32)
    row = 2 * ((n * heads + h) * queries + offs_c)
    r = tl.load(rows_ptr + row, mask=offs_c < queries, other=float("inf"))
    return g, -tl.sum(g * y, axis=1), r, tl.load(rows_ptr + row + 1, mask=offs_c < queries, other=1.0)


@triton.jit
def _pair_grads(g, delta, v, offs_c, PRECISION: tl.constexpr):
    """The gradient g_i · v_j + δ_i of each weight within a chunk, 0 where j > i."""
    pairs = tl.dot(g, tl.trans(v), input_precision=PRECISION) + delta[:, None]
    return tl.where(offs_c[:, None] >= offs_c[None, :], pairs, 0.0)


@tuned("favor", key=["M", "D", "V", "CAUSAL", "BLOCK_C", "PRECISION"])
@triton.jit(do_not_specialize=["queries", "keys", "chunks", "query_chunks"])
def _favor_query_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    w_ptr,
    mask_ptr,
    g_ptr,
    y_ptr,
    rows_ptr,
    gq_ptr,
    states,
    query_states,
    q_strides,
    k_strides,
    v_strides,
    w_strides,
    mask_strides,
    g_strides,
    y_strides,
    gq_strides,
    heads,
    queries,
    keys,
    chunks,
    query_chunks,
    D,
    V,
    M,
    scale,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head, chunk = program // query_chunks, program % query_chunks
    n, h = head // heads, head % heads
    offs_c = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_d, offs_v = tl.arange(0, BLOCK_D).to(tl.int64), tl.arange(0, BLOCK_V).to(tl.int64)
    q = load_rows(q_ptr, q_strides, n, h, offs_c, queries, offs_d, D)
    g, delta, r, total = _query_side(
        g_ptr, y_ptr, rows_ptr, g_strides, y_strides, n, h, heads, offs_c, queries, offs_v, V
    )
    k = load_rows(k_ptr, k_strides, n, h, offs_c, keys, offs_d, D) if CAUSAL else q
    v = load_rows(v_ptr, v_strides, n, h, offs_c, keys, offs_v, V).to(tl.float32) if CAUSAL else g
    shift = key_shift(mask_ptr, mask_strides, n, h, offs_c, keys)
    pairs = _pair_grads(g, delta, v, offs_c, PRECISION)
    first_state = (head * chunks + (chunk if CAUSAL else 0)) * M
    gq = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    grad_sum = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(0, M, BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < M
        w = load_directions(w_ptr, w_strides, offs_m, M, offs_d, D)
        top = tl.load(states.top + first_state + offs_m, mask=mask_m, other=0.0)
        norm, state = load_states(states, first_state + offs_m, mask_m, offs_v, V)
        log_q = log_features(q, w, offs_m, M, scale, PRECISION) + top[None, :]
        phi_q = tl.exp(log_q - r[:, None]) / total[:, None]
        slope = tl.dot(g, tl.trans(state), input_precision=PRECISION) + delta[:, None] * norm[None, :]
        if CAUSAL:
            log_k = log_features(k, w, offs_m, M, scale, PRECISION) + shift[:, None]
            phi_k = tl.exp(log_k - top[None, :])
            slope = tl.dot(pairs, phi_k, slope, input_precision=PRECISION)
        grad_log = phi_q * slope
        grad_sum += tl.sum(grad_log, axis=1)
        gq = tl.dot(grad_log, w.to(tl.float32), gq, input_precision=PRECISION)
        place = program * M + offs_m
        tl.store(query_states.norm + place, tl.sum(phi_q * delta[:, None], axis=0), mask=mask_m)
        tl.store(
            query_states.state + place[:, None] * V + offs_v[None, :],
            tl.dot(tl.trans(phi_q), g, input_precision=PRECISION),
            mask=mask_m[:, None] & (offs_v < V)[None, :],
        )
    # The sum is 0 but for rounding; this takes back a part of that.
    gq = (gq - grad_sum[:, None] * (q.to(tl.float32) * scale)) * scale
    store_rows(gq_ptr, gq_strides, gq, n, h, offs_c, queries, offs_d, D)


@triton.jit(do_not_specialize=["query_chunks"])
def _favor_reverse_scan_kernel(
    query_states,
    tops_ptr,
    query_chunks,
    V,
    M,
    CAUSAL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write in place the sums of the chunks after each, shifted to its T; or those of all, in the first."""
    head = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V).to(tl.int64)
    offs_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    mask = mask_m[:, None] & (offs_v < V)[None, :]
    norm = tl.zeros((BLOCK_M,), tl.float32)
    state = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    later_top = tl.zeros((BLOCK_M,), tl.float32)
    for step in range(query_chunks):
        place = (head * query_chunks + query_chunks - 1 - step) * M + offs_m
        own_norm, own_state = load_states(query_states, place, mask_m, offs_v, V)
        if CAUSAL:
            top = tl.load(tops_ptr + place, mask=mask_m, other=0.0)
            # The first step has no later chunk, and nothing to shift.
            decay = tl.exp(tl.where(step > 0, top - later_top, 0.0))
            norm, state, later_top = norm * decay, state * decay[:, None], top
            # Several warps have loaded the numbers that one of them overwrites.
            tl.debug_barrier()
            tl.store(query_states.norm + place, norm, mask=mask_m)
            tl.store(query_states.state + place[:, None] * V + offs_v[None, :], state, mask=mask)
        norm += own_norm
        state += own_state
    if not CAUSAL:
        tl.debug_barrier()
        place = head * query_chunks * M + offs_m
        tl.store(query_states.norm + place, norm, mask=mask_m)
        tl.store(query_states.state + place[:, None] * V + offs_v[None, :], state, mask=mask)


@tuned("favor", key=["M", "D", "V", "CAUSAL", "BLOCK_C", "PRECISION"])
@triton.jit(do_not_specialize=["queries", "keys", "length", "chunks", "query_chunks"])
def _favor_key_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    w_ptr,
    mask_ptr,
    g_ptr,
    y_ptr,
    rows_ptr,
    gk_ptr,
    gv_ptr,
    states,
    query_states,
    q_strides,
    k_strides,
    v_strides,
    w_strides,
    mask_strides,
    g_strides,
    y_strides,
    gk_strides,
    gv_strides,
    heads,
    queries,
    keys,
    length,
    chunks,
    query_chunks,
    D,
    V,
    M,
    scale,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head, chunk = program // chunks, program % chunks
    n, h = head // heads, head % heads
    offs_c = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_d, offs_v = tl.arange(0, BLOCK_D).to(tl.int64), tl.arange(0, BLOCK_V).to(tl.int64)
    k = load_rows(k_ptr, k_strides, n, h, offs_c, keys, offs_d, D)
    v = load_rows(v_ptr, v_strides, n, h, offs_c, keys, offs_v, V).to(tl.float32)
    shift = key_shift(mask_ptr, mask_strides, n, h, offs_c, keys)
    if CAUSAL:
        q = load_rows(q_ptr, q_strides, n, h, offs_c, queries, offs_d, D)
        g, delta, r, total = _query_side(
            g_ptr, y_ptr, rows_ptr, g_strides, y_strides, n, h, heads, offs_c, queries, offs_v, V
        )
        pairs = _pair_grads(g, delta, v, offs_c, PRECISION)
        weights = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    place_of_state = (head * chunks + (chunk if CAUSAL else 0)) * M
    place_of_query_state = (head * query_chunks + (chunk if CAUSAL else 0)) * M
    gk = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    gv = tl.zeros((BLOCK_C, BLOCK_V), tl.float32)
    grad_sum = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(0, M, BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < M
        w = load_directions(w_ptr, w_strides, offs_m, M, offs_d, D)
        top = tl.load(states.top + place_of_state + offs_m, mask=mask_m, other=0.0)
        norm, state = load_states(query_states, place_of_query_state + offs_m, mask_m, offs_v, V)
        log_k = log_features(k, w, offs_m, M, scale, PRECISION) + shift[:, None]
        phi_k = tl.exp(log_k - top[None, :])
        slope = tl.dot(v, tl.trans(state), input_precision=PRECISION) + norm[None, :]
        gv = tl.dot(phi_k, state, gv, input_precision=PRECISION)
        if CAUSAL:
            log_q = log_features(q, w, offs_m, M, scale, PRECISION) + top[None, :]
            phi_q = tl.exp(log_q - r[:, None]) / total[:, None]
            slope = tl.dot(tl.trans(pairs), phi_q, slope, input_precision=PRECISION)
            weights = tl.dot(phi_q, tl.trans(phi_k), weights, input_precision=PRECISION)
        grad_log = phi_k * slope
        gk = tl.dot(grad_log, w.to(tl.float32), gk, input_precision=PRECISION)
        grad_sum += tl.sum(grad_log, axis=1)
    if CAUSAL:
        weights = tl.where(offs_c[:, None] >= offs_c[None, :], weights, 0.0)
        gv = tl.dot(tl.trans(weights), g, gv, input_precision=PRECISION)
    gk = (gk - grad_sum[:, None] * (k.to(tl.float32) * scale)) * scale
    # Keys from `keys` to `length` are seen by no query: their gradients are the zeros that came out.
    store_rows(gk_ptr, gk_strides, gk, n, h, offs_c, length, offs_d, D)
    store_rows(gv_ptr, gv_strides, gv, n, h, offs_c, length, offs_v, V)


def favor_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their types, from that of the output (N, H, L, V)."""
    gq, gk, gv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if 0 in (*q.shape, *k.shape, *v.shape):
        return gq.zero_(), gk.zero_(), gv.zero_()
    (N, H, L, D), S, V, M = q.shape, k.shape[2], v.shape[-1], directions.shape[0]
    sizes = sizes_of(q, k, v, causal, precision, backward=True)
    states = key_states(k, v, directions, key_mask, sizes, causal)
    y, rows = outputs_from(q, k, v, directions, key_mask, states, sizes, causal, torch.float32)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    query_states = States(
        states.top,
        torch.empty(N * H, sizes.query_chunks, M, **float32),
        torch.empty(N * H, sizes.query_chunks, M, V, **float32),
    )
    inputs = (q, k, v, directions, key_mask, grad, y, rows)
    strides = (
        q.stride(),
        k.stride(),
        v.stride(),
        directions.stride(),
        mask_strides(key_mask),
        grad.stride(),
        y.stride(),
    )
    counts = (sizes.chunks, sizes.query_chunks, D, V, M)
    shared = {**sizes.shared, "CAUSAL": causal}
    _favor_query_grad_kernel.launch(
        (N * H * sizes.query_chunks,),
        sizes.call,
        *inputs,
        gq,
        states,
        query_states,
        *strides,
        gq.stride(),
        H,
        L,
        sizes.keys,
        *counts,
        D**-0.25,
        **shared,
    )
    _favor_reverse_scan_kernel[(N * H, triton.cdiv(M, 16))](
        query_states,
        states.top,
        sizes.query_chunks,
        V,
        M,
        CAUSAL=causal,
        BLOCK_V=shared["BLOCK_V"],
        BLOCK_M=16,
    )
    _favor_key_grad_kernel.launch(
        (N * H * sizes.chunks,),
        sizes.call,
        *inputs,
        gk,
        gv,
        states,
        query_states,
        *strides,
        gk.stride(),
        gv.stride(),
        H,
        L,
        sizes.keys,
        S,
        *counts,
        D**-0.25,
        **shared,
    )
    return gq, gk, gv
