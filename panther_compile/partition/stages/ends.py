"""Prefixes chosen as the ends of pipeline stages, by the program of `chains`. No torch in here.

Every prefix of the graph is a candidate where they are few: the result is then the optimum. Else there are

    those of several orders of the vertices (PipeDream's program (SOSP 2019) sees one),
    the minimum cuts of the parametric sweep,
    and around each end found so far, minimum cuts in narrowing windows and single moves,
    until none of them helps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.stages.chains import Candidates, StageRequest, fastest, leanest
from panther_compile.partition.stages.cut import CutNetwork, Prefix

EXHAUSTIVE = 2500


@dataclass(frozen=True, slots=True)
class _Effort:
    """How hard to look, by the size of the graph.

    Attributes:
        vertices: of the largest graph it is for.
        windows: shares of the stages around an end in which to look for a cheaper one.
        flows: of the sweep in each window.
        global_flows: of the sweep through the whole graph.
        moves: single vertices to move at each end.
        keep_orders: whether all prefixes of the orders are candidates, or only the best ends of each.
        rounds: at most.
    """

    vertices: float
    windows: tuple[float, ...]
    flows: int
    global_flows: int
    moves: int
    keep_orders: bool
    rounds: int


_EFFORTS = (
    _Effort(500, (1.0, 0.35, 0.1), 3, 12, 64, True, 4),
    _Effort(1500, (0.5, 0.15), 2, 4, 24, False, 3),
    _Effort(float("inf"), (0.25,), 1, 0, 16, False, 2),
)


@dataclass(frozen=True, slots=True)
class StageCuts:
    """The ends of the stages.

    Attributes:
        prefixes: (stages + 1, n), from empty to full.
        seconds: of the slowest stage for one microbatch.
        cut_bytes: of all cuts, forward and backward.
        exact: whether every prefix of the graph was a candidate.
        candidates: how many there were.
    """

    prefixes: Prefix
    seconds: float
    cut_bytes: float
    exact: bool
    candidates: int


def linear_cuts(
    flow: FlowGraph, request: StageRequest, network: CutNetwork | None = None, *, late: bool = False
) -> StageCuts | None:
    """PipeDream's program: the best ends among the prefixes of one order; None if nothing fits.

    Args:
        flow: the graph.
        request: stages, links, memory.
        network: of the graph, if there is one already.
        late: let every vertex come as late as it may, instead of taking the graph's own order.
    """
    network = network or CutNetwork(flow)
    prefixes = network.order_prefixes(network.late_order() if late else None)
    candidates = Candidates(flow, network, prefixes, chain=True)
    value, chain = fastest(candidates, request, fewest_bytes=False)
    return _cuts(candidates, value, chain, exact=False) if chain else None


def choose_cuts(flow: FlowGraph, request: StageRequest, *, exhaustive: int = EXHAUSTIVE) -> StageCuts | None:
    """The best ends that the candidates hold.

    Args:
        flow: the graph.
        request: stages, links, memory.
        exhaustive: look at every prefix where there are at most so many.

    Returns:
        None if no candidate chain fits into the memory or there are fewer vertices than stages.
    """
    network = CutNetwork(flow)
    every = network.all_prefixes(exhaustive)
    if every is not None:
        candidates = Candidates(flow, network, every)
        value, chain = fastest(candidates, request)
        return _cuts(candidates, value, chain, exact=True) if chain else None

    effort = next(effort for effort in _EFFORTS if len(network) <= effort.vertices)
    starts = [linear_cuts(flow, request, network, late=late) for late in (False, True)]
    if starts == [None, None]:
        starts = [_lean_cuts(flow, request, network)]
    fitting = [start for start in starts if start is not None]
    if not fitting:
        return None
    start = min(fitting, key=lambda cuts: cuts.seconds)
    pool = [cuts.prefixes for cuts in fitting] + _global_candidates(network, effort)
    best: StageCuts | None = None
    centre, seen = start.prefixes, set[bytes]()
    for _ in range(effort.rounds):
        pool.append(_nearby(network, centre, effort, seen))
        candidates = Candidates(flow, network, np.concatenate(pool))
        value, chain = fastest(candidates, request)
        if not chain:
            break
        found = _cuts(candidates, value, chain, exact=False)
        if best is not None and (found.seconds, found.cut_bytes) >= (best.seconds, best.cut_bytes):
            break
        best, centre, pool = found, found.prefixes, [candidates.prefixes]
    return best


def least_memory(flow: FlowGraph, request: StageRequest) -> tuple[float, int]:
    """The memory of the largest stage at its smallest in the graph's own order, and which stage that is."""
    network = CutNetwork(flow)
    candidates = Candidates(flow, network, network.order_prefixes(), chain=True)
    value, chain = leanest(candidates, request)
    sizes = [
        candidates.memory(end, np.array([start]), slice(stage, stage + 1), request).item()
        for stage, (start, end) in enumerate(pairwise(chain))
    ]
    return value, int(np.argmax(sizes)) if sizes else 0


def lower_bound(flow: FlowGraph, request: StageRequest, reached: float) -> float:
    """Seconds that the slowest stage takes at least.

    Stages no slower than `reached` leave each cut a range of work, and so some vertices on a side of their
    own; the minimum cut between those is what the cut must transfer. All work and transfers, divided evenly,
    cannot be beaten, nor can the largest vertex; nor, where devices differ, all work divided by their speeds.

    Args:
        flow: the graph.
        request: stages and links; the memory is not looked at.
        reached: seconds of the slowest stage of some solution.
    """
    network = CutNetwork(flow, flow.least_seconds)
    back_only = CutNetwork(replace(flow, values=tuple(replace(value, bytes=0) for value in flow.values)))
    total, count = float(network.seconds.sum()), request.count
    least = total
    for cut, link in enumerate(request.links, start=1):
        low, high = network.certain(total - (count - cut) * reached, cut * reached)
        if (low & ~high).any():
            return reached
        forward, backward = network.crossing_bytes(network.minimum_cut(low, high)[None])
        _, gradients = network.crossing_bytes(back_only.minimum_cut(low, high)[None])
        least += 2 * link.seconds(float(forward[0] + backward[0]))
        least += 2 * link.latency_seconds * float(gradients[0] > 0)
    even = flow.total.seconds / sum(map(flow.speed_at, range(count)))
    return max(least / count, even, float(network.seconds.max(initial=0.0)))


def _lean_cuts(flow: FlowGraph, request: StageRequest, network: CutNetwork) -> StageCuts | None:
    """A place to start from where no linear order fits."""
    candidates = Candidates(flow, network, network.order_prefixes(), chain=True)
    value, chain = leanest(candidates, request)
    return _cuts(candidates, value, chain, exact=False) if chain else None


def _global_candidates(network: CutNetwork, effort: _Effort) -> list[Prefix]:
    """Prefixes of whole orders where the graph is small, and the minimum cuts of the sweep."""
    found = []
    if effort.global_flows:
        found.append(np.array(network.sweep(network.empty, network.full, effort.global_flows)))
    if effort.keep_orders:
        found += [network.order_prefixes(), network.order_prefixes(network.late_order())]
    return found


def _nearby(network: CutNetwork, ends: Prefix, effort: _Effort, seen: set[bytes]) -> Prefix:
    """Around each end between two stages: minimum cuts in windows of its neighbours, and single moves.

    Args:
        network: to cut.
        ends: of the stages.
        effort: how hard to look.
        seen: ends that were looked at between the same neighbours; added to.
    """
    found = [network.empty, network.full]
    for before, end, after in zip(ends, ends[1:], ends[2:], strict=False):
        key = np.packbits([before, end, after]).tobytes()
        if key in seen:
            continue
        seen.add(key)
        for width in effort.windows:
            low = end & ~_last_share(network, end & ~before, width)
            high = end | _first_share(network, after & ~end, width)
            found += network.sweep(low, high, effort.flows)
            found.append(network.minimum_cut(low, high))
        found += network.neighbours(end, effort.moves)
    return np.array(found)


def measure_cuts(flow: FlowGraph, request: StageRequest, prefixes: Prefix) -> StageCuts:
    """The time and bytes of ends chosen elsewhere, from empty to full; stages may be empty."""
    candidates = Candidates(flow, CutNetwork(flow), prefixes, chain=True)
    transfers = candidates.transfers(request.links)
    slowest = max(
        candidates.seconds(stage + 1, np.array([stage]), slice(stage, stage + 1), transfers).item()
        for stage in range(request.count)
    )
    return _cuts(candidates, slowest, range(len(prefixes)), exact=False)


def _first_share(network: CutNetwork, rows: Prefix, share: float) -> Prefix:
    """The first vertices of a stage, up to a share of its work."""
    done = np.cumsum(np.where(rows, network.seconds, 0.0))
    return rows & (done <= share * done[-1])


def _last_share(network: CutNetwork, rows: Prefix, share: float) -> Prefix:
    """The last vertices of a stage, up to a share of its work."""
    left = np.cumsum(np.where(rows, network.seconds, 0.0)[::-1])[::-1]
    return rows & (left <= share * left[0])


def _cuts(candidates: Candidates, value: float, chain: Sequence[int], *, exact: bool) -> StageCuts:
    sent = float(sum(candidates.cut_bytes[end] for end in chain[1:-1]))
    return StageCuts(candidates.prefixes[list(chain)], value, sent, exact, candidates.count)
