"""Every sketched operation in a few lines of plain PyTorch: the specification and the CPU path.

Torch only, no casts, nothing given is written to: float64 in gives float64 arithmetic, and autograd
differentiates it.
"""

# B rows (all leading dims flattened), I in_features, O out_features, R rank, S = I - R
# N batch, H height, W width, P = H W

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor


def pair_linear(x: Tensor, down_RI: Tensor, up_OR: Tensor, bias_O: Tensor | None) -> Tensor:
    """Rank-R product y = (x downᵀ) upᵀ + b, for x of shape (..., I); returns (..., O)."""
    return F.linear(F.linear(x, down_RI), up_OR, bias_O)


def pivoted_linear(x: Tensor, down_RS: Tensor, up_OR: Tensor, bias_O: Tensor | None, *, start: int) -> Tensor:
    """Pivoted rank-R product y = (x₁ + x₂ downᵀ) upᵀ + b, for x of shape (..., I); returns (..., O).

    The pivot columns x₁ = x[..., start : start + R] are a leading (start = 0) or trailing
    (start = I - R) slice; x₂ holds the S = I - R others. See Zhao et al., "Pivoting Factorization"
    (ICML 2025) for the output-side form.
    """
    R, S = down_RS.shape
    first, second = x.split_with_sizes((R, S) if start == 0 else (S, R), -1)
    pivots, others = (first, second) if start == 0 else (second, first)
    return F.linear(F.linear(others, down_RS).add_(pivots), up_OR, bias_O)


def gate_and_add(y: Tensor, multiplier: Tensor | None, residual: Tensor | None) -> Tensor:
    """What may follow a layer and its activation, y m + r; all of one shape."""
    y = y if multiplier is None else y * multiplier
    return y if residual is None else y + residual


def pivoted_linear_by_rows(
    x: Tensor, down_RS: Tensor, up_OR: Tensor, bias_O: Tensor | None, *, start: int
) -> Tensor:
    """`pivoted_linear` as a compiler takes it best: the leading dimensions made one, x₁ added by the product.

    Behind a product of more dimensions the addition is a kernel of its own, which Inductor compiles for half
    a second. In eager mode it is the other way round: the two reshapes are what shows, at batch 1.
    """
    R, S = down_RS.shape
    first, second = x.reshape(-1, x.shape[-1]).split_with_sizes((R, S) if start == 0 else (S, R), -1)
    pivots_BR, others_BS = (first, second) if start == 0 else (second, first)
    y_BO = F.linear(torch.addmm(pivots_BR, others_BS, down_RS.t()), up_OR, bias_O)
    return y_BO.reshape(*x.shape[:-1], up_OR.shape[0])


def pivoted_conv1x1(x: Tensor, down_RS11: Tensor, *, start: int) -> Tensor:
    """Latent x₁ + conv1x1(x₂) (N, R, H, W) of x (N, R + S, H, W), or the same without N.

    On a CPU it is a matrix product: a convolution would copy its slice of the channels first.
    """
    if x.dim() == 3:
        return pivoted_conv1x1(x[None], down_RS11, start=start)[0]
    pivots, others = split_channels(x, down_RS11.shape[0], start)
    if x.device.type != "cpu":
        return pivots + F.conv2d(others, down_RS11)
    down_RS = down_RS11.flatten(1)
    if x.stride(1) == 1:  # channels_last
        pivots_NHWR, others_NHWS = pivots.movedim(1, -1), others.movedim(1, -1)
        z_BR = torch.addmm(pivots_NHWR.flatten(0, 2), others_NHWS.flatten(0, 2), down_RS.T)
        return z_BR.view(pivots_NHWR.shape).movedim(-1, 1)
    z_NRP = torch.baddbmm(pivots.flatten(2), down_RS.expand(x.shape[0], -1, -1), others.flatten(2))
    return z_NRP.view(pivots.shape)


# It chooses by strides, which a symbolic trace does not have.
torch.fx.wrap("pivoted_conv1x1")


def split_channels(x: Tensor, rank: int, start: int) -> tuple[Tensor, Tensor]:
    """The pivot channels x₁ of x (..., I, H, W), and the others."""
    others = x.shape[-3] - rank
    return x.narrow(-3, start, rank), x.narrow(-3, rank if start == 0 else 0, others)


# FAVOR+ attention: Choromanski et al., "Rethinking Attention with Performers" (ICLR 2021), Lemma 1
# and eq. 5-7. exp(q·k) = E[φ(q)·φ(k)] with φ(x) = exp(x·w - |x|²/2) > 0 and w standard normal, so
# softmax(q kᵀ) v is near φ(q) (φ(k)ᵀ v) / φ(q) (φ(k)ᵀ 1), in time linear in the length.
# ... batch and heads, L queries, S keys, D head_dim, M features, V columns of v


def favor_features(x: Tensor, directions_MD: Tensor) -> Tensor:
    """Logarithms of the positive features of x (..., S, D) / D^(1/4); returns (..., S, M).

    The factor 1/sqrt(M), which cancels in the attention, is left out; so is the exponential, which
    `favor_attention` takes once it knows by how much to shift.
    """
    x = x * x.shape[-1] ** -0.25
    return x @ directions_MD.t() - x.square().sum(-1, keepdim=True) / 2


def favor_directions(features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Standard normal directions w (M, D), float32, orthogonal within each block of D.

    Each has the length of an independent normal vector, so that it is standard normal by itself;
    being orthogonal lowers the variance of the estimate (Choromanski et al., section 3).
    """
    blocks = -(-features // head_dim)
    normal = torch.randn(blocks, head_dim, head_dim, generator=generator)
    # QR, with the signs that make Q uniformly distributed (Mezzadri, Notices AMS 2007).
    Q, R = torch.linalg.qr(normal)
    rows = (Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).reshape(-1, head_dim)
    lengths = torch.randn(rows.shape, generator=generator).norm(dim=1, keepdim=True)
    return (rows * lengths)[:features]


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions_MD: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
    chunk: int = 128,
) -> Tensor:
    """Softmax attention by positive random features; q (..., L, D), k (..., S, D), v (..., S, V).

    `key_mask` (..., S) is added to the logits of each key; -inf hides it. With `causal`, query i
    sees keys 0..i: the sums over earlier chunks of keys are carried along. Returns (..., L, V), 0
    where no key is visible.
    """
    log_q, log_k = _favor_logs(q, k, directions_MD, key_mask)
    v1 = F.pad(v, (0, 1), value=1.0)  # the last column sums the weights
    if causal:
        sums = _causal_sums(log_q, log_k, v1, chunk)
    else:
        top = _top(log_k)
        sums = _shifted_exp(log_q + top) @ ((log_k - top).exp().mT @ v1)
    return _divide(sums[..., :-1], sums[..., -1:])


def favor_weights(
    q: Tensor,
    k: Tensor,
    directions_MD: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """The weights (..., L, S) that `favor_attention` implies; rows sum to 1, or 0 if all hidden."""
    log_q, log_k = _favor_logs(q, k, directions_MD, key_mask)
    top = _top(log_k)
    weights = _shifted_exp(log_q + top) @ (log_k - top).exp().mT
    weights = weights.tril() if causal else weights
    return _divide(weights, weights.sum(-1, keepdim=True))


def _causal_sums(log_q: Tensor, log_k: Tensor, v1: Tensor, chunk: int) -> Tensor:
    """Row i is Σ_{j <= i} φ(q_i)·φ(k_j) v1_j, up to a positive factor of its own."""
    missing = log_q.shape[-2] - log_k.shape[-2]  # below 0 it drops keys that no query sees
    log_k = F.pad(log_k, (0, 0, 0, missing), value=-torch.inf)
    v1 = F.pad(v1, (0, 0, 0, missing))
    top = torch.full_like(log_k[..., :1, :], torch.finfo(log_k.dtype).min)
    state_MV = v1.new_zeros(*v1.shape[:-2], log_k.shape[-1], v1.shape[-1])
    rows = []
    chunks = (x.split(chunk, dim=-2) for x in (log_q, log_k, v1))
    for log_qc, log_kc, v1c in zip(*chunks, strict=True):
        old, top = top, torch.maximum(top, _top(log_kc))
        state_MV = state_MV * (old - top).exp().mT
        phi_q, phi_k = _shifted_exp(log_qc + top), (log_kc - top).exp()
        rows.append(phi_q @ state_MV + (phi_q @ phi_k.mT).tril() @ v1c)
        state_MV = state_MV + phi_k.mT @ v1c
    return torch.cat(rows, dim=-2)


def _favor_logs(
    q: Tensor, k: Tensor, directions_MD: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    log_k = favor_features(k, directions_MD)
    if key_mask is not None:
        log_k = log_k + key_mask.unsqueeze(-1)
    return favor_features(q, directions_MD), log_k


def _top(log_k: Tensor) -> Tensor:
    """The largest logarithm of each feature over the keys, (..., 1, M), finite.

    Taking it from the keys and giving it to the queries changes no product, so no gradient goes
    through it, and it leaves a term exp(0) for each feature in the sum over the keys.
    """
    return log_k.detach().amax(-2, keepdim=True).clamp_min(torch.finfo(log_k.dtype).min)


def _shifted_exp(log_q: Tensor) -> Tensor:
    """The exponential, each row divided by its largest entry: it cancels in the attention."""
    return (log_q - log_q.detach().amax(-1, keepdim=True)).exp()


def _divide(x: Tensor, total: Tensor) -> Tensor:
    """The quotient; 0 where the total is so small that gradients would overflow, or is 0."""
    smallest = torch.finfo(total.dtype).tiny ** 0.75
    return x / torch.where(total > smallest, total, torch.inf)
