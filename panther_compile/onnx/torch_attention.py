"""ONNX's Attention and RotaryEmbedding (opset 23) in torch, and what other forms of them are made of."""

# B batch, H heads, S positions of queries, P those of a cache, T = P + S of all keys, E numbers of a head
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.onnx.torch_cells import UnknownOperatorError

_PLAIN = {
    *("is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "outputs"),
    *("qk_matmul_output_mode", "softmax_precision"),  # of an output that is not asked for; of rounding
}


def attention(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Y as the queries are, (B, H, S, E) or (B, S, H E), and all keys and values (B, H, T, E).

    Raises:
        UnknownOperatorError: a node has a window, or asks for its logits.
    """
    query, key, value, mask, past_key, past_value, lengths = [*inputs, *[None] * 4][:7]
    if set(given) - _PLAIN or given["outputs"] > 3:
        raise UnknownOperatorError("Attention with options of its own is not known here")
    flat = query.dim() == 3
    if flat:
        heads = given["q_num_heads"], given["kv_num_heads"], given["kv_num_heads"]
        parts = zip((query, key, value), heads, strict=True)
        query, key, value = (in_heads(one, count) for one, count in parts)
    key, value = behind(past_key, key), behind(past_value, value)
    size, total = query.shape[2], key.shape[2]
    allowed = added = None
    if mask is not None:
        allowed, added = (mask, None) if mask.dtype == torch.bool else (None, mask)
    first: Any = 0 if past_key is None else past_key.shape[2]
    if lengths is not None:
        lengths = lengths.reshape(-1, 1, 1, 1)
        allowed, first = both(allowed, torch.arange(total) < lengths), lengths - size
    if given.get("is_causal", 0):
        allowed = both(allowed, causal(size, total, first))
    found = attended(query, key, value, allowed, added, given.get("scale"), given.get("softcap", 0.0))
    return (out_of_heads(found) if flat else found), key, value


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    added: Tensor | None,
    scale: float | None,
    cap: float = 0.0,
) -> Tensor:
    """What queries (B, H, S, E) find among keys and values (B, H or fewer, T, E).

    Args:
        query: what is asked for.
        key: what is there.
        value: what it holds.
        allowed: where a query may look, up to (B, H, S, T); None for everywhere.
        added: to the logits, likewise.
        scale: of the logits; None or 0 for the root of 1 / E.
        cap: of the logits, by tanh; 0 for none.
    """
    scale = scale or None
    if cap:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        logits = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        logits = cap * (logits / cap).tanh()
        logits = logits if added is None else logits + added
        logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        return logits.softmax(-1).nan_to_num(0.0) @ value
    if allowed is not None:
        added = torch.where(allowed, 0.0 if added is None else added, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, added, scale=scale, enable_gqa=True)


def in_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, H E) as (B, H, S, E)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def out_of_heads(x: Tensor) -> Tensor:
    """(B, H, S, E) as (B, S, H E)."""
    return x.transpose(1, 2).flatten(2)


def behind(past: Tensor | None, new: Tensor) -> Tensor:
    """Keys or values (B, H, S, E) behind those of a cache (B, H, P, E)."""
    return new if past is None else torch.cat((past, new), 2)


def both(allowed: Tensor | None, other: Tensor) -> Tensor:
    """Where two masks allow it."""
    return other if allowed is None else allowed & other


def causal(size: int, total: int, first: Any) -> Tensor:
    """Where a query may look that sees nothing behind itself; the first one is at the place `first`."""
    return torch.arange(total) <= torch.arange(size).unsqueeze(1) + first


def rotary(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a RotaryEmbedding node, as X is: (B, H, S, E) or (B, S, H E)."""
    x, cos, sin, places = [*inputs, None][:4]
    cos, sin = (one if places is None else one[places] for one in (cos, sin))
    flat = x.dim() == 3
    x = in_heads(x, given["num_heads"]) if flat else x
    found = _turned(x, cos.unsqueeze(1), sin.unsqueeze(1), bool(given.get("interleaved", 0)))
    return out_of_heads(found) if flat else found


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of numbers of a head turned by angles (.., S, R / 2); those from R on are left."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        one, other = turning[..., 0::2], turning[..., 1::2]
        found = torch.stack((one * cos - other * sin, one * sin + other * cos), -1).flatten(-2)
    else:
        one, other = turning[..., :half], turning[..., half:]
        found = torch.cat((one * cos - other * sin, one * sin + other * cos), -1)
    return torch.cat((found, rest), -1)
