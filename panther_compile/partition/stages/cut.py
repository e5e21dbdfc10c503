"""Cuts through which data flows one way only, and the cheapest of them by maximum flow. No torch in here.

A cut is a set of vertices that holds, with each vertex, everything it needs: a *prefix* of the model, as a
row of booleans over the vertices. Nested prefixes are the ends of pipeline stages.

The cheapest prefix between two others is a minimum s-t cut (Ford and Fulkerson) of this network:

    s ──work·p──► v           leaving v out of the prefix loses its work, weighed by a multiplier p / q
    v ──bytes·q─► hub ──∞──► each consumer of v's value       sent once, however many receive it
    consumer ──∞──► v         nobody is in the prefix without what it needs

As the multiplier grows the minimum cuts grow too: they are nested (Gallo, Grigoriadis and Tarjan 1989). They
change at breakpoints only, which `sweep` finds by intersecting the lines of the cuts known so far (Eisner
and Severance 1976). Capacities are integers, so that the flow ends and is exact.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction

import networkx as nx
import numpy as np
from networkx.algorithms.flow import preflow_push
from numpy.typing import NDArray

from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph

Prefix = NDArray[np.bool_]

# Seconds become integers in units of this share of the model's work.
_WORK_UNITS = 2**24


class CutNetwork:
    """A flow graph in arrays, and the cuts through it.

    Attributes:
        vertices: in an order that respects the edges.
        seconds: (n,), forward and backward of one microbatch.
    """

    def __init__(self, flow: FlowGraph, seconds: Sequence[float] | None = None) -> None:
        self.vertices = tuple(flow.work)
        count = len(self.vertices)
        index = {vertex: number for number, vertex in enumerate(self.vertices)}
        index |= {SOURCE: -1, SINK: count}
        if seconds is None:
            seconds = [work.forward_seconds + work.backward_seconds for work in flow.work.values()]
        self.seconds = np.array(seconds, dtype=float)
        total = float(self.seconds.sum()) or 1.0
        self._work = np.rint(self.seconds / total * _WORK_UNITS).astype(np.int64)
        self._values = [
            (index[value.producer], sorted({index[name] for name in value.consumers}), value)
            for value in flow.values
        ]
        self._producers = np.array([producer for producer, _, _ in self._values], dtype=int)
        self._consumers = np.array([c for _, consumers, _ in self._values for c in consumers], dtype=int)
        lengths = [len(consumers) for _, consumers, _ in self._values]
        self._starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(int)
        self._bytes = np.array([value.bytes for _, _, value in self._values], dtype=float)
        self._gradient_bytes = np.array([value.gradient_bytes for _, _, value in self._values], dtype=float)
        self._needs: list[set[int]] = [set() for _ in range(count)]
        self._used_by: list[set[int]] = [set() for _ in range(count)]
        for producer, consumers, value in self._values:
            assert producer < consumers[0], f"{value.name} flows backwards"
            for consumer in consumers:
                if producer >= 0 and consumer < count:
                    self._needs[consumer].add(producer)
                    self._used_by[producer].add(consumer)

    def __len__(self) -> int:
        return len(self.vertices)

    @property
    def empty(self) -> Prefix:
        """The prefix that holds nothing."""
        return np.zeros(len(self), dtype=bool)

    @property
    def full(self) -> Prefix:
        """The prefix that holds every vertex."""
        return np.ones(len(self), dtype=bool)

    def crossing_bytes(
        self, prefixes: Prefix, *, nested: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes across each of the cuts (C, n), forward and backward; each value counts once.

        Args:
            prefixes: any.
            nested: whether each holds the one before, which is faster.
        """
        forward, backward = np.zeros(len(prefixes)), np.zeros(len(prefixes))
        if self._values and nested:
            # The first prefix that holds each vertex; the sink is in none, the source in all.
            first = np.concatenate(((~prefixes).sum(axis=0), (len(prefixes), 0)))
            last = np.maximum.reduceat(first[self._consumers], self._starts)
            for crossing, sizes in ((forward, self._bytes), (backward, self._gradient_bytes)):
                steps = np.zeros(len(prefixes) + 1)
                np.add.at(steps, first[self._producers], sizes)
                np.subtract.at(steps, last, sizes)
                crossing[:] = np.cumsum(steps)[:-1]
        elif self._values:
            for number, prefix in enumerate(prefixes):
                # Index n is the sink, which no prefix holds, and index -1 the source, which all do.
                inside = np.concatenate((prefix, (False, True)))
                all_consumers = np.logical_and.reduceat(inside[self._consumers], self._starts)
                crosses = inside[self._producers] & ~all_consumers
                forward[number] = self._bytes[crosses].sum()
                backward[number] = self._gradient_bytes[crosses].sum()
        return forward, backward

    def order_prefixes(self, order: Iterable[int] | None = None) -> Prefix:
        """Every prefix of one order of the vertices, from empty to full: (n + 1, n)."""
        position = np.empty(len(self), dtype=int)
        position[list(order) if order is not None else range(len(self))] = np.arange(len(self))
        return position[None, :] < np.arange(len(self) + 1)[:, None]

    def late_order(self) -> list[int]:
        """An order in which every vertex comes as late as those who use it allow."""
        depth = [0] * len(self)
        for vertex in reversed(range(len(self))):
            depth[vertex] = 1 + max((depth[user] for user in self._used_by[vertex]), default=0)
        return sorted(range(len(self)), key=lambda vertex: (-depth[vertex], vertex))

    def all_prefixes(self, limit: int) -> Prefix | None:
        """Every prefix there is, by size; None if there are more than the limit."""
        if len(self) + 1 > limit:  # as many has each order of the vertices
            return None
        needs = [sum(1 << need for need in set_) for set_ in self._needs]
        known, queue = {0}, deque([0])
        while queue:
            rows = queue.popleft()
            for vertex, need in enumerate(needs):
                bit = 1 << vertex
                if rows & bit or need & ~rows or rows | bit in known:
                    continue
                if len(known) == limit:
                    return None
                known.add(rows | bit)
                queue.append(rows | bit)
        table = [[rows >> vertex & 1 for vertex in range(len(self))] for rows in known]
        return np.array(sorted(table, key=sum), dtype=bool)

    def certain(self, least: float, most: float) -> tuple[Prefix, Prefix]:
        """What every prefix with so many seconds of work holds, and what it can hold at most.

        Without v, a prefix is without all that depends on v; with v, it has all that v depends on.
        """
        low, high = self.empty, self.full
        for vertex in range(len(self)):
            if self.seconds[~self._reach(vertex, self._used_by)].sum() < least:
                low[vertex] = True
            if self.seconds[self._reach(vertex, self._needs)].sum() > most:
                high[vertex] = False
        return low, high

    def _reach(self, vertex: int, steps: Sequence[set[int]]) -> Prefix:
        reached, queue = self.empty, [vertex]
        reached[vertex] = True
        while queue:
            for other in steps[queue.pop()]:
                if not reached[other]:
                    reached[other] = True
                    queue.append(other)
        return reached

    def neighbours(self, prefix: Prefix, limit: int) -> list[Prefix]:
        """The prefixes that differ from one by a single vertex; the heaviest vertices first."""
        movable = [
            vertex
            for vertex in range(len(self))
            if (
                not any(prefix[user] for user in self._used_by[vertex])
                if prefix[vertex]
                else all(prefix[need] for need in self._needs[vertex])
            )
        ]
        movable.sort(key=lambda vertex: -self.seconds[vertex])
        changed = []
        for vertex in movable[:limit]:
            other = prefix.copy()
            other[vertex] = not other[vertex]
            changed.append(other)
        return changed

    def minimum_cut(self, low: Prefix, high: Prefix, multiplier: Fraction = Fraction(0)) -> Prefix:
        """The prefix between two others that minimises bytes - multiplier * work, the largest if several do.

        Args:
            low: a prefix inside it.
            high: a prefix around it.
            multiplier: bytes that a unit of work is worth; work is in 2**-24 of the model's.
        """
        worth, scale = multiplier.numerator, multiplier.denominator
        free = high & ~low
        capacities: dict[tuple[object, object], int] = {}

        def add(tail: object, head: object, capacity: int) -> None:
            capacities[tail, head] = capacities.get((tail, head), 0) + capacity

        for vertex in np.flatnonzero(free).tolist():
            gain = worth * int(self._work[vertex])
            add("s", vertex, max(gain, 0))
            add(vertex, "t", max(-gain, 0))
        hubs: list[tuple[int, list[int]]] = []
        touched = np.concatenate((free, (False, False)))
        near = touched[self._producers]
        if self._values:
            near = near | np.logical_or.reduceat(touched[self._consumers], self._starts)
        for number in np.flatnonzero(near).tolist():
            producer, consumers, value = self._values[number]
            size = scale * (value.bytes + value.gradient_bytes)
            if producer >= 0 and not high[producer]:
                continue
            tail = producer if producer >= 0 and free[producer] else "s"
            if consumers[-1] == len(self) or not all(high[consumer] for consumer in consumers):
                add(tail, "t", size)
                continue
            inner = [consumer for consumer in consumers if free[consumer]]
            if inner:
                hub = len(self) + 1 + number
                add(tail, hub, size)
                hubs.append((hub, inner))
        infinite = sum(capacities.values()) + 1
        for hub, inner in hubs:
            for consumer in inner:
                capacities[hub, consumer] = infinite
        for vertex in np.flatnonzero(free).tolist():
            for need in self._needs[vertex]:
                if free[need]:
                    capacities[vertex, need] = infinite
        network = nx.DiGraph()
        network.add_nodes_from(("s", "t"))
        network.add_weighted_edges_from(
            ((tail, head, capacity) for (tail, head), capacity in capacities.items() if capacity),
            weight="capacity",
        )
        _, (inside, _) = nx.minimum_cut(network, "s", "t", flow_func=preflow_push)
        chosen = low.copy()
        chosen[
            [vertex for vertex in np.flatnonzero(free).tolist() if vertex in inside or vertex not in network]
        ] = True
        return chosen

    def sweep(self, low: Prefix, high: Prefix, limit: int) -> list[Prefix]:
        """Minimum cuts between two prefixes for all multipliers: nested, the smallest first.

        Args:
            low: the smallest.
            high: the largest.
            limit: on the number of flows; the widest gaps are looked into first.
        """
        points = {self._point(prefix): prefix for prefix in (low, high)}
        gaps = [(self._point(low), self._point(high))]
        for _ in range(limit):
            if not gaps:
                break
            gaps.sort(key=lambda gap: gap[1][0] - gap[0][0])
            left, right = gaps.pop()
            if right[0] <= left[0]:
                continue
            multiplier = Fraction(right[1] - left[1], right[0] - left[0])
            prefix = self.minimum_cut(low, high, multiplier)
            point = self._point(prefix)
            if point[1] - multiplier * point[0] < left[1] - multiplier * left[0] and point not in points:
                points[point] = prefix
                gaps += [(left, point), (point, right)]
        return [points[point] for point in sorted(points)]

    def _point(self, prefix: Prefix) -> tuple[int, int]:
        """(work, bytes) of a prefix, exactly."""
        work = int(self._work[prefix].sum())
        forward, backward = self.crossing_bytes(prefix[None])
        return work, int(forward[0] + backward[0])
