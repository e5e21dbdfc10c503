"""Tables for people: what `print(plan)` and `print(report)` show."""

import io
from collections.abc import Sequence


def render_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    footer: Sequence[str],
    *,
    width: int = 160,
) -> str:
    """A table as text.

    Args:
        title: above the table.
        columns: (heading, "left" or "right") of each.
        rows: the cells.
        footer: lines below the table.
        width: in characters; longer cells are folded.
    """
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


def share(part: float, whole: float) -> str:
    """A ratio with three digits, or a dash where there is nothing to compare with."""
    return f"{part / whole:.3f}" if whole else "-"
