"""Trainings that stop, are killed and go on; each function runs on every rank.

As a script under torchrun this is a training whose last rank kills itself once, by signal 9.
"""

import copy
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel.prepared import made
from parallel.training import build, draw, joined, loss_fn, partition
from torch import nn

from panther_compile import TrainingCheckpoints, parallelize_model, partition_model, read_state_dict
from panther_compile.errors import CheckpointError, CheckpointMismatchError, ConfigError, RankMismatchError
from panther_compile.layers import SketchedLinear

COUNT, ROWS = 4, 64


class Noisy(nn.Module):
    """Dropout draws random numbers, and each replica has batch statistics of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.3)
        self.rest = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        for layer in self.rest:
            x = torch.tanh(layer(x))
        return x


def plan(name, mesh, part=None):
    """A model, example inputs, and the plan of it."""
    if name == "noisy":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, inputs = Noisy().train(), (torch.randn(2, 16),)
    else:
        model, inputs = build(name)
    return model, inputs, partition(model, inputs, mesh, COUNT, **(part or {}))


def make(name, mesh, part=None, optimizer=torch.optim.AdamW, **options):
    model, inputs, planned = made(plan, name=name, mesh=mesh, part=part)
    engine = parallelize_model(model, planned, loss_fn=loss_fn, **options)
    decayed = [p for key, p in engine.named_parameters() if key.endswith("weight")]
    rest = [p for key, p in engine.named_parameters() if not key.endswith("weight")]
    groups = [{"params": decayed, "lr": 3e-3}, {"params": rest, "lr": 1e-3, "weight_decay": 0.0}]
    return engine, optimizer([group for group in groups if group["params"]]), inputs


class Order:
    """The order of the data: another permutation each epoch."""

    def __init__(self, epoch=0, place=0):
        self.epoch, self.place = epoch, place

    def take(self, count):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch))
        rows = order[self.place : self.place + count].tolist()
        self.place += count
        if self.place >= ROWS:
            self.epoch, self.place = self.epoch + 1, 0
        return rows

    def state(self):
        return {"epoch": self.epoch, "place": self.place}


def go_on(rank, *, steps, folder=None, save_every=1, kill_at=None, name="noisy", mesh=None, **options):
    """Train up to a step, from the last checkpoint if there is one; losses and rows of each step."""
    engine, optimizer, _ = make(name, mesh or {"dp": 2}, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(5))
    order, seen, start = Order(), {}, 0
    checkpoints = TrainingCheckpoints(folder) if folder else None
    resumed = checkpoints.load(engine, optimizer) if checkpoints else None
    if resumed:
        start, order = resumed.step, Order(**resumed.extra["order"])
        scheduler.load_state_dict(resumed.extra["scheduler"])
    dp = engine.devices.shape.dp
    for step in range(start, steps):
        rows = order.take(2 * COUNT * dp)[engine.devices.dp :: dp]
        loss = engine.step(data[rows], data[rows].mean(1))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen[step] = float(loss).hex(), rows
        if checkpoints and (step + 1) % save_every == 0:
            extra = {"order": order.state(), "scheduler": scheduler.state_dict()}
            checkpoints.save(engine, optimizer, step=step + 1, extra=extra)
        if step == kill_at:
            checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    if checkpoints:
        checkpoints.wait()
    return {"start": start, "seen": seen, "state": engine.state_dict(full=True)}


def save(rank, *, folder, steps=2, name="gpt2", **options):
    """Train and save; the model and the optimizer's state as they were."""
    engine, optimizer, inputs = make(name, **options)
    checkpoints = TrainingCheckpoints(folder)
    for step in range(steps):
        train(engine, optimizer, inputs, step)
        checkpoints.save(engine, optimizer, step=step + 1, extra={"note": [step, "ä"]})
    state = whole_state(engine, optimizer)  # while the last checkpoint is written
    checkpoints.wait()
    return state


def load(rank, *, folder, steps, name="gpt2", **options):
    """Load, and train a step further."""
    engine, optimizer, inputs = make(name, **options)
    resumed = TrainingCheckpoints(folder).load(engine, optimizer)
    assert (resumed.step, resumed.extra) == (steps, {"note": [steps - 1, "ä"]})
    loaded = whole_state(engine, optimizer)
    train(engine, optimizer, inputs, steps)
    return loaded


def train(engine, optimizer, inputs, step):
    batch, target = draw(inputs, COUNT, 10 * step + engine.devices.dp)
    engine.step(**batch, target=target) if isinstance(batch, dict) else engine.step(*batch, target)
    optimizer.step()
    optimizer.zero_grad()


def whole_state(engine, optimizer):
    """The model, and the state and options of the optimizer for the parameters of this rank."""
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    state, options = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            options[name] = {key: value for key, value in group.items() if key != "params"}
            for key, value in optimizer.state[parameter].items():
                is_shard = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                state[name, key] = joined(engine, name, value) if is_shard else value
    model = {name: value.clone() for name, value in engine.state_dict(full=True).items()}
    return {"model": model, "optimizer": copy.deepcopy(state), "options": options}


def newest(rank, folder):
    """The checkpoint that all ranks agree on."""
    return TrainingCheckpoints(folder).latest().name


def keeping(rank, folder, other):
    """Two stay; a step that is saved again stands beside the first; what is unfinished is removed."""
    engine, optimizer, inputs = make("mlp", {"dp": 2}, data_parallel="fsdp")
    checkpoints = TrainingCheckpoints(folder, keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.load(engine, optimizer) is None
    for step in (0, 1, 2, 2):  # before the first update there is no state of the optimizer
        checkpoints.save(engine, optimizer, step=step)
        train(engine, optimizer, inputs, step)
    checkpoints.wait()
    assert names_in(folder) == ["step-000000002", "step-000000002.1"]
    assert checkpoints.latest().name == "step-000000002.1"
    if rank == 0:
        (Path(folder) / "step-000000002.1" / "__1_0.distcp").unlink()
        killed = Path(folder) / ".saving-killed"
        (killed / "checkpoint").mkdir(parents=True)
        (killed / ".in-use").touch()
    dist.barrier()
    again = TrainingCheckpoints(folder, keep=2)
    assert names_in(folder) == ["step-000000002", "step-000000002.1"]
    again.save(engine, optimizer, step=3)
    again.wait()
    # A broken one does not count.
    later = ((2, ""), (2, ".1"), (3, ""))
    assert names_in(folder) == [f"step-{at:09d}" + end for at, end in later]
    # One of an earlier step stays as long as it is the last that was written.
    for step in (0, 1):
        again.save(engine, optimizer, step=step)
        again.wait()
        assert names_in(folder) == [f"step-{at:09d}" + end for at, end in ((step, ""), *later)]
    aside = Path(f"{folder}.aside")
    if rank == 0:
        Path(folder).rename(aside)
    dist.barrier()
    again.save(engine, optimizer, step=4)
    with pytest.raises(CheckpointError, match=r"No such file or directory: .*saving"):
        again.wait()
    if rank == 0:
        aside.rename(folder)
    dist.barrier()
    again.save(engine, optimizer, step=4 + rank)
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] save another step"):
        again.wait()
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        again.save(engine, optimizer, step=4, extra={"order": {1, 2}})
    Path(other).touch()
    with pytest.raises(CheckpointError, match="exists"):
        TrainingCheckpoints(other)


def names_in(folder):
    """On every rank, before any of them goes on."""
    found = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    return found


def mismatches(rank, folder):
    """What differs is named, on every rank."""
    engine, optimizer, _ = make("mlp", {"pp": 2})
    checkpoints = TrainingCheckpoints(folder)
    checkpoints.save(engine, optimizer, step=1)
    engine, _, _ = make("noisy", {"pp": 2})
    with pytest.raises(CheckpointMismatchError, match=r"it lacks first.bias.* lacks layers.0.bias, .*7 more"):
        checkpoints.load(engine, torch.optim.AdamW(engine.parameters()))
    engine, _, _ = make("mlp", {"dp": 2}, data_parallel="fsdp")
    with pytest.raises(CheckpointMismatchError, match="the optimizer was AdamW, and is SGD"):
        checkpoints.load(engine, torch.optim.SGD(engine.parameters()))
    with pytest.raises(CheckpointMismatchError, match="holds parameters that had 2 different"):
        checkpoints.load(engine, torch.optim.AdamW(engine.parameters()))
    checkpoints.load(engine, optimizer_of_groups(engine))


def optimizer_of_groups(engine):
    weights = [p for key, p in engine.named_parameters() if key.endswith("weight")]
    rest = [p for key, p in engine.named_parameters() if not key.endswith("weight")]
    return torch.optim.AdamW([{"params": weights}, {"params": rest}])


def main(folder, steps, kill_at):
    rank = int(os.environ["RANK"])
    first, last = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", int(os.environ["WORLD_SIZE"]) - 1
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    kill = int(kill_at) if first and rank == last else None
    found = go_on(rank, steps=int(steps), folder=folder, kill_at=kill, data_parallel="ddp")
    del found["state"]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])


def other_pivots(rank, folder):
    """Factors of the same shapes that are read another way are refused: a fit elsewhere may make such."""

    def of(start, mesh):
        torch.manual_seed(0)
        layers = [SketchedLinear(12, 12, 4, form="pivoted", start=start), nn.Linear(12, 8)]
        model = nn.Sequential(*layers)
        part = partition_model(model, (torch.randn(8, 12),), mesh=mesh, microbatches=2)
        kind = "ddp" if "dp" in mesh else None
        engine = parallelize_model(model, part, data_parallel=kind, loss_fn=nn.functional.mse_loss)
        return model, engine, torch.optim.AdamW(engine.parameters())

    checkpoints = TrainingCheckpoints(folder)
    model, engine, optimizer = of(8, {"pp": 2})
    checkpoints.save(engine, optimizer, step=1)
    checkpoints.wait()
    _, *same = of(8, {"dp": 2})
    assert checkpoints.load(*same).step == 1
    other, *others = of(0, {"dp": 2})
    with pytest.raises(CheckpointMismatchError, match=r"0: .* of another sketch \(start 8, here 0\)"):
        checkpoints.load(*others)
    for state in (read_state_dict(folder), engine.state_dict(full=True)):
        model.load_state_dict(state)
        same[0].load_state_dict(state)
        for one in (other, others[0]):
            with pytest.raises(
                CheckpointMismatchError, match=r"0.*: .* of another sketch \(start 8, here 0\)"
            ):
                one.load_state_dict(state)
