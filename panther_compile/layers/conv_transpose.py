"""SketchedConvTranspose1d, 2d and 3d: a 1 x 1 convolution and a thinner transposed one.

channel:  y = up(down(x)) + b          down 1 x 1 (I -> G r), up k x k transposed (G r -> O)
pivoted:  y = up(x₁ + down(x₂)) + b    without groups: down (I - r -> r)

Each pixel of x is multiplied by a matrix W (O k k, I) within a group, and the patches are added up where they
overlap; W = A B of rank r. Stride, padding, output padding and dilation belong to the transposed factor.
"""

# N batch, O out_channels, I in_channels, G groups, K numbers of a kernel
import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigError, LayerError, check_choice
from panther_compile.factorization.pivot import from_pivoted, split_at
from panther_compile.layers.base import check_rank, copy_into, take_over
from panther_compile.layers.convolution import SketchedConvolution

TRANSPOSED_SCHEMES = ("channel", "pivoted")


class _SketchedConvTranspose(SketchedConvolution):
    """A low-rank replacement of a transposed convolution, for x (N, I, ...) or (I, ...).

    Args:
        in_channels: I.
        out_channels: O.
        kernel_size: as for the dense layer, and so are the other arguments of its names.
        rank: r per group, in 1..min(I / G, O / G K).
        scheme: "channel" or "pivoted".
        stride: see the dense layer.
        padding: likewise.
        output_padding: likewise.
        groups: G.
        dilation: likewise.
        bias: whether there is a bias of shape (O,).
        start: first channel of the pivot slice, 0 or I - r ("pivoted" only).
        device: where the factors are made.
        dtype: of the factors, any floating dtype.

    Raises:
        ConfigError: the scheme is unknown.
        LayerError: "pivoted" with groups.
        RankError: the rank is out of range.
        ValueError: from the dense layer, for what it refuses itself.
    """

    rank_first = True
    geometry_names = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "output_padding",
        "groups",
        "dilation",
    )
    rank: int
    _pixel_type: ClassVar[type[nn.Module]]
    _axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        rank: int,
        *,
        scheme: str = "channel",
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        dilation: int | tuple[int, ...] = 1,
        bias: bool = True,
        start: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        what = f"{type(self).__name__}({in_channels}, {out_channels})"
        check_choice(f"{what}: scheme", scheme, TRANSPOSED_SCHEMES)
        if scheme == "pivoted" and groups > 1:
            raise LayerError(f"{what}: the pivoted form is for layers without groups, got {groups=}")
        self.scheme, self.rank, self.ranks = scheme, rank, (rank,)
        self._pivot_at(start, device)

        def transposed(inputs: int, has_bias: bool, **factory: Any) -> Any:
            return self.dense_type(
                inputs,
                out_channels,
                tuple(kernel_size) if isinstance(kernel_size, list) else kernel_size,
                stride,
                padding,
                output_padding,
                groups,
                has_bias,
                dilation,
                **factory,
            )

        dense = transposed(in_channels, False, device="meta")
        self._take_geometry(dense)
        largest = min(in_channels // groups, out_channels // groups * math.prod(dense.kernel_size))
        check_rank(rank, largest - (scheme == "pivoted" and largest == in_channels), what)
        if start not in (0, in_channels - rank if scheme == "pivoted" else 0):
            raise ConfigError(f"{what}: {start=}, wanted 0, or {in_channels - rank} in the pivoted form")
        width = in_channels - rank if scheme == "pivoted" else in_channels
        self.down: Any = self._pixel_type(
            width, groups * rank, 1, groups=groups, bias=False, device=device, dtype=dtype
        )
        self.up: Any = transposed(groups * rank, bias, device=device, dtype=dtype)

    @classmethod
    def from_stored(
        cls, left: Tensor, down: Tensor, bias: Tensor | None, like: nn.Module, *, start: int | None
    ) -> Self:
        """A layer of factors as they are stored; all else is that of a dense layer.

        Args:
            left: `(G, O / G K, r)`.
            down: `(G, r, I / G)`, or `(1, r, I - r)` in the pivoted form.
            bias: `(O,)` or None.
            like: the layer whose place this one takes.
            start: of the pivot slice; None for a plain pair.
        """
        groups, _, rank = left.shape
        dense: Any = like
        new = cls(
            **cls.geometry(like) | {"bias": bias is not None},
            rank=rank,
            scheme="channel" if start is None else "pivoted",
            start=start or 0,
            device="meta",
            dtype=dense.weight.dtype,
        )
        new.to_empty(device=dense.weight.device)
        kernel = left.transpose(1, 2).reshape(groups * rank, dense.out_channels // groups, *dense.kernel_size)
        copy_into(new.up.weight, kernel)
        copy_into(new.down.weight, down.reshape(new.down.weight.shape))
        if bias is not None:
            copy_into(new.up.bias, bias)
        take_over(new, like, dense.weight.requires_grad)
        return new

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map input (N, I, ...) or (I, ...) as the dense layer would."""
        if self.scheme == "channel":
            return self.up(self.down(input), output_size)
        dim = -1 - self._axes
        pivots, others = split_at(input.movedim(dim, -1), self.rank, self.start)
        latent = pivots.movedim(-1, dim) + self.down(others.movedim(-1, dim))
        return self.up(latent, output_size)

    def kernel_axes(self, factor: str) -> tuple[int, ...]:
        """The axes along which a factor has the dense kernel, stride and padding."""
        return tuple(range(self._axes)) if factor == "up" else ()

    def matrices(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The factors left (G, O / G K, r) and right (G, r, I / G) of the weight, differentiable."""
        up, down = (factor.weight.to(dtype or factor.weight.dtype) for factor in (self.up, self.down))
        left = up.reshape(self.groups, self.rank, -1).transpose(1, 2)
        right = down.reshape(self.groups, self.rank, -1)
        if self.scheme == "pivoted":
            one, other = from_pivoted(left[0], right[0], self.start)
            left, right = one.unsqueeze(0), other.unsqueeze(0)
        return left, right

    def _product(self, dtype: torch.dtype | None = None) -> Tensor:
        left, right = self.matrices(dtype)
        return (left @ right).transpose(1, 2).reshape(self._weight_shape())

    def _weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.up.kernel_size)


class SketchedConvTranspose1d(_SketchedConvTranspose):
    """A low-rank replacement of `nn.ConvTranspose1d`, for x (N, I, L) or (I, L); see its base."""

    dense_type, _pixel_type, _axes = nn.ConvTranspose1d, nn.Conv1d, 1


class SketchedConvTranspose2d(_SketchedConvTranspose):
    """A low-rank replacement of `nn.ConvTranspose2d`, for x (N, I, H, W) or (I, H, W); see its base."""

    dense_type, _pixel_type, _axes = nn.ConvTranspose2d, nn.Conv2d, 2


class SketchedConvTranspose3d(_SketchedConvTranspose):
    """A low-rank replacement of `nn.ConvTranspose3d`, for x (N, I, D, H, W) or (I, D, H, W); see its base."""

    dense_type, _pixel_type, _axes = nn.ConvTranspose3d, nn.Conv3d, 3


SketchedConvTranspose = SketchedConvTranspose1d | SketchedConvTranspose2d | SketchedConvTranspose3d
