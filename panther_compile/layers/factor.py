"""What stands for a weight in the text of a forward: products with it are calls of layers.

Anything else is asked of the values, which are multiplied out then. They are nowhere: what would be written
to them raises.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from panther_compile.errors import FactoredWeightError
from panther_compile.layers.lazy_weight import REFUSED, lazy_weight


class StandsForWeight:
    """Is asked what a weight is asked. Its operators are those of the values."""

    @abstractmethod
    def factor(self) -> "Factor":
        """What the products are made with."""

    def __len__(self) -> int:
        return self.factor().shape[0]

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.factor())  # type: ignore[arg-type]


class Factor(StandsForWeight):
    """Stands for a parameter for the time of one use.

    Attributes:
        shape: of the parameter.
        ndim: its number of dimensions.
        given_bias: of a layer, in whose place it has a bias of its own, if it has one.
        cast: the dtype that parameters of layers are cast to for a product; None for their own.
        products: functions of a weight that are calls of layers, by torch's own; None from one says that this
            use of it is not.
    """

    products: ClassVar[Mapping[Any, Callable[..., Tensor | None]]] = {}

    shape: torch.Size
    ndim: int
    given_bias: nn.Parameter | None = None
    cast: torch.dtype | None = None

    def factor(self) -> "Factor":
        """Itself."""
        return self

    @abstractmethod
    def values(self) -> Tensor:
        """The weight, multiplied out."""

    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of its dtype, on its device."""

    def lazy(self) -> Tensor:
        """The weight, multiplied out where its values are read; it refuses to be written to."""
        found = lazy_weight(tuple(self.shape), self.like(), self.values)
        return found if self.cast is None else found.to(self.cast)

    def scaled(self, scale: float) -> "Factor | None":
        """What stands for a multiple of the weight; None if nothing does but its values."""
        return None

    def product(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What a layer makes of rows, in the dtype asked for."""
        if self.cast is None:
            out: Tensor = layer(x)
            return out
        held = {name: one.to(self.cast) for name, one in layer.named_parameters() if one.is_floating_point()}
        out = functional_call(layer, held, (x,))
        return out

    def has_bias(self, layer: Any) -> bool:
        """Whether a layer has a bias in the place of `given_bias`; otherwise it is not asked for one."""
        return self.given_bias is not None and layer.bias is not None

    def stands_for(self, bias: Tensor | None, layer: Any) -> bool:
        """Whether a product with this bias is one of the layer, which may have the bias already."""
        if not self.has_bias(layer):
            return True
        return bias is not None and (bias is self.given_bias or self.cast is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter, or that asked for."""
        return self.cast or self.like().dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameter."""
        return self.like().device

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def contiguous(self) -> "Factor":
        """Itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, if it is of that dtype, on that device; of another dtype it is a factor too."""
        dtype = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != self.dtype:
            return self._changed(cast=dtype)
        asked = [*args, *kwargs.values()]
        here = all(one == self.dtype or one == self.device for one in asked)
        return self if here else self.lazy().to(*args, **kwargs)

    def _changed(self, **changes: Any) -> Self:
        """A copy with other attributes."""
        found = copy.copy(self)
        vars(found).update(changes)
        return found

    def type_as(self, other: Tensor) -> Any:
        """See `to`."""
        return self.to(other.dtype)

    def __getitem__(self, key: Any) -> Any:
        return self.lazy()[key]

    def __getattr__(self, name: str) -> Any:
        """Anything else is asked of the values."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.lazy(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the layers where the function is a product that they are."""
        kwargs = kwargs or {}
        product = cls.products.get(func)
        out = None if product is None else product(*args, **kwargs)
        if out is not None:
            return out
        args, kwargs = tree_map_only(StandsForWeight, _lazy, (args, kwargs))
        return func(*args, **kwargs)


def _lazy(one: StandsForWeight) -> Tensor:
    return one.factor().lazy()


def of_values(name: str) -> Callable[..., Any]:
    """An operator, or a method of tensors that modules have too, that works on the values."""

    def method(one: StandsForWeight, *others: Any) -> Any:
        value: Any = getattr(_lazy(one), name)
        return value(*tree_map_only(StandsForWeight, _lazy, others))

    return method


def _refusal(name: str) -> Callable[..., Any]:
    """An operator that would write to the values."""

    def refuse(*_: Any) -> Any:
        raise FactoredWeightError(REFUSED.format(name))

    return refuse


def _scaling(name: str) -> Callable[..., Any]:
    """Multiplication, or division, which a factor may put off till after its products."""
    of_the_values = of_values(name)

    def scale(one: StandsForWeight, other: Any) -> Any:
        found = None
        if isinstance(other, int | float) and other:
            found = one.factor().scaled(1 / other if name == "__truediv__" else other)
        return of_the_values(one, other) if found is None else found

    return scale


_ARITHMETIC = """
    add radd sub rsub rtruediv floordiv rfloordiv pow neg abs matmul lt gt le ge
"""
for _name in _ARITHMETIC.split():
    setattr(StandsForWeight, f"__{_name}__", of_values(f"__{_name}__"))
for _name in ("mul", "rmul", "truediv"):
    setattr(StandsForWeight, f"__{_name}__", _scaling(f"__{_name}__"))
for _name in ("setitem", "iadd", "isub", "imul", "itruediv"):
    setattr(StandsForWeight, f"__{_name}__", _refusal(f"__{_name}__"))
