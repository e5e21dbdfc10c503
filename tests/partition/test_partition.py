"""`partition_model` as users call it: what is chosen, printed and refused."""

import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from torch import nn

from panther_compile import Hardware, partition_model
from panther_compile.errors import (
    CaptureError,
    ConfigError,
    ConfigTypeError,
    MeshError,
    PartitionError,
    StageCountError,
    StageMemoryError,
)
from panther_compile.partition import Link
from panther_compile.partition.graph.hardware import read_bytes
from panther_compile.partition.records import Mesh


class Blocks(nn.Module):
    def __init__(self, count=8, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


def cut(**options):
    options = {"mesh": {"pp": 2}, "hardware": "cpu"} | options
    return partition_model(Blocks(), torch.randn(16, 32), **options)


def test_equal_blocks_are_divided_evenly():
    part = cut()
    assert [len(stage.parameters) for stage in part.stages] == [8, 8]
    assert part.exact
    assert part.lower_bound_seconds() <= part.bottleneck_seconds
    first, last = part.stages
    assert first.sent_bytes == last.received_bytes == 16 * 32 * 4
    assert last.gradient_sent_bytes == 16 * 32 * 4
    assert first.seconds == pytest.approx(first.compute_seconds + first.receive_seconds + first.send_seconds)
    assert (first.in_flight, last.in_flight) == (2, 1)
    assert first.memory_bytes == (
        first.parameter_bytes
        + first.gradient_bytes
        + first.optimizer_bytes
        + 2 * first.activation_bytes
        + 2 * 16 * 32 * 4
    )
    assert first.inputs[0].name == "x"
    assert first.inputs[0].shape == (16, 32)
    assert first.outputs[0].requires_grad


def test_print_json_and_plot(tmp_path):
    part = cut(mesh={"dp": 2, "pp": 2, "tp": 2}, memory_per_device="40GiB")
    text = str(part)
    for shown in ("dp 2 x pp 2 x tp 2", "1f1b", "sent MB", "bubble", "each stage is of 2 devices"):
        assert shown in text
    read = json.loads(part.to_json())
    assert read["stages"][0]["seconds"] == part.stages[0].seconds
    assert read["mesh"] == {"dp": 2, "pp": 2, "tp": 2, "cp": 1}
    part.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_schedules(schedule):
    part = cut(schedule=schedule, microbatches=4)
    assert len(part.stages) == (4 if schedule == "interleaved" else 2)
    assert [stage.device for stage in part.stages][:2] == [0, 1]
    assert part.step_seconds > 4 * part.stages[0].compute_seconds
    assert 0 < part.bubble < 0.5
    assert part.stages[0].in_flight == {"gpipe": 4, "1f1b": 2, "interleaved": 4}[schedule]


class Table(nn.Module):
    """An embedding that holds much and takes no time, in front of layers that take time."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4000, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

    def forward(self, ids):
        return self.layers(self.table(ids))


def test_memory_is_that_of_a_device_over_all_its_stages():
    def interleaved(**options):
        options = {"mesh": {"pp": 2}, "schedule": "interleaved", "microbatches": 4} | options
        return partition_model(Table(), torch.zeros(8, 4, dtype=torch.long), **options)

    free = interleaved()
    most = free.device_memory_bytes
    assert max(stage.memory_bytes for stage in free.stages) > most / 2  # one takes more than an equal share
    tight = interleaved(memory_per_device=most)
    assert tight.device_memory_bytes <= most
    assert tight.step_seconds == free.step_seconds
    with pytest.raises(StageMemoryError):
        interleaved(memory_per_device=4000 * 32 * 4)


def test_data_parallel_reduction_takes_time():
    assert cut(mesh={"dp": 4, "pp": 2}).step_seconds > cut(mesh={"dp": 1, "pp": 2}).step_seconds


def test_recomputation_saves_memory_and_takes_time():
    kept, again = cut(), cut(recompute=True)
    assert again.stages[0].memory_bytes < kept.stages[0].memory_bytes
    assert again.bottleneck_seconds > kept.bottleneck_seconds


def test_devices_are_divided_by_the_predicted_throughput():
    quick = Hardware("quick", 1e12, 1e12, 10**9, Link(1e12, 0.0), Link(1e12, 0.0), launch_seconds=0.0)
    whole = cut(mesh=None, devices=4, hardware=quick)
    assert whole.mesh.devices == 4
    assert whole.mesh == Mesh(dp=4, pp=1)
    options = {"mesh": None, "devices": 4, "hardware": quick, "memory_per_device": 110_000}
    tight, shared = cut(**options, data_parallel="ddp"), cut(**options)
    assert tight.mesh.pp * tight.mesh.tp > 1
    assert shared.data_parallel != "ddp"  # replicas that share their states fit too
    assert shared.step_seconds <= tight.step_seconds
    for part in (tight, shared):
        assert max(stage.memory_bytes for stage in part.stages) <= 110_000


def test_a_measured_profile_decides():
    part = cut(profile={f"linear{suffix}": 1.0 for suffix in ("", "_1")})
    assert [len(stage.parameters) for stage in part.stages] == [2, 14]
    assert cut(profile=True).bottleneck_seconds > 0


def test_a_profile_of_other_nodes_is_refused():
    with pytest.raises(ConfigError, match=r"profile names nope; the nodes are \w+, "):
        cut(profile={"nope": 1.0})


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(MeshError, match=r"dp 1 x pp 2 x tp 1 is of 2 devices, and devices=16"):
        cut(devices=16)
    with pytest.raises(MeshError, match=r"\['ep'\]"):
        cut(mesh={"ep": 2})
    with pytest.raises(MeshError, match=r"mesh\['pp'\] is 0"):
        cut(mesh={"pp": 0})
    with pytest.raises(MeshError, match="microbatches=0, wanted 1 or more"):
        cut(mesh={"pp": 2}, microbatches=0)
    with pytest.raises(MeshError, match="give mesh="):
        cut(mesh=None)
    with pytest.raises(MeshError, match=r"groups of pp=2.*microbatches=3"):
        cut(schedule="interleaved", microbatches=3)
    with pytest.raises(MeshError, match="needs schedule='interleaved'"):
        cut(stages_per_device=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": 4}, "mesh is a int, wanted a mapping"),
        ({"mesh": ("pp", 2), "hardware": ["cpu", "cpu"]}, "mesh is a tuple, wanted a mapping"),
        ({"mesh": {"pp": 2}, "hardware": 3}, "hardware=3, wanted a preset"),
        ({"mesh": {"pp": 2}, "boundaries": "0"}, "boundaries='0', wanted a list"),
        ({"mesh": {"dp": 2}, "shard_size": "2"}, "shard_size='2' is a str, wanted an integer"),
        ({"mesh": {"dp": 2}, "shard_size": True}, "shard_size=True is a bool, wanted an integer"),
        (
            {"mesh": {"pp": 1}, "schedule": "interleaved", "stages_per_device": 1.5},
            r"stages_per_device=1\.5 is a float, wanted an integer",
        ),
        ({"mesh": {"pp": 1}, "training": "no"}, "training='no' is a str, wanted bool"),
        ({"mesh": {"pp": 1}, "profile": "no"}, "profile='no' is a str, wanted bool or Mapping"),
        ({"devices": 2, "global_batch": "x"}, "global_batch='x' is a str, wanted an integer"),
        ({"devices": 2.0}, r"devices=2\.0 is a float, wanted an integer"),
        ({"devices": 2, "microbatch_sizes": 2}, "microbatch_sizes=2, wanted a list"),
    ],
)
def test_options_of_another_type_are_refused(options, text):
    with pytest.raises(ConfigTypeError, match=text):
        partition_model(nn.Linear(8, 8), torch.randn(4, 8), **{"hardware": "cpu", **options})


def test_numbers_of_numpy_are_read_as_pythons_own():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    two, four = np.arange(2, 5, 2)
    plain = partition_model(model, x, mesh={"dp": 1, "pp": 2}, microbatches=4, hardware="cpu")
    given = partition_model(model, x, mesh={"dp": 1, "pp": two}, microbatches=four, hardware="cpu")
    assert given.to_json() == plain.to_json()


class Centred(nn.Module):
    """Writes into what it is given: a tensor, or an object that holds one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, given):
        if isinstance(given, torch.Tensor):
            return self.body(given.sub_(1.0))
        given.x = self.body(given.x)
        return given.x


def test_a_model_that_writes_into_its_example():
    """A profile ran it on the example itself, and torch.fx left its proxies in objects."""
    x = torch.randn(4, 8)
    given, held = x.clone(), SimpleNamespace(x=x)
    partition_model(Centred(), given, mesh={"dp": 2}, hardware="cpu", profile=True)
    assert torch.equal(given, x)
    with pytest.raises(CaptureError, match="Centred is given a SimpleNamespace, which holds tensors"):
        partition_model(Centred(), held, mesh={"dp": 2}, hardware="cpu")  # each batch would be the example
    assert held.x is x


@dataclass
class Pair:
    x: torch.Tensor
    scale: torch.Tensor


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, pair):
        return self.body(pair.x * pair.scale)


def test_objects_that_hold_tensors_are_inputs_once_they_are_registered():
    """They were part of the graph by torch.fx: whatever was given, stages ran the example."""
    pair = Pair(torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(CaptureError, match=r"a Pair, which holds tensors.*register_dataclass"):
        partition_model(Scaled(), (pair,), mesh={"pp": 2}, hardware="cpu")
    torch.export.register_dataclass(Pair)
    part = partition_model(Scaled(), (pair,), mesh={"pp": 2}, hardware="cpu")
    assert len(part.captured.example) == 2


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
def test_an_example_without_numbers_is_refused(shape):
    """All would cost next to nothing, and the plan be of no model."""
    with pytest.raises(CaptureError, match=rf"are empty, {re.escape(str(shape))}: wanted the inputs of one"):
        partition_model(nn.Sequential(nn.Linear(8, 8)), torch.randn(*shape), devices=2, hardware="cpu")


@pytest.mark.parametrize(
    "given", [None, 3, torch.randn(4, 3), torch.randn(4, 8, dtype=torch.float64), torch.ones(4, 8).long()]
)
def test_an_example_that_the_model_does_not_run_on_is_refused(given, capfd):
    with pytest.raises(CaptureError, match=r"does not run on example_inputs: (Type|Runtime)Error"):
        partition_model(nn.Sequential(nn.Linear(8, 8)), given, mesh={"pp": 1}, hardware="cpu")
    assert capfd.readouterr().err == ""


def test_more_stages_than_operations_are_refused():
    with pytest.raises(StageCountError, match=r"2000 stages.*Blocks has 24 operations"):
        cut(mesh={"pp": 2000})


def test_a_stage_that_cannot_fit_says_what_would_help():
    with pytest.raises(StageMemoryError) as caught:
        cut(memory_per_device=80_000)
    text = str(caught.value)
    assert "stage 0 takes" in text
    assert "more than the" in text
    assert "recompute=True would take" in text
    assert "pp=4 would take" in text
    assert "sketchify" in text
    assert isinstance(caught.value, PartitionError)


def test_options_are_checked():
    for option in ({"schedule": "zigzag"}, {"optimizer": "lion"}, {"tied": "loose"}, {"hardware": "abacus"}):
        with pytest.raises(ConfigError, match=next(iter(option.values()))):
            cut(**option)
    with pytest.raises(ConfigTypeError, match=r"wanted an nn\.Module"):
        partition_model(lambda x: x, torch.randn(2), mesh={"pp": 1})
    with pytest.raises(ConfigError, match="memory_bytes is 0"):
        Hardware("none", 1.0, 1.0, 0, Link(1.0, 0.0), Link(1.0, 0.0))


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 * 2**30), ("40GB", 40 * 10**9), ("1.5 kB", 1500), ("7b", 7), (12, 12)]
)
def test_sizes_are_read(text, size):
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["40", "GiB", "0GB", "1.2.3GB", -1, 0, True])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="is no size"):
        read_bytes(text)


def test_early_exit_has_no_graph():
    entry = zoo.ZOO["early_exit"]
    with pytest.raises(PartitionError, match=r"handwritten\.py:\d+: if logits"):
        partition_model(entry.build(), entry.inputs(), mesh={"pp": 2})


class WorkBetween(nn.Module):
    """Most of the work has no parameters: it is behind the first layer."""

    def __init__(self, layers, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        x = self.first(x)
        for _ in range(6):
            x = torch.softmax(x @ x.transpose(-1, -2), -1) @ x
        return self.last(x)


def test_every_device_that_trains_has_a_parameter():
    x = torch.randn(3, 256, 8)
    trained = partition_model(WorkBetween(2), x, mesh={"pp": 3})
    assert all(stage.parameters for stage in trained.stages)
    run = partition_model(WorkBetween(2), x, mesh={"pp": 3}, training=False)
    assert not run.stages[1].parameters
    assert run.has_idle_optimizers
    fastest = partition_model(WorkBetween(1, 9), torch.randn(1, 257, 9), devices=4, global_batch=3)
    assert not fastest.has_idle_optimizers


def test_every_device_that_trains_has_a_copy_of_the_only_parameter():
    class Tied(nn.Module):
        """The table is the head too; kept together, it leaves nothing to the other stage."""

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 64)

        def forward(self, ids):
            x = self.table(ids)
            for _ in range(3):
                x = torch.softmax(x @ x.mT, -1) @ x
            return x @ self.table.weight.T

    ids = torch.randint(0, 100, (8, 64))
    assert not partition_model(Tied(), ids, mesh={"pp": 2}).has_idle_optimizers
    assert partition_model(Tied(), ids, mesh={"pp": 2}, tied="together").has_idle_optimizers
