"""nn.MultiheadAttention becomes SketchedMultiheadAttention: four sketched projections, exact attention.

Before:
    %y : call_module[target=attn](args = (%x, %x, %x))
    attn: MultiheadAttention(in_proj_weight (3 E, E), out_proj)
After:
    %y : call_module[target=attn](args = (%x, %x, %x))
    attn: SketchedMultiheadAttention(q_proj, k_proj, v_proj, out_proj)
"""

from collections.abc import Mapping

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.layers.attention import (
    PROJECTIONS,
    SketchedMultiheadAttention,
    dense_projection,
    projection_weights,
)
from panther_compile.layers.base import SketchedLayer, take_over
from panther_compile.layers.linear import SketchedLinear
from panther_compile.passes.base import NOTHING_READY, Ready
from panther_compile.passes.match import why_not_plain
from panther_compile.passes.sketch_linear import matrix_unit, sketch_matrix
from panther_compile.records import Choice, Fitted, Site, Unit

_TENSORS = frozenset(
    {
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "bias_k",
        "bias_v",
    }
)


class SketchAttention:
    """See the module's docstring."""

    def kind(self, module: nn.Module) -> str | None:
        """Called "MultiheadAttention"."""
        return "MultiheadAttention" if isinstance(module, nn.MultiheadAttention) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `SketchPass.why_not`."""
        assert isinstance(module, nn.MultiheadAttention)
        children = frozenset({"out_proj"})
        reason = why_not_plain(module, nn.MultiheadAttention, tensors=_TENSORS, children=children)
        if reason is not None:
            return reason
        tensors = frozenset({"weight", "bias"})
        reason = why_not_plain(module.out_proj, nn.Linear, tensors=tensors)
        return None if reason is None else f"its out_proj: {reason}"

    def unit_names(self, site: Site) -> tuple[str, ...]:
        """One for each projection, as the stand-in names them."""
        return tuple(f"{site.name}.{name}" if site.name else name for name in PROJECTIONS)

    def units(self, site: Site, config: SketchConfig, *, energies: bool) -> tuple[Unit, ...]:
        """The four projections."""
        assert isinstance(site.module, nn.MultiheadAttention)
        projections = projection_weights(site.module).values()
        return tuple(
            matrix_unit(name, weight, bias, config, energies=energies)
            for name, (weight, bias) in zip(self.unit_names(site), projections, strict=True)
        )

    def sketch(
        self, site: Site, choices: Mapping[str, Choice], config: SketchConfig, ready: Ready = NOTHING_READY
    ) -> tuple[SketchedLayer, dict[str, Fitted]]:
        """See `SketchPass.sketch`."""
        attention = site.module
        assert isinstance(attention, nn.MultiheadAttention)
        fitted: dict[str, Fitted] = {}
        projections: dict[str, nn.Module] = {}
        dense = projection_weights(attention)
        for projection, name in zip(PROJECTIONS, self.unit_names(site), strict=True):
            weight, bias = dense[projection]
            if name in ready:
                projections[projection], fitted[name] = ready[name]
            elif name in choices:
                layer, fitted[name] = sketch_matrix(SketchedLinear, weight, bias, name, choices[name], config)
                take_over(layer, attention, weight.requires_grad)
                if bias is not None and layer.up.bias is not None:
                    layer.up.bias.requires_grad_(bias.requires_grad)
                projections[projection] = layer
            else:
                projections[projection] = dense_projection(weight, bias)
        new = SketchedMultiheadAttention.from_projections(
            attention,
            projections,
            attention=config.attention,
            features=config.features,
            feature_seed=config.seed,
        )
        return new, fitted
