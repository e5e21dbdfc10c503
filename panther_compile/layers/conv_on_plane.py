"""SketchedConv1d and 3d: the schemes of SketchedConv2d, of kernels laid on a plane.

A kernel of one axis, k, is one of k x 1; one of three, kd x kh x kw, is one of kd x (kh kw), its taps the
same numbers in the same order. So it is factorized as that of SketchedConv2d is, and run along its own axes:

channel:  y = up(down(x)) + b          down k (I -> G r), up 1
spatial:  y = up(down(x)) + b          down kd x 1 x 1 (I -> G r), up 1 x kh x kw; of three
tucker2:  y = up(core(down(x))) + b    down 1 (I -> G q), core k (G q -> G p), up 1
basis:    y = up(down(x)) + b          down k (each channel by the same r filters, I -> I r), up 1; of one
pivoted:  y = up(x₁ + down(x₂)) + b    kernels of 1 without groups only

"spatial" of three axes is the (2+1)D convolution of Tran et al. (CVPR 2018), time first.
"""

# N batch, O out_channels, I in_channels, G groups, K axes behind the channels
import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther_compile.errors import LayerError
from panther_compile.factorization.pivot import split_at
from panther_compile.layers.base import copy_into, take_over
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.convolution import (
    PaddingMode,
    SketchedConvolution,
    convolved,
    filtered,
    makes_kernel,
)


class _SketchedOnPlane(SketchedConvolution):
    """A low-rank replacement of a convolution of one or three axes, for x (N, I, *) or (I, *).

    Args:
        in_channels: I.
        out_channels: O.
        kernel_size: as for the dense layer, and so are the other arguments of its names.
        rank: r per group, of "basis" in all; for "tucker2" (r_in, r_out).
        scheme: "channel", "spatial", "tucker2", "basis" or "pivoted".
        stride: see the dense layer.
        padding: numbers, "same" or "valid".
        dilation: see the dense layer.
        groups: G.
        bias: whether there is a bias of shape (O,).
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        start: first channel of the pivot slice, 0 or I - r ("pivoted" only).
        device: where the factors are made.
        dtype: of the factors, any floating dtype.

    Raises:
        ConfigError, LayerError, RankError: see `SketchedConv2d`.
    """

    dense_type: ClassVar[type[nn.Conv1d | nn.Conv3d]]
    without: ClassVar[str]
    """The scheme of `SketchedConv2d` that it has not."""

    _why_without: ClassVar[str]

    down: nn.Conv1d | nn.Conv3d
    core: nn.Conv1d | nn.Conv3d
    up: nn.Conv1d | nn.Conv3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        rank: int | tuple[int, ...],
        *,
        scheme: str = "channel",
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        start: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense: Any = self.dense_type(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            groups,
            padding_mode=padding_mode,
            device="meta",
        )
        self._take_geometry(dense)
        self._pivot_at(start, device)
        if scheme == self.without:
            raise LayerError(f"{type(self).__name__}: scheme={scheme!r} {self._why_without}")
        plane = SketchedConv2d(  # checks the rank, and divides channels among the factors
            in_channels,
            out_channels,
            on_plane(self.kernel_size),
            rank,
            scheme=scheme,
            groups=groups,
            bias=bias,
            start=start,
            device="meta",
        )
        self.scheme, self.rank, self.ranks = scheme, plane.rank, plane.ranks
        for name, factor in plane.named_children():
            assert isinstance(factor, nn.Conv2d)
            self.add_module(name, self._factor(name, factor, device=device, dtype=dtype))

    def _factor(self, name: str, plane: nn.Conv2d, **factory: Any) -> nn.Module:
        """The factor that runs along the kernel's own axes, from the one on the plane."""
        axes = self.kernel_axes(name)

        def along(values: tuple[int, ...], other: int) -> Any:
            return tuple(value if axis in axes else other for axis, value in enumerate(values))

        return self.dense_type(
            plane.in_channels,
            plane.out_channels,
            along(self.kernel_size, 1),
            along(self.stride, 1),
            self.padding if isinstance(self.padding, str) else along(self.padding, 0),
            along(self.dilation, 1),
            plane.groups,
            plane.bias is not None,
            self.padding_mode if axes else "zeros",
            **factory,
        )

    @classmethod
    def from_plane(cls, plane: SketchedConv2d, like: nn.Module) -> Self:
        """The layer of a chain of kernels on the plane; all else but the bias is that of a dense layer.

        Args:
            plane: the chain, with the bias.
            like: the layer whose place this one takes.
        """
        weight: Any = like.weight
        new = cls(
            **cls.geometry(like),
            rank=plane.rank,
            scheme=plane.scheme,
            start=plane.start,
            device="meta",
            dtype=weight.dtype,
        )
        new.to_empty(device=weight.device)
        for name, factor in plane.named_children():
            own: Any = new.get_submodule(name)
            copy_into(own.weight, factor.weight.reshape(own.weight.shape))  # type: ignore[operator]
        if plane.bias is not None and new.bias is not None:
            copy_into(new.bias, plane.bias)
        take_over(new, like, weight.requires_grad)
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Map input (N, I, *) or (I, *) as the dense layer would."""
        x = input
        if self.scheme == "tucker2":
            return self.up(self.core(self.down(x)))
        if self.scheme in ("channel", "spatial"):
            return self.up(self.down(x))
        if makes_kernel(self, self.dense_type):
            return convolved(self, x, self._product())
        count = len(self.kernel_size)
        if self.scheme == "basis":
            return self.up(filtered(self.down, x, 1))
        x = self._stepped_on(x)
        pivots, others = split_at(x.movedim(-1 - count, -1), self.ranks[0], self.start)
        return self.up(pivots.movedim(-1, -1 - count) + self.down(others.movedim(-1, -1 - count)))

    def kernel_axes(self, factor: str) -> tuple[int, ...]:
        """The axes along which a factor has the dense kernel, stride and padding."""
        axes = tuple(range(len(self.kernel_size)))
        if self.scheme == "spatial":
            return {"down": axes[:1], "up": axes[1:]}[factor]
        long = {"channel": "down", "basis": "down", "tucker2": "core"}
        return axes if long.get(self.scheme) == factor else ()

    @classmethod
    def geometry(cls, layer: nn.Module) -> dict[str, Any]:
        """See its base; numbers, where torch keeps tuples of one."""
        return {
            name: value[0] if isinstance(value, tuple) and len(value) == 1 else value
            for name, value in super().geometry(layer).items()
        }


class SketchedConv1d(_SketchedOnPlane):
    """A low-rank replacement of `nn.Conv1d`, for x (N, I, L) or (I, L); see its base."""

    dense_type = nn.Conv1d
    without, _why_without = "spatial", "takes two axes or more"


class SketchedConv3d(_SketchedOnPlane):
    """A low-rank replacement of `nn.Conv3d`, for x (N, I, D, H, W) or (I, D, H, W); see its base."""

    dense_type = nn.Conv3d
    # At half of the numbers it ran at .3 to 1.4 of the dense speed, where "channel" ran at 1.6 to 2.2.
    without, _why_without = "basis", "is for kernels of one or two axes"


SketchedOnPlane = SketchedConv1d | SketchedConv3d


def on_plane(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Sizes along the axes of a kernel as (height, width) of the plane."""
    return sizes[0], math.prod(sizes[1:])
