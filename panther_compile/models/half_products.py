"""Products of half types in float32, on a processor that has none of its own.

Without AVX-512 torch multiplies them by plain loops. One thread of an EPYC with AVX2, 64 rows by a matrix
(5632, 2048), GFLOP/s: bfloat16 3.6 forwards and 0.09 backwards, float32 14 and 17; a small ResNet takes four
times as long. So each product, of convolutions too, is one of float32, rounded once, as a processor with such
products does it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HALVES = (torch.bfloat16, torch.float16)
_BLOCK = 1 << 24  # numbers of a factor that are in float32 at once: 64 MB
_OPS = torch.ops.aten
# The place of the right factor among the arguments.
_PRODUCTS: dict[Any, int] = {
    _OPS.mm.default: 1,
    _OPS.bmm.default: 1,
    _OPS.addmm.default: 2,
    _OPS.baddbmm.default: 2,
}
_CONVOLUTIONS = (_OPS.convolution.default, _OPS.convolution_backward.default)


def half_products(model: nn.Module) -> AbstractContextManager[object]:
    """A context that makes products of a model's half types quick, forwards and backwards, in this thread.

    Args:
        model: where it has no parameter of a half type on a processor without such products, nothing is done.
    """
    tables = (module._parameters.values() for module in model.modules())  # each run asks
    slow = {one.dtype for held in tables for one in held if one is not None and one.device.type == "cpu"}
    return (
        _InFloat32() if any(kind in slow and not _has_products(kind) for kind in _HALVES) else nullcontext()
    )


def _has_products(kind: torch.dtype) -> bool:
    """Whether the processor multiplies a half type."""
    name = "bf16" if kind == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


class _InFloat32(TorchDispatchMode):  # type: ignore[misc]
    """Does products in float32, those in `_PRODUCTS` in blocks of columns, and rounds them."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if len({value.dtype for value in args if isinstance(value, Tensor)}) > 1:  # refused, as ever
            return func(*args, **kwargs)
        if func in _CONVOLUTIONS and _is_half(args[0]):
            found = func(*map(_widened, args), **kwargs)
            return tree_map(lambda one: one if one is None else one.to(args[0].dtype), found)
        place = _PRODUCTS.get(func)
        if place is None or not _is_half(args[place]):
            return func(*args, **kwargs)
        *added, left, right = args[: place + 1]
        left = left.float()
        columns = max(1, _BLOCK // max(1, right.numel() // max(1, right.shape[-1])))
        out = right.new_empty(*left.shape[:-1], right.shape[-1])
        for start in range(0, right.shape[-1], columns):
            block = slice(start, start + columns)
            # A column that stands for all of them stays as it is.
            sums = [(one if one.shape[-1] == 1 else one[..., block]).float() for one in added]
            out[..., block] = func(*sums, left, right[..., block].float(), **kwargs)
        return out


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in _HALVES and tensor.device.type == "cpu"


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
