"""The shards that are chosen against all there are, on graphs small enough to try all."""

import functools
import itertools
import math
import random

import numpy as np
import pytest
import torch
import zoo
from partition.shard_problems import device, price, problem_of, read
from thinned import thinned
from torch import nn

from panther_compile.partition import partition_model
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graphs import read_graphs
from panther_compile.partition.shards.choices import Choices
from panther_compile.partition.shards.collectives import place_collectives
from panther_compile.partition.shards.device_flow import per_device_flow
from panther_compile.partition.shards.label import find_sharding_plan
from panther_compile.partition.shards.problem import Prices, Ring


class Random(nn.Module):
    """A random graph of linear layers, activations, sums, products and norms."""

    def __init__(self, seed, layers):
        super().__init__()
        draw = random.Random(seed)
        self.plan, widths = [], [8]
        self.linears, self.norms = nn.ModuleDict(), nn.ModuleDict()
        for number in range(layers):
            kind = draw.choice(["linear", "linear", "relu", "add", "mul", "norm"])
            source = max(0, len(widths) - 1 - draw.choice([0, 0, 0, 1, 2]))
            width = widths[source]
            partners = [place for place, other in enumerate(widths) if other == width and place != source]
            if kind in ("add", "mul") and not partners:
                kind = "linear"
            if kind == "linear":
                width = draw.choice([8, 8, 12, 16, 15])
                self.linears[str(number)] = nn.Linear(widths[source], width, bias=draw.random() < 0.5)
            elif kind == "norm":
                self.norms[str(number)] = nn.LayerNorm(width)
            self.plan.append((kind, number, source, draw.choice(partners) if partners else None))
            widths.append(width)

    def forward(self, x):
        values, unread = [x], set()
        for place, (kind, number, source, partner) in enumerate(self.plan, 1):
            unread = (unread | {place}) - {source, partner if kind in ("add", "mul") else None}
            value = values[source]
            if kind == "linear":
                value = self.linears[str(number)](value)
            elif kind == "relu":
                value = torch.relu(value)
            elif kind == "add":
                value = value + values[partner]
            elif kind == "mul":
                value = value * values[partner]
            else:
                value = self.norms[str(number)](value)
            values.append(value)
        return [values[place] for place in sorted(unread)]  # a graph has no others


def random_case(seed, most=12):
    draw = random.Random(seed)
    model = Random(seed, draw.randint(3, most))
    flops = draw.choice([1e8, 1e9, 1e10])
    link, latency = draw.choice([1e7, 1e8, 1e9, 1e10]), draw.choice([0.0, 1e-8, 1e-6])
    x = torch.randn(draw.choice([4, 64]), 8)
    return model, x, device(flops, 1e9, link, latency)


@functools.cache
def random_graph(seed, most):
    """What is read of a random case, with its hardware: nothing that shards are chosen by changes it."""
    model, x, hardware = random_case(seed, most)
    return read(model, x), hardware


def random_problem(seed, most=12, **options):
    return problem_of(*random_graph(seed, most), **options)


def all_costs(labels):
    """The cost of every allowed assignment in which followers follow: (labels by number, costs)."""
    free = [number for number in range(len(labels)) if number not in labels.followers]
    counts = [len(labels.options[number]) for number in free]
    table = np.zeros((math.prod(counts), len(labels)), dtype=np.int8)
    rest = np.arange(len(table))
    for number, count in zip(free, counts, strict=True):
        rest, table[:, number] = np.divmod(rest, count)

    def holds(statement):
        variable, label, wanted = statement
        if label not in labels.options[variable]:
            return np.full(len(table), not wanted)
        return (table[:, variable] == labels.options[variable].index(label)) == wanted

    for number, leaders in labels.followers.items():
        table[:, number] = np.logical_or.reduce([holds(leader) for leader in leaders])
    allowed = np.ones(len(table), dtype=bool)
    for key in labels.forbidden:
        allowed &= ~np.logical_and.reduce([holds(one) for one in key])
    table = table[allowed]
    costs = np.full(len(table), labels.constant, dtype=np.int64)
    for key, cost in labels.clauses.items():
        costs += cost * np.logical_and.reduce([holds(one) for one in key])
    return table, costs


def check_prices(choices, table, costs, seed):
    """The cost of labels is the price of what will run, for some of all labellings."""
    problem, labels = choices.problem, choices.labels
    for row in random.Random(seed).sample(range(len(table)), min(20, len(table))):
        names = [labels.options[number][place] for number, place in enumerate(table[row])]
        cost = labels.cost(names)
        assert cost == costs[row]
        priced = price(problem, choices.plan(names, None))
        assert priced == pytest.approx(cost / 1e12, rel=1e-6, abs=len(labels) * 1e-12)


@pytest.mark.parametrize("seed", thinned(range(40), 4))
def test_random_graphs_against_every_labelling(seed, record_property):
    problem = random_problem(seed)
    choices = Choices(problem)
    found = find_sharding_plan(problem)
    table, costs = all_costs(choices.labels)
    least = int(costs.min())
    record_property("gap", found.gap)
    assert found.gap == 0
    assert found.seconds * 1e12 == pytest.approx(least, abs=1)
    check_prices(choices, table, costs, seed)


def test_random_graphs_are_of_both_kinds():
    kinds = set()
    for seed in range(10):
        choices = Choices(random_problem(seed))
        _, minimum = choices.solve("sharded", choices.labels.first(), 64)
        kinds.add(minimum.submodular)
    assert kinds == {True, False}


@pytest.mark.parametrize("seeds", [range(16, 24), pytest.param(range(40), marks=pytest.mark.slow)])
def test_sequences_on_random_graphs_against_every_labelling(seeds, record_property):
    """Elimination finds the best; moves nearly always do, and are never worse than two labels."""
    gaps, better = [], 0
    for seed in seeds:
        problem = random_problem(seed, sequence=True, most=8)
        choices, exact, found = (
            Choices(problem),
            find_sharding_plan(problem),
            find_sharding_plan(problem, largest=0),
        )
        table, costs = all_costs(choices.labels)
        reached, least = round(found.seconds * 1e12), int(costs.min())
        two = round(find_sharding_plan(random_problem(seed, most=8)).seconds * 1e12)
        assert (exact.gap, found.gap) == (0, None)
        assert round(exact.seconds * 1e12) == least <= reached <= two
        check_prices(choices, table, costs, seed)
        gaps.append(reached / least - 1)
        better += reached < two
    record_property("gap", max(gaps))
    assert better >= len(seeds) / 4
    assert sum(gap == 0 for gap in gaps) >= 0.95 * len(seeds)
    assert max(gaps) <= 0.01


def cut_in_three(seed, most):
    """Stages of the operations of a random graph, whose ends are anywhere."""
    captured, _ = random_graph(seed, most)[0]
    graph = captured.graph_module.graph
    calls = [node.name for node in graph.nodes if node.op == "call_function"]
    ends = sorted(random.Random(seed).choices(range(len(calls) + 1), k=2))
    return {name: sum(place >= end for end in ends) for place, name in enumerate(calls)}


def test_stages_of_random_graphs_hand_on_whole_tensors():
    """The labelling is the best, its cost that of what runs; what lies in shards is gathered and sent."""
    sent = 0
    for seed in range(12):
        problem = random_problem(seed, sequence=True, most=8, stage_of=cut_in_three(seed, 8))
        choices, found = Choices(problem), find_sharding_plan(problem)
        table, costs = all_costs(choices.labels)
        assert round(found.seconds * 1e12) == int(costs.min())
        check_prices(choices, table, costs, seed)
        gathered = {
            (one.stage, one.tensor)
            for one in (placed.collective for placed in place_collectives(problem, found))
            if (one.kind, one.phase) == ("all_gather", "forward")
        }
        for node in problem.stages.sent:
            if node.name in found.steps and found.steps[node.name].out is not None:
                assert (problem.stages.stage_of[node.name], node.name) in gathered
                sent += 1
    assert sent > 0


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(40), marks=pytest.mark.slow)])
def test_memory_on_random_graphs_against_every_labelling(seeds, record_property):
    """If any labelling fits, one is found that does, and it is rarely slower than the fastest of these."""
    slower = []
    for seed in seeds:
        model, x, hardware = random_case(seed, most=5)
        graphs = read_graphs(model, x, (), Costs(hardware), "shared")
        problem, _ = graphs.shard(Ring(2, hardware.intra_node), Prices())
        choices = Choices(problem)
        found = []
        for row in all_costs(choices.labels)[0]:
            names = [options[place] for options, place in zip(choices.labels.options, row, strict=True)]
            plan = choices.plan(names, None)
            placed = place_collectives(problem, plan)
            flow = per_device_flow(problem, plan, graphs.flows["shared"], placed)
            held = sum(one.bytes + one.trained_bytes for one in flow.holdings)
            found.append((held + sum(one.saved_bytes for one in flow.work.values()), plan.seconds))
        least, fastest = min(memory for memory, _ in found), min(found, key=lambda one: one[::-1])[0]
        options = {"mesh": {"tp": 2}, "hardware": hardware}
        part = partition_model(model, x, **options)
        ends = part.stages[0].memory_bytes - fastest
        assert part.stages[0].memory_bytes >= fastest
        for limit in {least, (least + fastest) // 2}:
            part = partition_model(model, x, memory_per_device=limit + ends, **options)
            assert part.stages[0].memory_bytes <= limit + ends
            best = min(seconds for memory, seconds in found if memory <= limit)
            slower.append(part.bottleneck_seconds / best)
    record_property("slower", max(slower))
    assert sum(ratio < 1 + 1e-6 for ratio in slower) >= 0.8 * len(slower)


def greedy(choices):
    """Variable by variable, each time what costs least; then the same for pairs of neighbours."""
    labels = choices.labels
    free = [number for number in range(len(labels)) if number not in labels.followers]
    found = labels.complete(labels.first())
    best = labels.cost(found)
    improved = True
    while improved:
        improved = False
        for size in (1, 2):
            for moved in itertools.combinations(free, size):
                if moved[-1] - moved[0] > 6:
                    continue
                for names in itertools.product(*(labels.options[number] for number in moved)):
                    changed = list(found)
                    for number, name in zip(moved, names, strict=True):
                        changed[number] = name
                    changed = labels.complete(changed)
                    if labels.allows(changed) and labels.cost(changed) < best:
                        found, best, improved = changed, labels.cost(changed), True
    return best


@pytest.mark.parametrize(
    "name",
    [
        "tied_autoencoder",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixer", "lstm", "encoder_classifier")),
    ],
)
def test_no_worse_than_all_whole_or_greedy(name, record_property):
    entry = zoo.ZOO[name]
    graph = read(entry.build(), entry.inputs())
    for hardware in (device(1e9, 1e9), device(1e10, 1e10, 1e9, 1e-6)):
        problem = problem_of(graph, hardware)
        choices, found = Choices(problem), find_sharding_plan(problem)
        whole = choices.labels.cost(choices.labels.complete(choices.labels.first()))
        record_property("gap", found.gap)
        assert round(found.seconds * 1e12) <= min(whole, greedy(choices))
