"""nn.Embedding becomes SketchedEmbedding; a Linear head tied to its table shares the factors.

Before:
    %embed : call_module[target=embed](args = (%ids,))    embed: Embedding(V, D)
    %head : call_module[target=head](args = (%h,))        head.weight is embed.weight
After:
    %embed : call_module[target=embed](args = (%ids,))    embed: SketchedEmbedding(codes, basis)
    %head : call_module[target=head](args = (%h,))   head: SketchedLinear(down=basis, up.weight=codes.weight)
"""

from collections.abc import Mapping

import torch
from torch import nn

from panther_compile.candidates import LinearCandidate
from panther_compile.config import SketchConfig
from panther_compile.factorize import probe_error
from panther_compile.layers.base import SketchedLayer, take_over
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.linear import SketchedLinear
from panther_compile.passes.base import NOTHING_READY, Ready, fit_matrix, generator_for, spectrum
from panther_compile.passes.match import why_not_plain
from panther_compile.records import Choice, Fitted, Site, Unit


class SketchEmbedding:
    """See the module's docstring."""

    def kind(self, module: nn.Module) -> str | None:
        """Called "Embedding"."""
        return "Embedding" if isinstance(module, nn.Embedding) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `SketchPass.why_not`."""
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm renormalizes rows of the dense table"
        return why_not_plain(module, nn.Embedding, tensors=frozenset({"weight"}))

    def units(self, site: Site, config: SketchConfig, *, energies: bool) -> tuple[Unit, ...]:
        """One: the table, as a plain pair: rows are looked up, so no column can be left out."""
        weight = site.module.weight
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape
        values = spectrum(weight, energies=energies)
        pair = LinearCandidate(rows, columns, "pair", singular_values=values)
        return (Unit(site.name, (rows, columns), weight.numel(), 0, (pair,), None),)

    def unit_names(self, site: Site) -> tuple[str, ...]:
        """The site's own."""
        return (site.name,)

    def sketch(
        self, site: Site, choices: Mapping[str, Choice], config: SketchConfig, ready: Ready = NOTHING_READY
    ) -> tuple[SketchedLayer, dict[str, Fitted]]:
        """See `SketchPass.sketch`."""
        assert isinstance(site.module, nn.Embedding)
        weight = site.module.weight
        low_rank = fit_matrix(weight, site.name, choices[site.name].rank, config)
        layer = SketchedEmbedding.from_factors(low_rank.left, low_rank.right, site.module)
        left, right = (factor.detach() for factor in layer.factors())
        generator = generator_for(site.name, config, weight.device)
        error = probe_error(weight.detach(), left, right, generator=generator)
        return layer, {site.name: Fitted("pair", (layer.rank,), low_rank.method, error)}

    def can_share(self, module: nn.Module, other: nn.Module) -> bool:
        """See `SketchPass.can_share`: another table, or a head tied to it."""
        return isinstance(other, nn.Embedding | nn.Linear)

    def share(self, layer: SketchedLayer, other: nn.Module) -> SketchedLayer:
        """See `SketchPass.share`."""
        assert isinstance(layer, SketchedEmbedding)
        if isinstance(other, nn.Embedding):
            table = SketchedEmbedding(**layer.sketch_spec() | _options(other), device="meta")
            table.codes.weight, table.basis = layer.codes.weight, layer.basis
            take_over(table, other, layer.codes.weight.requires_grad)
            return table
        assert isinstance(other, nn.Linear)
        head = SketchedLinear(
            layer.embedding_dim,
            layer.num_embeddings,
            layer.rank,
            bias=other.bias is not None,
            device="meta",
        )
        head.down, head.up.weight = layer.basis, layer.codes.weight
        if other.bias is not None:
            head.up.bias = nn.Parameter(other.bias.detach().clone())
        take_over(head, other, layer.codes.weight.requires_grad)
        return head


def _options(module: nn.Embedding) -> dict[str, object]:
    return {
        "padding_idx": module.padding_idx,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
    }
