"""Tables with a row for each layer, as a plan and a report show them; layers that repeat are one row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from panther_compile.reporting.folding import Row, fold
from panther_compile.reporting.tables import render_html, render_table, stored_share

Column = tuple[str, str, Callable[[Any], str]]
"""A heading, "left" or "right", and what the column says of a layer."""

_SAME = ("kind", "scheme")  # what layers have in common that are one row


@dataclass(frozen=True, slots=True)
class LayerTable:
    """A table of layers.

    Attributes:
        title: above the table.
        columns: the name of a layer first, what is to be said of it last.
        layers: lines of a plan, or rows of a report.
        footer: lines below.
    """

    title: str
    columns: Sequence[Column]
    layers: Sequence[Any]
    footer: Sequence[str]

    def text(self, *, optional: Sequence[str], width: int = 160) -> str:
        """The table as text; see `render_table`."""
        headings, folded = self._folded()
        rows = [row for row, _ in folded]
        return render_table(self.title, headings, rows, self.footer, width=width, optional=optional)

    def html(self, above: Sequence[str] = ()) -> str:
        """The table as HTML, the share that each layer stores drawn as a bar; see `render_html`."""
        headings, folded = self._folded()
        rows = [row for row, _ in folded]
        bars = [stored_share([self.layers[place] for place in places]) for _, places in folded]
        return render_html(self.title, headings, rows, self.footer, above=above, bars=bars)

    def _folded(self) -> tuple[list[tuple[str, str]], list[tuple[Row, tuple[int, ...]]]]:
        """The headings, and the rows with the places of the layers that each stands for."""
        rows = [tuple(cell(layer) for *_, cell in self.columns) for layer in self.layers]
        same = [place for place, (heading, *_) in enumerate(self.columns) if heading in _SAME]
        return [(heading, side) for heading, side, _ in self.columns], fold(rows, same=same)
