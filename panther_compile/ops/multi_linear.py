"""Several sketched linear layers of one x: q, k and v at once."""

# ... leading dims, B their product, I in_features, O out_features, R rank, S = I - R if pivoted, else I

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.ops.checks import autocast, keeps
from panther_compile.ops.linear_dispatch import check_linear, fake_latent, linear_backward, linear_forward

_PAIR = -1  # a schema has no list of optional integers


def sketched_multi_linear(x: Tensor, layers: Sequence[Factors]) -> list[Tensor]:
    """Several rank-R linear layers of the same x, as one operation.

    Args:
        x: (..., I), any strides.
        layers: factors as of `sketched_linear`; ranks, outputs and forms may differ.

    Returns:
        y (..., O) of every layer.

    Raises:
        OpError: see `sketched_linear`.
    """
    check_linear("sketched_multi_linear", x, layers)
    x, *cast = autocast(x, *(tensor for layer in layers for tensor in layer[:3]))
    downs, ups, biases = (list(cast[index::3]) for index in range(3))
    # Those there are: autograd passes over a list that may hold None.
    biased, biases = [bias is not None for bias in biases], [bias for bias in biases if bias is not None]
    starts = [_PAIR if layer.start is None else layer.start for layer in layers]
    keep = keeps(x, *cast)
    return _sketched_multi_linear(x, downs, ups, biases, biased, starts, keep)[: len(layers)]


@torch.library.custom_op("panther_compile::sketched_multi_linear", mutates_args=())
def _sketched_multi_linear(
    x: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[bool],
    starts: Sequence[int],
    keep: bool,
) -> list[Tensor]:
    ys, zs = linear_forward(x, _layers(downs, ups, biases, biased, starts), keep)
    return [*ys, *zs]


@_sketched_multi_linear.register_fake
def _(
    x: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[bool],
    starts: Sequence[int],
    keep: bool,
) -> list[Tensor]:
    ys = [x.new_empty(*x.shape[:-1], up.shape[0]) for up in ups]
    return ys + [fake_latent(x, down, keep) for down in downs]


@torch.library.custom_op("panther_compile::sketched_multi_linear_backward", mutates_args=())
def _sketched_multi_linear_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[bool],
    zs: Sequence[Tensor],
    starts: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    layers = _layers(downs, ups, biases, biased, starts)
    return linear_backward(grads, x, layers, zs, Needs(*needs))


@_sketched_multi_linear_backward.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[bool],
    zs: Sequence[Tensor],
    starts: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    return [
        x.new_empty(one.shape if need else 0)
        for need, group in zip(needs, ([x], downs, ups, biases), strict=True)
        for one in group
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, downs, ups, biases, ctx.biased, ctx.starts, _ = inputs
    zs = output[len(downs) :]
    ctx.save_for_backward(x, *downs, *ups, *zs, *biases)
    ctx.mark_non_differentiable(*zs)


def _grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *saved = ctx.saved_tensors
    count = len(ctx.starts)
    downs, ups, zs = (saved[first : first + count] for first in (0, count, 2 * count))
    biases = saved[3 * count :]
    # None for an output that no loss depends on.
    given = [
        x.new_zeros(*x.shape[:-1], up.shape[0]) if grad is None else grad
        for grad, up in zip(grads, ups, strict=False)
    ]
    needs_x, *needs_lists = ctx.needs_input_grad[:4]
    needs = [needs_x, *(any(needed) for needed in needs_lists)]
    found = iter(
        _sketched_multi_linear_backward(given, x, downs, ups, biases, ctx.biased, zs, ctx.starts, needs)
    )
    gx, *others = (
        [grad if need else None for grad in itertools.islice(found, size)]
        for need, size in zip(needs, (1, count, count, len(biases)), strict=True)
    )
    return gx[0], *others, None, None, None


_sketched_multi_linear.register_autograd(_grad, setup_context=_save)


def _layers(
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[bool],
    starts: Sequence[int],
) -> list[Factors]:
    left = iter(biases)
    return [
        Factors(down, up, next(left) if has_bias else None, None if start == _PAIR else start)
        for down, up, has_bias, start in zip(downs, ups, biased, starts, strict=True)
    ]
