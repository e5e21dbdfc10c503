"""Stages in shards on the ranks of a tp group, against the model in one process."""

import copy
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import zoo
from parallel.prepared import made
from parallel.ranks import SENDS_ALL
from parallel.training import EAGER
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from panther_compile import partition_model, sketchify
from panther_compile.errors import MeshError
from panther_compile.layers import NarrowLinear, SketchedLinear
from panther_compile.parallel.tensor import (
    join_shards,
    parameter_layouts,
    shard_stage,
    tensor_placements,
)
from panther_compile.partition import Hardware, Link


@dataclass
class Seen:
    """What a job tells: number and kinds of divided layers, collectives, shapes of norms whole and here."""

    shards: int
    kinds: set
    planned: Counter
    norms: list


RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-6}


class Encoder(nn.Module):
    """nn.TransformerEncoder, read in train mode, so that queries, keys and values are one product."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(24, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))


class Dropping(nn.Module):
    """Dropout of what is sharded along features, and of a residual stream."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.down(self.dropout(torch.relu(self.up(self.norm(x))))))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)])

    def forward(self, x):
        x = x + self.layers[1](torch.tanh(self.layers[0](x)))
        return self.layers[2](x)


class Namesakes(nn.Module):
    """Parameters that are called as an input and as results of the graph are."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        for name, size in {"x": 32, "linear": 64, "mul": 64, "add": 32}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, x):
        return self.down(torch.relu(self.up(x * self.x) * self.linear + self.mul)) + self.add


class Halves(nn.Module):
    """Both halves of what each block reads, which are results called as those of a message of several are."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(32, 32) for _ in range(4)) for _ in range(2))

    def forward(self, ids):
        x, scale = self.table(ids).chunk(2, -1)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x) * scale)))
        return x


def build(name, *, sketched=False, double=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "mlp":
            model, inputs = Mlp(), (torch.randn(16, 32),)
        elif name == "encoder":
            model, inputs = Encoder(), (torch.randint(24, (3, 8)),)
        elif name == "namesakes":
            model, inputs = Namesakes(), (torch.randn(16, 32),)
        elif name == "halves":
            model, inputs = Halves(), (torch.randint(24, (3, 8)),)
        else:
            model, inputs = zoo.ZOO[name].build(), zoo.ZOO[name].inputs()
    if sketched == "narrow":
        narrow(model)
    elif sketched:
        model = sketchify(model, ratio=0.5, min_params=0, allow_slower=True, progress=False)
    if double:
        inputs = tree_map(lambda one: one.double() if one.is_floating_point() else one, inputs)
    return model.train().to(torch.float64 if double else torch.float32), inputs


def narrow(model):
    """BERT's values and feed-forward parts at half their features, as data would have it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for layer in model.bert.encoder.layer:
            heads = layer.attention.self.num_attention_heads
            for part, name, reader, reads, count, factors in (
                (layer.attention.self, "value", layer.attention.output, "dense", heads, False),
                (layer.intermediate, "dense", layer.output, "dense", 1, True),
            ):
                writer, after = getattr(part, name), getattr(reader, reads)
                kept = writer.out_features // 2
                inner = nn.Linear(writer.in_features, kept)
                if factors:
                    inner = SketchedLinear.from_dense(inner, rank=kept // 2)
                around = {"heads": count, "padded": count > 1}
                setattr(part, name, NarrowLinear.around(inner, writer, side="out", **around))
                new = NarrowLinear.around(nn.Linear(kept, after.out_features), after, side="in", **around)
                setattr(reader, reads, new)


# Work is dear and messages are cheap, so that small models are divided: with "eager" everything that can be,
# with "usual" what is worth a message of a third of a microsecond for each kilobyte.
HARDWARE = {
    "eager": EAGER,
    "usual": Hardware("usual", 3e9, 1e12, 10**12, Link(3e9, 0.0), Link(3e9, 0.0), launch_seconds=0.0),
}


class Bytes(TorchDispatchMode):
    """Kind and bytes of every collective, of the whole tensor; shapes that layer norms are given."""

    def __init__(self):
        super().__init__()
        self.seen, self.norms = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            kind = name.removesuffix("_into_tensor").removesuffix("_tensor")
            whole = args[0] if kind == "reduce_scatter" else result
            self.seen.append((kind, whole.numel() * whole.element_size()))
        if name == "aten::native_layer_norm":
            self.norms.append(tuple(args[0].shape))
        return result


def close(found, wanted, what, scale=None):
    scale = max(float(wanted.abs().max()), 1e-30) if scale is None else scale
    error = float((found - wanted).abs().max()) / scale
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    assert error <= RELATIVE[wanted.dtype], f"{what}: relative error {error:.2e}"


# What `check` asks for, where it is not given.
USUAL = {"sketched": False, "double": False, "hardware": "eager", "pp": 1, "sequence": "auto"}


def plan_shards(name, tp, sketched, double, hardware, pp, sequence):
    """A model, example inputs, and the plan of it."""
    model, inputs = build(name, sketched=sketched, double=double)
    mesh = {"pp": pp, "tp": tp}
    part = partition_model(model, inputs, mesh=mesh, hardware=HARDWARE[hardware], sequence_parallel=sequence)
    return model, inputs, part


def check(rank, *, name, **options):
    """Outputs, loss, every gradient and every collective."""
    tp = dist.get_world_size()
    model, inputs, part = made(plan_shards, name=name, tp=tp, **{**USUAL, **options})
    reference = copy.deepcopy(model)
    staged = part.split()
    shards = [shard_stage(stage, part, index, dist.group.WORLD) for index, stage in enumerate(staged.stages)]
    keywords, arguments = (inputs, ()) if isinstance(inputs, dict) else ({}, inputs)

    with Bytes() as whole_norms:
        wanted = zoo.call(reference, inputs)
    wanted_loss = zoo.scalar(wanted)
    wanted_loss.backward()

    counts = []
    values = staged.flatten_inputs(*arguments, **keywords)
    comm = CommDebugMode()
    with comm, Bytes() as seen:
        for stage in shards:
            values = stage(*values)
        found = staged.unflatten_outputs(values)
        loss = zoo.scalar(found)
        counts.append(len(seen.seen))
        loss.backward()

    for before, after in zip(zoo.tensors(wanted), zoo.tensors(found), strict=True):
        close(after, before, "output")
    close(loss, wanted_loss, "loss")
    layouts = parameter_layouts(part)
    sizes = dict(reference.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in sizes.values() if one.grad is not None)
    for index, stage in enumerate(shards):
        assert {own for own, _ in stage.named_parameters()} == set(part.stages[index].parameters)
    gradients = {}
    for own, parameter in (item for stage in shards for item in stage.named_parameters()):
        if parameter.grad is not None:
            gradients[own] = gradients.get(own, 0) + parameter.grad
    for own, gradient in gradients.items():
        layout, whole = layouts[own], sizes[own].grad
        assert whole is not None, own
        expected = whole if layout is None else layout.local(whole, tp, rank)
        # Keys have gradients that cancel out: they are compared on the scale of the model.
        close(gradient, expected, own, max(float(whole.abs().max()), 1e-2 * largest))
        if layout is None:
            others = [torch.empty_like(gradient) for _ in range(tp)]
            dist.all_gather(others, gradient.contiguous())
            assert all(torch.equal(others[0], other) for other in others), own
    missing = {own for own, one in sizes.items() if one.grad is not None and one.grad.any()}
    assert missing <= set(gradients) | set(part.unused), missing - set(gradients)

    planned = sorted((one.kind, one.bytes) for one in part.collectives)
    assert sorted(seen.seen) == planned
    forward = sorted((one.kind, one.bytes) for one in part.collectives if one.phase == "forward")
    assert sorted(seen.seen[: counts[0]]) == forward
    by_kind = {str(op): count for op, count in comm.get_comm_counts().items()}
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        seen_count = sum(count for op, count in by_kind.items() if kind in op)
        assert seen_count == sum(one.kind == kind for one in part.collectives), by_kind
    state = {own: one for stage in shards for own, one in stage.named_parameters()}
    for own, tensor in state.items():
        layout = layouts[own]
        full = tensor.detach() if layout is None else join_shards(tensor.detach(), layout, dist.group.WORLD)
        assert torch.equal(full, sizes[own]), own
        assert tensor.numel() * (1 if layout is None else tp) == sizes[own].numel(), own
    return Seen(
        len(part.shards),
        {shard.kind for shard in part.shards},
        Counter((one.phase, one.kind) for one in part.collectives),
        list(zip(whole_norms.norms, seen.norms, strict=True)),
    )


def check_dropout(rank, *, sequence):
    """Shards are dropped out by parts of the mask that one process draws."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Dropping().train(), torch.randn(4, 8, 16)
    part = partition_model(model, x, mesh={"tp": 2}, hardware=HARDWARE["eager"], sequence_parallel=sequence)
    assert bool(part.sequence) == sequence
    dropped = [node for node in part.stage_of if node.startswith("dropout")]
    assert set(dropped) <= set(part.sharding.plan.steps) or not sequence
    assert dropped[0] in part.sharding.plan.steps
    stage = shard_stage(part.split().stages[0], part, 0, dist.group.WORLD)
    found, masks = {}, []
    for name, run in (("shards", lambda: stage(x)[0]), ("whole", lambda: model(x))):
        torch.manual_seed(1)
        for parameter in (*model.parameters(), *stage.parameters()):
            parameter.grad = None
        out = run()
        out.square().sum().backward()
        holder = stage if name == "shards" else model
        found[name] = out.detach(), {own: one.grad for own, one in holder.named_parameters()}
        masks.append(torch.get_rng_state())
    assert torch.equal(*masks)
    close(found["shards"][0], found["whole"][0], "output")
    layouts = parameter_layouts(part)
    for own, gradient in found["shards"][1].items():
        whole = found["whole"][1][own]
        close(gradient, whole if layouts[own] is None else layouts[own].local(whole, 2, rank), own)
    return True


def plan_replicas():
    """A model, example inputs, and the plan of two replicas of two shards."""
    model, inputs = build("encoder")
    mesh = {"dp": 2, "tp": 2}
    return model, inputs, partition_model(model, inputs, mesh=mesh, hardware=HARDWARE["eager"])


def check_replicas(rank, *, data_parallel):
    """Two replicas of two shards: gradients are means, and a checkpoint can hold shards as DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, (ids,), part = made(plan_replicas)
    reference = copy.deepcopy(model)
    sharded = shard_stage(part.split().stages[0], part, 0, mesh["tp"])
    placements = tensor_placements(part)
    assert any(isinstance(one, Shard) for one in placements.values())
    assert any(layout is not None and layout.blocks == 3 for layout in parameter_layouts(part).values())
    for own, tensor in sharded.named_parameters():
        if isinstance(placements[own], _StridedShard) and not SENDS_ALL:
            continue  # torch 2.11 cannot gather it
        whole = DTensor.from_local(tensor.detach(), mesh["tp"], [placements[own]]).full_tensor()
        assert torch.equal(whole, dict(reference.named_parameters())[own]), own
    if data_parallel == "ddp":
        wrapped = DistributedDataParallel(sharded, process_group=mesh.get_group("dp"))
    else:
        wrapped = fully_shard(sharded, mesh=mesh["dp"])
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    batches = [ids, ids.flip(0).roll(1, 1)]
    zoo.scalar(wrapped(batches[dp])).backward()
    for batch in batches:
        (zoo.scalar(reference(batch)) / 2).backward()
    wholes = dict(reference.named_parameters())
    for own, tensor in sharded.named_parameters():
        gradient = tensor.grad.full_tensor() if data_parallel == "fsdp" else tensor.grad
        layout, whole = parameter_layouts(part)[own], wholes[own].grad
        close(
            gradient,
            whole if layout is None else layout.local(whole, 2, tp),
            own,
            float(whole.abs().max()) + 1e-3,
        )
    return True


def check_refusals(rank):
    """A group of another size, and a stage of another place."""
    model, inputs = build("mlp")
    hardware = HARDWARE["eager"]
    four = partition_model(model, inputs, mesh={"tp": 4}, hardware=hardware)
    with pytest.raises(MeshError, match="the tp group is of 2 ranks, and the partition of 4"):
        shard_stage(four.split().stages[0], four, 0, dist.group.WORLD)
    part = partition_model(model, inputs, mesh={"pp": 2, "tp": 2}, hardware=hardware)
    with pytest.raises(MeshError, match=r"stage 1 takes .*, and the module given takes \['x'\]"):
        shard_stage(part.split().stages[0], part, 1, dist.group.WORLD)
