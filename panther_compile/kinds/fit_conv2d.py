"""A sketched convolution from data: factors in the metric of what reaches it, the last by least squares."""

# I in_channels, O out_channels, n outputs that are looked at
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import ConvKernels, factorize_conv2d
from panther_compile.factorization.gain import gain_as_told
from panther_compile.factorization.moments import MAX_ROWS, RIDGE, ridge_on
from panther_compile.factorization.reliability import reliable_part
from panther_compile.factorization.row_sums import HalvedSums, Means
from panther_compile.kinds.kernel_descent import brought_closer
from panther_compile.kinds.kernel_metric import KernelSums, PatchMoments
from panther_compile.kinds.weights import generator_for
from panther_compile.kinds.windows import Convolution, windows_in_parts
from panther_compile.layers.base import copy_into
from panther_compile.layers.conv2d import SketchedConv2d
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
def cut_conv2d(
    conv: nn.Conv2d,
    name: str,
    choice: Choice,
    config: SketchConfig,
    moments: PatchMoments,
    gradient: Tensor | None,
) -> SketchedConv2d:
    """A k x k convolution whose kernel is factorized in a metric; its bias makes up for the means.

    Args:
        conv: the dense layer, on a plane.
        name: of the unit, for its random numbers.
        choice: scheme and ranks.
        config: the options.
        moments: of what reaches it; where those of whole patches are known, factors are brought closer.
        gradient: weight of errors at the output, `(O, O)`, or None.
    """
    dense = conv.weight.detach().double()
    metric = moments.metric(None if gradient is None else gradient.double())
    whitened = metric.whiten(dense).contiguous()
    kernels: Sequence[Tensor] = fit_kernel(whitened, conv.groups, name, choice, config).kernels
    if moments.halves:
        halves = [metric.whiten_moments(half.to(whitened.device)) for half in moments.halves]
        kernels = brought_closer(choice.scheme, kernels, whitened, halves)
    kernels = metric.take_back(choice.scheme, kernels)
    layer = SketchedConv2d.from_kernels(choice.scheme, kernels, conv)
    if layer.up.bias is not None and conv.groups == 1:
        lost = torch.einsum("oihw,ihw->o", dense - layer.weight.double(), moments.mean)
        copy_into(layer.up.bias, layer.up.bias.double() + lost)
    return layer


@torch.no_grad()
def fit_conv2d_to(
    conv: nn.Conv2d,
    name: str,
    choice: Choice,
    config: SketchConfig,
    arrivals: Sequence[Arrival],
    gradient: Tensor | None,
    ridge: float = RIDGE,
    reads: Convolution | None = None,
    *,
    whole: bool = True,
) -> tuple[SketchedConv2d, float]:
    """Fit a k x k convolution; gives the relative error of its output too.

    The kernel is cut in the metric of z and of errors at its output channels (`kernel_metric.py`), and its
    factors are brought closer in that of whole patches (`kernel_descent.py`). Then the last factor and the
    bias are fitted, in closed form, so that the factors on z give what the dense layer gives on x, with much
    of its deviations where there is a bias (`gain.py`). Of large maps a few thousand places are looked at
    (`windows.py`).

    Args:
        conv: the dense layer, on a plane.
        name: of the unit, for its random numbers.
        choice: scheme and ranks.
        config: the options.
        arrivals: what reached the layer.
        gradient: weight of errors at the output, float64 `(O, O)`, or None.
        ridge: on second moments, of their mean power.
        reads: the dense layer as it is; None if it is of two axes.
        whole: whether factors are brought closer in the metric of whole patches.
    """
    reads = reads or conv
    sums = KernelSums(conv, reads, whole=whole)
    for arrival in arrivals:
        sums.add(arrival.z)
    layer = cut_conv2d(conv, name, choice, config, sums.moments(ridge), gradient)
    return layer, _refit_last(_Outputs(conv, reads, layer, arrivals), ridge)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Outputs of a convolution, and what the last factor of a sketched one reads to make them.

    Attributes:
        conv: the dense layer, on a plane.
        reads: as it is.
        layer: the sketched one.
        arrivals: what reaches them.
    """

    conv: nn.Conv2d
    reads: Convolution
    layer: SketchedConv2d
    arrivals: Sequence[Arrival]

    def of_each(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs (n, O) of each arrival, without bias, and what the last factor reads (n, I', kh, kw)."""
        for arrival in self.arrivals:
            one = arrival.evened()
            pairs = zip(self._windows(one.x, most), self._windows(one.z, most), strict=True)
            found = [(_product(self.conv, x), _before_last(self.layer, z)) for x, z in pairs]
            wanted, read = zip(*found, strict=True)
            yield torch.cat(wanted), torch.cat(read)

    def _windows(self, x: Tensor, most: int) -> Iterator[Tensor]:
        for part in windows_in_parts(self.reads, x, most):
            yield part.reshape(*part.shape[:2], *self.conv.kernel_size)


def _refit_last(outputs: _Outputs, ridge: float) -> float:
    """Fit the last factor, by what is told of the change from what it is; gives the relative error left.

    Of very many features the bias alone is fitted.
    """
    conv, last = outputs.conv, outputs.layer.up
    groups, channels = last.groups, last.weight.shape[0] // last.groups
    features = last.weight[0].numel()
    if features > _MOST_FEATURES:
        return _refit_bias(outputs)
    most = min(MAX_ROWS, max(_LEAST_ROWS, _ROWS_EACH * features // len(outputs.arrivals)))
    sums = [HalvedSums(channels, features, last.weight.device, apart=True) for _ in range(groups)]
    power = torch.zeros(groups, channels, dtype=torch.float64, device=last.weight.device)
    for wanted, read in outputs.of_each(most):
        wanted = wanted.float().unflatten(1, (groups, channels))
        read = read.float().reshape(-1, groups, features)
        for group, one in enumerate(sums):
            one.add(wanted[:, group], read[:, group], None, halved=True)
        power += wanted.detach().double().square().sum(0)
    power /= sums[0].rows
    explained = 0.0
    kernels, shifts = [], []
    present = last.weight.detach().double().reshape(groups, channels, features)
    for one, before, of_group in zip(sums, present, power, strict=True):
        kernel, means = _refitted(before, one, ridge, centred=conv.bias is not None)
        if conv.bias is not None:
            of_group -= means.x.square()
            given = (kernel @ means.covariance * kernel).sum(1)
            kernel = gain_as_told(of_group, given)[:, None] * kernel
        explained += float((kernel * (2.0 * means.cross - kernel @ means.covariance)).sum())
        kernels.append(kernel)
        shifts.append(means.x - kernel @ means.z)
    copy_into(last.weight, torch.stack(kernels).reshape(last.weight.shape))
    if conv.bias is not None and last.bias is not None:
        copy_into(last.bias, conv.bias.double() + torch.cat(shifts))
    total = float(power.sum())
    return (max(0.0, total - explained) / max(total, 1e-30)) ** 0.5


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
    system.diagonal().add_(ridge_on(system, ridge))
    return kernel + reliable_part(means.cross - kernel @ means.covariance, system, halves), means


def _refit_bias(outputs: _Outputs) -> float:
    """Shift the bias by the mean of what is lost; gives the relative error left."""
    conv, last = outputs.conv, outputs.layer.up
    lost = torch.zeros(conv.out_channels, dtype=torch.float64, device=conv.weight.device)
    squares, size, count = 0.0, 0.0, 0
    for wanted, read in outputs.of_each(MAX_ROWS):
        found = F.conv2d(read, last.weight, None, groups=last.groups).flatten(1)
        rows = (wanted - found).double()
        lost += rows.sum(0)
        squares += float(rows.square().sum())
        size += float(wanted.double().square().sum())
        count += len(rows)
    if conv.bias is not None and last.bias is not None:
        copy_into(last.bias, conv.bias.double() + lost / count)
        squares -= float((lost.square() / count).sum())
    return float(max(0.0, squares) / max(size, 1e-30)) ** 0.5


def _product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The dense layer's outputs (n, O) for windows, without its bias."""
    return F.conv2d(x, conv.weight, None, groups=conv.groups).flatten(1)


def _before_last(layer: SketchedConv2d, z: Tensor) -> Tensor:
    """What the last factor reads of windows (n, I, kh, kw)."""
    if layer.scheme == "basis":
        filtered = F.conv2d(z.flatten(0, 1).unsqueeze(1), layer.down.weight)
        return filtered.reshape(len(z), -1, 1, 1)
    z = F.conv2d(z, layer.down.weight, None, groups=layer.down.groups)
    return F.conv2d(z, layer.core.weight, None, groups=layer.core.groups) if layer.scheme == "tucker2" else z
