"""Weights that a module's own forward multiplies by, as layers that do it.

    torch.bmm(x, self.w1)            w1 (n, I, O) as n linear layers: `Matrices`
    F.linear(x[rows], self.w2[e])    w2 (n, O, I) likewise
    super().forward(pad(x))          the weight and bias of a convolution as one: `Kernel`

The module keeps its class and its forward. Products with what it finds under the name of the parameter are
calls of the layers, whatever they have been replaced by.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from panther_compile.config import OF_CLASS
from panther_compile.errors import FactoredWeightError
from panther_compile.layers.capture import is_captured
from panther_compile.layers.lazy_weight import REFUSED, lazy_weight
from panther_compile.layers.matrix_stacks import parts_of_stack, stack_of_parts
from panther_compile.layers.stack_product import read_product


class OwnWeight(nn.Module):
    """Layers that stand for a parameter of the module that holds this one under the parameter's name.

    Attributes:
        order: the names of all parameters that the module had.
        marks: whether the module was said to be initialized for this.
    """

    order: tuple[str, ...] = ()
    marks: bool = False

    @abstractmethod
    def factor(self) -> "Factor":
        """What the forward of that module multiplies by."""

    @abstractmethod
    def dense(self) -> nn.Parameter | None:
        """The parameter that it stands for; None if a layer was replaced."""

    def __getattr__(self, name: str) -> Any:
        """See `factor`: whatever a forward asks of a parameter."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not self.__dict__.get("_modules"):
                raise
            return getattr(self.factor(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would be written to the parameter.

        Raises:
            FactoredWeightError: see there.
        """
        if name in _WRITTEN and not (name == "requires_grad" and value == self.requires_grad):
            raise FactoredWeightError(REFUSED.format(f"Setting {name}"))
        super().__setattr__(name, value)

    def keep_alone(self) -> None:
        """Have layers that were not replaced hold numbers of their own, not views of the parameter's."""
        for layer in self.children():
            if type(layer) is nn.Linear and not _is_alone(layer.weight):
                layer.weight.data = layer.weight.data.clone(memory_format=torch.contiguous_format)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of a tensor: the forward asks it. Who moves or casts a model does so with the modules around."""
        return self.factor().to(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.factor())

    def __getitem__(self, key: Any) -> Any:
        return self.factor()[key]

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.factor())  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `factor`."""
        args, kwargs = tree_map_only(OwnWeight, _factor_of, (args, kwargs or {}))
        return func(*args, **kwargs)


class Matrices(OwnWeight):
    """The matrices of a 3-D parameter (n, O, I), or (n, I, O), each a linear layer, by its number.

    Args:
        stack: the parameter.
        transposed: whether it is (n, I, O).

    Attributes:
        sizes: n, I and O.
    """

    def __init__(self, stack: nn.Parameter, *, transposed: bool) -> None:
        super().__init__()
        count, one, other = stack.shape
        self.transposed, self.sizes = transposed, (count, *((one, other) if transposed else (other, one)))
        for place, layer in enumerate(parts_of_stack(stack, None, transposed=transposed)):
            self._modules[str(place)] = layer

    @property
    def layers(self) -> list[Any]:
        """In the order of the matrices."""
        return list(self._modules.values())

    def factor(self) -> "Factor":
        """See `OwnWeight`."""
        return MatrixFactor(self)

    def dense(self) -> nn.Parameter | None:
        """See `OwnWeight`."""
        if not all(type(layer) is nn.Linear for layer in self.layers):
            return None
        return stack_of_parts(self.layers, transposed=self.transposed)[0]


class Kernel(OwnWeight):
    """The weight of a convolution, as one without padding, which has the bias of that convolution.

    Args:
        conv: a subclass of nn.Conv1d, nn.Conv2d or nn.Conv3d.
        base: which of them.

    Attributes:
        layer: the convolution.
        given_bias: the parameter that the module passes as its bias, in whose place the layer has another
            while it is fitted.
    """

    def __init__(self, conv: nn.Module, base: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]) -> None:
        super().__init__()
        bias = conv._parameters.get("bias")
        sizes = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, 0, conv.dilation)
        self.layer = base(*sizes, conv.groups, bias is not None, device="meta")  # type: ignore[arg-type]
        setattr(self.layer, OF_CLASS, type(conv))
        self.layer._parameters["weight"] = conv._parameters["weight"]
        self.layer._parameters["bias"] = bias
        self.__dict__["given_bias"] = bias  # not registered: it is the module's

    def factor(self) -> "Factor":
        """See `OwnWeight`."""
        return KernelFactor(self)

    def dense(self) -> nn.Parameter | None:
        """See `OwnWeight`."""
        return self.layer._parameters["weight"] if type(self.layer) in _CONVOLUTIONS.values() else None


def _is_alone(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory as it is, and there is nothing else."""
    whole = tensor.numel() * tensor.element_size()
    return tensor.is_meta or (tensor.is_contiguous() and tensor.untyped_storage().nbytes() == whole)


def _factor_of(own: OwnWeight) -> "Factor":
    return own.factor()


def holds_own_weights(module: nn.Module) -> bool:
    """Whether layers stand for parameters of a module."""
    return any(isinstance(child, OwnWeight) for child in module._modules.values())


class Factor:
    """Stands for a parameter in the text of a forward. Anything but products is asked of its values.

    Attributes:
        shape: of the parameter.
        ndim: its number of dimensions.
    """

    shape: torch.Size
    ndim: int

    @abstractmethod
    def values(self) -> Tensor:
        """The weight, multiplied out."""

    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of its dtype, on its device."""

    def lazy(self) -> Tensor:
        """The weight, multiplied out where its values are read; it refuses to be written to."""
        return lazy_weight(tuple(self.shape), self.like(), self.values)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.like().dtype

    @property
    def device(self) -> torch.device:
        """Where the parameter is."""
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
        """Itself, if it is of that dtype, on that device."""
        asked = [*args, *kwargs.values()]
        here = all(one == self.dtype or one == self.device for one in asked)
        return self if here else self.lazy().to(*args, **kwargs)

    def type_as(self, other: Tensor) -> Any:
        """See `to`."""
        return self.to(other.dtype)

    def __len__(self) -> int:
        return self.shape[0]

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
        product = _PRODUCTS.get(func)
        out = None if product is None else product(*args, **kwargs)
        if out is not None:
            return out
        args, kwargs = tree_map_only(Factor, Factor.lazy, (args, kwargs))
        return func(*args, **kwargs)


def _of_values(name: str) -> Callable[..., Any]:
    """An operator, or a method of tensors that modules have too, that works on the values."""

    def method(one: Factor | OwnWeight, *others: Any) -> Any:
        factor = one if isinstance(one, Factor) else one.factor()
        others = tree_map_only(OwnWeight, _factor_of, others)
        value: Any = getattr(factor.lazy(), name)
        return value(*tree_map_only(Factor, Factor.lazy, others))

    return method


def _refusal(name: str) -> Callable[..., Any]:
    """An operator that would write to the values."""

    def refuse(*_: Any) -> Any:
        raise FactoredWeightError(REFUSED.format(name))

    return refuse


_WRITTEN = ("data", "grad", "requires_grad")
_ARITHMETIC = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv pow neg abs matmul lt gt le ge
"""
for _name in _ARITHMETIC.split():
    setattr(Factor, f"__{_name}__", _of_values(f"__{_name}__"))
    setattr(OwnWeight, f"__{_name}__", _of_values(f"__{_name}__"))
for _name in ("setitem", "iadd", "isub", "imul", "itruediv"):
    setattr(Factor, f"__{_name}__", _refusal(f"__{_name}__"))
    setattr(OwnWeight, f"__{_name}__", _refusal(f"__{_name}__"))
for _name in ("float", "double", "half", "bfloat16", "cuda", "cpu", "type"):
    setattr(OwnWeight, _name, _of_values(_name))


class MatrixFactor(Factor):
    """A stack of matrices, or one of them.

    Args:
        matrices: the layers.
        turned: whether the last two dimensions are swapped.
        place: of one matrix, which this stands for then.
    """

    def __init__(self, matrices: Matrices, turned: bool = False, place: int | None = None) -> None:
        self.matrices, self.turned, self.place = matrices, turned, place
        # As in x @ P, not F.linear(x, P).
        self.multiplies_rows = matrices.transposed != turned
        count, inputs, outputs = matrices.sizes
        sizes = (inputs, outputs) if self.multiplies_rows else (outputs, inputs)
        self.shape = torch.Size(sizes if place is not None else (count, *sizes))
        self.ndim = len(self.shape)

    @property
    def layers(self) -> list[Any]:
        """Those of its matrices."""
        return self.matrices.layers if self.place is None else [self.matrices.layers[self.place]]

    def like(self) -> Tensor:
        """See `Factor`."""
        weight: Tensor = self.matrices.layers[0].weight
        return weight

    def values(self) -> Tensor:
        """See `Factor`."""
        weights = [layer.weight + 0 for layer in self.layers]
        values = torch.stack(weights) if self.place is None else weights[0]
        return values.mT if self.multiplies_rows else values

    def __getitem__(self, key: Any) -> Any:
        if self.place is not None or not _is_place(key):
            return self.lazy()[key]
        for place in range(len(self)):  # to a compiler the key may be a symbol, which is no index of a list
            if key in (place, place - len(self)):
                return MatrixFactor(self.matrices, self.turned, place)
        raise IndexError(f"matrix {int(key)}, wanted one of {len(self)}")

    @property
    def mT(self) -> "MatrixFactor":  # noqa: N802
        """The matrices transposed."""
        return MatrixFactor(self.matrices, not self.turned, self.place)

    @property
    def T(self) -> Any:  # noqa: N802
        """As of a tensor."""
        return self.mT if self.place is not None else self.lazy().T

    def t(self) -> "MatrixFactor":
        """As of a matrix."""
        return self.mT

    def transpose(self, one: int, other: int) -> Any:
        """As of a tensor."""
        if {one % self.ndim, other % self.ndim} == {self.ndim - 2, self.ndim - 1}:
            return self.mT
        return self.lazy().transpose(one, other)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self)  # type: ignore[arg-type]


class KernelFactor(Factor):
    """The weight of a convolution."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """See `Factor`."""
        return self.like().shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """See `Factor`."""
        return self.like().ndim

    def like(self) -> Tensor:
        """See `Factor`."""
        weight: Tensor = self.kernel.layer.weight  # type: ignore[assignment]
        return weight

    def values(self) -> Tensor:
        """See `Factor`."""
        return self.like() + 0


def _is_place(key: Any) -> bool:
    """Whether a key is the number of one matrix, whose value can be read."""
    if not isinstance(key, Tensor):
        return isinstance(key, int) and not isinstance(key, bool)
    counts = key.dim() == 0 and not key.is_floating_point() and key.dtype != torch.bool
    traced = torch._C._get_tracing_state() is not None or torch._C._functorch.maybe_get_level(key) >= 0
    return counts and not traced and not is_captured()


def _matmul(x: Any, other: Any) -> Tensor | None:
    """Rows times P, where x is (T, I), or (..., n, T, I), or that with 1 in place of n."""
    if not isinstance(x, Tensor) or not isinstance(other, MatrixFactor) or not other.multiplies_rows:
        return None
    layers = other.layers
    if other.place is not None:
        out: Tensor = layers[0](x)
        return out
    if x.dim() < 2 or (x.dim() > 2 and x.shape[-3] not in (1, len(layers))):
        return None
    rows = (x,) if x.dim() == 2 else x.unbind(-3)
    rows = rows if len(rows) == len(layers) else rows * len(layers)
    return torch.stack([layer(one) for layer, one in zip(layers, rows, strict=True)], -3)


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    if not isinstance(weight, MatrixFactor) or weight.place is None or weight.multiplies_rows:
        return None
    out: Tensor = weight.layers[0](input)
    return out if bias is None else out + bias.to(out.dtype)


def _added(added: Any, x: Any, other: Any, **scales: Any) -> Tensor | None:
    product = None if scales else _matmul(x, other)
    return None if product is None else added.to(product.dtype) + product


def _einsum(equation: str, *operands: Any) -> Tensor | None:
    """Rows and a stack, see `read_product`."""
    read = read_product(equation)
    if read is None or len(operands) != 2 or not isinstance(operands[1], MatrixFactor):
        return None
    x, stack = operands
    if not isinstance(x, Tensor) or stack.place is not None or stack.multiplies_rows != read.multiplies_rows:
        return None
    layers = stack.layers
    rows = x.movedim(read.letters.index(read.inputs), -1)
    letters = read.letters.replace(read.inputs, "") + read.inputs
    every: Sequence[Tensor] = [rows] * len(layers)
    if read.stack in letters:
        every = rows.unbind(letters.index(read.stack))
        letters = letters.replace(read.stack, "")
    if len(every) != len(layers):
        return None
    found = torch.stack([layer(one) for layer, one in zip(layers, every, strict=True)])
    return torch.einsum(f"{read.stack}{letters[:-1]}{read.outputs}->{read.result}", found).contiguous()


def _convolution(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if not isinstance(weight, KernelFactor):
        return None
    layer: Any = weight.kernel.layer
    if bias is not layer.bias and (bias is None or bias is not weight.kernel.given_bias):
        return None
    axes = weight.ndim - 2
    if (_each(stride, axes), _each(dilation, axes), groups) != (layer.stride, layer.dilation, layer.groups):
        return None
    pads = _pads(padding, layer.kernel_size, layer.dilation)
    out: Tensor = layer(F.pad(input, pads) if any(pads) else input)
    return out


def _each(value: Any, axes: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        return (operator.index(value),) * axes
    return tuple(map(operator.index, value)) * (axes if len(value) == 1 else 1)


def _pads(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """As `F.pad` takes them: before and behind, from the last axis on."""
    if padding == "same":
        total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        pairs = [(one // 2, one - one // 2) for one in total]
    else:
        pairs = [(one, one) for one in _each(0 if padding == "valid" else padding, len(kernel))]
    return [one for pair in reversed(pairs) for one in pair]


_CONVOLUTIONS = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
_PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm), _added),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}
