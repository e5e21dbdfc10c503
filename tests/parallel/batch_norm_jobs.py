"""Batch norms over all replicas, beside one process on the joined batch; each function runs on every rank."""

import copy

import pytest
import torch
import torch.nn.functional as F
from parallel.training import joined, partition
from torch import nn

from panther_compile import parallelize_model
from panther_compile.errors import BatchError, ConfigError

MICROBATCHES = 2


class Normed(nn.Module):
    """Batch norms behind a convolution and a layer; products wide enough to be divided."""

    def __init__(self):
        super().__init__()
        self.conv, self.first = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
        self.up, self.second = nn.Linear(16, 32), nn.BatchNorm1d(32, affine=False)
        self.down, self.head = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.tanh(self.first(self.conv(x))).flatten(1)
        return self.head(torch.tanh(self.down(torch.tanh(self.second(self.up(x))))))


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Normed().double(), torch.randn(4, 2, 4, 4).double()


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def summed(output, target):
    return (output - target).square().sum()


def like_one_process(rank, *, layouts, rows=(8, 8)):
    """Losses, gradients and running statistics are those of one process; rows differ over replicas."""
    for mesh, data_parallel in layouts:
        _like_one_process(mesh, data_parallel, rows)


def _like_one_process(mesh, data_parallel, rows):
    model, example = build()
    reference = copy.deepcopy(model)
    plan = partition(model, (example,), mesh, count=MICROBATCHES)
    engine = parallelize_model(
        model,
        plan,
        loss_fn=summed,
        count_tokens=torch.numel,
        sync_batchnorm=True,
        data_parallel=data_parallel,
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        xs = [3 * torch.randn(size, 2, 4, 4, generator=generator).double() + 1 for size in rows]
        targets = [torch.randn(size, 4, generator=generator).double() for size in rows]
        engine.zero_grad()
        reference.zero_grad()
        loss = engine.step(xs[engine.devices.dp], targets[engine.devices.dp])
        total = sum(target.numel() for target in targets)
        wanted = torch.zeros((), dtype=torch.float64)
        for part in range(MICROBATCHES):
            # One microbatch of every replica, in one batch.
            x, target = (
                torch.cat([one.tensor_split(MICROBATCHES)[::-1][part] for one in found])
                for found in ([x.flip(0) for x in xs], [target.flip(0) for target in targets])
            )
            loss_of_part = summed(reference(x), target) / total
            loss_of_part.backward()
            wanted += loss_of_part.detach()
        near(loss, wanted)
        gradients = dict(reference.named_parameters())
        for name, parameter in engine.named_parameters():
            near(joined(engine, name, parameter.grad), gradients[name].grad)
    state = engine.state_dict(full=True)
    for name, value in reference.named_buffers():
        near(state[name], value)
    engine.eval()
    near(engine.predict(xs[0], everywhere=True), reference.eval()(xs[0]).detach())


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return F.batch_norm(self.linear(x), None, None, training=True)


def refusals(rank):
    """What is not synchronised is named; so are replicas that would wait for each other."""
    asked = {"data_parallel": "ddp", "sync_batchnorm": True}
    for model, example, text in (
        (nn.Sequential(nn.Conv2d(2, 4, 3), Own(4)), torch.randn(4, 2, 4, 4), "1 is a Own, whose own forward"),
        (Calls(), torch.randn(4, 4), r"batch_norm is a call of F.batch_norm in the model's own code"),
    ):
        with pytest.raises(ConfigError, match=text):
            parallelize_model(model, partition(model, (example,), {"dp": 2}), **asked)
    model, example = build()
    plan = partition(model, (example,), {"dp": 2}, count=4)
    engine = parallelize_model(model, plan, loss_fn=summed, count_tokens=torch.numel, **asked)
    rows = (8, 3)[rank]
    with pytest.raises(BatchError, match=r"different numbers of microbatches, .* and 3\.5 on average"):
        engine.step(torch.randn(rows, 2, 4, 4).double(), torch.randn(rows, 4).double())
