"""A weight that is multiplied out only when its values are read.

Some models look at `layer.weight` in every forward just for its dtype (T5) or device. Multiplying the
factors out there would cost more than the layer saves, so metadata is answered without it.

There is no such tensor in the layer: what is written to it, or to a view of it, would be lost. It raises.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from panther_compile.errors import FactoredWeightError
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


_SETTERS = {
    Tensor.data.__set__: "data",  # type: ignore[attr-defined]
    Tensor.grad.__set__: "grad",  # type: ignore[union-attr]
    Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    Tensor.requires_grad_: "requires_grad",
}


class LazyWeight(Tensor):
    """Stands for `product()`, of known shape, dtype and device; every operation works on the values.

    Raises:
        FactoredWeightError: an operation writes to the values.
    """

    # transformers asks this before it draws initial values into what a checkpoint did not hold.
    _is_hf_initialized = True
    _product: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor, product: Callable[[], Tensor]) -> Any:
        """Make the replacement; `like` gives dtype, device and `requires_grad`."""
        weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        weight._product = product
        return weight

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer metadata as it stands; compute the values for anything else.

        A module that stands for a weight beside it answers first, as it knows what its product adds.
        """
        if not all(issubclass(one, Tensor) for one in types):
            return NotImplemented
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _SETTERS and isinstance(args[0], cls):
                return _refuse_setting(_SETTERS[func], args, kwargs)
        values = _Values(cls)
        # Multiplied out as any code is: what a product reads may be lazy too, and has its gradients then.
        read, named = values.of(args), values.of(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*read, **named)
            values.check_unwritten(getattr(func, "__name__", str(func)), args, kwargs)
            return values.kept_lazy(result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached from C++ callers only: the same, below autograd."""
        values, kwargs = _Values(cls), kwargs or {}
        result = func(*values.of(args), **values.of(kwargs))
        values.check_unwritten(func.__name__.partition(".")[0], args, kwargs)
        return result


class _Values:
    """The products that stand for the lazy weights of one operation."""

    def __init__(self, kind: type[LazyWeight]) -> None:
        self._kind = kind
        self._made: list[tuple[Tensor, int | None]] = []

    def of(self, arguments: Any) -> Any:
        """The arguments with values in place of lazy weights."""
        return tree_map_only(self._kind, self._value, arguments)

    def _value(self, weight: LazyWeight) -> Tensor:
        value = weight._product()
        self._made.append((value, None if value.is_inference() else value._version))
        return value

    def check_unwritten(self, name: str, args: Any, kwargs: Any) -> None:
        """Raise FactoredWeightError if the operation of a name has written to the values."""
        for value, version in self._made:
            if version is not None and value._version != version:
                raise FactoredWeightError(REFUSED.format(name))
        # Tensors of inference mode count no versions; a function that writes is recognised by its name.
        first = (args[:1] or tuple(kwargs.values())) if _NAMES.fullmatch(name) else ()
        written = tree_leaves([first, kwargs.get("out")])
        if any(isinstance(one, self._kind) for one in written):
            raise FactoredWeightError(REFUSED.format(name))

    def kept_lazy(self, result: Any) -> Any:
        """The result, in which views of the values refuse to be written to as well."""
        return tree_map_only(Tensor, self._read_only, result)

    def _read_only(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, self._kind) or not any(_is_view(tensor, value) for value, _ in self._made):
            return tensor
        lazy: Tensor = self._kind(tuple(tensor.shape), tensor, lambda: tensor)
        return lazy


# Methods that end in one underline, and those of `+=`, `[...] =` and the like.
_NAMES = re.compile(r".*[^_]_|__i(?!nvert|ndex)\w+__|__setitem__")
REFUSED = (
    "{} would write to the weight of a sketched layer, which is made of its factors when it is read: "
    "the write would be lost. Write to the parameters of the layer's parts, such as `up` and `down`, or make "
    "the layer dense first: panther_compile.densify(model)"
)


def _refuse_setting(name: str, args: Any, kwargs: Any) -> Any:
    """Raise FactoredWeightError, unless `requires_grad` is set to what it is."""
    value = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if name == "requires_grad" and value == args[0].requires_grad:
        return args[0]
    raise FactoredWeightError(REFUSED.format(f"Setting {name}"))


def _is_view(tensor: Tensor, value: Tensor) -> bool:
    """Whether both are one memory; tensors of functorch, which have none, count as values of their own."""
    wrapped = any(torch._C._functorch.maybe_get_level(one) >= 0 for one in (tensor, value))
    if wrapped or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    alias: bool = torch._C._is_alias_of(tensor, value)  # type: ignore[attr-defined]
    return alias


def lazy_weight(shape: tuple[int, ...], like: Tensor, product: Callable[[], Tensor]) -> Tensor:
    """The product, lazily; under a compiler, plainly: what is not used is dropped there anyway."""
    if is_captured():
        return product()
    weight: Tensor = LazyWeight(shape, like, product)
    return weight
