"""Tables for people: what `print(plan)` and `print(report)` show."""

import html
import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from panther_compile.errors import MissingExtraError

_LAST = 24  # characters that a last column, of words, has at least


def render_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    footer: Sequence[str],
    *,
    width: int = 160,
    optional: Sequence[str] = (),
) -> str:
    """A table as text, as wide as the terminal if it is printed on one.

    Args:
        title: above the table.
        columns: (heading, "left" or "right") of each.
        rows: the cells.
        footer: lines below the table.
        width: in characters, where there is no terminal; longer cells are folded.
        optional: headings of columns that are left out, one after the other, until the rest fits.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size((width, 24)).columns
    columns, rows = _fitting(columns, rows, width, optional)
    # rich takes 0.1 s to import, which only those who print a table should pay.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading, justify in columns:
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # Plain whatever the terminal or FORCE_COLOR says: no escape codes, no markup or emoji read into names.
    console = Console(file=text, width=width, color_system=None, markup=False, emoji=False)
    console.print(table)
    lines = (line.rstrip() for line in text.getvalue().splitlines())
    return "\n".join([*lines, *footer])


def _fitting(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], width: int, optional: Sequence[str]
) -> tuple[Sequence[tuple[str, str]], Sequence[Sequence[str]]]:
    """The columns without the optional ones that do not fit beside the others; the last one folds."""
    left_out: set[str] = set()
    for heading in (*optional, None):
        kept = [place for place, (one, _) in enumerate(columns) if one not in left_out]
        longest = [max(len(row[place]) for row in (*rows, [one for one, _ in columns])) for place in kept]
        if heading is None or sum(longest[:-1]) + min(longest[-1], _LAST) + 2 * len(kept) <= width:
            break
        left_out.add(heading)
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]


def render_html(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    footer: Sequence[str],
    *,
    above: Sequence[str] = (),
    bars: Sequence[float | None] = (),
) -> str:
    """A table as HTML, for notebooks.

    Args:
        title: above the table.
        columns: (heading, "left" or "right") of each.
        rows: the cells.
        footer: lines below the table.
        above: lines between title and table.
        bars: a share in [0, 1] for each row, drawn behind its cell in the column "ratio"; None draws none.
    """
    drawn = dict(enumerate(bars))
    body = []
    for number, row in enumerate(rows):
        cells = []
        for (heading, side), cell in zip(columns, row, strict=True):
            part = drawn.get(number) if heading == "ratio" else None
            filled = (
                "" if part is None else f";background:linear-gradient(90deg,#9cf {min(part, 1):.1%},#eee 0)"
            )
            cells.append(f'<td style="text-align:{side}{filled}">{html.escape(cell)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th style="text-align:{side}">{html.escape(heading)}</th>' for heading, side in columns)
    before, after = ("<br>".join(map(html.escape, lines)) for lines in (above, footer))
    return (
        f"<div><b>{html.escape(title)}</b><div>{before}</div><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table><small>{after}</small></div>"
    )


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` of the rows, by their "name".

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("to_pandas needs pandas: pip install pandas") from error
    return pandas.DataFrame(rows).set_index("name")


def counted(number: int, what: str) -> str:
    """A number of things, as in "1 batch" and "2 batches", whose name makes its plural by "es"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}es"


def share(part: float, whole: float) -> str:
    """A ratio with three digits, or a dash where there is nothing to compare with."""
    return f"{part / whole:.3f}" if whole else "-"


def number(value: float | None, digits: str = ".3f") -> str:
    """A number with three digits, or as `digits` says; empty where there is none."""
    return "" if value is None else f"{value:{digits}}"


def stored_share(rows: Sequence[Any]) -> float | None:
    """What rows of a report or lines of a plan store of their dense numbers; None if they have none."""
    dense = sum(row.dense_numbers for row in rows)
    return sum(row.stored_numbers for row in rows) / dense if dense else None
