"""What replicas share of a model's states, and what is computed again, in memory and time."""

import dataclasses
import functools
import json
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from panther_compile.errors import ConfigError, MeshError, StageMemoryError
from panther_compile.partition import Hardware, Link, partition_model
from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph, Holding, Result, Value, Work
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graphs import read_graphs
from panther_compile.partition.options import PlanOptions
from panther_compile.partition.records import Mesh
from panther_compile.partition.replicas import (
    ReplicaLinks,
    StateSharding,
    count_replica_seconds,
    share_states,
)
from panther_compile.partition.search import partition_mesh
from panther_compile.partition.stages.units import find_units, recompute_units

pytestmark = pytest.mark.usefixtures("models_are_read_once")

WIDTH, LAYERS = 64, 8
NUMBERS = LAYERS * WIDTH * (WIDTH + 1)


class Blocks(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.sum()  # a loss, which keeps nothing more


def cluster(memory=10**9, rate=1e9, overlap=False, flops=1e9):
    link = Link(rate, 0.0)
    return Hardware("test", flops, 1e12, memory, link, link, launch_seconds=0.0, overlap=overlap)


@functools.cache
def blocks(rows, dtype):
    return Blocks(dtype), torch.randn(rows, WIDTH, dtype=dtype)


def cut(rows=4, dtype=torch.float32, **options):
    options = {"mesh": {"dp": 4}, "hardware": cluster(), "microbatches": 2} | options
    return partition_model(*blocks(rows, dtype), **options)


def states(**options):
    return cut(**{"microbatches": 1, **options}).stages[0].memory.states


@pytest.mark.parametrize(
    ("kind", "bytes_a_number"),
    [("ddp", 4 + 4 + 8), ("zero1", 4 + 4 + 8 / 4), ("zero2", 4 + (4 + 8) / 4), ("zero3", (4 + 4 + 8) / 4)],
)
def test_replicas_hold_their_share_of_states(kind, bytes_a_number):
    assert states(data_parallel=kind) == pytest.approx(NUMBERS * bytes_a_number, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "bytes_a_number"),
    [("zero1", 4 + 4 + 8 / 4), ("zero2", 4 + 4 + 8 / 4), ("zero3", 4 + (4 + 8) / 4)],
)
def test_gradients_of_several_microbatches_add_up_whole(kind, bytes_a_number):
    assert states(data_parallel=kind, microbatches=2) == pytest.approx(NUMBERS * bytes_a_number, rel=1e-3)


def test_a_pipeline_keeps_what_its_backward_has_gathered():
    """In place of twice: four microbatches gather the parameters five times, and hold them once."""
    options = {"mesh": {"dp": 2, "pp": 2}, "microbatches": 4}
    shared, whole = (cut(data_parallel=kind, **options) for kind in ("zero3", "zero2"))
    for one, other in zip(shared.stages, whole.stages, strict=True):
        assert one.memory == other.memory
    sent = [
        next(one.intra_node_bytes for one in part.traffic if one.purpose == "replicas")
        for part in (shared, whole)
    ]
    assert sent == [6 * NUMBERS * 4, 2 * NUMBERS * 4]


def test_hybrid_shares_states_within_groups():
    assert states(data_parallel="zero3", shard_size=2) == pytest.approx(NUMBERS * 16 / 2, rel=1e-3)


@pytest.mark.parametrize(("kind", "bytes_a_number"), [("ddp", 2 + 4 + 12), ("zero3", (4 + 12) / 4)])
def test_master_weights_are_states(kind, bytes_a_number):
    found = states(data_parallel=kind, dtype=torch.bfloat16, master_weights=True)
    assert found == pytest.approx(NUMBERS * bytes_a_number, rel=1e-3)


def test_whole_units_are_counted():
    """Two of the parameters count, one of the gradients, where all of them are shared."""
    part = cut(data_parallel="zero3", microbatches=1)
    unit = part.stages[0].memory.gathered
    assert 3 * WIDTH * (WIDTH + 1) * 4 <= unit < 3 * NUMBERS * 4
    assert cut(data_parallel="zero3").stages[0].memory.gathered == unit * 2 / 3
    assert cut(data_parallel="ddp").stages[0].memory.gathered == 0


def test_a_model_that_replicas_cannot_hold_alone_is_shared():
    """As an 8B model on eight devices of 80 GB: 16 bytes a number do not fit into one."""
    limit = 8 * NUMBERS
    with pytest.raises(StageMemoryError, match="ddp over 4 replicas"):
        cut(data_parallel="ddp", memory_per_device=limit)
    part = cut(memory_per_device=limit, microbatches=1)
    assert part.data_parallel.kind in ("zero2", "zero3")
    assert part.stages[0].memory_bytes <= limit
    divided = partition_model(*blocks(4, torch.float32), devices=2, hardware=cluster(12 * NUMBERS))
    assert divided.stages[0].memory_bytes <= 12 * NUMBERS


def test_the_leanest_way_to_share_states_is_named_where_none_fits():
    """Though a unit that is gathered whole takes more than the device has."""
    taken = {}
    for kind in ("auto", "ddp", "zero1", "zero2", "zero3"):
        with pytest.raises(StageMemoryError) as caught:
            cut(data_parallel=kind, microbatches=1, memory_per_device=NUMBERS)
        taken[kind] = float(re.search(r"takes (\S+) GiB", str(caught.value))[1])
    assert taken["auto"] == min(taken.values()) < taken["zero1"] < taken["ddp"]


def test_equal_replicas_are_taken_where_they_fit():
    assert cut().data_parallel == StateSharding("ddp", 4, 1, accumulates=True)


def test_gathering_takes_time_in_every_microbatch():
    seconds = {kind: cut(data_parallel=kind).step_seconds for kind in ("ddp", "zero1", "zero2", "zero3")}
    assert seconds["ddp"] == pytest.approx(seconds["zero1"]) == pytest.approx(seconds["zero2"])
    gather = 3 * (NUMBERS * 4 / 4) / 1e9
    # In place of once a step: twice in each of two microbatches.
    assert seconds["zero3"] - seconds["zero2"] == pytest.approx(3 * gather)


def test_what_hides_behind_computing_takes_no_time():
    open_, hidden = (cut(hardware=cluster(overlap=overlap, flops=1e6)) for overlap in (False, True))
    compute = 2 * open_.stages[0].compute_seconds
    tail = open_.step_seconds - compute
    assert tail > 0
    assert 0 < hidden.step_seconds - compute < tail


def test_rings_within_and_between_groups():
    """Eight replicas in groups of four: scatter and gather within, then a sum of the shards of two groups."""
    links = ReplicaLinks(Link(100.0, 0.0), Link(10.0, 0.0), overlap=False)
    found = count_replica_seconds(
        StateSharding("zero2", 8, 4),
        links,
        parameter_bytes=400,
        gradient_bytes=800,
        forward_seconds=1.0,
        backward_seconds=1.0,
        units=1,
    )
    assert found.tail == pytest.approx(3 * 200 / 100 + 2 * (800 / 4 / 2) / 10 + 3 * 100 / 100)
    assert found.forward == found.backward == 0


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="data_parallel='zero4', wanted one of 'auto', 'ddp'"):
        cut(data_parallel="zero4")
    with pytest.raises(MeshError, match="shard_size=3 does not divide dp=4"):
        cut(data_parallel="zero2", shard_size=3)
    with pytest.raises(ConfigError, match="recompute='all' is none of 'auto', 'none'"):
        cut(recompute="all")


# ---------------------------------------------------------------------------- activation checkpointing


def test_recomputation_saves_memory_without_a_pipeline():
    kept, again = (cut(rows=256, mesh={}, recompute=one) for one in (False, True))
    assert again.stages[0].memory.activations + again.stages[0].memory.recomputed < (
        0.75 * kept.stages[0].memory.activations
    )
    assert again.step_seconds > kept.step_seconds


class FeedForward(nn.Module):
    """Blocks of a product that widens and one that narrows."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x.sum()


def test_selective_is_between_none_and_full():
    memory, seconds = [], []
    model, x = FeedForward(), torch.randn(256, WIDTH)
    for kind in ("none", "selective", "full"):
        options = {"mesh": {}, "hardware": cluster(), "microbatches": 2, "recompute": kind}
        part = partition_model(model, x, **options)
        memory.append(part.stages[0].memory_bytes)
        seconds.append(part.step_seconds)
    assert memory == sorted(memory, reverse=True)
    assert len(set(memory)) == 3
    assert seconds == sorted(seconds)


def test_budgets_are_between_full_and_none():
    memory, seconds = [], []
    model, x = FeedForward(), torch.randn(256, WIDTH)
    for kind in ("full", 0.3, 0.9, "none"):
        options = {"mesh": {}, "hardware": cluster(), "microbatches": 2, "recompute": kind}
        part = partition_model(model, x, **options)
        assert part.recompute == kind
        assert json.loads(part.to_json())["recompute"] == kind
        stored = part.stages[0].memory
        memory.append(stored.activations)
        seconds.append(part.step_seconds)
    assert memory == sorted(memory)
    assert len(set(memory)) == 4
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 4


def test_what_is_kept_within_a_budget_is_worth_most():
    saved = {"a": (5.0, 60), "b": (4.0, 30), "c": (3.0, 30), "d": (9.0, 90)}
    work = {
        name: Work(seconds, 1.0, size, results=(Result(seconds, size),))
        for name, (seconds, size) in saved.items()
    }
    values = [Value(f"x{n}", tail, (head,), 1) for n, (tail, head) in enumerate(pairwise([SOURCE, *work]))]
    again, unit = recompute_units(FlowGraph(work, tuple(values)), (3, 4), 0.5)
    assert [one.saved_bytes for one in again.work.values()] == [0 + 1, 30, 0, 0 + 1]
    assert [one.backward_seconds for one in again.work.values()] == [6.0, 1.0, 4.0, 10.0]
    assert unit == 90


@pytest.mark.parametrize("given", [0.0, 1.0, 1.5, -0.1, float("nan"), 3])
def test_what_is_no_budget_is_refused(given):
    with pytest.raises(ConfigError, match=f"recompute={given} is none of .* and no budget"):
        cut(recompute=given)


def test_what_is_computed_again_is_chosen_by_the_memory():
    free = cut(rows=256, mesh={}, recompute="auto")
    assert free.recompute == "none"
    tight = cut(rows=256, mesh={}, recompute="auto", memory_per_device=free.stages[0].memory_bytes - 1)
    assert tight.recompute != "none"
    assert tight.stages[0].memory_bytes < free.stages[0].memory_bytes


class Uneven(nn.Module):
    """Blocks of products that widen, narrow and do neither."""

    def __init__(self):
        super().__init__()
        widths = [WIDTH, 4 * WIDTH, WIDTH, WIDTH, 2 * WIDTH, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(*pair) for _ in range(LAYERS // 2) for pair in pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


@pytest.mark.parametrize(
    ("mesh", "shares"),
    [
        ({"pp": 2}, (0.3,)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (({}, (0.3, 0.8)), ({"dp": 4}, (0.5,)))),
    ],
)
def test_a_budget_is_found_between_selective_and_none(mesh, shares):
    """Its step is faster than those of all other kinds that fit."""
    model, x = Uneven(), torch.randn(256, WIDTH)

    def plan(recompute, memory=10**9):
        options = {"mesh": mesh, "microbatches": 2, "data_parallel": "ddp", "recompute": recompute}
        return partition_model(model, x, hardware=cluster(), memory_per_device=memory, **options)

    kinds = {kind: plan(kind) for kind in ("full", "selective", "none")}
    held = [max(part.held_bytes) for part in kinds.values()]
    assert held == sorted(held)
    for share in shares:
        limit = int(held[1] + share * (held[2] - held[1]))
        found = plan("auto", limit)
        assert isinstance(found.recompute, float)
        assert 0 < found.recompute < 1
        assert max(found.held_bytes) <= limit
        assert kinds["none"].step_seconds < found.step_seconds < 0.99 * kinds["selective"].step_seconds
        assert kinds["selective"].step_seconds < kinds["full"].step_seconds
        same = plan(found.recompute, limit)
        assert (same.step_seconds, same.held_bytes) == (found.step_seconds, found.held_bytes)


def line(saved, alive):
    """Vertices one after the other that save so much, and tensors of so many bytes before each."""
    names = [f"v{number}" for number in range(len(saved))]
    work = {name: Work(1.0, 2.0, size) for name, size in zip(names, saved, strict=True)}
    ends = [SOURCE, *names, SINK]
    sizes = [*alive, 0]
    values = [
        Value(f"x{number}", tail, (head,), size)
        for number, (tail, head, size) in enumerate(zip(ends, ends[1:], sizes, strict=False))
    ]
    return FlowGraph(work, tuple(values))


def test_units_end_where_little_is_alive():
    flow = line([50, 50, 50, 50, 50, 50], [1, 90, 1, 90, 1, 90])
    assert find_units(flow) == (2, 4, 6)
    again, unit = recompute_units(flow, (2, 4, 6), "full")
    assert unit == 100
    assert [work.saved_bytes for work in again.work.values()] == [1, 0, 1, 0, 1, 0]
    assert [work.backward_seconds for work in again.work.values()] == [3.0] * 6


def test_a_tensor_that_several_units_read_is_kept_once():
    work = {name: Work(1.0, 1.0, 10) for name in "abc"}
    values = (
        Value("a", "a", ("b", "c"), 7),
        Value("b", "b", ("c",), 5),
        Value("c", "c", (SINK,), 3),
    )
    again, _ = recompute_units(FlowGraph(work, values), (1, 2, 3), "full")
    assert [one.saved_bytes for one in again.work.values()] == [0, 7, 5]


def test_the_largest_unit_is_gathered():
    flow = line([1, 1, 1, 1], [1, 1, 1, 1])
    held = tuple(Holding(f"w{n}", 4 * n, 12 * n, 4 * n, (f"v{n}",)) for n in range(4))
    shared, whole = share_states(
        FlowGraph(flow.work, flow.values, held), StateSharding("zero3", 2, 2), (2, 4)
    )
    assert [one.memory_bytes for one in shared.holdings] == [0, 8, 16, 24]
    assert whole == 3 * (8 + 12)


# -------------------------------------------------------------------------------------------- the loss


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1000)

    def forward(self, x):
        return self.head(x)


def planned(model, x, costs, mesh, *, divide=find_units, **options):
    """By the planner's own records, for what `partition_model` does not offer."""
    graphs = dataclasses.replace(read_graphs(model, x, (), costs), divide=divide)
    asked = PlanOptions(hardware=costs.hardware, memory_bytes=10**12, microbatches=4, **options)
    return partition_mesh(graphs, asked, Mesh(**mesh))


def test_a_divided_loss_takes_logits_in_shards():
    hardware = cluster(rate=1e12, flops=1e6)
    model, x = Classifier(), torch.randn(16, 8)
    whole, shards = (
        planned(model, x, Costs(hardware, parallel_loss=one), {"tp": 2}) for one in (False, True)
    )
    assert [(one.phase, one.kind) for one in whole.collectives] == [("forward", "all_gather")]
    assert shards.shards[0].kind == "column"
    assert shards.collectives == ()
    assert shards.stages[0].memory.activations < whole.stages[0].memory.activations


def test_stages_that_send_parts_send_faster_and_hold_less():
    costs = Costs(cluster(rate=1e6))
    mesh, (model, x) = {"pp": 2, "tp": 2}, blocks(4, torch.float32)
    all_of_it, parts = (planned(model, x, costs, mesh, scattered=one) for one in (False, True))
    for one, other in zip(all_of_it.stages, parts.stages, strict=True):
        assert other.send_seconds == pytest.approx(one.send_seconds / 2)
        assert other.memory.buffers == one.memory.buffers / 2
    # A unit across the cut: to compute it again, the second stage keeps what it receives.
    options = {"recompute": "full", "schedule": "gpipe"}
    one, other = (
        planned(
            model, x, costs, mesh, scattered=parts, divide=lambda flow: (len(flow.work),), **options
        ).stages[1]
        for parts in (False, True)
    )
    assert one.memory.activations - other.memory.activations == one.in_flight * one.received_bytes / 2 > 0


def test_the_loss_keeps_its_logits():
    """A log-softmax and its gradient in float32, that of the logits; and a copy for fewer bits."""
    for dtype, each in ((torch.float32, 12), (torch.bfloat16, 14)):
        model, x = Classifier().to(dtype), torch.randn(16, 8, dtype=dtype)
        part = partition_model(model, x, mesh={}, hardware=cluster(), microbatches=1)
        assert part.stages[0].memory.activations == 16 * 1000 * each + 16 * 8 * dtype.itemsize
        assert (
            partition_model(model, x, mesh={}, hardware=cluster(), training=False)
            .stages[0]
            .memory.activations
            == 0
        )
