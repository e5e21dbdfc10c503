"""SketchedConvolution: what the sketched convolutions, transposed ones too, have in common."""

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.factorization.conv2d import BasisCandidate, is_multiplied_out, multiply_out
from panther_compile.factorization.pivot import from_pivoted
from panther_compile.layers.base import (
    SketchedLayer,
    Spec,
    copy_into,
    is_called_plainly,
    is_plain,
    take_over,
)
from panther_compile.layers.capture import is_captured
from panther_compile.layers.lazy_weight import lazy_weight

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class SketchedConvolution(SketchedLayer):
    """A chain of convolutions in place of one; `up`, the last one, has the bias.

    Attributes:
        in_channels: I.
        out_channels: O.
        kernel_size: of the dense layer.
        groups: G.
        scheme: name of the scheme.
        rank: r per group, or several.
        ranks: of the factors.
        start: first channel of the pivot slice ("pivoted" only).
        dense_type: torch's class of the dense layer.
        geometry_names: of the arguments that torch's class is made with, bias aside; attributes of this too.
    """

    dense_type: ClassVar[type[nn.Module]]
    geometry_names: ClassVar[tuple[str, ...]] = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: PaddingMode
    groups: int
    scheme: str
    rank: int | tuple[int, ...]
    start: int
    down: nn.modules.conv._ConvNd
    up: nn.modules.conv._ConvNd

    def _weight_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def _product(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight, from the factors, in their type or in another one; differentiable."""
        weights = [getattr(self, name).weight for name in self.stages]
        if dtype is not None:
            weights = [weight.to(dtype) for weight in weights]
        if self.scheme == "pivoted":
            left, right = from_pivoted(weights[1].flatten(1), weights[0].flatten(1), self.start)
            return (left @ right).reshape(self._weight_shape())
        # Of one axis and of three the kernels are laid on a plane, where the schemes are at home.
        kernels = tuple(weight.unsqueeze(-1).flatten(3) for weight in weights)
        return multiply_out(kernels, self.groups, self.scheme).reshape(self._weight_shape())

    @property
    def stages(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `SketchedLayer`."""
        return ("down", "core", "up") if self.scheme == "tucker2" else ("down", "up")

    @classmethod
    def geometry(cls, layer: nn.Module) -> dict[str, Any]:
        """The arguments that a dense layer is made with, or one of these."""
        return {name: getattr(layer, name) for name in cls.geometry_names} | {"bias": layer.bias is not None}

    def _take_geometry(self, dense: nn.Module) -> None:
        """Keep the arguments of a dense layer, which has checked them, and turned numbers into tuples."""
        for name in self.geometry_names:
            setattr(self, name, getattr(dense, name))

    def _stepped_on(self, x: Tensor) -> Tensor:
        """What a kernel of one tap reads of x (N, I, *) or (I, *): padded, and one place in so many."""
        if not isinstance(self.padding, str) and any(self.padding):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, [pad for pad in reversed(self.padding) for _ in range(2)], mode=mode)
        if any(step > 1 for step in self.stride):
            steps: list[Any] = [slice(None, None, step) for step in self.stride]
            x = x[(..., *steps)]
        return x

    @property
    def weight(self) -> Tensor:
        """The dense weight that the factors stand for; read-only, computed when read."""
        return lazy_weight(self._weight_shape(), self.up.weight, self._product)

    @property
    def bias(self) -> Tensor | None:
        """The bias (O,), or None."""
        return self.up.bias

    @property
    def macs(self) -> int:
        """See `SketchedLayer.macs`; see `BasisCandidate.macs`."""
        if self.scheme != "basis":
            return super().macs
        outputs, inputs, *kernel = self._weight_shape()
        return BasisCandidate((outputs, inputs, math.prod(kernel), 1), self.groups).macs(self.ranks[0])

    def to_dense(self) -> nn.Module:
        """The ordinary layer with the factors multiplied out."""
        like = self.up.weight
        dense: Any = nn.utils.skip_init(
            self.dense_type, **self.geometry(self), device=like.device, dtype=like.dtype
        )
        copy_into(dense.weight, self._product(torch.float64))
        if self.bias is not None:
            copy_into(dense.bias, self.bias)
        take_over(dense, self, self.down.weight.requires_grad)
        return dense

    @property
    def multiplies_out(self) -> bool:
        """See `SketchedLayer.multiplies_out` and `is_multiplied_out`."""
        outputs, _, *kernel = self._weight_shape()
        taps = math.prod(kernel)
        return self.scheme == "basis" and is_multiplied_out(self.ranks[0], taps, outputs // self.groups)

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        return self.dense_macs + (self.out_channels if self.bias is not None else 0)

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`; of a transposed convolution per input position."""
        return math.prod(self._weight_shape())

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        spec = {
            **self.geometry(self),
            "rank": self.rank,
            "scheme": self.scheme,
            "start": self.start,
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in spec.items()}


def filtered(filters: nn.Module, x: Tensor, axes: int) -> Tensor:
    """What the same filters make of each channel.

    Args:
        filters: a convolution from one channel to r.
        x: `(N, I, *)` or `(I, *)`, with so many axes behind the channels.
        axes: 1 or 2.

    Returns:
        `(N, I r, *)` or `(I r, *)`, the r of a channel beside each other.
    """
    y = filters(x.flatten(0, -axes - 1).unsqueeze(1))
    return y.unflatten(0, x.shape[:-axes]).flatten(-axes - 2, -axes - 1)


def makes_kernel(layer: SketchedConvolution, kind: type[nn.Module]) -> bool:
    """Whether the kernel is made of the factors now: not where these have to be called themselves.

    Args:
        layer: the layer.
        kind: of its factors.
    """
    plain = is_called_plainly if is_captured() else is_plain
    return layer.multiplies_out and plain(layer.down, kind) and plain(layer.up, kind)


def padded(conv: nn.Module, x: Tensor) -> Tensor:
    """The input of a convolution with its padding done."""
    pads: Any = conv._reversed_padding_repeated_twice
    return F.pad(x, pads, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)  # type: ignore[arg-type]


def convolved(layer: SketchedConvolution, x: Tensor, kernel: Tensor) -> Tensor:
    """What a layer that stands for a convolution makes of x by a dense kernel, as the dense layer would."""
    geometry = layer.geometry(layer)
    options = {name: geometry[name] for name in ("stride", "padding", "dilation", "groups")}
    if geometry["padding_mode"] != "zeros":
        x, options["padding"] = padded(layer.down, x), 0
    return (F.conv1d if kernel.dim() == 3 else F.conv2d)(x, kernel, layer.bias, **options)
