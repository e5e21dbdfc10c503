"""Parameters that get no gradient, complex ones, and what is refused; each function runs on every rank."""

import copy

import pytest
import torch
import zoo
from parallel.training import OneProcess, draw, joined, loss_fn, partition
from torch import nn

from panther_compile import parallelize_model, partition_model
from panther_compile.errors import BatchError, CheckpointMismatchError, ParallelError


def layers(count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)))


class Odd(nn.Module):
    """A frozen weight at both ends, a branch on each side of a `detach`, a parameter that nothing reads."""

    def __init__(self, is_complex):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.first.weight.requires_grad_(False)
        self.last.weight = self.first.weight
        self.middle, self.side, self.idle, self.unread = layers(2), layers(2), layers(2), nn.Linear(3, 3)
        self.phase = nn.Parameter(torch.randn(9, dtype=torch.cdouble)) if is_complex else None

    def forward(self, x):
        y = self.middle(torch.tanh(self.first(x)))
        y = y + self.side(y.detach()) + self.idle(y).detach()
        if self.phase is not None:
            y = torch.fft.irfft(torch.fft.rfft(y) * self.phase, n=16)
        return self.last(y)


def build_odd(is_complex):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Odd(is_complex).double(), (torch.randn(2, 16, dtype=torch.double),)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)


def odd_parameters(rank, *, mesh, is_complex=False, **options):
    """Gradients are there, or not, and parameters move, or not, as in one process."""
    model, inputs = build_odd(is_complex)
    start = copy.deepcopy(model.state_dict())
    plan = partition(model, inputs, mesh, 2)
    assert ("pp" in mesh) == any(one.name == "first.weight" for one in plan.shared)
    reference = OneProcess(model, mesh.get("dp", 1), 2, adamw)
    engine = parallelize_model(model, plan, loss_fn=loss_fn, **options)
    optimizer = adamw(engine.parameters())
    for step in range(2):
        batches = [draw(inputs, 2, 10 * step + replica) for replica in range(mesh.get("dp", 1))]
        reference.backward(batches)
        batch, target = batches[engine.devices.dp]
        engine.step(*batch, target)
        own = dict(reference.models[engine.devices.dp].named_parameters())
        for name, parameter in engine.named_parameters():
            assert (parameter.grad is None) == (own[name].grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(joined(engine, name, parameter.grad), own[name].grad)
        wanted = [nn.utils.clip_grad_norm_(one.parameters(), 0.01) for one in reference.models]
        torch.testing.assert_close(engine.clip_grad_norm_(0.01), wanted[0])
        reference.update()
        optimizer.step()
        optimizer.zero_grad()
    trained = engine.state_dict(full=True)
    for name, value in reference.models[0].state_dict().items():
        torch.testing.assert_close(trained[name], value)
    assert torch.equal(trained["first.weight"], start["first.weight"])
    load_states(engine, start)


def load_states(engine, start):
    """A whole state is taken whole, and what does not fit leaves all as it was."""
    other = {name: value + 1 for name, value in start.items()}
    engine.load_state_dict(other)
    lacking = {name: value for name, value in start.items() if name != "unread.bias"}
    narrow = {**start, "middle.0.0.bias": torch.zeros(5)}
    for state, text in (
        ({**start, "surplus": torch.ones(1)}, "surplus is not in the model"),
        (lacking, r"unread\.bias is not given"),
        (narrow, r"middle\.0\.0\.bias of stage .* has the shape \(16,\), and \(5,\) is given"),
    ):
        if state is not narrow or "middle.0.0.bias" in engine.state_dict():
            with pytest.raises(CheckpointMismatchError, match=text):
                engine.load_state_dict(state)
    held = engine.state_dict(full=True)
    assert all(torch.equal(held[name], value) for name, value in other.items())


class Wide(nn.Module):
    """A row of numbers, and ids that both halves read."""

    def __init__(self):
        super().__init__()
        self.layers = layers(4)

    def forward(self, x, ids):
        return self.layers(x * ids[:, None]) * ids[:, None]


def dtypes_of_a_batch(rank):
    """What the example's dtype holds is converted before it is sent, and what it does not is refused."""
    torch.manual_seed(0)
    model, ids, target = Wide(), torch.arange(4), torch.randn(4)
    x = torch.randn(4, 16)
    plan = partition(model, (x[:2], ids[:2]), {"pp": 2}, 2)
    reference = copy.deepcopy(model)
    engine = parallelize_model(model, plan, loss_fn=loss_fn)
    loss = engine.step(x, ids.int(), target)
    parts = zip(x.chunk(2), ids.chunk(2), target.chunk(2), strict=True)
    torch.testing.assert_close(loss, sum(loss_fn(reference(a, b), c) for a, b, c in parts).detach() / 2)
    for batch, text in (((x.double(), ids), "x is float64"), ((x, ids.float()), "ids is float32")):
        with pytest.raises(BatchError, match=f"{text}, and the partition was made for"):
            engine.step(*batch, target)


class Backbone(nn.Module):
    """Only its head learns: no gradient comes to the first stage."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = layers(4), nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.layers(x).detach())


def detached_stage(rank):
    """A stage that no gradient reaches takes part in the schedule, under autocast too."""
    torch.manual_seed(0)
    model, inputs = Backbone(), (torch.randn(2, 16),)
    plan = partition(model, inputs, {"pp": 2})
    assert len(plan.stages[0].parameters) > 0
    engine = parallelize_model(model, plan, loss_fn=loss_fn)
    for enabled in (False, True):
        batch, target = draw(inputs, 4, 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            engine.step(*batch, target)
    learning = {name for name, parameter in engine.named_parameters() if parameter.grad is not None}
    assert learning == ({"head.weight", "head.bias"} if rank else set())


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.other = layers(2), nn.Linear(16, 16)

    def forward(self, x):
        return self.layers(x), self.other(x)


class Numbers(nn.Module):
    def __init__(self, dtype, shape):
        super().__init__()
        self.layers = layers(2)
        self.scale, self.shift = nn.Parameter(torch.ones(shape, dtype=dtype)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.layers(x) * self.scale.to(x.dtype) + self.shift


def refused_gradients(rank):
    """What torch would say late, or on one rank alone, is said at once and on every rank."""
    inputs = (torch.randn(2, 16),)
    for model, text in (
        (Numbers(torch.float32, ()), "scale has no dimension"),
        (Numbers(torch.float64, (1,)), r"several dtypes \(scale float64, shift float32\)"),
    ):
        plan = partition(model, inputs, {"dp": 2}, 2)
        with pytest.raises(ParallelError, match=text):
            parallelize_model(model, plan, data_parallel="fsdp", loss_fn=loss_fn)
    model = TwoOutputs()
    plan = partition(model, inputs, {"dp": 2}, 2)
    batch, target = draw(inputs, 2, 0)

    def of_the_first(output, target):
        return loss_fn(output[0], target)

    engine = parallelize_model(model, plan, data_parallel="ddp", loss_fn=of_the_first)
    with pytest.raises(ParallelError, match=r"does not reach other\.bias, other\.weight, and DDP waits"):
        engine.step(*batch, target)
    engine.zero_grad()
    found = {"data_parallel": "ddp", "find_unused_parameters": True}
    engine = parallelize_model(model, plan, loss_fn=of_the_first, **found)
    engine.step(*batch, target)
    assert model.other.weight.grad is None

    model, ids = nn.Sequential(nn.Embedding(8, 16, sparse=True), nn.Linear(16, 16)), torch.arange(4)
    plan = partition(model, ids[:2], {"dp": 2}, 2)
    with pytest.raises(ParallelError, match="0 gives sparse gradients, which data_parallel='ddp' adds up"):
        parallelize_model(model, plan, data_parallel="fsdp", loss_fn=loss_fn)
    engine = parallelize_model(model, plan, data_parallel="ddp", loss_fn=loss_fn)
    engine.step(ids, torch.zeros(4))
    assert model[0].weight.grad.is_sparse

    model = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(16, 16))
    plan = partition_model(model, inputs, mesh={"pp": 2}, microbatches=2, hardware="cpu")
    assert [len(stage.parameters) for stage in plan.stages] == [0, 2]
    with pytest.raises(ParallelError, match="stage 0 of the partition has no parameters"):
        parallelize_model(model, plan, loss_fn=loss_fn)
    engine = parallelize_model(model, plan)
    assert zoo.tensors(engine.predict(*batch, everywhere=True))[0].shape == (4, 16)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(4)

    def forward(self, x):
        for layer in self.layers:
            x = _Halved.apply(layer(x)) + x
        return x


def own_functions(rank):
    """The backward of a model's own function of autograd is that of the function, on every mesh."""
    for mesh in ({"pp": 2}, {"tp": 2}, {"dp": 2}):
        torch.manual_seed(0)
        model, x = Quantized(), torch.randn(2, 16)
        plan = partition(model, (x,), mesh, 2)
        reference = OneProcess(model, mesh.get("dp", 1), 2, adamw)
        engine = parallelize_model(
            model, plan, loss_fn=loss_fn, data_parallel="ddp" if "dp" in mesh else None
        )
        batches = [draw((x,), 2, replica) for replica in range(mesh.get("dp", 1))]
        wanted = reference.backward(batches)
        batch, target = batches[engine.devices.dp]
        torch.testing.assert_close(engine.step(*batch, target), wanted)
        own = dict(reference.models[0].named_parameters())
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(joined(engine, name, parameter.grad), own[name].grad)
