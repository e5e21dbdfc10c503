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
from panther_compile.kinds.base import CompositeKind
from panther_compile.kinds.match import why_not_plain
from panther_compile.layers.attention import (
    SketchedMultiheadAttention,
    dense_projection,
    projection_weights,
)

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


class AttentionKind(CompositeKind):
    """See the module's docstring."""

    wanted = "nn.MultiheadAttention"
    layers = (SketchedMultiheadAttention,)

    def matches(self, module: nn.Module) -> str | None:
        """Called "MultiheadAttention"."""
        return "MultiheadAttention" if isinstance(module, nn.MultiheadAttention) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        assert isinstance(module, nn.MultiheadAttention)
        reason = why_not_plain(
            module,
            nn.MultiheadAttention,
            tensors=_TENSORS,
            children=frozenset({"out_proj"}),
            sizes=(1, 1),
        )
        if reason is not None:
            return reason
        tensors = frozenset({"weight", "bias"})
        reason = why_not_plain(module.out_proj, nn.Linear, tensors=tensors, sizes=(1, 1))
        return None if reason is None else f"its out_proj: {reason}"

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """The four projections, with copies of the weights."""
        assert isinstance(module, nn.MultiheadAttention)
        weights = projection_weights(module)
        return {name: dense_projection(weight, bias) for name, (weight, bias) in weights.items()}

    def assemble(
        self, module: nn.Module, parts: Mapping[str, nn.Module], config: SketchConfig | None = None
    ) -> nn.Module:
        """See `Kind.assemble`."""
        assert isinstance(module, nn.MultiheadAttention)
        if config is None:
            return SketchedMultiheadAttention.from_projections(module, parts)
        return SketchedMultiheadAttention.from_projections(
            module,
            parts,
            attention=config.attention,
            features=config.features,
            feature_seed=config.seed,
        )
