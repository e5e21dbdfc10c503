"""One sketched linear layer, plain or pivoted, and what follows it."""

# ... leading dims, B their product, I in_features, O out_features, R rank, S = I - R if pivoted, else I

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from panther_compile.errors import OpError
from panther_compile.kernels import plain
from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.ops.checks import autocast, check_alike, keeps, size
from panther_compile.ops.linear_dispatch import (
    Epilogue,
    check_linear,
    fake_latent,
    linear_backward,
    linear_forward,
)


def sketched_linear(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    start: int | None = None,
    activation: str = "none",
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A rank-R linear layer, y = a((x downᵀ) upᵀ + b) m + r, or pivoted, a((x₁ + x₂ downᵀ) upᵀ + b) m + r.

    Args:
        x: (..., I), any strides.
        down: (R, I), or (R, I - R) in the pivoted form.
        up: (O, R).
        bias: (O,) or None.
        start: first column of x₁ in x, 0 or I - R; None for the plain pair.
        activation: "none", "relu", "silu", "gelu" or "gelu_tanh".
        multiplier: m (..., O), such as what a gate lets through, or None; it is not broadcast.
        residual: r (..., O), or None; likewise.

    Returns:
        y, (..., O), in the type of x, or of autocast.

    Raises:
        OpError: a shape, dtype or device does not fit the others.
    """
    check_linear("sketched_linear", x, [Factors(down, up, bias, start)])
    if activation not in plain.ACTIVATIONS:
        raise OpError(f"sketched_linear: {activation=}, wanted one of {tuple(plain.ACTIVATIONS)}")
    check_alike("sketched_linear", x=x, multiplier=multiplier, residual=residual)
    wanted = (*x.shape[:-1], up.shape[0])
    for name, one in (("multiplier", multiplier), ("residual", residual)):
        if one is not None and one.shape != wanted:
            raise OpError(f"sketched_linear: {name} {size(one)}, wanted {wanted}, the shape of the output")
    tensors = autocast(x, down, up, bias, multiplier, residual)
    x, down, up, bias, multiplier, residual = tensors
    keep = keeps(*tensors[:5])
    return _sketched_linear(x, down, up, bias, multiplier, residual, start, activation, keep)[0]


@torch.library.custom_op("panther_compile::sketched_linear", mutates_args=())
def _sketched_linear(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    residual: Tensor | None,
    start: int | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    epilogue = Epilogue(activation, multiplier, residual)
    (y,), (z,) = linear_forward(x, [Factors(down, up, bias, start)], keep, epilogue)
    return y, z


@_sketched_linear.register_fake
def _(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    residual: Tensor | None,
    start: int | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], up.shape[0]), fake_latent(x, down, keep)


@torch.library.custom_op("panther_compile::sketched_linear_backward", mutates_args=())
def _sketched_linear_backward(
    grad: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    z: Tensor,
    start: int | None,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layers, epilogue = [Factors(down, up, bias, start)], Epilogue(activation, multiplier)
    found = iter(linear_backward([grad], x, layers, [z], Needs(*needs), epilogue))
    gx, gdown, gup, gbias, gmultiplier = (
        x.new_empty(0) if one is None else next(found) for one in (x, down, up, bias, multiplier)
    )
    return gx, gdown, gup, gbias, gmultiplier


@_sketched_linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    z: Tensor,
    start: int | None,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gx, gdown, gup, gbias, gmultiplier = (
        x.new_empty(one.shape if need and one is not None else 0)
        for one, need in zip((x, down, up, bias, multiplier), needs, strict=True)
    )
    return gx, gdown, gup, gbias, gmultiplier


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, down, up, bias, multiplier, _, ctx.start, ctx.activation, _ = inputs
    ctx.save_for_backward(x, down, up, bias, multiplier, output[1])
    ctx.mark_non_differentiable(output[1])


def _grad(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *needs, residual = ctx.needs_input_grad[:6]
    gradients: list[Tensor | None] = [None] * 5
    if any(needs):
        found = _sketched_linear_backward(grad, *ctx.saved_tensors, ctx.start, ctx.activation, needs)
        gradients = [one if need else None for one, need in zip(found, needs, strict=True)]
    return *gradients, grad if residual else None, None, None, None


_sketched_linear.register_autograd(_grad, setup_context=_save)
