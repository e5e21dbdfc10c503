"""nn.Conv2d becomes SketchedConv2d, a chain of two or three convolutions.

Before:
    %y : call_module[target=conv](args = (%x,))      conv: Conv2d(I, O, kernel_size=(3, 3))
After:
    %y : call_module[target=conv](args = (%x,))      conv: SketchedConv2d(down: Conv2d, up: Conv2d)
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from panther_compile.candidates import Candidate, SignSketchCandidate
from panther_compile.config import SketchConfig
from panther_compile.cost import device_class
from panther_compile.factorize_conv2d import (
    ConvKernels,
    conv_candidates,
    factorize_conv2d,
    is_depthwise,
)
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.passes.base import (
    NOTHING_READY,
    Ready,
    can_compute_spectrum,
    fit_matrix,
    generator_for,
    numbers_of,
)
from panther_compile.passes.match import why_not_plain
from panther_compile.records import Choice, Fitted, Site, Unit


class SketchConv2d:
    """See the module's docstring."""

    def kind(self, module: nn.Module) -> str | None:
        """Called "Conv2d"."""
        return "Conv2d" if isinstance(module, nn.Conv2d) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `SketchPass.why_not`."""
        assert isinstance(module, nn.Conv2d)
        if is_depthwise(module.in_channels // module.groups, module.groups):
            return "depthwise: each filter sees one channel, a low rank has nothing to share"
        tensors = frozenset({"weight", "bias"})
        return why_not_plain(module, nn.Conv2d, tensors=tensors, methods=("forward", "_conv_forward"))

    def unit_names(self, site: Site) -> tuple[str, ...]:
        """The site's own."""
        return (site.name,)

    def units(self, site: Site, config: SketchConfig, *, energies: bool) -> tuple[Unit, ...]:
        """One: the kernel."""
        conv = site.module
        assert isinstance(conv, nn.Conv2d)
        weight, bias_numbers = conv.weight.detach(), numbers_of(conv.bias)
        if config.method == "panther":
            outputs, taps = weight.flatten(1).shape
            candidates: tuple[Candidate, ...] = (SignSketchCandidate(outputs, taps, "channel"),)
            candidates = candidates if conv.groups == 1 else ()
        else:
            energies = energies and can_compute_spectrum(weight)
            candidates = conv_candidates(weight, conv.groups, compute_energies=energies)
        shape = tuple(weight.shape)
        return (
            Unit(
                site.name,
                shape,
                weight.numel() + bias_numbers,
                bias_numbers,
                candidates,
                device_class(weight.device),
                conv.groups,
                conv.stride,  # type: ignore[arg-type]
            ),
        )

    def sketch(
        self, site: Site, choices: Mapping[str, Choice], config: SketchConfig, ready: Ready = NOTHING_READY
    ) -> tuple[SketchedLayer, dict[str, Fitted]]:
        """See `SketchPass.sketch`."""
        conv, choice = site.module, choices[site.name]
        assert isinstance(conv, nn.Conv2d)
        if site.name in ready:
            layer, fitted = ready[site.name]
            return layer, {site.name: fitted}
        if choice.scheme == "pivoted":
            layer, method = _sketch_1x1(conv, site.name, choice, config)
        else:
            layer, method = _sketch_kernel(conv, site.name, choice, config)
        error = relative_error(conv.weight.detach(), layer.weight.detach())
        return layer, {site.name: Fitted(layer.scheme, layer.ranks, method, error)}


def _sketch_1x1(
    conv: nn.Conv2d, name: str, choice: Choice, config: SketchConfig
) -> tuple[SketchedConv2d, str]:
    """A 1 x 1 kernel is a matrix."""
    matrix = conv.weight.flatten(1)
    low_rank = fit_matrix(matrix, name, choice.rank, config)
    residual = low_rank.residual(matrix)
    layer = SketchedConv2d.from_factors(low_rank.left, low_rank.right, conv, residual=residual)
    return layer, low_rank.method


def _sketch_kernel(
    conv: nn.Conv2d, name: str, choice: Choice, config: SketchConfig
) -> tuple[SketchedConv2d, str]:
    weight = conv.weight.detach()
    if config.device is not None:
        weight = weight.to(config.device)
    found = fit_kernel(weight, conv.groups, name, choice, config)
    return SketchedConv2d.from_kernels(choice.scheme, found.kernels, conv), found.method


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


def relative_error(weight: Tensor, stored: Tensor) -> float:
    """Of the kernel as stored; a kernel is small enough to be multiplied out."""
    size = torch.linalg.vector_norm(weight.double())
    distance = torch.linalg.vector_norm(weight.double() - stored.double())
    return float(distance / size) if size > 0 else 0.0
