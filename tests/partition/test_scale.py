"""Many devices without any: the search over meshes, bytes by class of link, ranks of a world of 64."""

import dataclasses
import json
import resource

import pytest
import torch
import torch.distributed as dist
import zoo
from large_models import llama_70b
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from panther_compile import Hardware, partition_model, plan_sketch
from panther_compile.errors import ConfigError, ConfigTypeError, MeshError, NoTargetError, StageMemoryError
from panther_compile.parallel.tensor import shard_stage
from panther_compile.partition import Link, Mesh
from panther_compile.partition.shards import elimination
from panther_compile.partition.stages.mesh_search import find_meshes
from panther_compile.skeleton import sketch_skeleton

FAST = Link(1e12, 0.0)
SLOW = Link(1e9, 0.0)
SKETCH = {"min_params": 0, "allow_slower": True, "progress": False}


def cluster(devices_per_node=8, memory=10**12):
    return Hardware("test", 1e9, 1e9, memory, FAST, SLOW, devices_per_node, launch_seconds=0.0)


class Mlp(nn.Module):
    def __init__(self, layers=4, width=32):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_meshes_stay_within_a_node():
    found = list(find_meshes(16, cluster(devices_per_node=4)))
    assert {mesh.tp for mesh in found} == {1, 2, 4}
    assert all(mesh.devices == 16 for mesh in found)
    assert len(found) == len(set(found)) == 5 + 4 + 3
    assert list(find_meshes(3, cluster())) == [Mesh(3, 1, 1), Mesh(1, 3, 1)]


@pytest.mark.parametrize(
    "microbatches", [pytest.param(8, marks=pytest.mark.slow), pytest.param(24, marks=pytest.mark.slow), 64]
)
def test_the_search_finds_the_best_of_all_meshes_at_one_global_batch(microbatches):
    model, x = Mlp(layers=2), torch.randn(64, 32)
    options = {"hardware": cluster(devices_per_node=4), "global_batch": 64 * microbatches}
    parts = [
        partition_model(model, x, mesh=dataclasses.asdict(mesh), **options)
        for mesh in find_meshes(4, options["hardware"])
    ]
    assert {part.mesh.dp * part.microbatches for part in parts} == {microbatches}
    found = partition_model(model, x, devices=4, **options)
    assert found.mesh.dp * found.microbatches == microbatches
    assert found.step_seconds == pytest.approx(min(part.step_seconds for part in parts))
    assert found.left_out == ()


@pytest.mark.slow
def test_a_long_pipeline_needs_a_large_batch():
    """Stages of one device each send less than shards do, and wait while the pipeline fills."""
    model, x = Mlp(layers=16), torch.randn(64, 32)
    hardware = Hardware("slow links", 1e9, 1e9, 10**12, Link(2e7, 0.0), Link(2e7, 0.0), 8, launch_seconds=0.0)
    options = {"devices": 8, "hardware": dataclasses.replace(hardware, memory_bytes=900_000)}
    options |= {"data_parallel": "ddp", "recompute": False, "schedule": "1f1b"}
    small, large = (partition_model(model, x, global_batch=64 * count, **options) for count in (2, 64))
    assert small.mesh.pp < large.mesh.pp
    assert large.bubble < 0.2


def test_meshes_that_do_not_divide_the_batch_are_left_out():
    model, x = Mlp(), torch.randn(4, 32)
    found = partition_model(model, x, devices=6, hardware=cluster(), global_batch=40)
    assert {mesh.dp for mesh, _ in found.left_out} == {3, 6}
    assert "global_batch=40 is not divisible by dp=6 x 4 samples" in dict(found.left_out)[Mesh(6, 1, 1)]
    assert "3 meshes are left out, as dp 6" in str(found)
    default = partition_model(model, x, devices=6, hardware=cluster())
    assert default.mesh.dp * default.microbatches == 12
    with pytest.raises(MeshError, match=r"no mesh of 2 devices can run Mlp:\n.*global_batch=6 is not div"):
        partition_model(model, x, devices=2, hardware=cluster(), global_batch=6)


def test_global_batches_are_checked():
    model, x = Mlp(), torch.randn(4, 32)
    part = partition_model(model, {"x": x}, mesh={"dp": 2, "pp": 2}, hardware="cpu", global_batch=24)
    assert part.microbatches == 3
    refused = {20: (MeshError, "is not divisible by dp=2 x 4 samples of a microbatch")}
    refused |= dict.fromkeys((0, -8), (MeshError, "wanted 1 or more"))
    refused |= dict.fromkeys(("8", 8.0), (ConfigTypeError, "wanted an integer"))
    for batch, (error, text) in refused.items():
        with pytest.raises(error, match=text):
            partition_model(model, x, mesh={"dp": 2}, hardware="cpu", global_batch=batch)
    for options in ({"devices": 2}, {"mesh": {"dp": 2}, "global_batch": 8}):
        with pytest.raises(MeshError, match="microbatches=2 is of each replica; give global_batch= alone"):
            partition_model(model, x, microbatches=2, hardware="cpu", **options)


def test_shards_are_chosen_where_nothing_else_fits():
    """One layer cannot be cut into stages, and is too large for a device."""
    model, x = nn.Linear(512, 512), torch.randn(64, 512)
    part = partition_model(model, x, devices=2, hardware=cluster(memory=3_000_000))
    assert part.mesh == Mesh(1, 1, 2)
    with pytest.raises(StageMemoryError, match="Linear does not fit"):
        partition_model(model, x, devices=2, hardware=cluster(memory=1_000_000))


def test_bytes_by_class_of_link():
    """Nodes of four: a replica of two stages of two devices each is a node; replicas meet on the network."""
    part = partition_model(
        Mlp(), torch.randn(64, 32), mesh={"dp": 2, "pp": 2, "tp": 2}, hardware=cluster(4), microbatches=4
    )
    crossing = part.stages[0].sent_bytes + part.stages[1].gradient_sent_bytes
    traffic = {one.purpose: one for one in part.traffic}
    assert crossing > 0
    assert traffic["pipeline"].intra_node_bytes == 4 * crossing * 2 * 2
    assert traffic["pipeline"].inter_node_bytes == 0
    gradients = sum(stage.gradient_bytes for stage in part.stages)
    assert traffic["replicas"].inter_node_bytes == gradients * 2 * 2  # 2 (n - 1) / n, two replicas, tp of two
    assert traffic["replicas"].intra_node_bytes == 0
    assert part.collectives
    sent = sum(one.bytes / 2 * (2 if one.kind == "all_reduce" else 1) for one in part.collectives)
    assert traffic["shards"].intra_node_bytes == 4 * sent * 2 * 2
    assert traffic["shards"].inter_node_bytes == traffic["tied"].inter_node_bytes == 0
    assert json.loads(part.to_json())["traffic"] == [dataclasses.asdict(one) for one in part.traffic]
    assert "GB between nodes (replicas" in str(part)


@pytest.mark.parametrize("name", ["vit", "odd_convnet", "nn_transformer"])
def test_a_skeleton_has_the_shapes_of_the_plan(name):
    entry = zoo.ZOO[name]
    dense = entry.build().to("meta").train()
    numbers = sum(parameter.numel() for parameter in dense.parameters())
    plan = plan_sketch(dense, 0.5, **SKETCH)
    made = sketch_skeleton(dense, 0.5, **SKETCH)
    saved = sum(line.dense_numbers - line.stored_numbers for line in plan.layers)
    assert saved > 0
    assert sum(parameter.numel() for parameter in made.parameters()) == numbers - saved
    assert sum(parameter.numel() for parameter in dense.parameters()) == numbers
    assert all(parameter.is_meta and parameter.requires_grad for parameter in made.parameters())
    assert made.training


def test_a_skeleton_keeps_ties():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    with torch.device("meta"):
        made = sketch_skeleton(Tied(), 0.5, include=["table", "head"], **SKETCH)
    assert made.table.codes.weight is made.head.up.weight


def test_skeletons_of_models_with_weights_are_refused():
    with pytest.raises(ConfigError, match="on the meta device"):
        sketch_skeleton(Mlp())
    with torch.device("meta"), pytest.raises(NoTargetError):
        sketch_skeleton(nn.ReLU())


@pytest.fixture
def world():
    made = []

    def enter(rank):
        if made:
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
        made.append(rank)
        return init_device_mesh("cpu", (8, 4, 2), mesh_dim_names=("dp", "pp", "tp"))

    yield enter
    dist.destroy_process_group()


def test_ranks_of_a_world_of_64_in_one_process(world):
    """Shapes and collectives; what a fake group gathers and sums has no meaning."""
    model, x = Mlp(), torch.randn(16, 32)
    part = partition_model(model, x, mesh={"dp": 8, "pp": 4, "tp": 2}, hardware=cluster())
    staged = part.split()
    whole = dict(model.named_parameters())
    for rank in (0, 3, 30, 37, 63):
        mesh = world(rank)
        index, record = mesh["pp"].get_local_rank(), part.stages[mesh["pp"].get_local_rank()]
        assert part.mesh.rank(mesh["dp"].get_local_rank(), index, mesh["tp"].get_local_rank()) == rank
        stage = shard_stage(staged.stages[index], part, index, mesh["tp"])
        held = dict(stage.named_parameters())
        assert set(held) == set(record.parameters)
        assert sum(p.numel() * p.element_size() for p in held.values()) == record.parameter_bytes
        divided = {
            name: dim for shard in part.shards for name, dim in shard.parameters.items() if name in held
        }
        assert divided
        for name, dim in divided.items():
            wanted = list(whole[name].shape)
            if dim is not None:
                wanted[dim] //= 2
            assert list(held[name].shape) == wanted
        inputs = [torch.randn(spec.shape, requires_grad=spec.requires_grad) for spec in record.inputs]
        with CommDebugMode() as forward:
            outputs = stage(*inputs)
        assert [tuple(one.shape) for one in outputs] == [spec.shape for spec in record.outputs]
        with CommDebugMode() as backward:
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        assert [one for one in part.collectives if one.stage == index]
        for phase, seen in (("forward", forward), ("backward", backward)):
            planned = [one for one in part.collectives if one.stage == index and one.phase == phase]
            assert seen.get_total_counts() == len(planned)
        assert all(parameter.grad.shape == parameter.shape for parameter in held.values())


class Forgetful(dict):
    def __contains__(self, key):
        return False


def test_blocks_that_repeat_are_labelled_once(monkeypatch):
    """The same plan as without looking up what equal blocks came to; tables do not grow with the blocks."""
    solve, prepare, solved = elimination._solve, elimination._Tables.__init__, []

    def count(sizes, tables):
        solved.append(sizes)
        return solve(sizes, tables)

    def forget(self, labels):
        prepare(self, labels)
        self._solved = Forgetful()

    def plan(blocks):
        solved.clear()
        part = partition_model(Mlp(layers=blocks), torch.randn(64, 32), mesh={"tp": 2}, hardware="h100")
        return part.to_json(), len(solved)

    monkeypatch.setattr(elimination, "_solve", count)
    (_, few), (found, many) = plan(4), plan(16)
    monkeypatch.setattr(elimination._Tables, "__init__", forget)
    wanted, without = plan(16)
    assert found == wanted
    assert many == few
    assert without > 8 * many


@pytest.mark.slow
@pytest.mark.parametrize("sketched", [False, True], ids=["dense", "sketched"])
def test_llama_70b_on_512_devices(sketched):
    model, example = llama_70b()
    if sketched:
        model = sketch_skeleton(model, 0.5, progress=False)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    part = partition_model(model, example, devices=512, hardware="h100")
    assert part.mesh.devices == 512
    assert part.mesh.tp in (1, 2, 4, 8)
    held = {name for stage in part.stages for name in stage.parameters}
    assert held == {name for name, _ in model.named_parameters()}
    sizes = {name: 2 * parameter.numel() for name, parameter in model.named_parameters()}
    divided = {name for shard in part.shards for name, dim in shard.parameters.items() if dim is not None}
    own = {name: size // part.mesh.tp if name in divided else size for name, size in sizes.items()}
    for stage in part.stages:
        assert stage.gradient_bytes == sum(own[name] for name in stage.parameters)
        assert stage.optimizer_bytes == 4 * stage.gradient_bytes  # two float32 states of a bfloat16 number
        assert stage.memory_bytes <= 80e9
        assert stage.memory_bytes > stage.memory.states + stage.memory.activations
        shared = (stage.gradient_bytes + stage.optimizer_bytes + stage.parameter_bytes) / part.mesh.dp
        assert stage.memory.states >= 0.99 * shared
    nodes = [name for stage in part.stages for name in stage.nodes]
    assert len(nodes) == len(set(nodes))
    assert numbers * 12 / 512 < max(stage.memory_bytes for stage in part.stages)
    sent = sum(one.intra_node_bytes + one.inter_node_bytes for one in part.traffic)
    assert sent > 512 * 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # kilobytes


def test_the_size_of_a_microbatch_is_chosen_at_one_global_batch():
    """What is fastest of those that fit."""
    model, x = Mlp(layers=2), torch.randn(64, 32)
    options = {"devices": 2, "hardware": cluster(), "global_batch": 256, "recompute": False}
    each = {
        size: partition_model(model, x.repeat(4, 1)[:size], **options).step_seconds for size in (4, 16, 64)
    }
    found = partition_model(model, x, microbatch_sizes=(4, 16, 64), **options)
    assert found.step_seconds == min(each.values())
    size = found.stages[0].inputs[0].shape[0]
    assert each[size] == found.step_seconds
    assert found.mesh.dp * found.microbatches * size == 256
    held = partition_model(model, x[:4], **options).device_memory_bytes
    tight = partition_model(model, x, microbatch_sizes=(64, 4), memory_per_device=held, **options)
    assert tight.device_memory_bytes <= held
    assert tight.step_seconds <= each[4]


def test_sizes_of_microbatches_are_checked():
    model, x = Mlp(), torch.randn(4, 32)
    options = {"devices": 2, "hardware": cluster()}
    with pytest.raises(MeshError, match=r"microbatch_sizes=\(2,\) are compared at one global_batch="):
        partition_model(model, x, microbatch_sizes=(2,), **options)
    with pytest.raises(MeshError, match=r"microbatch_sizes=\(0,\), wanted whole numbers"):
        partition_model(model, x, microbatch_sizes=(0,), global_batch=8, **options)
    with pytest.raises(MeshError, match="no mesh of 2 devices"):
        partition_model(model, x, microbatch_sizes=(3, 5), global_batch=8, **options)
