"""Random-feature attention (FAVOR+) in time linear in the length, causal or not.

    log_q = q' wᵀ - |q'|²/2, q' = q / D^(1/4); log_k likewise, plus the mask of the key
    top_c     = max over keys of chunk c of log_k            (one number for each feature)
    state_c   = Σ_keys of c exp(log_k - top_c) [v, 1]        -> _favor_state_kernel, chunks in parallel
    T_c, the running maximum of top, and S_c = Σ_{c' < c} exp(top_c' - T_c) state_c'
                                                             -> _favor_scan_kernel, or the sum over all c
    y_i = [Σ_m φ_im S_cm + Σ_{j of c, j <= i} (φ_i · exp(log_k_j - T_c)) v_j] / the same of 1,
    φ_i = exp(log_q_i + T_c - r_i), r_i its largest exponent -> _favor_output_kernel

Without `causal` there is one state, S of all keys, and no second sum. The shifts T and r cancel in the
quotient; they keep every exponential at 1 or below. Choromanski et al., "Rethinking Attention with
Performers", https://arxiv.org/abs/2009.14794.

q (N, H, L, D), k (N, H, S, D), v (N, H, S, V), w (M, D): float32, float16 or bfloat16, any strides.
Every sum is taken in float32. Logarithms of features are products of q and w, or k and w, as they are; all
other products are of float32, in TF32 where the inputs are of half types: both run on tensor cores. S_c costs
N H (S / BLOCK_C) M (V + 1) float32.
"""

# N batch, H heads, L queries, S keys, D head_dim, V columns of v, M features, C chunks

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from panther_compile.kernels.autotune import Call, chunk_length, kind_of, tuned

LOWEST = tl.constexpr(-3.4028234663852886e38)
# See _divide in reference.py: below it a gradient would overflow.
SMALLEST = tl.constexpr(3.5762e-29)


class States(NamedTuple):
    """Sums over keys, or over queries, float32; one chunk without `causal`.

    Attributes:
        top: (N H, C, M), the shift T of each feature.
        norm: (N H, C, M).
        state: (N H, C, M, V).
    """

    top: Tensor
    norm: Tensor
    state: Tensor


@triton.jit
def load_rows(x_ptr, strides, n, h, offs, length, offs_d, width):
    """Rows of x[n, h], 0 beyond its end."""
    return tl.load(
        x_ptr + n * strides[0] + h * strides[1] + offs[:, None] * strides[2] + offs_d[None, :] * strides[3],
        mask=(offs < length)[:, None] & (offs_d < width)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(x_ptr, strides, x, n, h, offs, length, offs_d, width):
    """Rows of x[n, h], up to its end."""
    place = x_ptr + n * strides[0] + h * strides[1]
    tl.store(
        place + offs[:, None] * strides[2] + offs_d[None, :] * strides[3],
        x.to(x_ptr.dtype.element_ty),
        mask=(offs < length)[:, None] & (offs_d < width)[None, :],
    )


@triton.jit
def load_directions(w_ptr, w_strides, offs_m, M, offs_d, D):
    """Rows of w, 0 beyond its end."""
    return tl.load(
        w_ptr + offs_m[:, None] * w_strides[0] + offs_d[None, :] * w_strides[1],
        mask=(offs_m < M)[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )


@triton.jit
def load_states(states, place, mask_m, offs_v, V):
    """Norms and states of some features, 0 beyond the last one."""
    norm = tl.load(states.norm + place, mask=mask_m, other=0.0)
    state = tl.load(
        states.state + place[:, None] * V + offs_v[None, :],
        mask=mask_m[:, None] & (offs_v < V)[None, :],
        other=0.0,
    )
    return norm, state


@triton.jit
def log_features(x, w, offs_m, M, scale, PRECISION: tl.constexpr):
    """Logarithms of the features of rows x, scaled here, -inf beyond the last feature.

    Products of half types are exact in float32, so x is scaled after them.
    """
    wide = x.to(tl.float32) * scale
    logs = (
        tl.dot(x, tl.trans(w), input_precision=PRECISION) * scale - 0.5 * tl.sum(wide * wide, axis=1)[:, None]
    )
    return tl.where((offs_m < M)[None, :], logs, float("-inf"))


@triton.jit
def key_shift(mask_ptr, mask_strides, n, h, offs, keys):
    """What is added to the logarithms of each key: its mask, -inf beyond the last key."""
    shift = tl.where(offs < keys, 0.0, float("-inf"))
    if mask_ptr is not None:
        place = n * mask_strides[0] + h * mask_strides[1] + offs * mask_strides[2]
        shift += tl.load(mask_ptr + place, mask=offs < keys, other=0.0).to(tl.float32)
    return shift


@tuned("favor", key=["M", "D", "V", "BLOCK_C", "PRECISION"])
@triton.jit(do_not_specialize=["keys", "chunks"])
def _favor_state_kernel(
    k_ptr,
    v_ptr,
    w_ptr,
    mask_ptr,
    states,
    k_strides,
    v_strides,
    w_strides,
    mask_strides,
    heads,
    keys,
    chunks,
    D,
    V,
    M,
    scale,
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
    offs_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    k = load_rows(k_ptr, k_strides, n, h, offs_c, keys, offs_d, D)
    v = load_rows(v_ptr, v_strides, n, h, offs_c, keys, offs_v, V).to(tl.float32)
    w = load_directions(w_ptr, w_strides, offs_m, M, offs_d, D)
    log_k = log_features(k, w, offs_m, M, scale, PRECISION)
    log_k += key_shift(mask_ptr, mask_strides, n, h, offs_c, keys)[:, None]
    top = tl.maximum(tl.max(log_k, axis=0), LOWEST)
    phi_k = tl.exp(log_k - top[None, :])
    place = program * M + offs_m
    tl.store(states.top + place, top, mask=mask_m)
    tl.store(states.norm + place, tl.sum(phi_k, axis=0), mask=mask_m)
    tl.store(
        states.state + place[:, None] * V + offs_v[None, :],
        tl.dot(tl.trans(phi_k), v, input_precision=PRECISION),
        mask=mask_m[:, None] & (offs_v < V)[None, :],
    )


@triton.jit(do_not_specialize=["chunks"])
def _favor_scan_kernel(
    states,
    chunks,
    V,
    M,
    CAUSAL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write in place T, and the sums of the chunks before, for every chunk; or those of all, in the first."""
    head = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V).to(tl.int64)
    offs_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    mask = mask_m[:, None] & (offs_v < V)[None, :]
    top = tl.zeros((BLOCK_M,), tl.float32) + LOWEST
    norm = tl.zeros((BLOCK_M,), tl.float32)
    state = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for chunk in range(chunks):
        place = (head * chunks + chunk) * M + offs_m
        wide = place[:, None] * V + offs_v[None, :]
        own_top = tl.load(states.top + place, mask=mask_m, other=LOWEST)
        own_norm, own_state = load_states(states, place, mask_m, offs_v, V)
        new_top = tl.maximum(top, own_top)
        decay, weight = tl.exp(top - new_top), tl.exp(own_top - new_top)
        top, norm, state = new_top, norm * decay, state * decay[:, None]
        if CAUSAL:
            # Several warps have loaded the numbers that one of them overwrites.
            tl.debug_barrier()
            tl.store(states.top + place, top, mask=mask_m)
            tl.store(states.norm + place, norm, mask=mask_m)
            tl.store(states.state + wide, state, mask=mask)
        norm += own_norm * weight
        state += own_state * weight[:, None]
    if not CAUSAL:
        tl.debug_barrier()
        place = head * chunks * M + offs_m
        tl.store(states.top + place, top, mask=mask_m)
        tl.store(states.norm + place, norm, mask=mask_m)
        tl.store(states.state + place[:, None] * V + offs_v[None, :], state, mask=mask)


@tuned("favor", key=["M", "D", "V", "CAUSAL", "BLOCK_C", "PRECISION"])
@triton.jit(do_not_specialize=["queries", "keys", "chunks", "query_chunks"])
def _favor_output_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    w_ptr,
    mask_ptr,
    y_ptr,
    rows_ptr,
    states,
    q_strides,
    k_strides,
    v_strides,
    w_strides,
    mask_strides,
    y_strides,
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
    k = load_rows(k_ptr, k_strides, n, h, offs_c, keys, offs_d, D) if CAUSAL else q
    shift = key_shift(mask_ptr, mask_strides, n, h, offs_c, keys)
    first_state = (head * chunks + (chunk if CAUSAL else 0)) * M
    r = tl.zeros((BLOCK_C,), tl.float32) + LOWEST
    total = tl.zeros((BLOCK_C,), tl.float32)
    sums = tl.zeros((BLOCK_C, BLOCK_V), tl.float32)
    weights = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for first in range(0, M, BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < M
        w = load_directions(w_ptr, w_strides, offs_m, M, offs_d, D)
        place = first_state + offs_m
        top = tl.load(states.top + place, mask=mask_m, other=0.0)
        norm, state = load_states(states, place, mask_m, offs_v, V)
        log_q = log_features(q, w, offs_m, M, scale, PRECISION) + top[None, :]
        new_r = tl.maximum(r, tl.max(log_q, axis=1))
        decay = tl.exp(r - new_r)
        r = new_r
        phi_q = tl.exp(log_q - r[:, None])
        total = total * decay + tl.sum(phi_q * norm[None, :], axis=1)
        sums = tl.dot(phi_q, state, sums * decay[:, None], input_precision=PRECISION)
        if CAUSAL:
            log_k = log_features(k, w, offs_m, M, scale, PRECISION) + shift[:, None]
            phi_k = tl.exp(log_k - top[None, :])
            weights = tl.dot(phi_q, tl.trans(phi_k), weights * decay[:, None], input_precision=PRECISION)
    if CAUSAL:
        weights = tl.where(offs_c[:, None] >= offs_c[None, :], weights, 0.0)
        v = load_rows(v_ptr, v_strides, n, h, offs_c, keys, offs_v, V).to(tl.float32)
        total += tl.sum(weights, axis=1)
        sums = tl.dot(weights, v, sums, input_precision=PRECISION)
    seen = total > SMALLEST
    total = tl.where(seen, total, 1.0)
    y = tl.where(seen[:, None], sums / total[:, None], 0.0)
    store_rows(y_ptr, y_strides, y, n, h, offs_c, queries, offs_v, V)
    # With them, exp(log_q + T - r) / total is φ over its total: 0 where nothing was seen. Not as one
    # logarithm, whose rounding would scale the gradients of the row.
    row, mask_c = 2 * (head * queries + offs_c), offs_c < queries
    tl.store(rows_ptr + row, tl.where(seen, r, float("inf")), mask=mask_c)
    tl.store(rows_ptr + row + 1, total, mask=mask_c)


class Sizes(NamedTuple):
    """What every launch is given; `shared` are the keyword arguments."""

    keys: int
    chunks: int
    query_chunks: int
    call: Call
    shared: dict[str, Any]


def sizes_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, precision: str, *, backward: bool = False
) -> Sizes:
    """Chunks and blocks for these inputs; with `causal`, keys that no query sees are left out."""
    (L, D), S, V = q.shape[-2:], k.shape[-2], v.shape[-1]
    kind = kind_of(q.dtype, precision)
    length = chunk_length(kind, q.shape[:-1].numel(), backward=backward)
    chunks = triton.cdiv(max(L, S) if causal else S, length)
    return Sizes(
        min(L, S) if causal else S,
        chunks,
        chunks if causal else triton.cdiv(L, length),
        Call(kind, max(16, triton.next_power_of_2(max(D, V))), length),
        {
            "PRECISION": "tf32" if q.dtype.itemsize == 2 else precision,
            "BLOCK_D": max(16, triton.next_power_of_2(D)),
            "BLOCK_V": max(16, triton.next_power_of_2(V)),
            "BLOCK_C": length,
        },
    )


def key_states(
    k: Tensor, v: Tensor, directions: Tensor, key_mask: Tensor | None, sizes: Sizes, causal: bool
) -> States:
    """The sums over keys that each chunk of queries starts from; see the head of the file."""
    (N, H, _, D), V, M = k.shape, v.shape[-1], directions.shape[0]
    count = max(sizes.chunks, 1)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    states = States(
        torch.empty(N * H, count, M, **float32),
        torch.empty(N * H, count, M, **float32),
        torch.empty(N * H, count, M, V, **float32),
    )

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return N * H * count, triton.cdiv(M, meta["BLOCK_M"])

    _favor_state_kernel.launch(
        grid,
        sizes.call,
        k,
        v,
        directions,
        key_mask,
        states,
        k.stride(),
        v.stride(),
        directions.stride(),
        mask_strides(key_mask),
        H,
        sizes.keys,
        count,
        D,
        V,
        M,
        D**-0.25,
        **sizes.shared,
    )
    scan_grid = (N * H, triton.cdiv(M, 16))
    _favor_scan_kernel[scan_grid](
        states, count, V, M, CAUSAL=causal, BLOCK_V=sizes.shared["BLOCK_V"], BLOCK_M=16
    )
    return states


def mask_strides(key_mask: Tensor | None) -> tuple[int, ...]:
    """Strides of a mask (N, H, S), zeros without one."""
    return (0, 0, 0) if key_mask is None else key_mask.stride()


def outputs_from(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    key_mask: Tensor | None,
    states: States,
    sizes: Sizes,
    causal: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The output (N, H, L, V), and r and the total of each row, (N H, L, 2) float32."""
    (N, H, L, D), V, M = q.shape, v.shape[-1], directions.shape[0]
    y = torch.empty(N, H, L, V, dtype=dtype, device=v.device)
    rows = torch.empty(N * H, L, 2, dtype=torch.float32, device=v.device)
    _favor_output_kernel.launch(
        (N * H * sizes.query_chunks,),
        sizes.call,
        q,
        k,
        v,
        directions,
        key_mask,
        y,
        rows,
        states,
        q.stride(),
        k.stride(),
        v.stride(),
        directions.stride(),
        mask_strides(key_mask),
        y.stride(),
        H,
        L,
        sizes.keys,
        max(sizes.chunks, 1),
        sizes.query_chunks,
        D,
        V,
        M,
        D**-0.25,
        CAUSAL=causal,
        **sizes.shared,
    )
    return y, rows


def favor_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    precision: str = "ieee",
) -> Tensor:
    """The attention (N, H, L, V); key_mask (N, H, S), of any strides, is added to the logits."""
    if q.shape[:-1].numel() == 0 or v.shape[-1] == 0:
        return torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    sizes = sizes_of(q, k, v, causal, precision)
    states = key_states(k, v, directions, key_mask, sizes, causal)
    return outputs_from(q, k, v, directions, key_mask, states, sizes, causal, v.dtype)[0]
