"""Random-feature attention."""

# N batch, H heads, L queries, S keys, D head_dim, V columns of v, M features

from typing import Any

import torch
from torch import Tensor

from panther_compile.errors import OpError
from panther_compile.kernels import dispatch, plain_attention
from panther_compile.ops.checks import check_alike, keeps, kernel_mode, launching_on, size


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Softmax attention by positive random features, computed in float32 or wider.

    Args:
        q: (N, H, L, D), any strides.
        k: (N, H, S, D).
        v: (N, H, S, V).
        directions: (M, D), without a gradient.
        key_mask: added to the logits of each key, broadcast to (N, H, S), without a gradient; -inf hides.
        causal: whether query i sees keys 0..i only.

    Returns:
        (N, H, L, V) in the type of v (float32 under autocast), 0 where no key is visible.

    Raises:
        OpError: a shape, dtype or device does not fit the others, or a gradient is asked for.
    """
    what = "favor_attention"
    check_alike(what, q=q, k=k, v=v, directions=directions)
    if not (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[3] == k.shape[3]
        and k.shape[2] == v.shape[2]
        and directions.shape[1:] == q.shape[3:]
        and len(directions)
    ):
        shapes = f"q {size(q)}, k {size(k)}, v {size(v)}, directions {size(directions)}"
        raise OpError(f"{what}: {shapes}; wanted (N, H, L, D), (N, H, S, D), (N, H, S, V), (M, D)")
    if key_mask is not None:
        try:
            key_mask = key_mask.expand(k.shape[:3])
        except RuntimeError as error:
            raise OpError(
                f"{what}: key_mask {size(key_mask)}, wanted what broadcasts to {size(k[..., 0])}"
            ) from error
    for name, tensor in (("directions", directions), ("key_mask", key_mask)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise OpError(f"{what}: {name} requires a gradient, which it cannot have; detach it")
    return _favor_attention(q, k, v, directions, key_mask, causal)


def has_attention_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether calling the operator on these, instead of plain torch, gives them a Triton kernel."""
    # Where the kernel was asked for, a width that only its forward serves is served so far.
    trained = kernel_mode() == "auto" and keeps(q, k, v)
    return _choose_attention(q, v, backward=trained) == "fused"


@torch.library.custom_op("panther_compile::favor_attention", mutates_args=())
def _favor_attention(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, key_mask: Tensor | None, causal: bool
) -> Tensor:
    if _sees_nothing(q, k):
        return v.new_zeros(*q.shape[:3], v.shape[3])
    forward: Any = plain_attention.favor_attention_forward
    if _choose_attention(q, v) == "fused":
        from panther_compile.kernels import random_feature_attention

        forward = random_feature_attention.favor_attention_forward
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    with launching_on(q):
        y = forward(q, k, v, directions, key_mask, causal=causal, precision=precision)
    return y.contiguous()


@_favor_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("panther_compile::favor_attention_backward", mutates_args=())
def _favor_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    key_mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if _sees_nothing(q, k):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    backward: Any = plain_attention.favor_attention_backward
    if _choose_attention(q, v, backward=True) == "fused":
        from panther_compile.kernels import random_feature_attention_backward

        backward = random_feature_attention_backward.favor_attention_backward
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    with launching_on(q):
        gq, gk, gv = backward(grad, q, k, v, directions, key_mask, causal=causal, precision=precision)
    return gq.contiguous(), gk.contiguous(), gv.contiguous()


@_favor_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    key_mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_favor_attention_backward(grad, *ctx.saved_tensors, ctx.causal), None, None, None


_favor_attention.register_autograd(_grad, setup_context=_save)
for _device in ("cpu", "cuda"):
    _favor_attention.register_autocast(_device, torch.float32)


def _sees_nothing(q: Tensor, k: Tensor) -> bool:
    """Whether there is no query, or no key for them, over which nothing has a largest."""
    return 0 in (q.shape[2], k.shape[2])


def _choose_attention(q: Tensor, v: Tensor, *, backward: bool = False) -> str:
    if not q.is_cuda:
        return "torch"
    sizes = {"head_dim": q.shape[3], "columns": v.shape[3]}
    device = dispatch.device_class(q.device)
    return dispatch.choose_attention(device, v.dtype, **sizes, forced=kernel_mode(), backward=backward)
