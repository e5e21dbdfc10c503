"""Random-feature attention in plain PyTorch, with its gradients: see plain.py for why they stand here.

The maths is that of reference.py and random_feature_attention_backward.py. Half types are computed in
float32, as by the kernels.
"""

# N batch, H heads, L queries, S keys, D head_dim, V columns of v, M features

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.kernels import reference


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
    """The attention (N, H, L, V); key_mask (N, H, S) is added to the logits."""
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, directions = q.to(wide), k.to(wide), directions.to(wide)
    key_mask = None if key_mask is None else key_mask.to(wide)
    return reference.favor_attention(q, k, v.to(wide), directions, key_mask, causal=causal).to(v.dtype)


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
    chunk: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their types, from that of the output (N, H, L, V)."""
    wide = torch.promote_types(v.dtype, torch.float32)
    qw, kw, vw, w, gw = (x.to(wide) for x in (q, k, v, directions, grad))
    log_q, log_k = reference.favor_features(qw, w), reference.favor_features(kw, w)
    if key_mask is not None:
        log_k = log_k + key_mask.to(wide).unsqueeze(-1)
    v1 = F.pad(vw, (0, 1), value=1.0)
    L, S = q.shape[-2], k.shape[-2]
    if causal:
        # Queries beyond the last key see all keys, keys beyond the last query are seen by none.
        log_k, v1 = F.pad(log_k, (0, 0, 0, L - S), value=-torch.inf), F.pad(v1, (0, 0, 0, L - S))
        glog_q, glog_k, gv = _causal_grads(gw, log_q, log_k, v1, chunk)
        glog_k, gv = (F.pad(x, (0, 0, 0, S - L)) for x in (glog_k, gv))
    else:
        top = _top(log_k)
        phi_k = (log_k - top).exp()
        state_MV = phi_k.mT @ v1
        phi_q, extended = _normalized(gw, log_q + top, lambda phi: phi @ state_MV)
        later_MV = phi_q.mT @ extended
        glog_q = phi_q * (extended @ state_MV.mT)
        glog_k = phi_k * (v1 @ later_MV.mT)
        gv = phi_k @ later_MV[..., :-1]
    gq, gk = _feature_grad(glog_q, qw, w), _feature_grad(glog_k, kw, w)
    return gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype)


def _causal_grads(
    grad: Tensor, log_q: Tensor, log_k: Tensor, v1: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_q, log_k and v, all of one length: chunks upwards, then downwards."""
    pieces = list(zip(*(x.split(chunk, dim=-2) for x in (grad, log_q, log_k, v1)), strict=True))
    top = torch.full_like(log_k[..., :1, :], torch.finfo(log_k.dtype).min)
    state_MV = v1.new_zeros(*v1.shape[:-2], log_k.shape[-1], v1.shape[-1])
    kept, glog_q = [], []
    for g, lq, lk, v1c in pieces:
        old, top = top, torch.maximum(top, _top(lk))
        phi_k = (lk - top).exp()
        before_MV = state_MV * (old - top).exp().mT

        def sums(phi: Tensor, before: Tensor = before_MV, phi_k: Tensor = phi_k, v1c: Tensor = v1c) -> Tensor:
            return phi @ before + (phi @ phi_k.mT).tril() @ v1c

        phi_q, extended = _normalized(g, lq + top, sums)
        pairs = (extended @ v1c.mT).tril()
        glog_q.append(phi_q * (extended @ before_MV.mT + pairs @ phi_k))
        state_MV = before_MV + phi_k.mT @ v1c
        kept.append((phi_q, phi_k, extended, pairs, v1c, top))
    later_MV, later_top = torch.zeros_like(state_MV), top
    glog_k, gv = [], []
    for phi_q, phi_k, extended, pairs, v1c, top in reversed(kept):
        later_MV = later_MV * (top - later_top).exp().mT
        glog_k.append(phi_k * (v1c @ later_MV.mT + pairs.mT @ phi_q))
        both = phi_k @ later_MV + (phi_q @ phi_k.mT).tril().mT @ extended
        gv.append(both[..., :-1])
        later_MV, later_top = later_MV + phi_q.mT @ extended, top
    return torch.cat(glog_q, -2), torch.cat(glog_k[::-1], -2), torch.cat(gv[::-1], -2)


def _normalized(grad: Tensor, logs: Tensor, sums: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """φ_q divided by its total over the keys, and [g, -g · y]; 0 where nothing is seen."""
    phi = (logs - logs.amax(-1, keepdim=True)).exp()
    found = sums(phi)
    total = found[..., -1:]
    total = torch.where(total > torch.finfo(total.dtype).tiny ** 0.75, total, torch.inf)
    y = found[..., :-1] / total
    return phi / total, torch.cat([grad, -(grad * y).sum(-1, keepdim=True)], -1)


def _top(log_k: Tensor) -> Tensor:
    """The largest logarithm of each feature over the keys, (..., 1, M), finite."""
    return log_k.amax(-2, keepdim=True).clamp_min(torch.finfo(log_k.dtype).min)


def _feature_grad(grad_logs: Tensor, x: Tensor, directions_MD: Tensor) -> Tensor:
    """Gradient of x from that of its log features."""
    scale = x.shape[-1] ** -0.25
    return (grad_logs @ directions_MD - grad_logs.sum(-1, keepdim=True) * (x * scale)) * scale
