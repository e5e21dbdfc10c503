"""Pipelines of devices that differ."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

from panther_compile import partition_model
from panther_compile.errors import ConfigError, MeshError, StageMemoryError
from panther_compile.partition import Link
from panther_compile.partition.graph.hardware import CPU, slowest_of

FREE = Link(1e15, 0.0)
FAST = replace(CPU, name="fast", intra_node=FREE, inter_node=FREE)
SLOW = replace(
    FAST,
    name="slow",
    flops_per_second=FAST.flops_per_second / 3,
    memory_bytes_per_second=FAST.memory_bytes_per_second / 3,
    weight_bytes_per_second=FAST.weight_bytes_per_second / 3,
    launch_seconds=3 * FAST.launch_seconds,
)


class Blocks(nn.Module):
    def __init__(self, count=8, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def cut(hardware, **options):
    mesh = {"pp": len(hardware)} if isinstance(hardware, list) else {"pp": 2}
    return partition_model(Blocks(), torch.randn(16, 32), **({"mesh": mesh, "hardware": hardware} | options))


def blocks_of(part):
    return [len(stage.parameters) // 2 for stage in part.stages]


def test_a_device_three_times_as_fast_gets_three_times_as_much():
    assert blocks_of(cut([FAST, SLOW])) == [6, 2]
    assert blocks_of(cut([SLOW, FAST])) == [2, 6]
    assert blocks_of(cut([FAST, SLOW], schedule="interleaved", microbatches=8)) == [3, 1, 3, 1]


def test_seconds_are_those_of_each_device_and_the_bound_holds():
    part, fast, slow = cut([FAST, SLOW]), cut(FAST), cut(SLOW)
    of_blocks = [sum(stage.compute_seconds for stage in one.stages) / 8 for one in (fast, slow)]
    assert of_blocks[1] == pytest.approx(3 * of_blocks[0])
    for stage, own, count in zip(part.stages, of_blocks, (6, 2), strict=True):
        assert stage.compute_seconds == pytest.approx(count * own, rel=0.05)
    assert part.lower_bound_seconds() <= part.bottleneck_seconds <= 1.05 * part.lower_bound_seconds()
    assert fast.step_seconds < part.step_seconds < slow.step_seconds


def test_places_of_one_kind_are_as_one_hardware():
    several, one = cut([FAST, FAST]), cut(FAST)
    assert several.to_json() == one.to_json()
    assert str(several) == str(one)


def test_memory_is_that_of_each_device():
    need = cut([FAST, FAST]).held_bytes
    small, large = (
        replace(FAST, name=name, memory_bytes=size)
        for name, size in (("small", min(need) // 2), ("large", 4 * max(need)))
    )
    for places in ([small, large], [large, small]):
        part = cut(places)
        assert all(held <= place.memory_bytes for held, place in zip(part.held_bytes, places, strict=True))
        assert part.held_bytes[places.index(large)] > part.held_bytes[places.index(small)]
    with pytest.raises(StageMemoryError, match="stage"):
        cut([small, small])
    with pytest.raises(StageMemoryError):
        cut([small, large], memory_per_device=small.memory_bytes)


def test_a_link_is_as_fast_as_its_slower_end():
    far = replace(FAST, name="far", intra_node=Link(1e6, 0.0))
    sent = 16 * 32 * 4
    stages = cut([FAST, far, FAST]).stages
    assert stages[0].send_seconds == pytest.approx(sent / 1e6)
    assert cut([FAST, FAST, FAST]).stages[0].send_seconds < 1e-9


def test_shards_and_replicas_of_devices_that_differ():
    part = partition_model(
        Blocks(), torch.randn(16, 32), mesh={"dp": 2, "pp": 2, "tp": 2}, hardware=[FAST, SLOW]
    )
    first, second = part.stages
    assert len(first.parameters) > len(second.parameters)
    assert first.compute_seconds == pytest.approx(second.compute_seconds, rel=0.4)


def test_what_is_told():
    part = cut([FAST, SLOW])
    assert "0 fast" in str(part)
    assert "1 slow" in str(part)
    assert "fast + slow" in part.title
    assert [place["name"] for place in json.loads(part.to_json())["places"]] == ["fast", "slow"]


def test_the_slowest_of_several_holds_for_all():
    kinds = [FAST, SLOW, replace(FAST, name="small", memory_bytes=1)]
    slowest = slowest_of(kinds)
    assert slowest.memory_bytes == 1
    assert slowest.flops_per_second == SLOW.flops_per_second
    assert all(slowest_of([one, one]) is one for one in kinds)
    for first, second in combinations(kinds, 2):
        assert slowest_of([first, second]).name == f"{first.name} + {second.name}"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"hardware": [FAST, SLOW], "mesh": {"pp": 4}}, MeshError, "names 2, .*; pp=4"),
        ({"hardware": [FAST, SLOW], "mesh": None, "devices": 2}, MeshError, "needs mesh="),
        ({"hardware": [FAST, SLOW], "profile": True}, ConfigError, "profile="),
        ({"hardware": [], "mesh": {"pp": 2}}, ConfigError, "one for each place"),
        ({"hardware": [FAST, 3]}, ConfigError, "one for each place"),
        ({"hardware": [FAST, "h300"]}, ConfigError, "h300"),
        ({"hardware": [FAST, replace(SLOW, devices_per_node=4)]}, ConfigError, "fast 64, slow 4"),
    ],
)
def test_what_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        cut(options.pop("hardware"), **options)
