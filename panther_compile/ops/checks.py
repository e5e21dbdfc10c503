"""What the operators ask of their arguments, and what autocast makes of them."""

import contextlib
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from panther_compile.errors import OpError
from panther_compile.kernels import dispatch


def kernel_mode() -> str:
    """The environment variable PANTHER_COMPILE_KERNEL: "auto", "triton" or "torch".

    Raises:
        OpError: it is something else.
    """
    mode = os.environ.get("PANTHER_COMPILE_KERNEL", "auto")
    if mode not in dispatch.MODES:
        raise OpError(f"PANTHER_COMPILE_KERNEL={mode!r}, wanted one of {dispatch.MODES}")
    return mode


def check_bias(what: str, bias: Tensor | None, up: Tensor) -> None:
    """Check that a bias (O,) fits its factor (O, ...)."""
    if bias is not None and bias.shape != up.shape[:1]:
        raise OpError(f"{what}: bias {size(bias)}, up {size(up)}; wanted bias ({up.shape[0]},)")


def check_alike(what: str, **tensors: Tensor | None) -> None:
    """One floating dtype, unless autocast will make it so, one device, and no forward-mode derivatives."""
    given = [(name, one) for name, one in tensors.items() if one is not None]
    (first, like), *others = given
    if not like.is_floating_point():
        raise OpError(f"{what}: {first} is {like.dtype}, wanted a floating dtype")
    for name, tensor in others:
        if tensor.device != like.device:
            raise OpError(f"{what}: {first} is on {like.device}, {name} on {tensor.device}")
        if tensor.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type):
            raise OpError(f"{what}: {first} is {like.dtype}, {name} {tensor.dtype}")
    if forward_ad._current_level >= 0:  # torch would take those of an operator that has none for zeros
        for name, tensor in given:
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise OpError(f"{what}: {name} has a forward-mode derivative, and the operator takes none")


def size(tensor: Tensor) -> tuple[int, ...]:
    """The shape, as a message shows it."""
    return tuple(tensor.shape)


def launching_on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """The device of x as the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def keeps(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow, for which intermediate results are to be kept."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def computed_dtype(x: Tensor) -> torch.dtype:
    """The type of x, or what `autocast` would make of it."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's type where it is on; it leaves float64 alone, as in F.linear."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in tensors)
