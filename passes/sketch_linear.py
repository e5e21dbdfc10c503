"""nn.Linear, and Hugging Face's Conv1D, become SketchedLinear and SketchedConv1D.

Before:
    %fc : call_module[target=fc](args = (%x,))      fc: Linear(in_features=I, out_features=O)
After:
    %fc : call_module[target=fc](args = (%x,))      fc: SketchedLinear(down: Linear, up: Linear)
"""

from collections.abc import Mapping

from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.cost import device_class
from panther_compile.factorize import probe_error
from panther_compile.layers.base import SketchedLayer, take_over
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.passes.base import (
    NOTHING_READY,
    Ready,
    fit_matrix,
    generator_for,
    matrix_candidates,
    numbers_of,
)
from panther_compile.passes.match import why_not_plain
from panther_compile.records import Choice, Fitted, Site, Unit

_TENSORS = frozenset({"weight", "bias"})


class SketchLinear:
    """See the module's docstring."""

    def kind(self, module: nn.Module) -> str | None:
        """Called "Linear" or "Conv1D"."""
        if isinstance(module, nn.Linear):
            return "Linear"
        return "Conv1D" if _is_conv1d(module) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `SketchPass.why_not`."""
        base = nn.Linear if isinstance(module, nn.Linear) else type(module)
        return why_not_plain(module, base, tensors=_TENSORS)

    def units(self, site: Site, config: SketchConfig, *, energies: bool) -> tuple[Unit, ...]:
        """One: the weight."""
        weight, bias = weight_and_bias(site.module)
        return (matrix_unit(site.name, weight, bias, config, energies=energies),)

    def unit_names(self, site: Site) -> tuple[str, ...]:
        """The site's own."""
        return (site.name,)

    def sketch(
        self, site: Site, choices: Mapping[str, Choice], config: SketchConfig, ready: Ready = NOTHING_READY
    ) -> tuple[SketchedLayer, dict[str, Fitted]]:
        """See `SketchPass.sketch`."""
        if site.name in ready:
            layer, fitted = ready[site.name]
            return layer, {site.name: fitted}
        weight, bias = weight_and_bias(site.module)
        layer_type = SketchedConv1D if _is_conv1d(site.module) else SketchedLinear
        layer, fitted = sketch_matrix(layer_type, weight, bias, site.name, choices[site.name], config)
        take_over(layer, site.module, weight.requires_grad)
        return layer, {site.name: fitted}

    def can_share(self, module: nn.Module, other: nn.Module) -> bool:
        """See `SketchPass.can_share`."""
        return self.kind(module) == self.kind(other)

    def share(self, layer: SketchedLayer, other: nn.Module) -> SketchedLayer:
        """See `SketchPass.share`: the same factors, the module's own bias."""
        assert isinstance(layer, SketchedLinear)
        _, bias = weight_and_bias(other)
        spec = layer.sketch_spec() | {"bias": bias is not None}
        twin = type(layer)(**spec, device="meta")
        twin.down = layer.down
        twin.up.weight = layer.up.weight
        if bias is not None:
            twin.up.bias = nn.Parameter(bias.detach().clone())
        take_over(twin, other, layer.up.weight.requires_grad)
        return twin


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight as (O, I), whichever way round the module keeps it, and the bias."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight.t() if _is_conv1d(module) else weight), bias


def matrix_unit(
    name: str, weight: Tensor, bias: Tensor | None, config: SketchConfig, *, energies: bool
) -> Unit:
    """The unit of one weight (O, I) with its bias."""
    bias_numbers = numbers_of(bias)
    return Unit(
        name,
        tuple(weight.shape),
        weight.numel() + bias_numbers,
        bias_numbers,
        matrix_candidates(weight, config, energies=energies),
        device_class(weight.device),
    )


def sketch_matrix(
    layer_type: type[SketchedLinear],
    weight: Tensor,
    bias: Tensor | None,
    name: str,
    choice: Choice,
    config: SketchConfig,
) -> tuple[SketchedLinear, Fitted]:
    """Factorize a weight (O, I) as chosen, back on its own device and in its own dtype."""
    low_rank = fit_matrix(weight, name, choice.ranks[0], config)
    layer = layer_type.from_factors(
        low_rank.left,
        low_rank.right,
        bias,
        form=choice.scheme,
        dtype=weight.dtype,
        device=weight.device,
        residual=low_rank.residual(weight),
    )
    error = matrix_error(layer, weight, name, config)
    return layer, Fitted(layer.form, (layer.rank,), low_rank.method, error)


def matrix_error(layer: SketchedLinear, weight: Tensor, name: str, config: SketchConfig) -> float:
    """Relative error of a weight (O, I) as stored, estimated by Gaussian probes."""
    left, right = (factor.detach() for factor in layer.factors())
    generator = generator_for(name, config, weight.device)
    return probe_error(weight.detach(), left, right, generator=generator)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's Conv1D, told without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
