"""What layers that have a table in common want of it, as the tokens that a decoder reads and its output head.

An error d_v of the table's row v does as much as the row is used, and where:

    read       Σ_v p_v d_v G d_vᵀ,        p_v the share of reads that are of v, G the weight of errors there
    head       Σ_v E[g_v²] d_v H d_vᵀ,    g_v the gradient at the score of v, H = E[h hᵀ] of the head's input

for each row that reaches them. A model writes much the tokens that it reads, so one share stands for all
and the best table of low rank has a closed form (`kinds/table.py`): M is the sum of these G and H, each times
its scale, and the share of a row the mean of theirs, weighed by the traces of the M. A part of it is alike
for all rows, as other texts have other tokens. SmolLM2, its table of half the numbers, fitted to 64 pieces of
128 tokens, perplexity over the dense model's on other topics and on another kind of text:

    alike for all rows           0     .1    .2    .3    .4    .5
    other topics                 1.41  1.37  1.35  1.34  1.34  1.36
    another kind                 2.75  2.52  2.38  2.29  2.25  2.26
    of the identity in H         .3    .1    .03   .01   .001          (a third alike)
    other topics                 1.46  1.34  1.32  1.33  1.34
    another kind                 2.80  2.29  2.16  2.18  2.20
"""

# V num_embeddings, D embedding_dim
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from panther_compile.calibration.sensitivity import SHARE_OF_G, weight_of_errors
from panther_compile.factorization.row_sums import RowSums
from panther_compile.kinds.table import TableSums, rows_with
from panther_compile.kinds.targets import Target
from panther_compile.kinds.view import LinearView

ALIKE = 0.25  # of the shares is the same for all rows
SHARE_OF_H = 0.97  # the rest is the identity: unlike G it is no estimate of few projections


@dataclass(frozen=True, slots=True)
class _Use:
    """What one layer wants of a table.

    Attributes:
        shares: how much each row counts (V,), of 1.
        metric: of errors of a row (D, D), for each row that reaches the layer.
        rows: how many do.
        is_known: whether gradients say what an error does; else the metric is of an unknown scale.
    """

    shares: Tensor
    metric: Tensor
    rows: int
    is_known: bool

    def relative(self, table: Tensor) -> "_Use":
        """The same, scaled so that an error of the whole table is 1."""
        whole = sum(
            float(shares @ ((rows @ self.metric) * rows).sum(1))
            for rows, shares in rows_with(table, self.shares)
        )
        return replace(self, metric=self.metric / whole if whole > 0 else self.metric)


class Ties:
    """Sums over what reaches layers that have tables in common with others.

    Args:
        targets: the tables, and others, by name.

    Attributes:
        views: of these layers, by name.
        gradients: by name, G of a layer that reads, not scaled, E[g_v²] of one that multiplies; missing where
            none arrive.
        given: rows of outputs of the tables and of these layers, see `OutputGradients`.
    """

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self.views: dict[str, LinearView] = {}
        self.gradients: dict[str, Tensor] = {}
        self.given: dict[str, float] = {}
        self._sums: dict[str, TableSums | RowSums] = {}
        for target in targets.values():
            for name, view in target.ties.items():
                reads, table = view.input_sums(), target.weight_and_bias()[0]
                self.views[name] = view
                width = table.shape[1]
                inputs = RowSums.zeros(width, width, table.device, apart=False)
                self._sums[name] = reads if isinstance(reads, TableSums) else inputs

    @property
    def heads(self) -> frozenset[str]:
        """The layers that multiply by a table: they have as many outputs as it has rows."""
        return frozenset(name for name, view in self.views.items() if not view.is_table)

    def add(self, name: str, x: Tensor, kept: Tensor | None) -> None:
        """Add what reaches a layer; see `LinearView.rows` for the mask."""
        sums, rows = self._sums[name], self.views[name].rows(x, kept)
        if isinstance(sums, TableSums):
            sums.add(rows)
        else:
            rows = rows.float()
            sums.add(rows, rows, None)

    def rows(self, target: Target) -> int:
        """How many reach the one of a table's other layers that most do."""
        return max(self._sums[name].rows for name in target.ties)

    def wanted(self, target: Target, reads: TableSums, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """The share of each row (V,) and M (D, D), for each row that reaches what most do; float64.

        Args:
            target: the table.
            reads: of it by its own layer.
            gradient: G there, not scaled, or None.
        """
        table = target.weight_and_bias()[0].detach()
        uses = [_read(reads, gradient, table)]
        for name in target.ties:
            sums, gradient = self._sums[name], self.gradients.get(name)
            if isinstance(sums, TableSums):
                uses.append(_read(sums, gradient, table))
            else:
                uses.append(_multiplied(sums, gradient, table))
        uses = [use for use in uses if use.rows]
        if any(use.is_known for use in uses):
            uses = [use for use in uses if use.is_known]
        else:
            uses = [use.relative(table) for use in uses]
        most = max(use.rows for use in uses)
        metrics = [use.metric * (use.rows / most) for use in uses]
        metric = torch.stack(metrics).sum(0)
        if not float(metric.trace()) > 0.0:  # as where a head is given zeros
            return reads.shares(), _identity(table)
        traces = torch.stack([metric.trace() for metric in metrics])
        found = (traces / traces.sum()) @ torch.stack([use.shares for use in uses])
        return (1.0 - ALIKE) * found + ALIKE / len(found), metric


def _read(sums: TableSums, gradient: Tensor | None, table: Tensor) -> _Use:
    if gradient is None:
        return _Use(sums.shares(), _identity(table), sums.rows, False)
    return _Use(sums.shares(), gradient, sums.rows, True)


def _multiplied(sums: RowSums, squares: Tensor | None, table: Tensor) -> _Use:
    metric = sums.covariance.double()
    if bool(metric.any()):
        metric = damped(metric / sums.rows, SHARE_OF_H)
    if squares is None:
        return _Use(metric.new_full((len(table),), 1 / len(table)), metric, sums.rows, False)
    return _Use(squares / squares.sum(), squares.sum() * metric, sums.rows, True)


def _identity(table: Tensor) -> Tensor:
    return torch.eye(table.shape[1], dtype=torch.float64, device=table.device)


def damped(metric: Tensor, share: float = SHARE_OF_G) -> Tensor:
    """A share of a metric, mixed with the identity as the weights of errors of all layers are."""
    weight, mean = weight_of_errors(metric, share)
    return mean * weight
