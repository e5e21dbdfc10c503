"""Labels of least cost by eliminating one variable after the other, in narrow graphs. No torch in here.

What the neighbours of a variable pay at least with it, for each of their labels, is a table over these. It
takes the place of the variable and of all tables that it is in:

    a ── b ── c ── d      without b:  a ── c ── d      cost(a, c) = min over b of  cost(a, b) + cost(b, c)

Of the variables left, the one with the fewest neighbours goes next. At the end there is only the least cost,
and the labels are read off backwards (nonserial dynamic programming: Bertele and Brioschi 1972). This is
exact whatever is paid for, and takes as long as its tables are large: graphs of models are long and narrow.

Blocks that repeat have equal tables, so what is left of a variable is looked up by the tables that it is in:
isomorphic parts of a graph are solved once.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from panther_compile.partition.shards.expansion import NO, Labels, Statement

# Entries of all tables together, above which a graph is too wide.
LARGEST = 2**24

_Scope = tuple[int, ...]
_Table = NDArray[np.float64]
_Places = NDArray[np.int8]


def eliminate(labels: Labels, largest: int = LARGEST) -> list[str] | None:
    """The labels of least cost; None if that takes larger tables.

    Args:
        labels: the variables, and what is paid.
        largest: number of entries that all tables may have together.
    """
    tables = _Tables(labels)
    found: list[tuple[int, _Scope, _Places]] = []
    queue = [(len(near), variable) for variable, near in enumerate(tables.neighbours)]
    heapq.heapify(queue)
    gone, spent = set[int](), 0
    while queue:
        count, variable = heapq.heappop(queue)
        near = tables.neighbours[variable]
        if variable in gone or count != len(near):
            continue
        spent += tables.size((*near, variable))
        if spent > largest:
            return None
        gone.add(variable)
        scope, best = tables.remove(variable)
        found.append((variable, scope, best))
        for other in scope:
            heapq.heappush(queue, (len(tables.neighbours[other]), other))
    places = [0] * len(labels)
    for variable, scope, best in reversed(found):
        places[variable] = int(best[tuple(places[other] for other in scope)])
    return labels.complete([options[place] for options, place in zip(labels.options, places, strict=True)])


class _Tables:
    """What is paid for the labels of some variables, in tables over these; infinite where that is forbidden.

    Attributes:
        neighbours: of each variable, those that share a table with it.
    """

    def __init__(self, labels: Labels) -> None:
        self._options = labels.options
        self._tables: dict[_Scope, _Table] = {}
        self._solved: dict[tuple[object, ...], tuple[_Table, _Places]] = {}
        self._paid: dict[tuple[object, ...], _Table] = {}
        self._of: list[set[_Scope]] = [set() for _ in labels.options]
        self.neighbours: list[set[int]] = [set() for _ in labels.options]
        for key, cost in labels.clauses.items():
            self._pay(cost, key)
        for key in labels.forbidden:
            self._pay(np.inf, key)
        for follower, leaders in labels.followers.items():
            for leader in leaders:
                self._pay(np.inf, (leader, (follower, NO, True)))

    def size(self, scope: Iterable[int]) -> int:
        """Entries of a table over some variables."""
        product = 1
        for variable in scope:
            product *= len(self._options[variable])
        return product

    def remove(self, variable: int) -> tuple[_Scope, _Places]:
        """Leave only what the others pay at least.

        Returns:
            The neighbours, and the place of the best label for each of their labels.
        """
        scope = tuple(sorted(self.neighbours[variable]))
        whole = (*scope, variable)
        tables = {tuple(map(whole.index, own)): self._tables.pop(own) for own in self._of[variable]}
        sizes = tuple(len(self._options[one]) for one in whole)
        key = sizes, frozenset((places, table.tobytes()) for places, table in tables.items())
        if key not in self._solved:
            self._solved[key] = _solve(sizes, tables)
        least, best = self._solved[key]
        for own in self._of[variable]:
            for other in own:
                if other != variable:
                    self._of[other].discard(own)
        self._add(scope, least)
        for other in scope:
            self.neighbours[other].discard(variable)
        return scope, best

    def _add(self, scope: _Scope, table: _Table) -> None:
        if scope in self._tables:
            self._tables[scope] = self._tables[scope] + table  # others may have the same one
            return
        self._tables[scope] = table
        for one in scope:
            self._of[one].add(scope)
            self.neighbours[one].update(scope)
            self.neighbours[one].discard(one)

    def _pay(self, cost: float, statements: Sequence[Statement]) -> None:
        """Pay where all of at most two statements hold."""
        scope = tuple(sorted({variable for variable, _, _ in statements}))
        options = tuple(self._options[variable] for variable in scope)
        key = cost, options, tuple((scope.index(one), label, wanted) for one, label, wanted in statements)
        if key not in self._paid:
            self._paid[key] = _table(*key)
        self._add(scope, self._paid[key])


def _solve(sizes: Sequence[int], tables: Mapping[_Scope, _Table]) -> tuple[_Table, _Places]:
    """What is paid at least over the last variable of some tables, and its place.

    Args:
        sizes: labels of each variable.
        tables: by the places of their variables.
    """
    total = np.zeros(sizes)
    for places, table in tables.items():
        spread = [1] * len(sizes)
        for place, size in zip(places, table.shape, strict=True):
            spread[place] = size
        total += table.transpose(np.argsort(places)).reshape(spread)
    least = total.min(axis=-1)
    lowest = least.min()
    if np.isfinite(lowest):  # what is paid whatever the others do would make equal blocks differ
        least -= lowest
    return least, total.argmin(axis=-1).astype(np.int8)


def _table(
    cost: float, options: Sequence[Sequence[str]], statements: Sequence[tuple[int, str, bool]]
) -> _Table:
    """A cost that is paid where all of some statements about one or two variables hold."""
    holds = np.ones([len(labels) for labels in options], dtype=bool)
    for place, label, wanted in statements:
        row = np.array([(option == label) == wanted for option in options[place]])
        holds &= row[:, None] if len(options) == 2 and place == 0 else row
    return np.where(holds, cost, 0.0)
