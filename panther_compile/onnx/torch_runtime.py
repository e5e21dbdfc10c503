"""Operators of ONNX Runtime's own domain, com.microsoft, in torch: what its optimizer writes for a CPU.

Products by a constant, and convolutions, are none of them: `taken_apart.py` writes those as ONNX does.
"""

# B batch, H heads, S positions of queries, T of keys, E numbers of a head
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.onnx.torch_attention import (
    attended,
    behind,
    both,
    causal,
    in_heads,
    out_of_heads,
    rotary,
)
from panther_compile.onnx.torch_cells import UnknownOperatorError
from panther_compile.onnx.torch_ops import Operator

_HIDDEN = -10000.0  # added to logits that a mask hides
_USUAL_EPSILON = 1e-12


def _added(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _gelu(approximate: str) -> Operator:
    def run(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
        x, bias = [*inputs, None][:2]
        return F.gelu(_added(x, bias), approximate=approximate)

    return run


def _quick_gelu(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    (x,) = inputs
    return x * (given.get("alpha", 1.702) * x).sigmoid()


def _product(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    if given.get("transBatchA", 0) or given.get("transBatchB", 0):
        raise UnknownOperatorError("FusedMatMul of transposed batches is not known here")
    a, b = (
        one.transpose(-1, -2) if given.get(name, 0) else one
        for one, name in zip(inputs, ("transA", "transB"), strict=True)
    )
    return given.get("alpha", 1.0) * (a @ b)


def _skip_layer_norm(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Any]:
    x, skip, scale, shift, bias = [*inputs, None, None][:5]
    total = _added(x + skip, bias)
    epsilon = given.get("epsilon", _USUAL_EPSILON)
    return F.layer_norm(total, total.shape[-1:], scale, shift, epsilon), None, None, total


def _skip_rms_norm(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Any]:
    x, skip, scale, bias = [*inputs, None][:4]
    total = _added(x + skip, bias)
    return F.rms_norm(total, total.shape[-1:], scale, given.get("epsilon", 1e-5)), None, None, total


def _embedded(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Words, places and segments, normed; how many of each line count; and the sum before it is normed."""
    ids, segments, words, places, kinds, scale, shift, mask, order = [*inputs, None, None][:9]
    order = torch.arange(ids.shape[1]).unsqueeze(0) if order is None else order
    total = words[ids] + places[order]
    total = total if segments is None else total + kinds[segments]
    found = F.layer_norm(total, total.shape[-1:], scale, shift, given.get("epsilon", _USUAL_EPSILON))
    counts = ids.new_zeros(len(ids)) if mask is None else mask.sum(1)
    return found, counts.int(), total


def _mask(mask: Tensor, total: int, given: Mapping[str, Any]) -> Tensor:
    """What a mask of keys adds to logits, up to (B, 1, S, T)."""
    places = torch.arange(total)
    if mask.dim() == 1 and given.get("lengths") == len(mask):
        seen = (places < mask.unsqueeze(1))[:, None, None]
    elif mask.dim() == 2:
        seen = mask.bool()[:, None, None]
    elif mask.dim() == 3:
        seen = mask.bool().unsqueeze(1)
    else:
        raise UnknownOperatorError("attention with such a mask is not known here")
    return torch.where(seen, 0.0, given.get("mask_filter_value", _HIDDEN))


def _looked_up(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    given: Mapping[str, Any],
) -> Tensor:
    """(B, S, H E) of queries, keys and values in heads."""
    size, total = query.shape[2], key.shape[2]
    if mask is not None:
        hidden = _mask(mask, total, {**given, "lengths": len(query)})
        bias = hidden if bias is None else hidden + bias
    allowed = causal(size, total, total - size) if given.get("unidirectional", 0) else None
    return out_of_heads(attended(query, key, value, allowed, bias, given.get("scale")))


def _attention(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """What is attended to, and keys and values with those of a cache, (2, B, H, T, E)."""
    x, weights, shift, mask, past, bias, length = [*inputs, *[None] * 5][:7]
    if length is not None or given.get("do_rotary", 0) or given.get("past_present_share_buffer", 0):
        raise UnknownOperatorError("com.microsoft Attention with options of its own is not known here")
    product = _added(x @ weights, shift)
    sizes = given.get("qkv_hidden_sizes") or [product.shape[-1] // 3] * 3
    query, key, value = (in_heads(one, given["num_heads"]) for one in product.split(list(sizes), -1))
    if past is not None:
        key, value = behind(past[0], key), behind(past[1], value)
    found = _looked_up(query, key, value, mask, bias, given)
    return [found, torch.stack((key, value))] if given["outputs"] > 1 else [found]


def _multi_head(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """What is attended to, keys and values."""
    query, key, value, shift, mask, bias, past_key, past_value, *others = [*inputs, *[None] * 9][:10]
    is_plain = query.dim() == 3 and key is not None and key.dim() in (3, 4) and value is not None
    if not is_plain or any(one is not None for one in others) or given["outputs"] > 3:
        raise UnknownOperatorError("MultiHeadAttention with options of its own is not known here")
    if shift is not None:
        own = query.shape[-1]
        query, shift = query + shift[:own], shift[own:]
        if key.dim() == 3:
            key, value = key + shift[: key.shape[-1]], value + shift[key.shape[-1] :]
    query, key, value = (
        one if one.dim() == 4 else in_heads(one, given["num_heads"]) for one in (query, key, value)
    )
    key, value = behind(past_key, key), behind(past_value, value)
    return _looked_up(query, key, value, mask, bias, given), key, value


def _grouped(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """What is attended to, keys and values, of lines that are all as long."""
    query, key, value, past_key, past_value, lengths, whole, *others = [*inputs, *[None] * 11][:17]
    cos, sin, places, bias, *rare = others
    unusual = any(one is not None for one in rare) or given["outputs"] > 3 or not given.get("causal", 1)
    unusual = unusual or any(given.get(name, 0) > 0 for name in ("smooth_softmax", "qk_output"))
    total = int(whole)
    if unusual or bool((lengths != total - 1).any()):
        raise UnknownOperatorError(
            "GroupQueryAttention with options, or lines of several lengths, is not known"
        )
    heads, groups = given["num_heads"], given["kv_num_heads"]
    if key is None:
        size = query.shape[-1] // (heads + 2 * groups)
        query, key, value = query.split([heads * size, groups * size, groups * size], -1)
    query, key, value = in_heads(query, heads), in_heads(key, groups), in_heads(value, groups)
    first = total - query.shape[2]
    if given.get("do_rotary", 0):
        order = first + torch.arange(query.shape[2]).unsqueeze(0) if places is None else places
        options = {"interleaved": given.get("rotary_interleaved", 0)}
        query, key = (rotary([one, cos, sin, order], options, opset) for one in (query, key))
    if first:
        key, value = behind(past_key[:, :, :first], key), behind(past_value[:, :, :first], value)
    allowed = causal(query.shape[2], total, first)
    if (window := given.get("local_window_size", -1)) > 0:
        allowed = both(allowed, ~causal(query.shape[2], total, first - window))
    found = attended(query, key, value, allowed, bias, given.get("scale"), given.get("softcap", 0.0))
    return out_of_heads(found), key, value


def _rotary(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y as the input is, (B, H, S, E) or (B, S, H E)."""
    x, places, cos, sin = inputs
    if given.get("is_packed_batching", 0) or given.get("scale", 1.0) != 1.0:
        raise UnknownOperatorError("RotaryEmbedding with options of its own is not known here")
    order = places + torch.arange(x.shape[-2]).unsqueeze(0) if places.dim() == 1 else places
    heads = given.get("num_heads", 0) or x.shape[-1] // (2 * cos.shape[-1])
    return rotary([x, cos, sin, order], {**given, "num_heads": heads}, opset)


RUNTIME_OPERATORS: dict[str, Operator] = {
    "Gelu": _gelu("none"),
    "BiasGelu": _gelu("none"),
    "FastGelu": _gelu("tanh"),
    "QuickGelu": _quick_gelu,
    "FusedMatMul": _product,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "EmbedLayerNormalization": _embedded,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _grouped,
    "RotaryEmbedding": _rotary,
}
