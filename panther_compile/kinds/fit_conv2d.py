"""A sketched convolution from data: factors in the metric of what reaches it, the last by least squares."""

# N batch, I in_channels, O out_channels, P positions times taps
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import ConvKernels, factorize_conv2d
from panther_compile.factorization.moments import MAX_ROWS, RIDGE, thinned
from panther_compile.factorization.row_sums import HalvedSums, Means
from panther_compile.factorization.told import told
from panther_compile.kinds.kernel_metric import KernelSums
from panther_compile.kinds.weights import generator_for
from panther_compile.layers.base import copy_into
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.convolution import filtered, padded
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice

_MOST_FEATURES = 4096  # of a group, that a last factor is fitted to
_ROWS_EACH, _LEAST_ROWS = 8, 2048  # for a feature of the last factor, of all batches, and of one batch


def fit_kernel(weight: Tensor, groups: int, name: str, choice: Choice, config: SketchConfig) -> ConvKernels:
    """Factorize a kernel (O, I / G, kh, kw) as chosen, with random numbers of its own."""
    return factorize_conv2d(
        weight,
        groups,
        choice.scheme,
        choice.rank if choice.scheme == "tucker2" else choice.ranks[0],
        method=config.method,
        sketch=config.sketch,
        generator=generator_for(name, config, weight.device),
    )


@torch.no_grad()
def fit_conv2d_to(
    conv: nn.Conv2d,
    name: str,
    choice: Choice,
    config: SketchConfig,
    arrivals: Sequence[Arrival],
    gradient: Tensor | None,
    ridge: float = RIDGE,
    lay_out: Callable[[Tensor], Tensor] | None = None,
) -> tuple[SketchedConv2d, float]:
    """Fit a k x k convolution; gives the relative error of its output too.

    The kernel is factorized in the metric of z and of errors at its output channels (`kernel_metric.py`);
    then the last factor and the bias are fitted, in closed form, so that the factors on z give what the
    dense layer gives on x.

    Args:
        conv: the dense layer.
        name: of the unit, for its random numbers.
        choice: scheme and ranks.
        config: the options.
        arrivals: what reached the layer.
        gradient: weight of errors at the output, float64 `(O, O)`, or None.
        ridge: on second moments, of their mean power.
        lay_out: makes what the convolution reads of x or z, for one batch at a time; None if they are that.
    """
    pairs = _Pairs(arrivals, lay_out)
    sums = KernelSums(conv)
    for arrival in arrivals:
        sums.add(pairs.read(arrival.z))
    metric = sums.metric(gradient, ridge)
    weight = metric.whiten(conv.weight.detach().double()).contiguous()
    found = fit_kernel(weight, conv.groups, name, choice, config)
    kernels = metric.take_back(choice.scheme, found.kernels)
    layer = SketchedConv2d.from_kernels(choice.scheme, kernels, conv)
    return layer, _refit_last(layer, conv, pairs, ridge)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs x, z of what a convolution reads, made one by one: they may be much larger than what is given."""

    arrivals: Sequence[Arrival]
    lay_out: Callable[[Tensor], Tensor] | None

    def read(self, x: Tensor) -> Tensor:
        """What the convolution reads of one of them."""
        return x if self.lay_out is None else self.lay_out(x)

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for arrival in self.arrivals:
            one = arrival.evened()
            yield self.read(one.x), self.read(one.z)


def _refit_last(layer: SketchedConv2d, conv: nn.Conv2d, pairs: _Pairs, ridge: float) -> float:
    """Fit the last factor, by what is told of the change from what it is; gives the relative error left.

    Of very many features the bias alone is fitted.
    """
    last = layer.up
    groups, outputs = last.groups, last.weight.shape[0] // last.groups
    features = last.weight[0].numel()
    if features > _MOST_FEATURES:
        return _refit_bias(layer, conv, pairs)
    most = min(MAX_ROWS, max(_LEAST_ROWS, _ROWS_EACH * features // len(pairs)))
    sums = [HalvedSums(outputs, features, last.weight.device, apart=True) for _ in range(groups)]
    power = 0.0
    for x, z in pairs:
        patches = _patches(last, _before_last(layer, z)).float()  # (G, n, features)
        wanted = _product(conv, x)
        wanted = wanted.reshape(-1, *wanted.shape[-3:]).transpose(0, 1).reshape(groups, outputs, -1)
        wanted = wanted.transpose(1, 2).float()  # (G, n, O / G)
        patches, wanted = thinned(patches.transpose(0, 1), most), thinned(wanted.transpose(0, 1), most)
        for group, one in enumerate(sums):
            one.add(wanted[:, group], patches[:, group], None, halved=True)
        power += float(wanted.detach().double().square().sum())
    power /= sums[0].rows
    explained = 0.0
    kernels, shifts = [], []
    present = last.weight.detach().double().reshape(groups, outputs, features)
    for one, before in zip(sums, present, strict=True):
        kernel, means = _refitted(before, one, ridge, centred=conv.bias is not None)
        explained += float((kernel * (2.0 * means.cross - kernel @ means.covariance)).sum())
        if conv.bias is not None:
            power -= float(means.x.square().sum())
        kernels.append(kernel)
        shifts.append(means.x - kernel @ means.z)
    copy_into(last.weight, torch.stack(kernels).reshape(last.weight.shape))
    if conv.bias is not None and last.bias is not None:
        copy_into(last.bias, conv.bias.double() + torch.cat(shifts))
    return (max(0.0, power - explained) / max(power, 1e-30)) ** 0.5


def _refitted(kernel: Tensor, sums: HalvedSums, ridge: float, *, centred: bool) -> tuple[Tensor, Means]:
    """A group's last factor (O / G, features) from what it is, and the means that it was fitted to."""
    outputs, features = kernel.shape
    about = kernel.new_zeros(outputs), kernel.new_zeros(features)
    means = sums.total().means(about, centred=centred)
    halves = [
        (half.cross - kernel @ half.covariance, half.covariance)
        for half in sums.halves(about, centred=centred)
    ]
    system = means.covariance.clone()
    system.diagonal().add_(ridge * float(system.diagonal().mean().clamp_min(1e-30)))
    return kernel + told(means.cross - kernel @ means.covariance, system, halves), means


def _refit_bias(layer: SketchedConv2d, conv: nn.Conv2d, pairs: _Pairs) -> float:
    """Shift the bias by the mean of what is lost; gives the relative error left."""
    lost = torch.zeros(conv.out_channels, dtype=torch.float64, device=conv.weight.device)
    squares, size, count = 0.0, 0.0, 0
    for x, z in pairs:
        wanted = _product(conv, x)
        found = layer(z)
        if conv.bias is not None:
            found = found - conv.bias[:, None, None]
        channels = (wanted - found).movedim(-3, 0).flatten(1).double()
        lost += channels.sum(1)
        squares += float(channels.square().sum())
        size += float(wanted.double().square().sum())
        count += channels.shape[1]
    if conv.bias is not None and layer.up.bias is not None:
        copy_into(layer.up.bias, conv.bias.double() + lost / count)
        squares -= float((lost.square() / count).sum())
    return float(max(0.0, squares) / max(size, 1e-30)) ** 0.5


def _product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The dense layer's output without its bias."""
    return F.conv2d(padded(conv, x), conv.weight, None, conv.stride, 0, conv.dilation, conv.groups)


def _before_last(layer: SketchedConv2d, z: Tensor) -> Tensor:
    """What the last factor is given."""
    if layer.scheme == "basis":
        return filtered(layer.down, z, 2)
    z = layer.down(z)
    return layer.core(z) if layer.scheme == "tucker2" else z


def _patches(factor: nn.Conv2d, x: Tensor) -> Tensor:
    """What each output of a factor reads, (G, n, I / G times taps), positions in the order of its output."""
    x = padded(factor, x.reshape(-1, *x.shape[-3:]))
    columns = F.unfold(x, factor.kernel_size, factor.dilation, 0, factor.stride)  # type: ignore[arg-type]
    return columns.reshape(len(x), factor.groups, -1, columns.shape[-1]).permute(1, 0, 3, 2).flatten(1, 2)
