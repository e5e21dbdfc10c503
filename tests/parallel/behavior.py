"""What an engine does beside its steps; each function runs on every rank."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import zoo
from parallel.prepared import made
from parallel.training import (
    build,
    call_engine,
    chunks,
    draw,
    joined,
    loss_fn,
    optimizer_of,
    partition,
    plan_training,
)
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from panther_compile import parallelize_model, partition_model
from panther_compile.errors import (
    BatchError,
    CheckpointMismatchError,
    CommunicationError,
    ConfigError,
    ParallelError,
    ProcessGroupError,
    RankMismatchError,
    ScheduleError,
)
from panther_compile.parallel.agreement import check_process_group


def make(name="mlp", mesh=None, part=None, count=4, **options):
    model, inputs, plan = made(plan_training, **asked(name, mesh, part, count))
    return model, inputs, parallelize_model(model, plan, **{"loss_fn": loss_fn, **options})


def asked(name="mlp", mesh=None, part=None, count=4, **_):
    """Of `plan_training`, by what `make` is given."""
    return {"name": name, "mesh": mesh or {"pp": 2}, "part": part, "count": count}


def differing_plans(rank):
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] were given another plan"):
        make(count=4 + 4 * rank)
    with pytest.raises(RankMismatchError, match=r"ranks \[1\]"):
        make(schedule=("gpipe", "1f1b")[rank])
    with pytest.raises(RankMismatchError, match=r"ranks \[1\]"):
        make(mesh={"pp": 2 + rank})
    for change in (
        lambda model: model.layers[0].requires_grad_(rank == 0),
        lambda model: model.train(rank == 0),
    ):
        model, inputs = build("mlp")
        change(model)
        plan = partition(model, inputs, {"dp": 2})
        with pytest.raises(RankMismatchError, match=r"ranks \[1\] .* with the same parameters frozen"):
            parallelize_model(model, plan, data_parallel="ddp", loss_fn=loss_fn)


def refusals(rank):
    with pytest.raises(ProcessGroupError, match=r"gloo, carries only tensors on .*cpu"):
        check_process_group(torch.device("xpu"))
    model, inputs = build("mlp")
    pipeline, replicas = (partition(model, inputs, mesh) for mesh in ({"pp": 2}, {"dp": 2}))
    for plan, options, error, text in (
        (replicas, {}, ConfigError, "with dp=2, data_parallel must be"),
        (replicas, {"data_parallel": "horovod"}, ConfigError, "'horovod', wanted one of None, 'ddp', 'fsdp'"),
        (
            replicas,
            {"data_parallel": "fsdp", "shard_size": 3},
            ConfigError,
            "shard_size=3 does not divide dp=2",
        ),
        (
            replicas,
            {"data_parallel": "ddp", "reshard_after_forward": True},
            ConfigError,
            "is an option of data_parallel='fsdp', and it is 'ddp'",
        ),
        (pipeline, {"schedule": "chimera"}, ConfigError, "'chimera', wanted one of"),
        (
            pipeline,
            {"schedule": "zbv"},
            ScheduleError,
            "two stages on each device, and the partition has 2 stages",
        ),
    ):
        with pytest.raises(error, match=text):
            parallelize_model(model, plan, loss_fn=loss_fn, **options)
    with pytest.raises(ProcessGroupError, match="3 devices, and the process group has 2 ranks"):
        make(mesh={"pp": 3})
    with pytest.raises(ScheduleError, match="runs one stage on each device, and the partition has 4 stages"):
        make(part={"schedule": "interleaved"}, schedule="1f1b")
    with pytest.raises(ScheduleError, match="a microbatch for each of 2 stages, and the partition has 1"):
        make(count=1)
    with pytest.raises(ParallelError, match="made from another model"):
        parallelize_model(copy.deepcopy(model), pipeline)
    engine = parallelize_model(model, pipeline)
    with pytest.raises(ParallelError, match="give loss_fn"):
        engine.step(torch.randn(8, 16), torch.randn(8))


def batches(rank):
    _, _, engine = make()
    for rows, text in (
        (10, "a batch of 10; .* 4 microbatches of 2, 8 in all"),
        (12, "a batch of 12; .* 4 microbatches of 2, 8 in all"),
        (0, "a batch of 0; .* 4 microbatches of 2"),
    ):
        with pytest.raises(BatchError, match=text):
            engine.step(torch.randn(rows, 16), torch.randn(rows))
    with pytest.raises(BatchError, match=r"the shape \(8, 15\)"):
        engine.step(torch.randn(8, 15), torch.randn(8))
    with pytest.raises(BatchError, match=r"the target has the shape \(7,\)"):
        engine.step(torch.randn(8, 16), torch.randn(7))
    engine.step(torch.randn(8, 16), torch.randn(8))


def silence(rank, where, absent=1, call="step", **options):
    """One rank stays away; the others say so and in what, and do not wait for ever."""
    _model, inputs, engine = make(**options)
    batch, target = draw(inputs, 4, 0)
    call_engine(engine.step, batch, target)
    start, store = time.monotonic(), _get_default_store()
    if rank != absent:
        with pytest.raises(CommunicationError, match=f"rank {rank} .*{where[rank]}: another") as caught:
            call_engine(engine.step, batch, target) if call == "step" else call_engine(engine.predict, batch)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert time.monotonic() - start < 40
        store.set(f"rank {rank} has heard", "")
    else:
        store.wait([f"rank {other} has heard" for other in where], timedelta(seconds=40))


def states(rank, **options):
    """Names and values go to the user's model and back, tied and unused ones too."""
    _, inputs, engine = make(**options)
    start = build(options["name"])[0]
    dp = engine.devices.dp
    optimizer = optimizer_of(engine.parameters())
    for step in range(2):
        batch, target = draw(inputs, 4, 10 * step + dp)
        call_engine(engine.step, batch, target)
        optimizer.step()
        optimizer.zero_grad()
    trained = engine.state_dict(full=True)
    assert list(trained) == list(start.state_dict())
    after = copy.deepcopy(start)
    after.load_state_dict(trained)
    batch, target = draw(inputs, 4, 99)
    with torch.no_grad():
        parts = [zoo.tensors(zoo.call(after, part))[0] for part in chunks(batch, 4)]
    output = zoo.tensors(call_engine(engine.predict, batch, everywhere=True))[0]
    torch.testing.assert_close(output, torch.cat(parts))
    local = engine.state_dict()
    assert set(local) < set(trained) or engine.devices.shape.pp == 1
    engine.load_state_dict(local)
    assert all(torch.equal(trained[name], value) for name, value in engine.state_dict(full=True).items())
    engine.load_state_dict(start.state_dict())
    restored = engine.state_dict(full=True)
    for name, value in start.state_dict().items():
        assert torch.equal(restored[name], value), name
    with pytest.raises(CheckpointMismatchError, match="not given"):
        engine.load_state_dict({})


def clipping(rank, **options):
    """The norm is the whole model's; two steps without an update between add up."""
    _, inputs, engine = make(**options)
    shape = engine.devices.shape
    reference = build(options["name"])[0]
    for step in range(2):
        for replica in range(shape.dp):
            batch, target = draw(inputs, 4, 10 * step + replica)
            for part, wanted in zip(chunks(batch, 4), target.chunk(4), strict=True):
                (loss_fn(zoo.call(reference, part), wanted) / (4 * shape.dp)).backward()
        batch, target = draw(inputs, 4, 10 * step + engine.devices.dp)
        call_engine(engine.step, batch, target)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(
            joined(engine, name, parameter.grad), gradients[name], rtol=1e-4, atol=1e-5
        )
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(engine.clip_grad_norm_(0.1), wanted, rtol=1e-4, atol=0)
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(
            joined(engine, name, parameter.grad), gradients[name], rtol=1e-4, atol=1e-6
        )
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.parameters())


class Residual(nn.Module):
    """Dropout of what every rank of a tp group has, and of what is divided over it."""

    def __init__(self, inner):
        super().__init__()
        self.norm = nn.LayerNorm(15)  # not divisible, nor are 5 rows: what is added up stays whole
        self.up, self.down, self.head = nn.Linear(15, 64), nn.Linear(64, 15), nn.Linear(15, 15)
        self.inner, self.outer = nn.Dropout(inner), nn.Dropout(0.5)

    def forward(self, x):
        x = x + self.outer(self.down(self.inner(torch.relu(self.up(self.norm(x))))))
        return self.head(x)


def dropout_on_shards(rank, *, mesh, inner=0.0, **options):
    """Ranks were seeded each its own way, and drop out alike; what is whole as one process does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = Residual(inner).train(), (torch.randn(5, 15),)
    plan = partition(model, inputs, mesh)
    assert {shard.name for shard in plan.shards} == {"up", "down"}
    reference = copy.deepcopy(model)
    engine = parallelize_model(model, plan, loss_fn=loss_fn, **options)
    state = torch.get_rng_state()
    batch, target = draw(inputs, 4, 0)
    loss = call_engine(engine.step, batch, target)
    gradients = {name: joined(engine, name, one.grad) for name, one in engine.named_parameters()}
    torch.set_rng_state(state)
    losses = [
        loss_fn(zoo.call(reference, part), wanted) / 4
        for part, wanted in zip(chunks(batch, 4), target.chunk(4), strict=True)
    ]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(loss, torch.stack(losses).sum().detach())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    loss = call_engine(engine.evaluate, batch, target)
    assert not torch.equal(loss, call_engine(engine.evaluate, batch, target))  # dropout is on
    engine.eval()
    loss = call_engine(engine.evaluate, batch, target)
    assert torch.equal(loss, call_engine(engine.evaluate, batch, target))


class Noisy(nn.Module):
    """Dropout, batch norm, attention with dropout, an integer input and one that is no batch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, table, scale=1.0):
        x = self.embedding(ids) + table
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.mean(1))
        return {"logits": self.head(self.dropout(x)) * scale, "ids": ids}


def modes(rank):
    """The graph of a model in train mode goes to eval and back; that of one in eval mode stays there."""
    torch.manual_seed(0)
    model = Noisy().train()
    ids, table = torch.randint(0, 16, (2, 5)), torch.randn(5, 8)
    wide, target = torch.randint(0, 16, (8, 5)), torch.randn(8)

    def loss(output, wanted):
        return (output["logits"].mean(1) - wanted).square().mean()

    options = {"mesh": {"pp": 2}, "hardware": "cpu", "microbatches": 4}
    part = partition_model(model, (ids, table), **options)
    engine = parallelize_model(model, part, loss_fn=loss)
    seen = [engine.predict(wide, table, everywhere=True)["logits"] for _ in range(2)]
    assert not torch.equal(*seen)  # dropout is on
    engine.step(wide, table, target)
    counted = [b for n, b in engine.state_dict(full=True).items() if n.endswith("num_batches_tracked")]
    assert [int(count) for count in counted] == [12]
    engine.eval()
    plain = copy.deepcopy(model)
    plain.load_state_dict(engine.state_dict(full=True))
    with torch.no_grad():
        wanted = plain.eval()(wide, table)
    output = engine.predict(wide, table, everywhere=True)
    torch.testing.assert_close(output["logits"], wanted["logits"])
    assert torch.equal(output["ids"], wide)
    torch.testing.assert_close(engine.evaluate(wide, table, target), loss(wanted, target))
    counted = [b for n, b in engine.state_dict(full=True).items() if n.endswith("num_batches_tracked")]
    assert [int(count) for count in counted] == [12]
    only_last = engine.predict(wide, table)
    assert (only_last is None) == (rank == 0)
    engine.train()
    assert not torch.equal(engine.predict(wide, table, everywhere=True)["logits"], output["logits"])

    part = partition_model(model.eval(), (ids, table), **options)
    engine = parallelize_model(model, part, loss_fn=loss)
    engine.step(wide, table, target)
    with pytest.raises(ParallelError, match=r"call model.train\(\) before"):
        engine.train()


def structured_targets(rank):
    """Targets of any structure, given by name; rows meet their own targets."""
    _model, _inputs, engine = make(
        loss_fn=lambda output, target: (output - target["wanted"]).square().mean() * target["weight"]
    )
    x, wanted = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(64.0).view(8, 8)
    loss = engine.step(x, target={"wanted": wanted, "weight": 2.0})
    reference = build("mlp")[0]
    torch.testing.assert_close(loss, (reference(x) - wanted).square().mean() * 2)


def other_dtypes(rank):
    """Torch's FSDP gathers in the dtype of the first step, and stages send that of the plan."""
    for options in ({"mesh": {"dp": 2}, "data_parallel": "fsdp"}, {"mesh": {"pp": 2}}):
        *_, engine = make(**options)
        batch = torch.randn(8, 16), torch.randn(8)
        engine.float().to("cpu").step(*batch)
        for dtype in (torch.float64, torch.bfloat16):
            with pytest.raises(ParallelError, match=rf"is torch.float32 here, and {dtype} is asked for"):
                engine.to(dtype)
        engine.step(*batch)
    *_, engine = make(mesh={"dp": 2}, data_parallel="ddp")
    engine.double().step(*(one.double() for one in batch))


def wrong_losses(rank, where):
    """A loss that is no number is named where it is made; the other rank waits, and says for what."""
    _, _, engine = make(loss_fn=lambda output, target: (output.mean(1) - target).square())
    text = (f"{where}.*: another rank did not answer", "loss_fn gave a tensor")[rank]
    with pytest.raises((CommunicationError, ParallelError)[rank], match=text):
        engine.step(torch.randn(8, 16), torch.randn(8))
