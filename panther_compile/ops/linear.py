"""One sketched linear layer, plain or pivoted."""

# ... leading dims, B their product, I in_features, O out_features, R rank, S = I - R if pivoted, else I

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from panther_compile.errors import OpError
from panther_compile.kernels import plain
from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.ops.checks import autocast, keeps
from panther_compile.ops.linear_dispatch import check_linear, fake_latent, linear_backward, linear_forward


def sketched_linear(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    start: int | None = None,
    activation: str = "none",
) -> Tensor:
    """A rank-R linear layer, y = a((x downᵀ) upᵀ + b), or pivoted, a((x₁ + x₂ downᵀ) upᵀ + b).

    Args:
        x: (..., I), any strides.
        down: (R, I), or (R, I - R) in the pivoted form.
        up: (O, R).
        bias: (O,) or None.
        start: first column of x₁ in x, 0 or I - R; None for the plain pair.
        activation: "none", "relu", "silu", "gelu" or "gelu_tanh".

    Returns:
        y, (..., O), in the type of x, or of autocast.

    Raises:
        OpError: a shape, dtype or device does not fit the others.
    """
    check_linear("sketched_linear", x, [Factors(down, up, bias, start)])
    if activation not in plain.ACTIVATIONS:
        raise OpError(f"sketched_linear: {activation=}, wanted one of {tuple(plain.ACTIVATIONS)}")
    x, down, up, bias = autocast(x, down, up, bias)
    return _sketched_linear(x, down, up, bias, start, activation, keeps(x, down, up, bias))[0]


@torch.library.custom_op("panther_compile::sketched_linear", mutates_args=())
def _sketched_linear(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    start: int | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    (y,), (z,) = linear_forward(x, [Factors(down, up, bias, start)], activation, keep)
    return y, z


@_sketched_linear.register_fake
def _(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
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
    z: Tensor,
    start: int | None,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layers = [Factors(down, up, bias, start)]
    gx, gdown, gup, *gbias = linear_backward([grad], x, layers, [z], activation, Needs(*needs))
    return gx, gdown, gup, gbias[0] if gbias else x.new_empty(0)


@_sketched_linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    z: Tensor,
    start: int | None,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gx, gdown, gup, gbias = (
        x.new_empty(one.shape if need and one is not None else 0)
        for one, need in zip((x, down, up, bias), needs, strict=True)
    )
    return gx, gdown, gup, gbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, down, up, bias, ctx.start, ctx.activation, _ = inputs
    ctx.save_for_backward(x, down, up, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _grad(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:4])
    found = _sketched_linear_backward(grad, *ctx.saved_tensors, ctx.start, ctx.activation, needs)
    gx, gdown, gup, gbias = (one if need else None for one, need in zip(found, needs, strict=True))
    return gx, gdown, gup, gbias, None, None, None


_sketched_linear.register_autograd(_grad, setup_context=_save)
