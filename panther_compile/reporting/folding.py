"""Rows of layers that repeat, as one row: `encoder.layer.[0-5].query`, and the range of each number."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")
_FEWEST = 3  # rows that are folded

Row = tuple[str, ...]


def fold(rows: Sequence[Row], *, same: Sequence[int]) -> list[tuple[Row, tuple[int, ...]]]:
    """Rows whose names differ in one number alone become one row, in the place of the first.

    Args:
        rows: cells; the name first, what is to be said last.
        same: places of the cells that have to be equal.

    Returns:
        The rows, each with the places of those that it stands for.
    """
    groups: dict[Row, list[int]] = {}
    for place, row in enumerate(rows):
        pattern = _NUMBER.sub("*", row[0])
        said = re.sub(r"\d+", "*", row[-1])
        groups.setdefault((pattern, said, *(row[one] for one in same)), []).append(place)
    folded: list[tuple[Row, tuple[int, ...]]] = []
    for places in (part for group in groups.values() for part in _by_layer(rows, group)):
        if len(places) < _FEWEST or len({rows[place][0] for place in places}) < len(places):
            folded.extend((rows[place], (place,)) for place in places)
        else:
            folded.append((_merged([rows[place] for place in places]), tuple(places)))
    return sorted(folded, key=lambda one: one[1][0])


def _by_layer(rows: Sequence[Row], places: Sequence[int]) -> list[list[int]]:
    """Places whose names differ in one number alone: the one with the most values, that of the layer."""
    numbers = {place: _NUMBER.findall(rows[place][0]) for place in places}
    values = [len(set(column)) for column in zip(*numbers.values(), strict=True)]
    layer = values.index(max(values)) if values else 0
    parts: dict[tuple[str, ...], list[int]] = {}
    for place, found in numbers.items():
        parts.setdefault((*found[:layer], *found[layer + 1 :]), []).append(place)
    return list(parts.values())


def _merged(rows: Sequence[Row]) -> Row:
    name = _range_of_names([row[0] for row in rows])
    ranges = (_range(cells) for cells in zip(*(row[1:-1] for row in rows), strict=True))
    return (name, *ranges, rows[0][-1] if len({row[-1] for row in rows}) == 1 else f"{rows[0][-1]}; likewise")


def _range_of_names(names: Sequence[str]) -> str:
    """One name for all: the numbers that differ as [0-5], or [0,2,5] where some are left out."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    shown = iter([_range_of_numbers(sorted(set(column))) for column in numbers])
    return _NUMBER.sub(lambda _: next(shown), names[0])


def _range_of_numbers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    whole = numbers[-1] - numbers[0] + 1 == len(numbers)
    return f"[{numbers[0]}-{numbers[-1]}]" if whole else f"[{','.join(map(str, numbers))}]"


def _range(cells: Sequence[str]) -> str:
    """The least and the greatest of some numbers, as they are written."""
    if len(set(cells)) == 1:
        return cells[0]
    ordered = sorted(filter(_values, cells), key=_values)
    if not ordered or ordered[0] == ordered[-1]:
        return "".join(ordered[:1])
    return f"{ordered[0]} - {ordered[-1]}"


def _values(cell: str) -> tuple[float, ...]:
    try:
        return tuple(float(part.replace(",", "")) for part in cell.split("x"))
    except ValueError:  # a dash, where there is no number
        return ()
