"""Yes-or-no choices of least cost, by minimum cuts. No torch in here.

The cost is a sum over clauses, each of one or two literals: it is paid where all of them hold.

    cost(x) = sum of c · [x_a = α]  +  sum of c · [x_a = α and x_b = β]        c >= 0

Where every clause of two has one literal that holds and one that does not (after turning some choices round,
which a walk over the clauses finds), the cost is submodular and one s-t cut minimises it exactly:

    a and not b, at cost c      a ──c──► b          cut where a is on the side of s and b is not
    a, at cost c                a ──c──► t
    not a, at cost c            s ──c──► a

Otherwise each choice and its opposite get a vertex of their own, and one cut of that twice as large network
gives a lower bound and the value that some choices have in a minimum (roof duality: Hammer, Hansen and
Simeone 1984; as QPBO in Boros and Hammer 2002). The others are tried both ways, the most promising first, up
to a limit on the number of cuts; what is left open shows as a gap between the value and the bound.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from networkx.algorithms.flow import preflow_push

Literal = tuple[int, bool]


def negate(literal: Literal) -> Literal:
    """The literal that holds where this one does not."""
    return literal[0], not literal[1]


@dataclass(frozen=True)
class Minimum:
    """What a minimisation found.

    Attributes:
        values: of every choice.
        cost: of them.
        bound: no values cost less.
        submodular: whether one cut was enough.
    """

    values: tuple[bool, ...]
    cost: int
    bound: int
    submodular: bool

    @property
    def gap(self) -> float:
        """Share of the cost by which the bound is below it; 0 where the values are proved the best."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


class Energy:
    """Choices and what they cost.

    Attributes:
        constant: paid whatever is chosen.
        clauses: cost of each set of one or two literals.
    """

    def __init__(self) -> None:
        self.constant = 0
        self.clauses: dict[tuple[Literal, ...], int] = {}
        self._followers: dict[int, tuple[Literal, ...]] = {}
        self._forbidden: list[tuple[Literal, ...]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def choice(self) -> Literal:
        """A new choice."""
        self._count += 1
        return self._count - 1, True

    def follower(self, leaders: Sequence[Literal]) -> Literal:
        """A choice that holds wherever one of the literals does; it pays once what they share."""
        unique = tuple(dict.fromkeys(leaders))
        if len(unique) == 1:
            return unique[0]
        follower = self.choice()
        self._followers[follower[0]] = unique
        for leader in unique:
            self.forbid(leader, negate(follower))
        return follower

    def pay(self, cost: int, *literals: Literal) -> None:
        """Pay where all of at most two literals hold."""
        assert cost >= 0, cost
        assert len(literals) <= 2, literals
        if not literals:
            self.constant += cost
            return
        key = tuple(sorted(set(literals)))
        if len(key) == 2 and key[0][0] == key[1][0]:
            return  # a choice and its opposite never hold together
        if cost:
            self.clauses[key] = self.clauses.get(key, 0) + cost

    def forbid(self, *literals: Literal) -> None:
        """Never let all of at most two literals hold."""
        self._forbidden.append(tuple(sorted(set(literals))))

    def cost(self, values: Sequence[bool]) -> int:
        """The cost of values of all choices; None is forbidden here."""
        return self.constant + sum(
            cost
            for literals, cost in self._all_clauses().items()
            if all(values[number] == wanted for number, wanted in literals)
        )

    def complete(self, values: Sequence[bool | None]) -> tuple[bool, ...]:
        """Values of all choices: followers follow, and whatever else is None is False."""
        full: list[bool] = [bool(value) for value in values]
        for number, leaders in self._followers.items():
            full[number] = any(full[leader] == wanted for leader, wanted in leaders)
        return tuple(full)

    def minimize(self, limit: int = 64) -> Minimum:
        """The values of least cost.

        Args:
            limit: on the number of cuts, where one is not enough.
        """
        clauses = _merge(self._all_clauses())
        turned = _balance(clauses, len(self))
        if turned is not None:
            values = self.complete(_cut(clauses, turned, len(self)))
            cost = self.cost(values)
            return Minimum(values, cost, cost, submodular=True)
        best = self.complete([None] * len(self))
        best_cost = self.cost(best)
        order = itertools.count()
        queue: list[tuple[int, int, dict[int, bool]]] = [(self.constant, next(order), {})]
        for _ in range(limit):
            if not queue or queue[0][0] >= best_cost:
                break
            _, _, fixed = heapq.heappop(queue)
            rest, paid = _simplify(clauses, fixed)
            turned = _balance(rest, len(self))
            if turned is not None:
                bound, known = 0, dict(enumerate(_cut(rest, turned, len(self))))
            else:
                bound, known = _roof(rest, len(self))
            known |= fixed
            values = self.complete([known.get(number) for number in range(len(self))])
            if self.cost(values) < best_cost:
                best, best_cost = values, self.cost(values)
            if turned is None and self.constant + paid + bound < best_cost:
                open_ = next(number for number in _by_weight(rest) if number not in known)
                for value in (False, True):
                    branch = (self.constant + paid + bound, next(order), {**known, open_: value})
                    heapq.heappush(queue, branch)
        bound = min([best_cost, *(entry[0] for entry in queue)])
        return Minimum(best, best_cost, bound, submodular=False)

    def _all_clauses(self) -> dict[tuple[Literal, ...], int]:
        infinite = sum(self.clauses.values()) + 1
        return self.clauses | dict.fromkeys(self._forbidden, infinite)


def _merge(clauses: Mapping[tuple[Literal, ...], int]) -> dict[tuple[Literal, ...], int]:
    """The same cost in fewer clauses: what is paid for a and b, and for a and not b, is paid for a."""
    merged = dict(clauses)
    for key in clauses:
        for kept, other in (key, key[::-1]) if len(key) == 2 else ():
            opposite = tuple(sorted((kept, negate(other))))
            both = min(merged[key], merged.get(opposite, 0))
            if both:
                merged[key] -= both
                merged[opposite] -= both
                merged[kept,] = merged.get((kept,), 0) + both
    return {key: cost for key, cost in merged.items() if cost}


def _simplify(
    clauses: Mapping[tuple[Literal, ...], int], fixed: Mapping[int, bool]
) -> tuple[dict[tuple[Literal, ...], int], int]:
    """The clauses on what is not fixed, and what is paid already."""
    rest: dict[tuple[Literal, ...], int] = {}
    paid = 0
    for literals, cost in clauses.items():
        if any(fixed.get(number, wanted) != wanted for number, wanted in literals):
            continue
        left = tuple(literal for literal in literals if literal[0] not in fixed)
        if left:
            rest[left] = rest.get(left, 0) + cost
        else:
            paid += cost
    return rest, paid


def _balance(clauses: Mapping[tuple[Literal, ...], int], count: int) -> list[bool] | None:
    """Choices to turn round so that every clause of two has literals of both signs; None if none do."""
    neighbours: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
    for literals in clauses:
        if len(literals) == 2:
            (first, one), (second, two) = literals
            neighbours[first].append((second, one == two))
            neighbours[second].append((first, one == two))
    turned: list[bool | None] = [None] * count
    for start in range(count):
        if turned[start] is not None:
            continue
        turned[start] = False
        queue = deque([start])
        while queue:
            number = queue.popleft()
            for other, differs in neighbours[number]:
                turn = bool(turned[number]) != differs
                if turned[other] is None:
                    turned[other] = turn
                    queue.append(other)
                elif turned[other] != turn:
                    return None
    return [bool(turn) for turn in turned]


def _cut(clauses: Mapping[tuple[Literal, ...], int], turned: Sequence[bool], count: int) -> list[bool]:
    """The minimum of balanced clauses."""
    network = nx.DiGraph()
    network.add_nodes_from(("s", "t", *range(count)))
    for literals, cost in clauses.items():
        ends: list[object] = ["s", "t"]
        for number, wanted in literals:
            ends[wanted == turned[number]] = number
        _widen(network, ends[0], ends[1], cost)
    _, (inside, _) = nx.minimum_cut(network, "s", "t", flow_func=preflow_push)
    return [(number in inside) != turned[number] for number in range(count)]


def _roof(clauses: Mapping[tuple[Literal, ...], int], count: int) -> tuple[int, dict[int, bool]]:
    """A lower bound, and the values that some choices have in a minimum."""
    network = nx.DiGraph()
    network.add_nodes_from(("s", "t", *itertools.product(range(count), (False, True))))
    for literals, cost in clauses.items():
        first = literals[0]
        tail, head = ("s", "t") if len(literals) == 1 else (literals[1], negate(literals[1]))
        _widen(network, first, head, cost)
        _widen(network, tail, negate(first), cost)
    twice, (inside, _) = nx.minimum_cut(network, "s", "t", flow_func=preflow_push)
    known = {
        number: (number, True) in inside
        for number in range(count)
        if ((number, True) in inside) != ((number, False) in inside)
    }
    return -(-twice // 2), known


def _by_weight(clauses: Mapping[tuple[Literal, ...], int]) -> list[int]:
    """Choices, those with the most at stake first."""
    weight: dict[int, int] = {}
    for literals, cost in clauses.items():
        for number, _ in literals:
            weight[number] = weight.get(number, 0) + cost
    return sorted(weight, key=lambda number: (-weight[number], number))


def _widen(network: nx.DiGraph, tail: object, head: object, capacity: int) -> None:
    before = network.get_edge_data(tail, head, {"capacity": 0})["capacity"]
    network.add_edge(tail, head, capacity=before + capacity)
