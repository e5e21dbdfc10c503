"""Products with matrices of a stack or the kernel of a convolution, and look-ups, as calls of layers."""

# n matrices, T rows, I in_features, O out_features
import operator
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.layers.capture import is_captured
from panther_compile.layers.factor import Factor
from panther_compile.layers.stack_product import MatrixProduct, read_matrix_product, read_product


class MatrixFactor(Factor):
    """A stack of matrices, or one of them.

    Args:
        layers: linear layers, one for each matrix.
        sizes: I and O.
        multiplies_rows: whether a matrix is (I, O), as in `x @ P`, not (O, I), as in `F.linear(x, P)`.
        is_one: whether it is one matrix, not a stack.
        given_bias: of one layer, in whose place it has a bias of its own, if it has one.

    Attributes:
        scale: what one matrix is multiplied by.
    """

    scale: float = 1.0

    def __init__(
        self,
        layers: Sequence[Any],
        sizes: tuple[int, int],
        multiplies_rows: bool,
        is_one: bool = False,
        given_bias: nn.Parameter | None = None,
    ) -> None:
        self.layers, self.sizes, self.multiplies_rows, self.is_one = layers, sizes, multiplies_rows, is_one
        self.given_bias = given_bias
        self._measure()

    def _measure(self) -> None:
        shape = self.sizes if self.multiplies_rows else self.sizes[::-1]
        self.shape = torch.Size(shape if self.is_one else (len(self.layers), *shape))
        self.ndim = len(self.shape)

    def _changed(self, **changes: Any) -> Self:
        found = super()._changed(**changes)
        found._measure()
        return found

    def like(self) -> Tensor:
        """See `Factor`."""
        weight: Tensor = self.layers[0].weight
        return weight

    def values(self) -> Tensor:
        """See `Factor`."""
        weights = [layer.weight + 0 for layer in self.layers]
        values = weights[0] * self.scale if self.is_one else torch.stack(weights)
        return values.mT if self.multiplies_rows else values

    def scaled(self, scale: float) -> "MatrixFactor | None":
        """See `Factor`; a layer with a bias would have that scaled too."""
        alone = self.is_one and not self.has_bias(self.layers[0])
        return self._changed(scale=self.scale * scale) if alone else None

    def product(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See `Factor`."""
        out = super().product(layer, x)
        return out if self.scale == 1 else out * self.scale

    def __getitem__(self, key: Any) -> Any:
        if self.is_one or not _is_place(key):
            return self.lazy()[key]
        for place in range(len(self)):  # to a compiler the key may be a symbol, which is no index of a list
            if key in (place, place - len(self)):
                return self._changed(layers=self.layers[place : place + 1], is_one=True)
        raise IndexError(f"matrix {int(key)}, wanted one of {len(self)}")

    @property
    def mT(self) -> "MatrixFactor":  # noqa: N802
        """The matrices transposed."""
        return self._changed(multiplies_rows=not self.multiplies_rows)

    @property
    def T(self) -> Any:  # noqa: N802
        """As of a tensor."""
        return self.mT if self.is_one else self.lazy().T

    def t(self) -> "MatrixFactor":
        """As of a matrix."""
        return self.mT

    def transpose(self, one: int, other: int) -> Any:
        """As of a tensor."""
        if {one % self.ndim, other % self.ndim} == {self.ndim - 2, self.ndim - 1}:
            return self.mT
        return self.lazy().transpose(one, other)


class WholeFactor(Factor):
    """The weight of one layer, as the layer has it.

    Attributes:
        layer: that one.
    """

    layer: Any

    def like(self) -> Tensor:
        """See `Factor`."""
        weight: Tensor = self.layer.weight
        return weight

    def values(self) -> Tensor:
        """See `Factor`."""
        return self.like() + 0


class KernelFactor(WholeFactor):
    """The weight of a convolution.

    Args:
        layer: a convolution without padding.
        given_bias: in whose place the layer has a bias of its own, if it has one.
    """

    def __init__(self, layer: Any, given_bias: nn.Parameter | None) -> None:
        self.layer, self.given_bias = layer, given_bias
        # Not asked of the weight, which torch.jit would note while it traces.
        self.shape = torch.Size((layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size))
        self.ndim = len(self.shape)


class TableFactor(WholeFactor):
    """The weight of an embedding.

    Args:
        layer: an embedding.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.shape, self.ndim = torch.Size((layer.num_embeddings, layer.embedding_dim)), 2


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
    if other.is_one:
        return None if other.has_bias(layers[0]) else other.product(layers[0], x)
    if x.dim() < 2 or (x.dim() > 2 and x.shape[-3] not in (1, len(layers))):
        return None
    rows = (x,) if x.dim() == 2 else x.unbind(-3)
    rows = rows if len(rows) == len(layers) else rows * len(layers)
    return torch.stack([other.product(layer, one) for layer, one in zip(layers, rows, strict=True)], -3)


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    if not isinstance(weight, MatrixFactor) or not weight.is_one or weight.multiplies_rows:
        return None
    layer = weight.layers[0]
    if not weight.stands_for(bias, layer):
        return None
    out = weight.product(layer, input)
    return out if bias is None or weight.has_bias(layer) else out + bias.to(out.dtype)


def _added(added: Any, x: Any, other: Any, **scales: Any) -> Tensor | None:
    if scales:
        return None
    layer = other.layers[0] if isinstance(other, MatrixFactor) and other.is_one else None
    if layer is not None and other.has_bias(layer) and other.multiplies_rows:
        return other.product(layer, x) if other.stands_for(added, layer) else None
    product = _matmul(x, other)
    return None if product is None else added.to(product.dtype) + product


def _einsum(equation: str, *operands: Any) -> Tensor | None:
    """Rows and a stack, see `read_product`, or one matrix, see `read_matrix_product`."""
    if len(operands) != 2 or not isinstance(operands[1], MatrixFactor):
        return None
    x, stack = operands
    one = read_matrix_product(equation) if stack.is_one else None
    if one is not None:
        return _einsum_of_one(one, x, stack)
    read = read_product(equation)
    if read is None or not isinstance(x, Tensor):
        return None
    if stack.is_one or stack.multiplies_rows != read.multiplies_rows:
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
    found = torch.stack([stack.product(layer, one) for layer, one in zip(layers, every, strict=True)])
    return torch.einsum(f"{read.stack}{letters[:-1]}{read.outputs}->{read.result}", found).contiguous()


def _einsum_of_one(read: MatrixProduct, x: Any, matrix: MatrixFactor) -> Tensor | None:
    layer = matrix.layers[0]
    if not isinstance(x, Tensor) or matrix.multiplies_rows != read.multiplies_rows or layer.bias is not None:
        return None
    found = matrix.product(layer, x.movedim(read.place, -1))
    if read.made == read.result:
        return found
    return torch.einsum(f"{read.made}->{read.result}", found).contiguous()


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
    layer: Any = weight.layer
    if not weight.stands_for(bias, layer):
        return None
    axes = weight.ndim - 2
    if (_each(stride, axes), _each(dilation, axes), groups) != (layer.stride, layer.dilation, layer.groups):
        return None
    pads = _pads(padding, layer.kernel_size, layer.dilation)
    out = weight.product(layer, F.pad(input, pads) if any(pads) else input)
    if weight.has_bias(layer) or bias is None:
        return out
    return out + bias.to(out.dtype).view(-1, *(1,) * axes)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if not isinstance(weight, TableFactor) or max_norm is not None:
        return None
    layer: Any = weight.layer
    options = layer.padding_idx, layer.scale_grad_by_freq, layer.sparse
    return weight.product(layer, input) if options == (padding_idx, scale_grad_by_freq, sparse) else None


def _each(value: Any, axes: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        return (operator.index(value),) * axes
    return tuple(map(operator.index, value)) * (axes if len(value) == 1 else 1)


def _pads(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Sizes as `F.pad` takes them: before and behind, from the last axis on."""
    if padding == "same":
        total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        pairs = [(one // 2, one - one // 2) for one in total]
    else:
        pairs = [(one, one) for one in _each(0 if padding == "valid" else padding, len(kernel))]
    return [one for pair in reversed(pairs) for one in pair]


MatrixFactor.products = {
    F.linear: _linear,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm), _added),
}
KernelFactor.products = dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution)
TableFactor.products = {F.embedding: _embedding}
