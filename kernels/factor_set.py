"""Factors of linear layers, as the operators take them and as the kernels do."""

# B rows, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """One layer: y = (x downᵀ) upᵀ + b, or pivoted, y = (x₁ + x₂ downᵀ) upᵀ + b.

    Attributes:
        down: (R, S).
        up: (O, R).
        bias: (O,) or None.
        start: first column of the slice x₁ of R columns, 0 or I - R; None without pivots.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None
    start: int | None

    @property
    def rest(self) -> int:
        """The first column of x₂, what `down` multiplies."""
        return self.down.shape[0] if self.start == 0 else 0


class Needs(NamedTuple):
    """Gradients of a linear operator that are wanted, of all its layers alike."""

    x: bool = True
    down: bool = True
    up: bool = True
    bias: bool = True
    multiplier: bool = True


class LinearGrads(NamedTuple):
    """Gradients of one layer's factors and multiplier, None where there is none or none is wanted."""

    down: Tensor | None
    up: Tensor | None
    bias: Tensor | None
    multiplier: Tensor | None = None


class FactorSet(NamedTuple):
    """One layer as a kernel sees it: tensors for their addresses, and sizes and strides beside them.

    It says latent = x₁ + x₂ downᵀ, out = a(latent upᵀ + bias) multiplier + residual, so it also describes a
    gradient, whose factors are the transposed ones.

    Attributes:
        down: (R, S).
        up: (O, R).
        bias: (O,) or None.
        multiplier: (B, O) or None.
        residual: (B, O) or None.
        out: (B, O), written.
        latent: (B, R), written, or None.
        rank: R.
        inputs: S.
        outputs: O.
        pivot: first column of x₁ in x, -1 if there is no x₁.
        rest: first column of x₂ in x.
        down_strides: of R, S.
        up_strides: of O, R.
        multiplier_strides: of B, O.
        residual_strides: of B, O.
        out_strides: of B, O.
        latent_strides: of B, R.
        last: None, see `packed`.
    """

    down: Any
    up: Any
    bias: Any
    multiplier: Any
    residual: Any
    out: Any
    latent: Any
    rank: int
    inputs: int
    outputs: int
    pivot: int
    rest: int
    down_strides: tuple[int, ...]
    up_strides: tuple[int, ...]
    multiplier_strides: tuple[int, ...]
    residual_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    latent_strides: tuple[int, ...]
    last: None = None


def packed(sets: Iterable[FactorSet]) -> tuple[FactorSet | None, ...]:
    """The sets as a kernel takes them.

    Triton 3.6 puts constants (None, a stride of 1) into the tuples of a kernel one after the other, and types
    a tuple anew only when one is put into itself: the types of tuples in it are stale, and a loop, which goes
    by types, loses those strides. A constant at the end of each tuple has it typed last.
    """
    return (*sets, None)


def factor_set(
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    out: Tensor,
    latent: Tensor | None,
    *,
    pivot: int | None = None,
    rest: int = 0,
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
) -> FactorSet:
    """The set of these tensors, any strides; the bias is contiguous."""
    assert bias is None or bias.stride(0) == 1
    return FactorSet(
        down,
        up,
        bias,
        multiplier,
        residual,
        out,
        latent,
        down.shape[0],
        down.shape[1],
        up.shape[0],
        -1 if pivot is None else pivot,
        rest,
        down.stride(),
        up.stride(),
        _strides(multiplier),
        _strides(residual),
        out.stride(),
        _strides(latent),
    )


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()
