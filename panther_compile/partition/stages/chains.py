"""A dynamic program over nested cuts: the best chain of pipeline stages. No torch in here.

A stage between the prefixes P and Q takes, for one microbatch,

    seconds = work(Q) - work(P) + transfer(P) + transfer(Q)            both ways, forward and backward
    memory  = holdings used in Q - P, with gradients and optimizer states
            + microbatches in flight * saved activations of Q - P + one buffer for each value at its ends
            + microbatches in flight * what it receives, if it starts inside of a unit that is computed again

and the slowest stage sets the pace. Over a fixed set of candidate prefixes the program finds the best nested
chain exactly, in two rounds: the smallest slowest stage first, then the fewest bytes at that pace. Stages
that are too long for the pace or the memory whatever else they cost are passed over.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.graph.hardware import Link
from panther_compile.partition.stages.cut import CutNetwork, Prefix

_BLOCK = 256
# Stages are first looked for among those of at most so many times an equal share.
_FIRST_LIMIT = 1.5
_SLACK, _LARGE = 1e-9, 1e300

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What the stages are to be.

    Attributes:
        links: one between each stage and the next; there are len(links) + 1 stages.
        in_flight: microbatches that each stage holds at once.
        memory_bytes: the most that a stage may take; None for no limit.
        spare_bytes: bytes that each stage may take beyond `memory_bytes`; empty if devices are alike.
        parts: how many devices a stage is on; each receives, keeps and sends one part of what crosses a cut.
        wanted: vertices that are shared out, at least one to a stage; empty if a stage may hold any.
    """

    links: tuple[Link, ...]
    in_flight: tuple[int, ...]
    memory_bytes: int | None = None
    spare_bytes: tuple[int, ...] = ()
    parts: int = 1
    wanted: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.in_flight)


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What no stage is to exceed, to be passed over unseen.

    Attributes:
        seconds: of work.
        memory: in bytes.
    """

    seconds: float
    memory: float


class Candidates:
    """Candidate prefixes, from empty to full, with what a stage between two of them takes."""

    def __init__(
        self, flow: FlowGraph, network: CutNetwork, prefixes: Prefix, *, chain: bool = False
    ) -> None:
        if not chain:
            _, kept = np.unique(np.packbits(prefixes, axis=1), axis=0, return_index=True)
            prefixes = prefixes[kept]
            prefixes = prefixes[np.argsort(prefixes.sum(axis=1), kind="stable")]
        self.prefixes = prefixes
        self.count = len(prefixes)
        self.forward_bytes, self.backward_bytes = network.crossing_bytes(prefixes, nested=chain)
        self.cut_bytes = self.forward_bytes + self.backward_bytes
        held = dict.fromkeys(network.vertices, 0.0)
        index = self._index = {vertex: number for number, vertex in enumerate(network.vertices)}
        shared = []
        for holding in flow.holdings:
            whole = holding.memory_bytes
            if len(holding.vertices) == 1:
                held[holding.vertices[0]] += whole
            elif holding.vertices:
                users = [index[vertex] for vertex in holding.vertices]
                shared.append((float(whole), prefixes[:, users].sum(axis=1)))
        saved = [work.saved_bytes for work in flow.work.values()]
        places = [flow.seconds_at(place) for place in range(len(flow.paces))]
        amounts = np.array([flow.least_seconds, list(held.values()), saved, *places], dtype=float).T
        if chain:
            sums = np.zeros((self.count + 1, amounts.shape[1]))
            np.add.at(sums, (~prefixes).sum(axis=0), amounts)
            sums = np.cumsum(sums, axis=0)[:-1]
        else:
            blocks = [prefixes[start : start + _BLOCK] @ amounts for start in range(0, self.count, _BLOCK)]
            sums = np.concatenate(blocks)
        # Work is that of the fastest device; of each place along the pipeline where they differ.
        self.work, self._held, self._saved, *self._work_at = sums.T
        self._shared = shared
        self._least = self._held + self._saved
        self._packed = None if chain else np.packbits(prefixes, axis=1)
        self._kept_inputs = self._count_kept_inputs(flow.checkpoints)

    def _count_kept_inputs(self, checkpoints: Sequence[int] | None) -> Floats:
        """What a stage that starts behind each prefix keeps of what it receives, to compute a unit again.

        Where a unit starts with the stage, that is among what its vertices save.
        """
        if checkpoints is None:
            return np.zeros(self.count)
        sizes = self.prefixes.sum(axis=1)
        first_outside = np.where(sizes == self.prefixes.shape[1], sizes, self.prefixes.argmin(axis=1))
        ends_a_unit = (first_outside == sizes) & np.isin(sizes, (0, *checkpoints))
        return np.where(ends_a_unit, 0.0, self.forward_bytes)

    def starts(self, end: int, limits: StageLimits) -> Indices:
        """Starts of a stage within the limits that goes to one of the candidates: at proper subsets."""
        near = self.work[:end] >= self.work[end] - limits.seconds
        near &= self._least[:end] >= self._least[end] - limits.memory
        found = np.flatnonzero(near)
        if self._packed is not None:
            found = found[~(self._packed[found] & ~self._packed[end]).any(axis=1)]
        return found

    def reach(self, request: StageRequest, limits: StageLimits) -> tuple[list[int], list[int]]:
        """The first stage that may end at each candidate, and the one behind the last that may.

        What is before the candidate has to go into the stages up to there, and the rest into the others.
        """
        in_flight = np.array(request.in_flight)
        before = np.minimum.accumulate(in_flight)
        behind = np.append(np.minimum.accumulate(in_flight[:0:-1])[::-1], 1)
        done, left = np.arange(1, request.count + 1)[:, None], np.arange(request.count)[::-1, None]
        work, held, saved = self.work, self._held, self._saved
        possible = (
            (work <= done * limits.seconds)
            & (held + before[:, None] * saved <= done * limits.memory)
            & (work[-1] - work <= left * limits.seconds)
            & (held[-1] - held + behind[:, None] * (saved[-1] - saved) <= left * limits.memory)
        )
        first = np.where(possible.any(axis=0), possible.argmax(axis=0), request.count)
        last = request.count - possible[::-1].argmax(axis=0)
        return first.tolist(), last.tolist()

    def seconds(self, end: int, starts: Indices, stages: slice, transfers: Floats) -> Floats:
        """Time of stages (rows) from some candidates (columns) to one; transfers is (stages + 1, C)."""
        if self._work_at:
            rows = range(*stages.indices(len(transfers) - 1))
            places = np.array([self._work_at[stage % len(self._work_at)] for stage in rows])
            work = places[:, end, None] - places[:, starts]
        else:
            work = self.work[end] - self.work[starts]
        result: Floats = work + transfers[stages, starts] + transfers[1:][stages, end, None]
        return result

    def memory(self, end: int, starts: Indices, stages: slice, request: StageRequest) -> Floats:
        """Memory of stages (rows) from some candidates (columns) to one, less what each has to spare."""
        held = self._held[end] - self._held[starts]
        for whole, uses in self._shared:
            held = held + whole * (uses[end] > uses[starts])
        saved = self._saved[end] - self._saved[starts]
        in_flight = np.array(request.in_flight[stages], dtype=float)[:, None]
        ends = (self.forward_bytes[starts] + self.forward_bytes[end]) / request.parts
        kept_inputs = self._kept_inputs[starts] / request.parts
        spare = np.array(request.spare_bytes[stages] or (0,), dtype=float)[:, None]
        return held + ends + in_flight * (saved + kept_inputs) - spare

    def having(self, vertices: Collection[str]) -> Indices:
        """How many of some vertices each candidate holds."""
        held: Indices = self.prefixes[:, [self._index[vertex] for vertex in vertices]].sum(axis=1)
        return held

    def transfers(self, links: Sequence[Link]) -> Floats:
        """Time that each cut costs a stage at either side, at the end of each stage: (stages + 1, C)."""
        result = np.zeros((len(links) + 2, self.count))
        for number, link in enumerate(links):
            for moved in (self.forward_bytes, self.backward_bytes):
                result[number + 1] += link.seconds_of_each(moved)
        return result


def _best_chain(
    candidates: Candidates,
    request: StageRequest,
    limits: StageLimits,
    costs: Callable[[int, Indices, slice], Floats],
    combine: Callable[[Floats, Floats], Floats],
) -> tuple[float, list[int]]:
    """The nested chain with the smallest combined cost; the list is empty if none has a finite one.

    Args:
        candidates: for the ends of stages.
        request: for their number.
        limits: of every stage; longer ones are passed over.
        costs: of some stages (rows) from some candidates (columns) to one.
        combine: costs of the stages before with that of one more.
    """
    stages, count = request.count, candidates.count
    best = np.full((stages + 1, count), np.inf)
    best[0, 0] = 0.0
    came_from = np.zeros((stages + 1, count), dtype=np.int32)
    first, last = candidates.reach(request, limits)
    for end in range(1, count):
        rows = slice(first[end], last[end])
        if rows.start >= rows.stop:
            continue
        starts = candidates.starts(end, limits)
        if not len(starts):
            continue
        row = combine(best[rows, starts], costs(end, starts, rows))
        least = row.argmin(axis=1)
        came_from[1:][rows, end] = starts[least]
        best[1:][rows, end] = row[np.arange(len(row)), least]
    value = float(best[stages, -1])
    if not np.isfinite(value):
        return value, []
    chain = [count - 1]
    for stage in range(stages, 0, -1):
        chain.append(int(came_from[stage, chain[-1]]))
    return value, chain[::-1]


def _within(
    least: float, most: float, solve: Callable[[float], tuple[float, list[int]]]
) -> tuple[float, list[int]]:
    """The chain with the smallest largest cost of a stage, where looking at short stages alone is faster.

    What is found with stages of at most a limit is the best of all if it costs no more than the limit; else
    the limit grows, to what was found or to twice as much.

    Args:
        least: cost of a stage if all were alike, transfers aside.
        most: cost of the longest stage there is.
        solve: the best chain of stages up to a limit.
    """
    limit = _FIRST_LIMIT * least
    value, chain = solve(limit)
    while value > limit and limit < most:
        limit = value * (1 + _SLACK) if chain else 2 * limit
        value, chain = solve(limit)
    return value, chain


def fastest(
    candidates: Candidates, request: StageRequest, *, fewest_bytes: bool = True
) -> tuple[float, list[int]]:
    """The chain with the smallest slowest stage within the memory, then with the fewest bytes."""
    wanted = candidates.having(request.wanted)
    transfers = candidates.transfers(request.links)
    most = (
        None if request.memory_bytes is None else request.memory_bytes + max(request.spare_bytes, default=0)
    )
    memory = _LARGE if most is None else most * (1 + _SLACK)

    def costs(end: int, starts: Indices, stages: slice) -> Floats:
        seconds = candidates.seconds(end, starts, stages, transfers)
        if request.wanted:
            seconds[:, wanted[starts] == wanted[end]] = np.inf
        if request.memory_bytes is not None:
            seconds[candidates.memory(end, starts, stages, request) > request.memory_bytes] = np.inf
        return seconds

    def solve(limit: float) -> tuple[float, list[int]]:
        limits = StageLimits(limit * (1 + _SLACK), memory)
        return _best_chain(candidates, request, limits, costs, np.maximum)

    total = float(candidates.work[-1])
    value, chain = _within(total / request.count, total, solve)
    if not chain or not fewest_bytes:
        return value, chain
    pace = value * (1 + _SLACK)

    def sent(end: int, starts: Indices, stages: slice) -> Floats:
        return np.where(costs(end, starts, stages) <= pace, candidates.cut_bytes[end], np.inf)

    limits = StageLimits(pace * (1 + _SLACK), memory)
    return value, _best_chain(candidates, request, limits, sent, np.add)[1]


def leanest(candidates: Candidates, request: StageRequest) -> tuple[float, list[int]]:
    """The chain with the smallest largest memory of a stage."""

    def costs(end: int, starts: Indices, stages: slice) -> Floats:
        return candidates.memory(end, starts, stages, request)

    def solve(limit: float) -> tuple[float, list[int]]:
        limits = StageLimits(_LARGE, (limit + max(request.spare_bytes, default=0)) * (1 + _SLACK))
        return _best_chain(candidates, request, limits, costs, np.maximum)

    total = float(candidates.memory(candidates.count - 1, np.array([0]), slice(None), request).max())
    return _within(total / request.count, total, solve)
