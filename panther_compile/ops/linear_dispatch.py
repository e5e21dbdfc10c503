"""Linear layers of one input, by whichever implementation serves them."""

# ... leading dims, B their product, I in_features, O out_features, R rank, S = I - R if pivoted, else I

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther_compile.errors import OpError
from panther_compile.kernels import dispatch, plain
from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.ops.checks import (
    check_alike,
    check_bias,
    computed_dtype,
    keeps,
    kernel_mode,
    launching_on,
    size,
)


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


def is_left_to_torch() -> bool:
    """Whether `has_kernel` says no whatever it is asked: the quick question ahead of it."""
    return dispatch.is_left_to_torch(kernel_mode())


def has_kernel(x: Tensor, layers: Sequence[Factors]) -> bool:
    """Whether calling the operator, instead of plain torch, gives these layers a faster kernel.

    Unless PANTHER_COMPILE_KERNEL=triton asks for kernels it does only while a CUDA graph is captured: an
    operator written in Python, and Triton's launches, take the CPU longer than the GPU needs.
    """
    return x.is_cuda and _choose(x, layers, dtype=computed_dtype(x)) != "torch"


class Epilogue(NamedTuple):
    """What follows a layer: y = a(s) m + r.

    Attributes:
        activation: the name of a.
        multiplier: m (..., O), or None.
        residual: r (..., O), or None.
    """

    activation: str = "none"
    multiplier: Tensor | None = None
    residual: Tensor | None = None


_NO_EPILOGUE = Epilogue()


def linear_forward(
    x: Tensor, layers: Sequence[Factors], keep: bool, epilogue: Epilogue = _NO_EPILOGUE
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs (..., O) of every layer, and latents (B, R), or (0, R) unless they are kept."""
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    choice = _choose(x, layers, dtype=x.dtype)
    forward: Any = plain.sketched_linear_forward
    # Imported on first use, because they import Triton.
    if choice == "fused":
        from panther_compile.kernels import sketched_linear

        forward = sketched_linear.sketched_linear_forward
    elif choice == "decode":
        from panther_compile.kernels import decode_linear

        forward = decode_linear.decode_linear_forward
    x_BI = x.reshape(-1, x.shape[-1])
    options = {"keep": keep, "precision": precision, "activation": epilogue.activation}
    with launching_on(x):
        ys, zs = forward(
            x_BI, layers, multiplier=_rows(epilogue.multiplier), residual=_rows(epilogue.residual), **options
        )
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys], zs


def linear_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    layers: Sequence[Factors],
    zs: Sequence[Tensor],
    needs: Needs,
    epilogue: Epilogue = _NO_EPILOGUE,
) -> list[Tensor]:
    """The gradient of x, then of every down, up, bias and multiplier; empty where none is wanted."""
    precision = dispatch.precision_of(torch.backends.cuda.matmul.fp32_precision)
    backward: Any = plain.sketched_linear_backward
    if _choose(x, layers, dtype=x.dtype) == "fused":
        from panther_compile.kernels import sketched_linear_backward

        backward = sketched_linear_backward.sketched_linear_backward
    x_BI = x.reshape(-1, x.shape[-1])
    if zs[0].shape[0] != x_BI.shape[0]:  # not kept
        zs = [plain.latent(x_BI, layer) for layer in layers]
    flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    options = {"activation": epilogue.activation, "needs": needs, "precision": precision}
    with launching_on(x):
        gx, found = backward(flat, x_BI, layers, zs, multiplier=_rows(epilogue.multiplier), **options)
    gx = None if gx is None else gx.reshape(x.shape)
    every = [gx, *(one.down for one in found), *(one.up for one in found)]
    every += [one.bias for one, layer in zip(found, layers, strict=True) if layer.bias is not None]
    if epilogue.multiplier is not None:
        gmultiplier = found[0].multiplier
        every.append(None if gmultiplier is None else gmultiplier.reshape(epilogue.multiplier.shape))
    return [x.new_empty(0) if one is None else one for one in every]


def _rows(tensor: Tensor | None) -> Tensor | None:
    """(..., O) as (B, O)."""
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])


def _choose(x: Tensor, layers: Sequence[Factors], *, dtype: torch.dtype) -> str:
    if not x.is_cuda:
        return "torch"
    rows = x.numel() // max(x.shape[-1], 1)
    captured = dispatch.is_capturing() and not _trains(x, layers)
    return _implementation(x.device, dtype, rows, layers, captured=captured)


def _trains(x: Tensor, layers: Sequence[Factors]) -> bool:
    return keeps(x, *(one for layer in layers for one in layer[:3]))


def fuses(layer: Factors, rows: int, dtype: torch.dtype) -> bool:
    """Whether a layer and what follows it should become one call of the operator; as `has_kernel`.

    Args:
        layer: with its factors where they will be used, outside of CUDA graphs for all that is known.
        rows: B.
        dtype: of x.
    """
    device = layer.up.device
    return layer.up.is_cuda and _implementation(device, dtype, rows, [layer], captured=False) != "torch"


def _implementation(
    device: torch.device, dtype: torch.dtype, rows: int, layers: Sequence[Factors], *, captured: bool
) -> str:
    first, outputs = layers[0], sum(layer.up.shape[0] for layer in layers)
    return dispatch.choose_linear(
        dispatch.device_class(device),
        dtype,
        rows=rows,
        ranks=tuple(layer.down.shape[0] for layer in layers),
        features=(sum(first.down.shape[first.start is None :]), outputs),
        captured=captured,
        forced=kernel_mode(),
    )


def fake_latent(x: Tensor, down: Tensor, keep: bool) -> Tensor:
    """The shape of a latent."""
    return x.new_empty(math.prod(x.shape[:-1]) if keep else 0, down.shape[0])
