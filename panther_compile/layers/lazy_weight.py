"""A weight that is multiplied out only when its values are read.

Some models look at `layer.weight` in every forward just for its dtype (T5) or device. Multiplying the
factors out there would cost more than the layer saves, so metadata is answered without it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from panther_compile.layers.capture import is_captured

_METADATA = frozenset(
    {
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,  # type: ignore[attr-defined]
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.layout.__get__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
        Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        Tensor.is_meta.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
    }
)


class LazyWeight(Tensor):
    """Stands for `product()`, of known shape, dtype and device; every operation works on the values."""

    _product: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor, product: Callable[[], Tensor]) -> Any:
        """Make the stand-in; `like` gives dtype, device and `requires_grad`."""
        weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        weight._product = product
        return weight

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer metadata as it stands; compute the values for anything else."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            args, kwargs = tree_map_only(cls, lambda weight: weight._product(), (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached from C++ callers only: the same, below autograd."""
        args, kwargs = tree_map_only(cls, lambda weight: weight._product(), (args, kwargs or {}))
        return func(*args, **kwargs)


def lazy_weight(shape: tuple[int, ...], like: Tensor, product: Callable[[], Tensor]) -> Tensor:
    """The product, lazily; under a compiler, plainly: what is not used is dropped there anyway."""
    if is_captured():
        return product()
    weight: Tensor = LazyWeight(shape, like, product)
    return weight
