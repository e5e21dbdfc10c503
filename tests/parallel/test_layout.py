"""A layout checked without its ranks: every kind of rank of any world, and plans that say something else."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from panther_compile import Hardware, check_layout, partition_model
from panther_compile.errors import ParallelError
from panther_compile.parallel import layout
from panther_compile.parallel.tensor import shard_stage
from panther_compile.partition import Link

SLOW = Hardware("slow", 1e9, 1e9, 10**12, Link(1e12, 0.0), Link(1e9, 0.0), launch_seconds=0.0)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
            for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(scope="module")
def part():
    return partition_model(Mlp(), torch.randn(16, 32), mesh={"dp": 512, "pp": 2, "tp": 4}, hardware=SLOW)


def test_a_world_of_4096_in_one_process(part):
    checked = check_layout(part)
    assert [(one.tp, one.stage) for one in checked] == [(tp, stage) for tp in range(4) for stage in range(2)]
    assert sum(one.alike for one in checked) == part.mesh.devices == 4096
    assert [one.parameter_bytes for one in checked[:2]] == [stage.parameter_bytes for stage in part.stages]
    assert sum(one.forward + one.backward for one in checked[:2]) == len(part.collectives) > 0
    assert not dist.is_initialized()
    whole = dict(part.captured.graph_module.named_parameters())
    assert all(parameter.grad is None for parameter in whole.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "clip"])
def test_models_do_what_their_plans_say(name):
    entry = zoo.ZOO[name]
    part = partition_model(
        entry.build().train(), entry.inputs(), mesh={"dp": 2, "pp": 2, "tp": 2}, hardware=SLOW
    )
    assert len(check_layout(part)) == 4


def changed(part, index, **fields):
    stages = list(part.stages)
    stages[index] = dataclasses.replace(stages[index], **fields)
    return dataclasses.replace(part, stages=tuple(stages))


def test_plans_that_say_something_else_are_refused(part):
    with pytest.raises(ParallelError, match=r"stage 1, tp 0: bytes of parameters and buffers: \d+, and the"):
        check_layout(changed(part, 1, parameter_bytes=7))
    first = part.stages[0]
    for field, value in (("dtype", "float64"), ("shape", (16, 31)), ("requires_grad", False)):
        other = (dataclasses.replace(first.outputs[0], **{field: value}), *first.outputs[1:])
        with pytest.raises(ParallelError, match=f"stage 0, tp 0: what comes out as {other[0].name}"):
            check_layout(changed(part, 0, outputs=other))
    fewer = dataclasses.replace(part.sharding, collectives=part.sharding.collectives[1:])
    with pytest.raises(ParallelError, match=r"collectives of the (forward|backward): .* bytes, and the plan"):
        check_layout(dataclasses.replace(part, sharding=fewer))


def test_a_process_in_a_group_is_refused(part):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ParallelError, match="this process is in one"):
            check_layout(part)
    finally:
        dist.destroy_process_group()


class Scored(nn.Module):
    """Products of heads by a vector, as many heads as samples."""

    def __init__(self):
        super().__init__()
        self.query, self.head = nn.Linear(32, 32), nn.Linear(4, 8)
        self.vector = nn.Parameter(torch.randn(8))

    def forward(self, x):
        heads = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return self.head((heads @ self.vector).transpose(1, 2))


def test_products_by_a_vector():
    slow = Hardware("slow", 1e9, 1e12, 10**10, Link(1e11, 0.0), Link(1e11, 0.0), launch_seconds=0.0)
    part = partition_model(Scored(), torch.randn(4, 6, 32), mesh={"tp": 2}, hardware=slow)
    assert len(check_layout(part)) == 2


class Unread(nn.Module):
    """A pooler whose result nobody reads, and halves of which the later stage has no use for one."""

    def __init__(self):
        super().__init__()
        self.first, self.pooler = Mlp(), nn.Linear(32, 32)
        self.twice, self.second = nn.Linear(32, 64), Mlp()

    def forward(self, x):
        x = self.first(x)
        torch.tanh(self.pooler(x))
        mean, deviation = self.twice(x).chunk(2, -1)
        x = self.second(mean + deviation.detach())
        deviation.exp()
        return x


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}])
def test_what_no_gradient_reaches_in_one_process_needs_none(mesh):
    part = partition_model(Unread(), torch.randn(16, 32), mesh=mesh, hardware=SLOW)
    assert len(check_layout(part)) == part.mesh.devices


def test_a_stage_that_loses_a_gradient_is_refused(part, monkeypatch):
    def detached(stage, *rest):
        made = shard_stage(stage, *rest)
        node = next(node for node in made.graph.nodes if node.op == "get_attr")
        with made.graph.inserting_after(node):
            cut = made.graph.call_method("detach", (node,))
        node.replace_all_uses_with(cut, lambda user: user is not cut)
        made.recompile()
        return made

    monkeypatch.setattr(layout, "shard_stage", detached)
    with pytest.raises(ParallelError, match=r"stage 0, tp 0: no gradient comes out for layers\.0\."):
        check_layout(part)
