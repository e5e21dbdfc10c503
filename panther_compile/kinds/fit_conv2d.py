"""A sketched convolution from data: factors in the metric of the channels, last factor by least squares."""

# N batch, I in_channels, O out_channels, P positions times taps
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import ConvKernels, factorize_conv2d
from panther_compile.factorization.moments import RIDGE, MomentSums, thinned
from panther_compile.factorization.whiten import root_of, solve
from panther_compile.kinds.weights import generator_for
from panther_compile.layers.base import copy_into
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice


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


def channel_rows(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The pixels of x (N, I, H, W) that a 1 x 1 convolution reads, as rows (n, I)."""
    if x.dim() == 3:
        x = x.unsqueeze(0)
    if conv.kernel_size == (1, 1):
        x = x[..., :: conv.stride[0], :: conv.stride[1]]
    return thinned(x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]))


def fit_conv2d_to(
    conv: nn.Conv2d,
    name: str,
    choice: Choice,
    config: SketchConfig,
    arrivals: Sequence[Arrival],
    gradient: Tensor | None,
    ridge: float = RIDGE,
) -> tuple[SketchedConv2d, float]:
    """Fit a k x k convolution; gives the relative error of its output too.

    The kernel is factorized where it is measured by E[z zᵀ] of its input channels and by the weight of
    errors at its output channels; then the last factor and the bias are fitted, in closed form, so that the
    factors on z give what the dense layer gives on x.

    Args:
        conv: the dense layer.
        name: of the unit, for its random numbers.
        choice: scheme and ranks.
        config: the options.
        arrivals: what reached the layer.
        gradient: weight of errors at the output, float64 `(O, O)`, or None.
        ridge: on second moments, of their mean power.
    """
    weight = conv.weight.detach().double()
    inner = outer = None
    if conv.groups == 1:
        sums = MomentSums(weight.shape[1], weight.device)
        for arrival in arrivals:
            rows = channel_rows(conv, arrival.z)
            sums.add(rows, rows)
        inner = root_of(sums.moments(centred=False, ridge=ridge).covariance)
        weight = torch.einsum("oihw,ij->ojhw", weight, inner.factor)
        if gradient is not None:
            outer = root_of(gradient)
            weight = torch.einsum("po,pihw->oihw", outer.factor, weight)
    found = fit_kernel(weight.contiguous(), conv.groups, name, choice, config)
    first, *between, last = found.kernels
    if inner is not None:
        first = torch.einsum("rihw,ij->rjhw", first.double(), inner.inverse)
    if outer is not None:
        last = torch.einsum("op,orhw->prhw", outer.inverse, last.double())
    layer = SketchedConv2d.from_kernels(choice.scheme, (first, *between, last), conv)
    return layer, _refit_last(layer, conv, arrivals, ridge)


def _refit_last(layer: SketchedConv2d, conv: nn.Conv2d, arrivals: Sequence[Arrival], ridge: float) -> float:
    """Fit the last factor by ridge regression towards what it is; gives the relative error that is left."""
    last = layer.up
    groups, outputs = last.groups, last.weight.shape[0] // last.groups
    taps = last.weight[0].numel()
    device = last.weight.device
    covariance = torch.zeros(groups, taps, taps, dtype=torch.float64, device=device)
    cross = torch.zeros(groups, outputs, taps, dtype=torch.float64, device=device)
    sum_p = torch.zeros(groups, taps, dtype=torch.float64, device=device)
    sum_y = torch.zeros(groups, outputs, dtype=torch.float64, device=device)
    power, rows = 0.0, 0
    for arrival in arrivals:
        patches = _patches(last, _before_last(layer, arrival.z)).float()  # (G, n, taps)
        wanted = F.conv2d(
            _padded(conv, arrival.x), conv.weight, None, conv.stride, 0, conv.dilation, conv.groups
        )
        wanted = wanted.reshape(-1, *wanted.shape[-3:]).transpose(0, 1).reshape(groups, outputs, -1)
        wanted = wanted.transpose(1, 2).float()  # (G, n, O / G)
        patches, wanted = thinned(patches.transpose(0, 1)), thinned(wanted.transpose(0, 1))
        covariance += torch.einsum("ngp,ngq->gpq", patches, patches)
        cross += torch.einsum("ngo,ngp->gop", wanted, patches)
        sum_p += patches.sum(0)
        sum_y += wanted.sum(0)
        power += float(wanted.double().square().sum())
        rows += len(patches)
    covariance, cross, mean_p, mean_y = covariance / rows, cross / rows, sum_p / rows, sum_y / rows
    if conv.bias is not None:
        covariance = covariance - mean_p[:, :, None] * mean_p[:, None, :]
        cross = cross - mean_y[:, :, None] * mean_p[:, None, :]
        power -= rows * float(mean_y.square().sum())
    present = last.weight.detach().double().reshape(groups, outputs, taps)
    kernels, lost = [], power / rows
    for s, c, w in zip(covariance, cross, present, strict=True):
        added = ridge * float(s.diagonal().mean().clamp_min(1e-30))
        system = s + added * torch.eye(taps, dtype=s.dtype, device=device)
        kernel = solve(system, (c + added * w).T).T
        lost += float((kernel @ s * kernel).sum() - 2.0 * (kernel * c).sum())
        kernels.append(kernel)
    stacked = torch.stack(kernels)
    copy_into(last.weight, stacked.reshape(last.weight.shape))
    if conv.bias is not None and last.bias is not None:
        shift = mean_y - torch.einsum("gop,gp->go", stacked, mean_p)
        copy_into(last.bias, conv.bias.double() + shift.reshape(-1))
    return float(max(0.0, lost) / max(power / rows, 1e-30)) ** 0.5


def _before_last(layer: SketchedConv2d, z: Tensor) -> Tensor:
    """What the last factor is given."""
    z = layer.down(z)
    return layer.core(z) if layer.scheme == "tucker2" else z


def _padded(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The input of a convolution with its padding done."""
    pad = conv._reversed_padding_repeated_twice
    return F.pad(x, pad, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)


def _patches(factor: nn.Conv2d, x: Tensor) -> Tensor:
    """What each output of a factor reads, (G, n, I / G times taps), positions in the order of its output."""
    x = _padded(factor, x.reshape(-1, *x.shape[-3:]))
    columns = F.unfold(x, factor.kernel_size, factor.dilation, 0, factor.stride)  # type: ignore[arg-type]
    return columns.reshape(len(x), factor.groups, -1, columns.shape[-1]).permute(1, 0, 3, 2).flatten(1, 2)
