"""SketchedConv1d: nn.Conv1d as a chain of smaller ones, the schemes of SketchedConv2d along one axis.

channel:  y = up(down(x)) + b          down k (I -> G r), up 1
tucker2:  y = up(core(down(x))) + b    down 1 (I -> G q), core k (G q -> G p), up 1
basis:    y = up(down(x)) + b          down k (each channel by the same r filters, I -> I r), up 1
pivoted:  y = up(x₁ + down(x₂)) + b    kernels of 1 without groups only
"""

# N batch, O out_channels, I in_channels, G groups, L length
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.errors import LayerError
from panther_compile.factorization.conv2d import multiply_out
from panther_compile.factorization.pivot import split_at
from panther_compile.layers.base import copy_into, take_over
from panther_compile.layers.conv2d import PaddingMode, SketchedConv2d
from panther_compile.layers.convolution import SketchedConvolution, convolved, filtered, makes_kernel

_GEOMETRY = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")


class SketchedConv1d(SketchedConvolution):
    """A low-rank replacement of `nn.Conv1d`, for x (N, I, L) or (I, L).

    Args:
        in_channels: I.
        out_channels: O.
        kernel_size: as for `nn.Conv1d`, and so are the other arguments of its names.
        rank: r per group, of "basis" in all; for "tucker2" (r_in, r_out).
        scheme: "channel", "tucker2", "basis" or "pivoted".
        stride: see `nn.Conv1d`.
        padding: a number, "same" or "valid".
        dilation: see `nn.Conv1d`.
        groups: G.
        bias: whether there is a bias of shape (O,).
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        start: first channel of the pivot slice, 0 or I - r ("pivoted" only).
        device: where the factors are made.
        dtype: of the factors, any floating dtype.

    Raises:
        ConfigError, LayerError, RankError: see `SketchedConv2d`.
    """

    down: nn.Conv1d
    core: nn.Conv1d
    up: nn.Conv1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        rank: int | tuple[int, ...],
        *,
        scheme: str = "channel",
        stride: int = 1,
        padding: str | int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        start: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if scheme == "spatial":
            raise LayerError(f"{type(self).__name__}: a single axis has no spatial scheme")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.dilation = (kernel_size,), (stride,), (dilation,)
        self.padding = padding if isinstance(padding, str) else (padding,)
        self.groups, self.padding_mode, self.start = groups, padding_mode, start
        plane = SketchedConv2d(  # checks the arguments, and divides them among the factors
            in_channels,
            out_channels,
            (kernel_size, 1),
            rank,
            scheme=scheme,
            stride=(stride, 1),
            padding=padding if isinstance(padding, str) else (padding, 0),
            dilation=(dilation, 1),
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            start=start,
            device="meta",
            dtype=dtype,
        )
        self.scheme, self.rank, self.ranks = scheme, plane.rank, plane.ranks
        for name, factor in plane.named_children():
            assert isinstance(factor, nn.Conv2d)
            self.add_module(
                name,
                nn.Conv1d(
                    factor.in_channels,
                    factor.out_channels,
                    factor.kernel_size[0],
                    factor.stride[0],
                    factor.padding if isinstance(factor.padding, str) else factor.padding[0],
                    factor.dilation[0],
                    factor.groups,
                    factor.bias is not None,
                    factor.padding_mode,  # type: ignore[arg-type]
                    device=device,
                    dtype=dtype,
                ),
            )

    @classmethod
    def from_plane(cls, plane: SketchedConv2d, like: nn.Conv1d) -> Self:
        """The layer of a chain of kernels (k, 1); all else but the bias is that of a dense layer.

        Args:
            plane: the chain, with the bias.
            like: the layer whose place this one takes.
        """
        new = cls(
            **geometry(like),
            rank=plane.rank,
            scheme=plane.scheme,
            start=plane.start,
            device="meta",
            dtype=like.weight.dtype,
        )
        new.to_empty(device=like.weight.device)
        for name, factor in plane.named_children():
            copy_into(new.get_submodule(name).weight, factor.weight.squeeze(-1))  # type: ignore[arg-type, operator]
        if plane.bias is not None and new.bias is not None:
            copy_into(new.bias, plane.bias)
        take_over(new, like, like.weight.requires_grad)
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Map input (N, I, L) or (I, L) as the dense layer would."""
        x = input
        if self.scheme == "tucker2":
            return self.up(self.core(self.down(x)))
        if self.scheme == "channel":
            return self.up(self.down(x))
        if makes_kernel(self, nn.Conv1d):
            kernel = multiply_out((self.down.weight, self.up.weight), self.groups, self.scheme)
            return convolved(self, x, kernel)
        if self.scheme == "basis":
            return self.up(filtered(self.down, x, 1))
        if not isinstance(self.padding, str) and any(self.padding):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, self.padding * 2, mode=mode)
        x = x[..., :: self.stride[0]].movedim(-2, -1)
        pivots, others = split_at(x, self.ranks[0], self.start)
        return self.up(pivots.movedim(-1, -2) + self.down(others.movedim(-1, -2)))

    def kernel_axes(self, factor: str) -> tuple[int, ...]:
        """The axes, 0 the length, along which a factor has the dense kernel, stride and padding."""
        long = {"channel": "down", "basis": "down", "tucker2": "core"}
        return (0,) if long.get(self.scheme) == factor else ()

    def _plane(self, dtype: torch.dtype | None = None) -> SketchedConv2d:
        """The same chain of kernels (k, 1), with this layer's parameters."""
        like = self.up.weight
        spec = {
            **self.sketch_spec(),
            "kernel_size": (*self.kernel_size, 1),
            "stride": (*self.stride, 1),
            "padding": self.padding if isinstance(self.padding, str) else (*self.padding, 0),
            "dilation": (*self.dilation, 1),
        }
        plane = SketchedConv2d(**spec, device=like.device, dtype=dtype or like.dtype)
        for name, factor in self.named_children():
            copy_into(plane.get_submodule(name).weight, factor.weight.unsqueeze(-1))  # type: ignore[arg-type, operator]
        return plane

    def _product(self) -> Tensor:
        return self._plane().weight.squeeze(-1) + 0

    def to_dense(self) -> nn.Conv1d:
        """An `nn.Conv1d` with the factors multiplied out."""
        like = self.up.weight
        dense = nn.utils.skip_init(nn.Conv1d, **geometry(self), device=like.device, dtype=like.dtype)
        copy_into(dense.weight, self._plane(torch.float64).to_dense().weight.squeeze(-1))
        if self.bias is not None:
            copy_into(dense.bias, self.bias)
        take_over(dense, self, self.down.weight.requires_grad)
        return dense

    def _weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def _geometry(self) -> dict[str, Any]:
        return geometry(self)


def geometry(layer: nn.Module) -> dict[str, Any]:
    """What `nn.Conv1d` and `SketchedConv1d` are built with: numbers, where torch keeps tuples of one."""
    found: dict[str, Any] = {}
    for name in _GEOMETRY:
        value: Any = getattr(layer, name)
        found[name] = value[0] if isinstance(value, tuple) else value
    return found | {
        "groups": layer.groups,
        "padding_mode": layer.padding_mode,
        "bias": layer.bias is not None,
    }
