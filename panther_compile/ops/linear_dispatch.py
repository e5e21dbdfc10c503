"""Linear layers of one input, by whichever implementation serves them."""

# ... leading dims, B their product, I in_features, O out_features, R rank, S = I - R if pivoted, else I

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from panther_compile.errors import OpError
from panther_compile.kernels import dispatch, plain
from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.ops.checks import check_alike, check_bias, kernel_mode, launching_on, size


def check_linear(what: str, x: Tensor, layers: Sequence[Factors]) -> None:
    """Check that the layers are layers of this x."""
    if not layers:
        raise OpError(f"{what}: no layers")
    for down, up, bias, start in layers:
        check_alike(what, x=x, down=down, up=up, bias=bias)
        wanted = None
        if down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
            wanted = "down (R, S) and up (O, R)"
        elif x.dim() == 0 or x.shape[-1] != sum(down.shape[start is None :]):
            wanted = f"x (..., {sum(down.shape[start is None :])})"
        elif start not in (None, 0, down.shape[1]):
            wanted = f"start 0, {down.shape[1]} or None"
        if wanted:
            shapes = f"x {size(x)}, down {size(down)}, up {size(up)}, {start=}"
            raise OpError(f"{what}: {shapes}; wanted {wanted}")
        check_bias(what, bias, up)


def has_kernel(x: Tensor, layers: Sequence[Factors], activation: str = "none") -> bool:
    """Whether a Triton kernel would serve these layers: where none would, plain torch has less overhead."""
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    return _choose(x, layers, activation, precision) != "torch"


def linear_forward(
    x: Tensor, layers: Sequence[Factors], activation: str, keep: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs (..., O) of every layer, and latents (B, R), or (0, R) unless they are kept."""
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    choice = _choose(x, layers, activation, precision)
    forward: Any = plain.sketched_linear_forward
    # Imported on first use, because they import Triton.
    if choice == "fused":
        from panther_compile.kernels import sketched_linear

        forward = sketched_linear.sketched_linear_forward
    elif choice == "decode":
        from panther_compile.kernels import decode_linear

        forward = decode_linear.decode_linear_forward
    x_BI = x.reshape(-1, x.shape[-1])
    with launching_on(x):
        ys, zs = forward(x_BI, layers, activation=activation, keep=keep, precision=precision)
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys], zs


def linear_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    layers: Sequence[Factors],
    zs: Sequence[Tensor],
    activation: str,
    needs: Needs,
) -> list[Tensor]:
    """The gradient of x, then of every down, up and bias; empty where none is wanted."""
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    backward: Any = plain.sketched_linear_backward
    if _choose(x, layers, activation, precision) == "fused":
        from panther_compile.kernels import sketched_linear_backward

        backward = sketched_linear_backward.sketched_linear_backward
    x_BI = x.reshape(-1, x.shape[-1])
    if zs[0].shape[0] != x_BI.shape[0]:  # not kept
        zs = [plain.latent(x_BI, layer) for layer in layers]
    flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    options = {"activation": activation, "needs": needs, "precision": precision}
    with launching_on(x):
        gx, found = backward(flat, x_BI, layers, zs, **options)
    gx = None if gx is None else gx.reshape(x.shape)
    every = [gx, *(one.down for one in found), *(one.up for one in found)]
    every += [one.bias for one, layer in zip(found, layers, strict=True) if layer.bias is not None]
    return [x.new_empty(0) if one is None else one for one in every]


def _choose(x: Tensor, layers: Sequence[Factors], activation: str, precision: str) -> str:
    if not x.is_cuda:
        return "torch"
    return dispatch.choose_linear(
        dispatch.device_class(x.device),
        x.dtype,
        precision,
        rows=x.numel() // max(x.shape[-1], 1),
        ranks=tuple(layer.down.shape[0] for layer in layers),
        features=(x.shape[-1], sum(layer.up.shape[0] for layer in layers)),
        extra=activation != "none" or any(layer.start is not None for layer in layers),
        forced=kernel_mode(),
    )


def fake_latent(x: Tensor, down: Tensor, keep: bool) -> Tensor:
    """The shape of a latent."""
    return x.new_empty(math.prod(x.shape[:-1]) if keep else 0, down.shape[0])
