"""Shards by cuts: Megatron's layout, sketched layers, and the optimum of graphs small enough to try all."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
import zoo
from torch import nn

from panther_compile.layers import SketchedLinear
from panther_compile.partition import Hardware, Link, partition_model
from panther_compile.partition.capture import capture, example_arguments
from panther_compile.partition.energy import Minimum
from panther_compile.partition.flow_graph import Costs
from panther_compile.partition.label import Builder, Ring, find_labelling, pose
from panther_compile.partition.layouts import Layout
from panther_compile.partition.observe import fold_shapes, observe
from panther_compile.partition.shards import place_collectives


def device(flops=1e12, memory=1e12, link=1e11, latency=0.0, launch=0.0):
    links = Link(link, latency), Link(link, latency)
    return Hardware("device", flops, memory, 10**12, *links, launch_seconds=launch)


def pose_model(model, inputs, hardware, tp=2):
    captured = capture(model, *example_arguments(inputs))
    notes = observe(captured)
    fold_shapes(captured, notes)
    return pose(captured, notes, Costs(hardware), Ring(tp, hardware.link(0, 1)))


def price(problem, labelling):
    """Seconds of a microbatch, from the work of each node and the collectives that will run."""
    shared = set(labelling.steps) | labelling.absorbed
    graph = problem.graph_module.graph
    work = sum(
        (problem.shared_work if node.name in shared else problem.whole_work)[node].seconds
        for node in graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    )
    placed = place_collectives(problem, labelling)
    return work + sum(problem.ring.seconds(one.collective.kind, one.collective.bytes) for one in placed)


# --------------------------------------------------------------------------------------- transformers


def transformer(name):
    """Two layers, wide enough to be worth two H100s, without data."""
    import transformers as hf

    sizes = dict(hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096)
    calm = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.zeros(8, 512, dtype=torch.long, device="meta")
    with torch.device("meta"):
        if name == "bert":
            model, inputs = hf.BertModel(hf.BertConfig(**sizes, **calm)), {"input_ids": ids}
        elif name == "gpt2":
            config = hf.GPT2Config(
                n_embd=1024, n_layer=2, n_head=16, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0
            )
            model, inputs = hf.GPT2Model(config), {"input_ids": ids}
        elif name == "vit":
            config = hf.ViTConfig(**sizes, **calm)
            model = hf.ViTForImageClassification(config)
            inputs = {"pixel_values": torch.zeros(16, 3, 224, 224)}
        else:
            layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
            model = nn.Sequential(nn.Embedding(1000, 1024), nn.TransformerEncoder(layer, 2))
            inputs = ids
    return model.train(), inputs


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "encoder"])
def test_megatrons_layout_is_found(name):
    model, inputs = transformer(name)
    part = partition_model(model, inputs, mesh={"tp": 2}, hardware="h100")
    layers = [shard for shard in part.shards if "mbedding" not in shard.name and shard.kind != "sharded"]
    kinds = {}
    for shard in layers:
        kinds.setdefault(shard.kind, []).append(shard.name)
    # Attention output and the second layer of the MLP by rows, all others by columns.
    assert len(kinds["row"]) == 4
    ends = ("output.dense", "c_proj", "o_proj", "fc2", "out_proj", "linear2")
    assert all(row.endswith(ends) for row in kinds["row"])
    assert len(kinds["column"]) == (4 if name in ("gpt2", "encoder") else 8)
    assert part.sharding.labelling.gap == 0
    rows = {shard.node for shard in layers if shard.kind == "row"}
    forward = [one for one in part.collectives if one.phase == "forward"]
    assert {one.tensor for one in forward if one.kind == "all_reduce"} >= rows
    assert all(one.kind == "all_reduce" for one in forward)
    assert len(forward) == 4
    assert {one.bytes for one in forward} == {part.stages[0].outputs[0].shape[0] * 1024 * 4 * tokens(part)}
    # Heads stay together: attention runs on half of them.
    steps = part.sharding.labelling.steps
    attentions = [step for node, step in steps.items() if node.startswith("scaled_dot_product")]
    assert [step.out for step in attentions] == [Layout(1)] * 2


def tokens(part):
    """Of a row of the batch."""
    nodes = {node.name: node for node in part.captured.graph_module.graph.nodes}
    norm = next(node for name, node in nodes.items() if name.startswith("layer_norm"))
    return norm.meta["tensor"].numel() // (norm.meta["tensor"].shape[0] * 1024)


def test_heads_that_do_not_divide_keep_attention_whole():
    layer = nn.TransformerEncoderLayer(48, 3, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()
    part = partition_model(model, torch.randn(4, 8, 48), mesh={"tp": 2}, hardware=device(1e9))
    assert not any("scaled_dot_product" in node for node in part.sharding.labelling.steps)
    assert {shard.name: shard.kind for shard in part.shards}["layers.0.linear1"] == "column"


# ------------------------------------------------------------------------------------ sketched layers


def sketched_mlp(form, tokens):
    with torch.device("meta"):
        first = SketchedLinear(1024, 4096, 256, form=form)
        second = SketchedLinear(4096, 1024, 256, form=form)
        return nn.Sequential(nn.LayerNorm(1024), first, nn.GELU(), second), torch.empty(8, tokens, 1024)


@pytest.mark.parametrize("form", ["pair", "pivoted"])
def test_sketched_layers_are_cut_at_the_bottleneck(form):
    model, x = sketched_mlp(form, 1024)
    part = partition_model(model, x, mesh={"tp": 2}, hardware="h100")
    assert {shard.name: shard.kind for shard in part.shards} == {"1.up": "column", "3.down": "row"}
    rank_sized = 8 * 1024 * 256 * 4
    activations = [one for one in part.collectives if not one.tensor.endswith("weight")]
    assert [(one.kind, one.bytes) for one in activations] == [("all_reduce", rank_sized)] * 2
    weights = [one.bytes for one in part.collectives if one.tensor.endswith("weight")]
    # In the pivoted form the columns of a device are uneven: the factor is held whole, its gradient summed.
    assert weights == ([256 * (4096 - 256) * 4] if form == "pivoted" else [])
    assert part.shards[1].parameters == {"3.down.weight": None if form == "pivoted" else 1}


def test_few_tokens_are_not_worth_the_gradient_of_a_whole_factor():
    model, x = sketched_mlp("pivoted", 64)
    part = partition_model(model, x, mesh={"tp": 2}, hardware="h100")
    assert part.shards == ()
    assert {reason for _, reason in part.whole} == {"its collectives take longer than the work they divide"}


# -------------------------------------------------------------------------------------- small graphs


class Random(nn.Module):
    """A random graph of linear layers, activations, sums, products and norms."""

    def __init__(self, seed, layers):
        super().__init__()
        draw = random.Random(seed)
        self.plan, widths = [], [8]
        self.linears = nn.ModuleDict()
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
            self.plan.append((kind, number, source, draw.choice(partners) if partners else None))
            widths.append(width)

    def forward(self, x):
        values = [x]
        for kind, number, source, partner in self.plan:
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
                value = nn.functional.layer_norm(value, value.shape[-1:])
            values.append(value)
        return values[-1]


def random_problem(seed):
    draw = random.Random(seed)
    model = Random(seed, draw.randint(3, 12))
    flops = draw.choice([1e8, 1e9, 1e10])
    hardware = device(flops, 1e9, draw.choice([1e7, 1e8, 1e9, 1e10]))
    return pose_model(model, torch.randn(draw.choice([4, 64]), 8), hardware)


def all_costs(energy):
    """The cost of every assignment in which followers follow: (values, costs)."""
    free = [number for number in range(len(energy)) if number not in energy._followers]
    table = np.zeros((2 ** len(free), len(energy)), dtype=bool)
    table[:, free] = (np.arange(2 ** len(free))[:, None] >> np.arange(len(free))) & 1
    for number, leaders in energy._followers.items():
        table[:, number] = np.logical_or.reduce([table[:, one] == wanted for one, wanted in leaders])
    costs = np.full(len(table), energy.constant, dtype=np.int64)
    for literals, cost in energy._all_clauses().items():
        costs += cost * np.logical_and.reduce([table[:, one] == wanted for one, wanted in literals])
    return table, costs


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_against_every_labelling(seed, record_property):
    problem = random_problem(seed)
    builder = Builder(problem)
    found = find_labelling(problem)
    table, costs = all_costs(builder.energy)
    least = int(costs.min())
    assert round(found.seconds * 1e12) <= least / (1 - found.gap) + 1
    record_property("gap", found.gap)
    assert found.gap == 0
    assert found.seconds * 1e12 == pytest.approx(least, abs=1)
    # The energy is the price of what will run, for the best labelling and for others.
    limit = sum(builder.energy.clauses.values()) + builder.energy.constant
    allowed = [row for row, cost in zip(table, costs, strict=True) if cost <= limit]
    some = random.Random(seed).sample(allowed, min(20, len(allowed)))
    for row in some:
        values = tuple(bool(value) for value in row)
        cost = builder.energy.cost(values)
        labelling = builder.labelling(Minimum(values, cost, cost, True))
        assert price(problem, labelling) == pytest.approx(
            cost / 1e12, rel=1e-6, abs=len(builder.energy) * 1e-12
        )


def test_random_graphs_are_of_both_kinds():
    energies = [Builder(random_problem(seed)).energy for seed in range(10)]
    assert {energy.minimize().submodular for energy in energies} == {True, False}


def greedy(builder):
    """Layer by layer, each time what costs least; then the same for pairs of neighbours."""
    energy = builder.energy
    free = [number for number in range(len(energy)) if number not in energy._followers]
    values = list(energy.complete([None] * len(energy)))
    best = energy.cost(values)
    improved = True
    while improved:
        improved = False
        for size in (1, 2):
            for moved in itertools.combinations(free, size):
                if moved[-1] - moved[0] > 6:
                    continue
                changed = list(values)
                for number in moved:
                    changed[number] = not changed[number]
                changed = list(energy.complete(changed))
                if energy.cost(changed) < best:
                    values, best, improved = changed, energy.cost(changed), True
    return best


@pytest.mark.parametrize("name", ["mixer", "tied_autoencoder", "lstm", "encoder_classifier"])
def test_no_worse_than_all_whole_or_greedy(name, record_property):
    entry = zoo.ZOO[name]
    for hardware in (device(1e9, 1e9), device(1e10, 1e10, 1e9, 1e-6)):
        problem = pose_model(entry.build(), entry.inputs(), hardware)
        builder, found = Builder(problem), find_labelling(problem)
        whole = builder.energy.cost(builder.energy.complete([None] * len(builder.energy)))
        record_property("gap", found.gap)
        assert round(found.seconds * 1e12) <= min(whole, greedy(builder))


# ------------------------------------------------------------------------------------------- results


class Mlp(nn.Module):
    def __init__(self, width=64, classes=6):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(x + self.second(torch.relu(self.first(x))))


def test_table_json_and_lighter_stages():
    x = torch.randn(32, 64)
    hardware = device(1e9, 1e12, 1e10)
    whole = partition_model(Mlp(classes=7), x, mesh={"tp": 1}, hardware=hardware)
    part = partition_model(Mlp(classes=7), x, mesh={"tp": 2}, hardware=hardware)
    assert whole.shards == whole.collectives == whole.whole == ()
    kinds = {shard.name: shard.kind for shard in part.shards}
    assert kinds["first"] == "column"
    assert kinds["second"] == "row"
    told = str(part)
    for text in ("first: column (first.weight axis 0", "second: row", "forward all_reduce 0.008 MB"):
        assert text in told
    read = json.loads(part.to_json())
    assert [shard["name"] for shard in read["shards"]] == list(kinds)
    assert read["shards"][1]["parameters"] == {"second.weight": 1, "second.bias": None}
    assert len(read["collectives"]) == len(part.collectives)
    before, after = whole.stages[0], part.stages[0]
    assert 0.5 < after.forward_seconds / before.forward_seconds < 0.6
    assert after.parameter_bytes < 0.6 * before.parameter_bytes
    assert after.optimizer_bytes < 0.6 * before.optimizer_bytes


def test_alike_layers_are_told_in_one_line():
    model = nn.Sequential(nn.Sequential(*(Mlp(classes=64) for _ in range(3))), nn.ReLU())
    part = partition_model(model, torch.randn(32, 64), mesh={"tp": 2}, hardware=device(1e9, 1e12, 1e9))
    assert len([shard for shard in part.shards if shard.name.endswith("second")]) == 3
    assert "3 x 0.*.second: row (0.*.second.weight axis 1" in str(part)


def test_uneven_layers_say_so():
    model = nn.Sequential(nn.Linear(15, 7), nn.ReLU(), nn.Linear(7, 5))
    part = partition_model(model, torch.randn(64, 15), mesh={"tp": 2}, hardware=device(1e6))
    assert part.shards == ()
    assert dict(part.whole)["0"] == "7 outputs do not divide by 2 and 15 inputs do not divide by 2"


def test_between_stages_every_tensor_is_whole():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    part = partition_model(model, torch.randn(64, 64), mesh={"pp": 2, "tp": 2}, hardware=device(1e9))
    steps = part.sharding.labelling.steps
    for spec in part.stages[0].outputs:
        assert spec.name not in steps or steps[spec.name].out is None
    assert {one.stage for one in part.collectives} == {0, 1}
    assert part.stages[0].sent_bytes == 64 * 64 * 4


def test_slow_links_leave_everything_whole():
    part = partition_model(Mlp(), torch.randn(32, 64), mesh={"tp": 2}, hardware=device(1e12, 1e12, 1e6))
    assert part.shards == part.collectives == ()
    assert {name for name, _ in part.whole} == {"first", "second", "head"}
