"""SketchedStack: a module whose own forward multiplies by matrices of 3-D parameters, with those sketched.

    y_e = x_e P_e     P (n, I, O), or y_e = x_e P_eᵀ, P (n, O, I): experts, members of an ensemble

The forward stays that of the dense module, whatever it does. It reads a `MatrixStack` where it read the
parameter, which multiplies by the factors of each matrix.
"""

# n matrices, T rows, I in_features, O out_features
from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from panther_compile.errors import CheckpointMismatchError, ConfigError, LayerError
from panther_compile.layers.base import Spec
from panther_compile.layers.capture import is_captured
from panther_compile.layers.matrix_stacks import (
    copied_part,
    part_name,
    parts_of_stack,
    stack_of_parts,
    without_parameters,
)
from panther_compile.layers.parts import LayerOfParts, part_of_spec, spec_of_part
from panther_compile.layers.stack_product import read_product

_Sizes = dict[str, tuple[int, int, int]]  # n, I and O of each stack
_Linears = dict[str, tuple[int, int, bool]]  # I, O and whether there is a bias


class SketchedStack(LayerOfParts):
    """Stands in for a module with matrices in 3-D parameters, which its own forward uses.

    Matrix e of the parameter `w1` is the linear layer `w1_{e}`. Linear layers of the module are parts too,
    under their own names, but for a router; all else is in `rest`.

    Args:
        stacks: n, I and O of each 3-D parameter, by name.
        transposed: names of those that are (n, I, O); the others are (n, O, I).
        linears: I, O and whether there is a bias, of each linear layer of the module, by name.
        parts: spec of a sketched layer for each part; None for an `nn.Linear`.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        rest: the dense module without its parts; set by `adopt`.

    Raises:
        ConfigError: parts names what is none, or there is no stack.
    """

    rest: nn.Module

    def __init__(
        self,
        stacks: Mapping[str, tuple[int, int, int]],
        transposed: tuple[str, ...] = (),
        linears: Mapping[str, tuple[int, int, bool]] | None = None,
        *,
        parts: Mapping[str, Spec | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._stacks, self._transposed, self._linears = dict(stacks), transposed, dict(linears or {})
        given = dict(parts or {})
        shapes = {
            part_name(name, place): (inputs, outputs, False)
            for name, (count, inputs, outputs) in self._stacks.items()
            for place in range(count)
        } | self._linears
        if not stacks or not set(transposed) <= set(stacks) or not set(given) <= set(shapes):
            raise ConfigError(
                f"{type(self).__name__}: stacks {list(stacks)}, transposed {transposed}, parts "
                f"{sorted(set(given) - set(shapes))[:3]}, wanted parts of {list(shapes)[:3]}, ..."
            )
        for name, (inputs, outputs, bias) in shapes.items():
            part = part_of_spec(given.get(name), inputs, outputs, bias=bias, device=device, dtype=dtype)
            self.add_module(name, part)

    @classmethod
    def from_parts(cls, dense: nn.Module, stacks: Mapping[str, bool], parts: Mapping[str, nn.Module]) -> Self:
        """The replacement of a module with parts made elsewhere, which are not copied.

        Args:
            dense: a module with 3-D parameters.
            stacks: their names, and whether each is (n, I, O).
            parts: by the names of `stack_parts`.
        """
        transposed = tuple(name for name, turned in stacks.items() if turned)
        sizes = _sizes(dense, stacks)
        new = cls(sizes, transposed, _linears(dense, sizes), device="meta")
        for name, part in parts.items():
            setattr(new, name, part)
        return new.adopt(dense).train(dense.training)

    def adopt(self, dense: nn.Module) -> Self:
        """See `SketchedLayer.adopt`: what belongs to the module's class, and parameters of no part.

        Raises:
            CheckpointMismatchError: the module holds matrices of other shapes, or none.
        """
        if isinstance(dense, SketchedStack):
            stacks, linears = dense._stacks, dense._linears
        else:
            turned = {name: name in self._transposed for name in self._stacks}
            stacks = _sizes(dense, turned)
            linears = _linears(dense, stacks)
        if (stacks, linears) != (self._stacks, self._linears):
            raise CheckpointMismatchError(
                f"a {type(dense).__name__} of matrices {stacks} and linear layers {linears}, wanted "
                f"{self._stacks} and {self._linears}"
            )
        rest = without_parameters(dense.rest if isinstance(dense, SketchedStack) else dense, stacks)
        for name in linears:
            rest._modules.pop(name, None)
        self.rest = rest
        # transformers draws initial values into the parameters of the classes that it knows.
        rest._is_hf_initialized = True  # type: ignore[assignment]
        return self

    def __getattr__(self, name: str) -> Any:
        """Read what the forward reads: a stack, a method of its class, or what the dense module holds."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            rest = self._modules.get("rest")
            if rest is None or name.startswith("__"):
                raise
            if name in self._stacks:
                return MatrixStack(self, name)
            held = getattr_static(type(rest), name, None)
            if isinstance(held, FunctionType):
                return MethodType(held, self)
            return getattr(rest, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the dense module's class."""
        if "rest" not in self._modules:
            raise LayerError(
                f"{type(self).__name__} lacks the module that it replaces: call adopt(dense) first"
            )
        out = type(self.rest).forward(self, *args, **kwargs)
        return self._reaching_all(out) if torch.is_grad_enabled() else out

    def _reaching_all(self, out: Any) -> Any:
        """The same result, from which all parts have a gradient, as all of a 3-D parameter has."""
        tensors, spec = tree_flatten(out)
        place = next(
            (p for p, one in enumerate(tensors) if isinstance(one, Tensor) and one.requires_grad), None
        )
        learn = [one for one in self.parameters() if one.requires_grad and one.dtype.is_floating_point]
        if place is None or not learn:
            return out
        nothing = torch.stack([one.flatten()[:0].sum() for one in learn]).sum()
        tensors[place] = tensors[place] + nothing.to(tensors[place].dtype)
        return tree_unflatten(tensors, spec)

    def to_dense(self) -> nn.Module:
        """The module that it replaces, of its own class, with the factors multiplied out."""
        dense = without_parameters(self.rest, ())
        vars(dense).pop("_is_hf_initialized", None)
        for name, (count, _, _) in self._stacks.items():
            parts = [self.get_submodule(part_name(name, place)) for place in range(count)]
            stack, _ = stack_of_parts(parts, transposed=name in self._transposed)
            dense.register_parameter(name, stack)
        for name in self._linears:
            part: Any = self.get_submodule(name)
            dense.add_module(name, copied_part(part) if type(part) is nn.Linear else part.to_dense())
        return dense.train(self.training)

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        biases = sum(outputs for _, outputs, bias in self._linears.values() if bias)
        rest = [*self.rest.parameters(), *self.rest.buffers()] if "rest" in self._modules else []
        return self.dense_macs + biases + sum(tensor.numel() for tensor in rest)

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`; of a row in every matrix."""
        stacks = sum(count * inputs * outputs for count, inputs, outputs in self._stacks.values())
        return stacks + sum(inputs * outputs for inputs, outputs, _ in self._linears.values())

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        parts = {name: part for name, part in self.named_children() if name != "rest"}
        return {
            "stacks": {name: list(sizes) for name, sizes in self._stacks.items()},
            "transposed": list(self._transposed),
            "linears": {name: list(sizes) for name, sizes in self._linears.items()},
            "parts": {name: spec_of_part(part) for name, part in parts.items()},
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Refuse the matrices of the dense module; see `SketchedLayer`."""
        for name in self._stacks:
            dense = state_dict.get(prefix + name)
            if dense is not None and dense.numel() > 0:
                raise CheckpointMismatchError(
                    f"{prefix}{name} {tuple(dense.shape)} holds the matrices of a dense module, and here is "
                    f"a {type(self).__name__}: load it into the dense model and call sketchify"
                )
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """The sizes and the stored share; the parts show themselves."""
        share = self.stored_numbers / self.dense_numbers
        return f"stacks={self._stacks}, stored={share:.3f}"


class MatrixStack:
    """Stands for a 3-D parameter of a dense module, in products, slices and questions of shape.

    Anything else is computed from its values, which are then multiplied out.

    Args:
        layer: holds the parts.
        name: of the parameter.
        turned: whether the last two dimensions are swapped.
        place: of one matrix, which this stands for then.
    """

    def __init__(
        self, layer: SketchedStack, name: str, turned: bool = False, place: int | None = None
    ) -> None:
        self._layer, self._name, self._turned, self._place = layer, name, turned, place
        count, inputs, outputs = layer._stacks[name]
        # As in x @ P, not F.linear(x, P).
        self._multiplies_rows = (name in layer._transposed) != turned
        sizes = (inputs, outputs) if self._multiplies_rows else (outputs, inputs)
        self.shape = torch.Size(sizes if place is not None else (count, *sizes))
        self.ndim = len(self.shape)

    def _parts(self) -> list[Any]:
        places = range(self._layer._stacks[self._name][0]) if self._place is None else (self._place,)
        return [self._layer._modules[part_name(self._name, place)] for place in places]

    def _values(self) -> Tensor:
        weights = [part.weight + 0 for part in self._parts()]
        values = weights[0] if self._place is not None else torch.stack(weights)
        return values.mT if self._multiplies_rows else values

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        dtype: torch.dtype = self._parts()[0].weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        device: torch.device = self._parts()[0].weight.device
        return device

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if self._place is not None or not _is_place(key):
            return self._values()[key]
        for place in range(len(self)):  # to a compiler the key may be a symbol, which is no index of a list
            if key in (place, place - len(self)):
                return MatrixStack(self._layer, self._name, self._turned, place)
        raise IndexError(f"matrix {int(key)} of {self._name}, wanted one of {len(self)}")

    @property
    def mT(self) -> "MatrixStack":  # noqa: N802
        """The matrices transposed."""
        return MatrixStack(self._layer, self._name, not self._turned, self._place)

    @property
    def T(self) -> Any:  # noqa: N802
        """As of a tensor."""
        return self.mT if self._place is not None else self._values().T

    def t(self) -> "MatrixStack":
        """As of a matrix."""
        return self.mT

    def transpose(self, one: int, other: int) -> Any:
        """As of a tensor."""
        if {one % self.ndim, other % self.ndim} == {self.ndim - 2, self.ndim - 1}:
            return self.mT
        return self._values().transpose(one, other)

    def contiguous(self) -> "MatrixStack":
        """Itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, if it is of that dtype, on that device."""
        asked = [*args, *kwargs.values()]
        here = all(one == self.dtype or one == self.device for one in asked)
        return self if here else self._values().to(*args, **kwargs)

    def type_as(self, other: Tensor) -> Any:
        """See `to`."""
        return self.to(other.dtype)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Anything else is asked of the values."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._values(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply by the factors where the function is a product of rows by matrices."""
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        out = None if product is None else product(*args, **kwargs)
        if out is not None:
            return out
        args, kwargs = (tree_map_only(cls, cls._values, given) for given in (args, kwargs))
        return func(*args, **kwargs)


def _of_values(name: str) -> Callable[..., Any]:
    """An operator of a stack that works on its values."""

    def operator(stack: MatrixStack, *others: Any) -> Any:
        others = tree_map_only(MatrixStack, MatrixStack._values, others)
        value: Any = getattr(stack._values(), name)
        return value(*others)

    return operator


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "neg",
    "abs",
    "matmul",
):
    setattr(MatrixStack, f"__{_name}__", _of_values(f"__{_name}__"))


def stack_parts(module: nn.Module, stacks: Mapping[str, bool]) -> dict[str, nn.Module]:
    """A linear layer for each matrix, whose weight is a view of it, and the module's own linear layers.

    Args:
        module: with 3-D parameters.
        stacks: their names, and whether each is (n, I, O).
    """
    found: dict[str, nn.Module] = {}
    for name, transposed in stacks.items():
        parts = parts_of_stack(module.get_parameter(name), None, transposed=transposed)
        found |= {part_name(name, place): part for place, part in enumerate(parts)}
    return found | {name: module.get_submodule(name) for name in _linears(module, _sizes(module, stacks))}


def _sizes(module: nn.Module, stacks: Mapping[str, bool]) -> _Sizes:
    """n, I and O of each stack that the module holds."""
    found: _Sizes = {}
    for name, rows_first in stacks.items():
        stack = module._parameters.get(name)
        if stack is not None and stack.dim() == 3:
            count, one, other = stack.shape
            found[name] = (count, one, other) if rows_first else (count, other, one)
    return found


def _linears(module: nn.Module, sizes: _Sizes) -> _Linears:
    """The linear layers that the module holds itself, but for a router: of one output for each matrix."""
    counts = {count for count, _, _ in sizes.values()}
    return {
        name: (one.in_features, one.out_features, one.bias is not None)
        for name, one in module.named_children()
        if type(one) is nn.Linear and one.out_features not in counts
    }


def _is_place(key: Any) -> bool:
    """Whether a key is the number of one matrix."""
    if isinstance(key, Tensor):
        return (
            key.dim() == 0 and not key.is_floating_point() and key.dtype != torch.bool and not is_captured()
        )
    return isinstance(key, int) and not isinstance(key, bool)


def _matmul(x: Any, other: Any) -> Tensor | None:
    """Rows times P, where x is (T, I), or (..., n, T, I), or that with 1 in place of n."""
    if not isinstance(x, Tensor) or not isinstance(other, MatrixStack) or not other._multiplies_rows:
        return None
    parts = other._parts()
    if other._place is not None:
        out: Tensor = parts[0](x)
        return out
    if x.dim() < 2 or (x.dim() > 2 and x.shape[-3] not in (1, len(parts))):
        return None
    rows = (x,) if x.dim() == 2 else x.unbind(-3)
    rows = rows if len(rows) == len(parts) else rows * len(parts)
    return torch.stack([part(one) for part, one in zip(parts, rows, strict=True)], -3)


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    if not isinstance(weight, MatrixStack) or weight._place is None or weight._multiplies_rows:
        return None
    out: Tensor = weight._parts()[0](x)
    return out if bias is None else out + bias


def _added(added: Any, x: Any, other: Any, **scales: Any) -> Tensor | None:
    product = None if scales else _matmul(x, other)
    return None if product is None else added + product


def _einsum(equation: str, *operands: Any) -> Tensor | None:
    """Two operands, the second a stack: see `read_product`."""
    read = read_product(equation)
    if read is None or len(operands) != 2 or not isinstance(operands[1], MatrixStack):
        return None
    x, stack = operands
    if (
        stack._place is not None
        or not isinstance(x, Tensor)
        or stack._multiplies_rows != read.multiplies_rows
    ):
        return None
    parts = stack._parts()
    rows = x.movedim(read.letters.index(read.inputs), -1)
    letters = read.letters.replace(read.inputs, "") + read.inputs
    every: Sequence[Tensor] = [rows] * len(parts)
    if read.stack in letters:
        every = rows.unbind(letters.index(read.stack))
        letters = letters.replace(read.stack, "")
    if len(every) != len(parts):
        return None
    found = torch.stack([part(one) for part, one in zip(parts, every, strict=True)])
    return torch.einsum(f"{read.stack}{letters[:-1]}{read.outputs}->{read.result}", found)


_PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm), _added),
}
