"""SketchedConv2d: nn.Conv2d as a chain of smaller ones.

channel:  y = up(down(x)) + b          down kh x kw (I -> G r), up 1 x 1
spatial:  y = up(down(x)) + b          down kh x 1  (I -> G r), up 1 x kw
tucker2:  y = up(core(down(x))) + b    down 1 x 1 (I -> G q), core kh x kw (G q -> G p), up 1 x 1
basis:    y = up(down(x)) + b          down kh x kw (each channel by the same r filters, I -> I r), up 1 x 1
pivoted:  y = up(x₁ + down(x₂)) + b    1 x 1 kernels without groups only: pivot.py

Every factor but the filters has the G groups of the dense layer. Stride, padding and dilation belong to the
factor that is as tall or as wide as the dense kernel. Padding there is the same as padding x: the factors
before it have no bias, so zeros stay zeros and copies stay copies. The weights come from factorize_conv2d.py.
"""

# N batch, O out_channels, I in_channels, G groups
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther_compile.errors import LayerError, RankError, check_choice
from panther_compile.factorization.candidates import Candidate
from panther_compile.factorization.conv2d import (
    SCHEMES,
    ChannelCandidate,
    conv_candidates,
    factorize_conv2d,
    is_depthwise,
    tucker2_ranks,
)
from panther_compile.factorization.factorize import factorize
from panther_compile.factorization.pivot import to_pivoted
from panther_compile.kernels import reference
from panther_compile.layers.base import (
    check_rank,
    check_rank_or_ratio,
    copy_into,
    is_plain,
    take_over,
)
from panther_compile.layers.capture import is_captured
from panther_compile.layers.convolution import (
    PaddingMode,
    SketchedConvolution,
    convolved,
    filtered,
    makes_kernel,
)
from panther_compile.ops.conv2d import has_conv2d_kernel, sketched_conv2d

CONV_SCHEMES = (*SCHEMES, "pivoted")
# Along which axes, 0 height and 1 width, a factor has the dense kernel, stride, padding and dilation.
_AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "channel": {"down": (0, 1), "up": ()},
    "spatial": {"down": (0,), "up": (1,)},
    "tucker2": {"down": (), "core": (0, 1), "up": ()},
    "basis": {"down": (0, 1), "up": ()},
    "pivoted": {"down": (), "up": ()},
}


class SketchedConv2d(SketchedConvolution):
    """A low-rank replacement of `nn.Conv2d`, for x (N, I, H, W) or (I, H, W).

    Args:
        in_channels: I.
        out_channels: O.
        kernel_size: as for `nn.Conv2d`, and so are the other arguments of its names.
        rank: r per group, of "basis" in all; for "tucker2" (r_in, r_out), or one number that sets both.
        scheme: "channel", "spatial", "tucker2", "basis" or "pivoted".
        stride: see `nn.Conv2d`.
        padding: numbers, "same" or "valid".
        dilation: see `nn.Conv2d`.
        groups: G.
        bias: whether there is a bias of shape (O,).
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        start: first channel of the pivot slice, 0 or I - r ("pivoted" only).
        device: where the factors are made.
        dtype: type of the factors, any floating dtype.

    Raises:
        ConfigError: the scheme is unknown.
        LayerError: the convolution is depthwise, or "pivoted" does not fit it.
        RankError: the rank is out of range.
        ValueError: from `nn.Conv2d`, for what it refuses itself.
    """

    dense_type = nn.Conv2d
    down: nn.Conv2d
    core: nn.Conv2d
    up: nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        rank: int | tuple[int, ...],
        *,
        scheme: str = "channel",
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        start: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("scheme", scheme, CONV_SCHEMES)
        dense = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            padding_mode=padding_mode,
            device="meta",
        )
        self._take_geometry(dense)
        self.scheme = scheme
        self._pivot_at(start, device)
        _refuse_depthwise(dense)
        self.rank = self._checked_rank(rank)
        self.ranks = self.rank if isinstance(self.rank, tuple) else (self.rank,)
        r_in, r_out = self.ranks[0], self.ranks[-1]
        width = in_channels - r_in if scheme == "pivoted" else in_channels
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if scheme == "basis":
            self.down = self._make_factor("down", 1, r_in, False, factory, groups=1)
            self.up = self._make_factor("up", in_channels * r_in, out_channels, bias, factory)
            return
        self.down = self._make_factor("down", width, groups * r_in, False, factory)
        if scheme == "tucker2":
            self.core = self._make_factor("core", groups * r_in, groups * r_out, False, factory)
        self.up = self._make_factor("up", groups * r_out, out_channels, bias, factory)

    def _checked_rank(self, rank: int | tuple[int, ...]) -> int | tuple[int, ...]:
        what = f"{type(self).__name__}({self.in_channels}, {self.out_channels}, {self.scheme})"
        shape = self._weight_shape()
        _, inputs, kh, kw = shape
        if self.scheme == "tucker2":
            return tucker2_ranks(shape, self.groups, rank if isinstance(rank, int) else tuple(rank))
        if self.scheme == "pivoted" and not kh == kw == self.groups == 1:
            raise LayerError(f"{what}: the pivoted form is for 1 x 1 kernels without groups")
        outputs = self.out_channels // self.groups
        largest = {
            "channel": min(outputs, inputs * kh * kw),
            "spatial": min(outputs * kw, inputs * kh),
            "basis": min(kh * kw, self.out_channels * inputs),
            "pivoted": min(outputs, inputs - 1),
        }
        return _one_rank(rank, largest[self.scheme], what)

    def _make_factor(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool,
        factory: dict[str, Any],
        groups: int | None = None,
    ) -> nn.Conv2d:
        axes = _AXES[self.scheme].get(name, ())

        def along(values: tuple[int, ...], other: int) -> tuple[int, int]:
            height, width = (values[axis] if axis in axes else other for axis in (0, 1))
            return height, width

        return nn.Conv2d(
            inputs,
            outputs,
            along(self.kernel_size, 1),
            along(self.stride, 1),
            self.padding if isinstance(self.padding, str) else along(self.padding, 0),
            along(self.dilation, 1),
            self.groups if groups is None else groups,
            bias,
            self.padding_mode if axes else "zeros",
            **factory,
        )

    @classmethod
    def from_kernels(
        cls,
        scheme: str,
        kernels: tuple[Tensor, ...],
        like: nn.Conv2d,
        *,
        start: int = 0,
    ) -> Self:
        """A layer of the given factors; all else, bias and dtype included, is that of a dense layer.

        Args:
            scheme: see the constructor.
            kernels: weights of the factors, first one first, (C_out, C_in / G, height, width) each.
            like: the layer whose place this one takes.
            start: first channel of the pivot slice ("pivoted" only).

        Raises:
            ConfigError, LayerError, RankError: see the constructor.
        """
        check_choice("scheme", scheme, CONV_SCHEMES)
        sharing = 1 if scheme == "basis" else like.groups
        ranks = tuple(kernel.shape[0] // sharing for kernel in kernels[:-1])
        new = cls(
            **cls.geometry(like),
            rank=ranks if scheme == "tucker2" else ranks[0],
            scheme=scheme,
            start=start,
            device=like.weight.device,
            dtype=like.weight.dtype,
        )
        for name, kernel in zip(new.stages, kernels, strict=True):
            copy_into(getattr(new, name).weight, kernel)
        if like.bias is not None and new.up.bias is not None:
            copy_into(new.up.bias, like.bias)
        take_over(new, like, like.weight.requires_grad)
        return new

    @classmethod
    def from_dense(
        cls,
        layer: nn.Conv2d,
        *,
        rank: int | tuple[int, ...] | None = None,
        ratio: float | None = None,
        scheme: str = "auto",
        method: str = "auto",
        sketch: str = "gaussian",
        seed: int = 0,
    ) -> Self:
        """The closest layer of a rank, or of the largest that stores `ratio` of the weight's numbers.

        Args:
            layer: an `nn.Conv2d`, not depthwise.
            rank: see the constructor.
            ratio: in (0, 1]; exactly one of rank and ratio is given.
            scheme: see the constructor. "auto" takes, given a ratio, the scheme of least error, and of
                those that agree to three digits the one of fewest multiply-adds; given a rank,
                "pivoted" where that fits, else "channel".
            method: see `panther_compile.factorization.factorize.factorize`.
            sketch: random test matrix of the randomized method.
            seed: seed of that matrix.

        Raises:
            ConfigError, RankError: see the constructor; also where no rank stores so little.
            LayerError: the layer is no `nn.Conv2d`, is depthwise, or the scheme does not fit it.
            WeightError: the weight holds NaN or Inf, or is on the meta device.
        """
        what = f"{cls.__name__}.from_dense({layer})"
        if not isinstance(layer, nn.Conv2d):
            raise LayerError(f"{what}: wanted an nn.Conv2d")
        _refuse_depthwise(layer)
        check_choice("scheme", scheme, ("auto", *CONV_SCHEMES))
        check_rank_or_ratio(rank, ratio, what)
        weight, groups = layer.weight.detach(), layer.groups
        candidates = _fitting(weight, groups, scheme, what, energies=ratio is not None)
        if rank is None:
            assert ratio is not None
            candidate, rank = _best(candidates, int(ratio * weight.numel()), what)
        else:
            candidate = candidates[0]
            if scheme == "auto" and isinstance(rank, int) and rank > candidate.max_rank:
                candidate = ChannelCandidate(tuple(weight.shape), groups)
        generator = torch.Generator(weight.device).manual_seed(seed)
        if candidate.scheme != "pivoted":
            found = factorize_conv2d(
                weight,
                groups,
                candidate.scheme,
                rank,
                method=method,
                sketch=sketch,
                generator=generator,
            )
            return cls.from_kernels(candidate.scheme, found.kernels, layer)
        rank = _one_rank(rank, candidate.max_rank, what)
        matrix = weight.flatten(1)
        pair = factorize(matrix, rank, method=method, sketch=sketch, generator=generator)
        return cls.from_factors(pair.left, pair.right, layer, residual=pair.residual(matrix))

    @classmethod
    def from_factors(cls, left: Tensor, right: Tensor, like: nn.Conv2d, *, residual: float = 0.0) -> Self:
        """A 1 x 1 layer with the weight left @ right: pivoted, or the plain pair at full rank.

        Args:
            left: `(O, r)`, float32 or float64.
            right: `(r, I)`, float32 or float64.
            like: see `from_kernels`; it has no groups.
            residual: see `SketchedLinear.from_factors`.
        """
        pivoted = to_pivoted(left, right, dtype=like.weight.dtype, residual=residual)
        if pivoted is None:
            return cls.from_kernels("channel", (right[..., None, None], left[..., None, None]), like)
        kernels = (pivoted.right[..., None, None], pivoted.left[..., None, None])
        return cls.from_kernels("pivoted", kernels, like, start=pivoted.start)

    def forward(self, input: Tensor) -> Tensor:
        """Map input (N, I, H, W) or (I, H, W) as the dense layer would, memory format included."""
        if self.scheme == "pivoted":
            return self.up(self._pivoted_latent(input))
        if makes_kernel(self, nn.Conv2d):
            return convolved(self, input, self._product())
        if self.scheme == "basis":
            return self.up(filtered(self.down, input, 2))
        last = self.down
        if self.scheme == "tucker2":
            input, last = self.down(input), self.core
        # A proxy of torch.fx would answer with another proxy.
        y = self._by_kernel(input, last) if input.is_cuda is True else None
        return self.up(last(input)) if y is None else y

    def _by_kernel(self, x: Tensor, factor: nn.Conv2d) -> Tensor | None:
        """What `up` makes of a factor, by the operator where a kernel serves x; never in a captured graph."""
        if is_captured() or x.dim() != 4 or self.scheme == "spatial":
            return None
        if self.groups > 1 or self.padding_mode != "zeros" or isinstance(factor.padding, str):
            return None
        if not (is_plain(factor, nn.Conv2d) and is_plain(self.up, nn.Conv2d)):
            return None
        geometry: dict[str, Any] = {
            "stride": factor.stride,
            "padding": factor.padding,
            "dilation": factor.dilation,
        }
        if not has_conv2d_kernel(x, factor.weight):
            return None
        return sketched_conv2d(x, factor.weight, self.up.weight, self.up.bias, **geometry)

    def _pivoted_latent(self, x: Tensor) -> Tensor:
        """The sum x₁ + down(x₂), with the dense layer's padding and stride done on x."""
        x = self._stepped_on(x)
        if is_plain(self.down, nn.Conv2d):
            return reference.pivoted_conv1x1(x, self.down.weight, start=self.start)
        pivots, others = reference.split_channels(x, self.up.in_channels, self.start)
        return pivots + self.down(others)

    def kernel_axes(self, factor: str) -> tuple[int, ...]:
        """The axes, 0 height and 1 width, along which a factor has the dense kernel, stride and padding."""
        return _AXES[self.scheme][factor]


def _fitting(weight: Tensor, groups: int, scheme: str, what: str, *, energies: bool) -> tuple[Candidate, ...]:
    """The candidates of a scheme, or of all."""
    if scheme == "channel":  # also of a 1 x 1 kernel, whose pivoted form is the better choice
        return (ChannelCandidate(tuple(weight.shape), groups),)
    choosing = energies and scheme == "auto" and max(weight.shape[2:]) > 1
    fitting = conv_candidates(weight, groups, compute_energies=choosing)
    if scheme != "auto":
        schemes = [candidate.scheme for candidate in fitting]
        fitting = tuple(candidate for candidate in fitting if candidate.scheme == scheme)
        if not fitting:
            raise LayerError(f"{what}: {scheme=} does not fit, wanted one of {schemes}")
    return fitting


def _best(candidates: tuple[Candidate, ...], numbers: int, what: str) -> tuple[Candidate, int]:
    """The candidate of least error, then fewest multiply-adds, at its largest affordable rank."""
    affordable = [(candidate, candidate.largest_rank(numbers)) for candidate in candidates]
    affordable = [(candidate, rank) for candidate, rank in affordable if rank > 0]
    if not affordable:
        raise RankError(f"{what}: no rank stores {numbers} numbers or fewer")

    def cost(choice: tuple[Candidate, int]) -> tuple[float, int]:
        candidate, rank = choice
        return round(candidate.error(rank) or 0.0, 3), candidate.macs(rank)

    return min(affordable, key=cost)


def _one_rank(rank: int | tuple[int, ...], largest: int, what: str) -> int:
    if not isinstance(rank, int):
        raise RankError(f"{what}: {rank=}, wanted one integer in 1..{largest}")
    check_rank(rank, largest, what)
    return rank


def _refuse_depthwise(layer: nn.Conv2d) -> None:
    if is_depthwise(layer.in_channels // layer.groups, layer.groups):
        raise LayerError(
            f"{layer} is depthwise: a filter sees one channel, so a low rank has nothing to share"
        )
