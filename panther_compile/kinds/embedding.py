"""nn.Embedding becomes SketchedEmbedding; a Linear head tied to its table shares the factors.

Before:
    %embed : call_module[target=embed](args = (%ids,))    embed: Embedding(V, D)
    %head : call_module[target=head](args = (%h,))        head.weight is embed.weight
After:
    %embed : call_module[target=embed](args = (%ids,))    embed: SketchedEmbedding(codes, basis)
    %head : call_module[target=head](args = (%h,))   head: SketchedLinear(down=basis, up.weight=codes.weight)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.kinds.base import Kind, OnnxForm
from panther_compile.kinds.match import why_not_plain
from panther_compile.kinds.table import TableSums, fit_table
from panther_compile.kinds.view import LinearView
from panther_compile.kinds.weights import fit_matrix, fitted_record, spectrum
from panther_compile.layers.base import SketchedLayer, take_over
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.linear import SketchedLinear
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice, Fitted, Unit


class TableView(LinearView):
    """A table (V, D): each token reads a row."""

    is_matrix = False
    is_linear = False
    is_table = True
    layer: nn.Embedding

    @property
    def outputs(self) -> int:
        """See `LinearView`: D."""
        return self.layer.embedding_dim

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The table, as it is."""
        return self.layer.weight, None

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The tokens (n, 1)."""
        return kept_rows(x.unsqueeze(-1), kept)

    def build(self, found: FittedPair) -> SketchedLayer:
        """See `LinearView`."""
        assert found.right is not None
        return SketchedEmbedding.from_factors(found.left, found.right, self.layer)

    def input_sums(self, *, centred: bool | None = None) -> TableSums:
        """See `LinearView`."""
        return TableSums(self.layer.weight)

    def fit(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        arrivals: Sequence[Arrival],
        masks: Sequence[Tensor | None],
        gradient: Tensor | None,
        ridge: float,
        stored: bool,
    ) -> tuple[SketchedLayer, float, int]:
        """See `LinearView`."""
        sums = self.input_sums()
        for arrival, kept in zip(arrivals, masks, strict=True):
            sums.add(self.rows(arrival.x, kept))
        layer, error = self.fit_shares(sums.shares(), gradient, choice.rank)
        return layer, error, sums.rows

    def fit_shares(
        self, shares: Tensor, gradient: Tensor | None, rank: int
    ) -> tuple[SketchedEmbedding, float]:
        """See `LinearView`."""
        left, right, error = fit_table(self.layer.weight, shares, gradient, rank)
        return SketchedEmbedding.from_factors(left, right, self.layer), error


class EmbeddingKind(Kind):
    """See the module's docstring."""

    wanted = "nn.Embedding (with include=)"
    layers = (SketchedEmbedding,)
    unless_included = "embedding: left alone unless included"

    def matches(self, module: nn.Module) -> str | None:
        """Called "Embedding"."""
        return "Embedding" if isinstance(module, nn.Embedding) else None

    def view(self, module: nn.Module) -> TableView:
        """See `Kind.view`."""
        assert isinstance(module, nn.Embedding)
        return TableView(module)

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm renormalizes rows of the dense table"
        return why_not_plain(module, nn.Embedding, tensors=frozenset({"weight"}), sizes=(1, 1))

    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """The table, as a plain pair: rows are looked up, so no column can be left out."""
        weight: Tensor = module.weight  # type: ignore[assignment]
        rows, columns = weight.shape
        values = spectrum(weight, energies=energies)
        pair = LinearCandidate(rows, columns, "pair", singular_values=values)
        return Unit(name, (rows, columns), weight.numel(), 0, (pair,), None)

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """See `Kind.sketch`."""
        assert isinstance(module, nn.Embedding)
        weight = module.weight
        low_rank = fit_matrix(weight, name, choice.rank, config)
        layer = SketchedEmbedding.from_factors(low_rank.left, low_rank.right, module)
        return layer, fitted_record(layer, weight, name, low_rank.method, config)

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """See `Kind.empty`."""
        assert isinstance(module, nn.Embedding)
        return SketchedEmbedding(
            module.num_embeddings,
            module.embedding_dim,
            choice.ranks[0],
            **_options(module),  # type: ignore[arg-type]
            device=device,
            dtype=module.weight.dtype,
        )

    def can_share(self, module: nn.Module, other: nn.Module) -> bool:
        """See `Kind.can_share`: another table, or a head tied to it."""
        return isinstance(other, nn.Embedding | nn.Linear)

    def share(self, layer: SketchedLayer, other: nn.Module) -> SketchedLayer:
        """See `Kind.share`."""
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


def _from_node(weight: Tensor, attributes: Mapping[str, Any]) -> nn.Module:
    del attributes
    table = nn.utils.skip_init(nn.Embedding, *weight.shape, device="meta")
    table.weight = nn.Parameter(weight, requires_grad=False)
    return table


EmbeddingKind.onnx = OnnxForm(("Gather",), 2, "a matrix", _from_node, is_table=True)
