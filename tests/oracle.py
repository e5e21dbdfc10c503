"""The 2x rule: a result may be off by twice what plain PyTorch is, in its own type, from float64.

    exact = the reference on float64 inputs
    plain = the reference on the inputs as they are
    err(found) <= 2 err(plain) + eps(dtype) max|exact|,    err(t) = max|t - exact|

No tolerance is chosen by hand, so none can be loosened to make a test pass.

cuBLAS sums float32 in several parts, and rounds to TF32. A kernel sums term after term, and tensor cores cut
its operands to TF32. So on a GPU plain PyTorch is also run with products made so (`InOrder`, `CutToTF32`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = Mapping[str, Tensor | None]


def to_double(inputs: Inputs) -> dict[str, Tensor | None]:
    return {name: None if one is None else one.detach().double() for name, one in inputs.items()}


def with_gradients(
    reference: Callable[..., Any], inputs: Inputs, wanted: tuple[str, ...], grads: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Outputs y0, y1, ... of the reference and the gradients of `wanted`, by name."""
    leaves = {
        name: one.detach().requires_grad_() if name in wanted and one is not None else one
        for name, one in inputs.items()
    }
    outputs = reference(**leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    names = [name for name in wanted if leaves[name] is not None]
    grads = tuple(grad.to(y.dtype) for grad, y in zip(grads, outputs, strict=True))
    found = torch.autograd.grad(outputs, [leaves[name] for name in names], grads)
    named = {f"y{index}": y.detach() for index, y in enumerate(outputs)}
    return named | {f"grad of {name}": grad for name, grad in zip(names, found, strict=True)}


_aten = torch.ops.aten


class _Products(TorchDispatchMode):
    """Products of float32 matrices made by `product`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        matrices = args[-2:]
        if any(getattr(one, "dtype", None) != torch.float32 for one in matrices):
            return func(*args, **kwargs or {})
        if func in (_aten.mm.default, _aten.bmm.default):
            return self.product(*matrices)
        if func in (_aten.addmm.default, _aten.baddbmm.default):
            return args[0] + self.product(*matrices)
        return func(*args, **kwargs or {})


class InOrder(_Products):
    """Products summed term after term."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        for k in range(a.shape[-1]):
            total.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])
        return total


class CutToTF32(_Products):
    """Products of operands without the bits that TF32 does not have."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        cut = ((one.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for one in (a, b))
        return torch.matmul(*cut)


def products_of_a_gpu(precision: str) -> TorchDispatchMode:
    """The products of a kernel, by the precision of those of float32."""
    return CutToTF32() if precision == "tf32" else InOrder()


def worst(plains: list[dict[str, Tensor]], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The one of several plain results, whose rounding differs, that is furthest off, by name.

    Where sums cancel, the error of one order of summation is a matter of luck.
    """
    return {
        name: max((plain[name] for plain in plains), key=lambda one: _error(one, exact[name]))
        for name in exact
    }


def _error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).abs().max()) if tensor.numel() else 0.0


def check(found: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Hold every named result to the 2x rule, its shape and its dtype."""
    assert set(found) == set(plain) == set(exact)
    for name, tensor in found.items():
        assert tensor.shape == exact[name].shape, name
        assert tensor.dtype == plain[name].dtype, name
        if tensor.numel() == 0:
            continue
        error, allowed = (float((one.double() - exact[name]).abs().max()) for one in (tensor, plain[name]))
        scale = float(exact[name].abs().max())
        bound = 2 * allowed + torch.finfo(tensor.dtype).eps * scale
        # Written so that a NaN fails.
        assert error <= bound, f"{name}: off by {error:.3g}, allowed {bound:.3g} at scale {scale:.3g}"
