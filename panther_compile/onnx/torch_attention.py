"""ONNX's Attention (opset 23) in torch."""

# B batch, H heads, L and S positions of queries and keys, E numbers of a head
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from panther_compile.onnx.torch_cells import UnknownOperatorError

_PLAIN = {
    *("is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "outputs"),
    *("qk_matmul_output_mode", "softmax_precision"),  # of an output that is not asked for; of rounding
}


def attention(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y as the queries are, (B, H, L, E) or (B, L, H E).

    Raises:
        UnknownOperatorError: a node has a cache, lengths, a cap of the logits or options of its own.
    """
    query, key, value, mask, *others = [*inputs, *[None] * 4][:7]
    unusual = set(given) - _PLAIN or given.get("softcap", 0) or given["outputs"] > 1
    if unusual or any(one is not None for one in others):
        raise UnknownOperatorError("Attention with a cache, lengths or options of its own is not known here")
    flat = query.dim() == 3
    if flat:
        heads = given["q_num_heads"], given["kv_num_heads"], given["kv_num_heads"]
        parts = zip((query, key, value), heads, strict=True)
        query, key, value = (one.unflatten(2, (count, -1)).transpose(1, 2) for one, count in parts)
    causal = bool(given.get("is_causal", 0))
    if causal and mask is not None:
        raise UnknownOperatorError("Attention that is causal and has a mask is not known here")
    found = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=given.get("scale"), enable_gqa=True
    )
    return found.transpose(1, 2).flatten(2) if flat else found
