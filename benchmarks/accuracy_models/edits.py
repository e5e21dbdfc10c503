"""Levenshtein's distance, for the error rates of letters and words."""

from collections.abc import Sequence


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """The fewest letters, or words, to put in, take out or change."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above, row = row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != wanted)))
    return row[-1]
