"""Units of a model: what is computed again at once, and gathered at once where replicas share states.

No torch in here. The vertices in their own order are cut into runs so that what activation checkpointing
takes is least: the tensors alive between units, which are kept, and all that the largest unit saves, which is
there while its backward runs,

    sum over ends of  bytes alive  +  max over units of  bytes saved.

For a limit on the second term the first is least by a dynamic program over the ends; the limits tried are
equal shares of all that is saved.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from panther_compile.partition.graph.budget import choose_kept
from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph, Result, Work
from panther_compile.partition.stages.cut import CutNetwork

RECOMPUTE = ("none", "selective", "full")
_MOST_UNITS = 256
_choose_kept = lru_cache(maxsize=4096)(choose_kept)  # units of blocks that repeat are alike


def find_units(flow: FlowGraph) -> tuple[int, ...]:
    """Ends of units, as numbers of vertices from the front; the last is the number of all."""
    network = CutNetwork(flow)
    alive, _ = network.crossing_bytes(network.order_prefixes(), nested=True)
    sizes = [work.saved_bytes - work.loss_bytes for work in flow.work.values()]
    saved, largest = [0, *accumulate(sizes)], max(sizes, default=0)
    found: dict[tuple[int, ...], float] = {}
    count = 1
    while count <= min(_MOST_UNITS, len(flow.work)):
        ends = _fewest_bytes(alive.tolist(), saved, max(largest, -(-saved[-1] // count)))
        starts = (0, *ends[:-1])
        most = max((saved[end] - saved[start] for start, end in zip(starts, ends, strict=True)), default=0)
        found[ends] = sum(alive[start] for start in starts) + most
        count = max(count + 1, round(count * 1.25))
    return min(found, key=found.__getitem__, default=())


def _fewest_bytes(alive: Sequence[float], saved: Sequence[int], most: int) -> tuple[int, ...]:
    """The ends of units that save no more, with the fewest bytes alive where they start."""
    best, came_from = [0.0], [0]
    queue = deque([0])  # starts within reach, the cheapest first
    costs = [alive[0]]  # of everything up to a start, what is alive there included
    for end in range(1, len(saved)):
        while saved[end] - saved[queue[0]] > most:
            queue.popleft()
        best.append(costs[queue[0]])
        came_from.append(queue[0])
        costs.append(best[end] + alive[end])
        while queue and costs[queue[-1]] >= costs[end]:
            queue.pop()
        queue.append(end)
    ends, end = [], len(saved) - 1
    while end > 0:
        ends.append(end)
        end = came_from[end]
    return tuple(reversed(ends))


def recompute_units(flow: FlowGraph, units: Sequence[int], kind: str | float) -> tuple[FlowGraph, int]:
    """The same model with activation checkpointing, and the bytes of the unit that is computed again.

    What a unit reads of others is kept, once; with "selective" also the results of products that narrow and
    of attention in it (`graph.narrowing`), with a budget those that `graph.budget` chooses. The rest is
    computed again in the backward.

    Args:
        flow: without checkpointing.
        units: of `find_units`.
        kind: of RECOMPUTE, or a budget.
    """
    if kind == "none":
        return flow, 0
    unit_of: dict[str, int] = {SOURCE: -1}
    vertices = tuple(flow.work)
    for number, (start, end) in enumerate(pairwise((0, *units))):
        unit_of |= dict.fromkeys(vertices[start:end], number)
    inputs = dict.fromkeys(vertices, 0)  # what a unit reads of others, at the first vertex that does
    for value in flow.values:
        readers = (one for one in value.consumers if one != SINK and unit_of[one] != unit_of[value.producer])
        first = min(readers, key=unit_of.__getitem__, default=None)
        if first is not None:
            inputs[first] += value.local_bytes
    kept = {vertex: Result(0.0, 0) for vertex in vertices}
    if kind == "selective":
        for vertex, one in flow.work.items():
            kept[vertex] = Result(one.forward_seconds - one.selective_seconds, one.selective_bytes)
    elif kind != "full":
        for start, end in pairwise((0, *units)):
            unit = {vertex: flow.work[vertex] for vertex in vertices[start:end]}
            kept |= _keep_within(float(kind), unit, sum(inputs[vertex] for vertex in unit))
    again = [0] * len(units)
    for vertex, one in flow.work.items():
        again[unit_of[vertex]] += one.saved_bytes - one.loss_bytes - kept[vertex].bytes
    work = {
        vertex: replace(
            one,
            backward_seconds=one.backward_seconds + max(0.0, one.forward_seconds - kept[vertex].seconds),
            saved_bytes=one.loss_bytes + kept[vertex].bytes + inputs[vertex],
        )
        for vertex, one in flow.work.items()
    }
    return replace(flow, work=work, checkpoints=tuple(units)), max(0, *again)


def _keep_within(budget: float, unit: Mapping[str, Work], inputs: int) -> dict[str, Result]:
    """What is kept, by vertex, within a share of the bytes that a unit saves besides its inputs."""
    saved = sum(work.saved_bytes - work.loss_bytes for work in unit.values())
    results = [(vertex, one) for vertex, work in unit.items() for one in work.results]
    chosen = _choose_kept(
        tuple(one.seconds for _, one in results),
        tuple(one.bytes for _, one in results),
        int(budget * max(0, saved - inputs)),
    )
    kept: dict[str, Result] = {}
    for vertex, one in (results[number] for number in sorted(chosen)):
        before = kept.get(vertex, Result(0.0, 0))
        kept[vertex] = Result(before.seconds + one.seconds, before.bytes + one.bytes)
    return kept
