"""Random flow graphs, and the best stages by trying all."""

import itertools
import random
from dataclasses import replace

from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph, Holding, Value, Work
from panther_compile.partition.graph.hardware import Link
from panther_compile.partition.stages.chains import StageRequest

LINK = Link(bytes_per_second=1e3, latency_seconds=0.01)


def request(stages, *, memory=None, in_flight=None, link=LINK):
    return StageRequest((link,) * (stages - 1), in_flight or (1,) * stages, memory)


def random_flow(seed, count=None, *, edge=0.3, holdings=False):
    """A graph of up to 12 vertices; weights and bytes of all sizes."""
    draw = random.Random(seed)
    count = count or draw.randint(4, 12)
    names = [f"v{number}" for number in range(count)]
    users = {name: [] for name in names}
    for first, second in itertools.combinations(names, 2):
        if draw.random() < edge:
            users[first].append(second)
    work = {
        name: Work(draw.randint(0, 20) / 10, draw.randint(0, 20) / 10, draw.randint(0, 50)) for name in names
    }
    values = [Value("x", SOURCE, (draw.choice(names),), draw.randint(0, 500))]
    for name in names:
        consumers = tuple(users[name]) or (SINK,)
        if draw.random() < 0.1:
            consumers = (*dict.fromkeys((*consumers, SINK)),)
        values.append(Value(name, name, consumers, draw.randint(0, 800), draw.choice([0, 400])))
    held = []
    if holdings:
        for number in range(count // 2):
            vertices = tuple(sorted(draw.sample(names, draw.choice([1, 1, 2])), key=names.index))
            held.append(Holding(f"w{number}", draw.randint(1, 100), draw.randint(0, 100), 1, vertices))
    return FlowGraph(work, tuple(values), tuple(held))


def uneven(flow, asked, seed):
    """The same on devices that differ, in speed by up to five times, by another factor for each vertex."""
    draw = random.Random(seed)
    speeds = [draw.choice([1.0, 0.5, 0.25]) for _ in range(asked.count)]
    paces = tuple(tuple(speed * draw.uniform(0.8, 1.0) for _ in flow.work) for speed in speeds)
    spare = tuple(draw.choice([0, 200]) for _ in range(asked.count))
    return replace(flow, paces=paces), replace(asked, spare_bytes=spare)


def stage_costs(flow, request, stage_of):
    """(seconds, bytes of memory) of each stage of an assignment, straight from the definition."""
    stages = request.count
    stage_of = {**stage_of, SOURCE: -1, SINK: stages}
    cut_seconds, cut_bytes, sent = [0.0] * (stages + 1), [0.0] * (stages + 1), 0
    for cut in range(1, stages):
        for way in ("bytes", "gradient_bytes"):
            moved = sum(
                getattr(value, way)
                for value in flow.values
                if stage_of[value.producer] < cut <= max(stage_of[name] for name in value.consumers)
            )
            link = request.links[cut - 1]
            cut_seconds[cut] += link.latency_seconds * (moved > 0) + moved / link.bytes_per_second
            cut_bytes[cut] += moved if way == "bytes" else 0
            sent += moved
    # The first stage holds the model's inputs, and the last its outputs.
    for value in flow.values:
        cut_bytes[0] += value.bytes if value.producer == SOURCE else 0
        cut_bytes[stages] += value.bytes if SINK in value.consumers else 0
    names, seconds, memory = list(flow.work), [], []
    for stage in range(stages):
        inside = [name for name in flow.work if stage_of[name] == stage]
        paces = dict(zip(flow.work, flow.paces[stage], strict=True)) if flow.paces else {}
        spent = sum(paces.get(name, 1.0) * flow.work[name].seconds for name in inside)
        seconds.append(spent + cut_seconds[stage] + cut_seconds[stage + 1])
        held = sum(
            holding.bytes + holding.trained_bytes
            for holding in flow.holdings
            if any(stage_of[name] == stage for name in holding.vertices)
        )
        saved = sum(flow.work[name].saved_bytes for name in inside)
        ends = cut_bytes[stage] + cut_bytes[stage + 1]
        before = [name for name in flow.work if stage_of[name] < stage]
        starts_a_unit = before == names[: len(before)] and len(before) in (0, *(flow.checkpoints or ()))
        kept = 0 if flow.checkpoints is None or starts_a_unit else cut_bytes[stage]
        spare = request.spare_bytes[stage] if request.spare_bytes else 0
        memory.append(held + ends + request.in_flight[stage] * (saved + kept) - spare)
    return seconds, memory, sent


def brute_force(flow, request, bound=float("inf")):
    """The smallest (slowest stage, bytes) over all assignments; None if none fits.

    Assignments are left as soon as the work of a stage alone is beyond the bound, or beyond the best so far.
    """
    spent = dict(zip(flow.work, flow.least_seconds, strict=True))
    load = [0.0] * request.count
    names = list(flow.work)
    needs = {name: [] for name in names}
    for value in flow.values:
        for consumer in value.consumers:
            if value.producer != SOURCE and consumer != SINK:
                needs[consumer].append(value.producer)
    best = None

    def place(position, stage_of):
        nonlocal best
        if position == len(names):
            if len(set(stage_of.values())) < request.count:
                return
            seconds, memory, sent = stage_costs(flow, request, stage_of)
            if request.memory_bytes is not None and max(memory) > request.memory_bytes:
                return
            if best is None or (round(max(seconds), 9), sent) < best:
                best = (round(max(seconds), 9), sent)
            return
        name = names[position]
        for stage in range(max((stage_of[need] for need in needs[name]), default=0), request.count):
            if load[stage] + spent[name] > (bound if best is None else min(bound, best[0])) + 1e-6:
                continue
            stage_of[name] = stage
            load[stage] += spent[name]
            place(position + 1, stage_of)
            load[stage] -= spent[name]
            del stage_of[name]

    place(0, {})
    return best


def is_prefix(network, rows):
    """Whether data flows forward only across the cut."""
    return all(rows[need] for vertex, held in enumerate(rows) if held for need in network._needs[vertex])
