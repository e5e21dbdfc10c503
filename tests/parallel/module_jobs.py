"""An engine as a module: called by the user's own loop, in other precisions, with batches of any size."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from parallel.behavior import make
from parallel.training import build, call_engine, draw, joined, loss_fn, partition
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from panther_compile import parallelize_model, partition_model
from panther_compile.errors import BatchError, ConfigError, ParallelError

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


class Narrowing(nn.Module):
    """Its products are of another dtype under autocast, its norms and sums are not."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        x = torch.tanh(self.up(x))
        return self.head(torch.tanh(self.down(self.norm(x))))


def build_narrowing():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Narrowing(), (torch.randn(2, 16),)


def autocast_across_a_cut(rank, *, captured, mesh, **options):
    """The loss and gradients of a step under autocast are those of one process under it."""
    model, inputs = build_narrowing()
    reference = copy.deepcopy(model)
    with torch.autocast(**BF16, enabled=captured):
        plan = partition(model, inputs, mesh)
    crossing = {spec.dtype for stage in plan.stages[:-1] for spec in stage.outputs}
    assert ("bfloat16" in crossing) == (captured and len(plan.stages) > 1)
    engine = parallelize_model(model, plan, loss_fn=loss_fn, **options)
    found = {}
    for enabled in (True, False, True):
        batch, target = draw(inputs, 4, 0)
        engine.zero_grad()
        reference.zero_grad()
        with torch.autocast(**BF16, enabled=enabled):
            loss = call_engine(engine.step, batch, target)
            parts = zip(batch[0].chunk(4), target.chunk(4), strict=True)
            wanted = sum(loss_fn(reference(part), goal) / 4 for part, goal in parts)
        wanted.backward()
        # Sums over shards are rounded to bfloat16 once a rank.
        near = 1e-3 if enabled and "tp" in mesh else 1e-5
        torch.testing.assert_close(loss, wanted.detach().float(), rtol=near, atol=near)
        gradients = dict(reference.named_parameters())
        for name, parameter in engine.named_parameters():
            gradient = joined(engine, name, parameter.grad)
            tolerance = 2e-2 if enabled else 1e-5
            torch.testing.assert_close(gradient, gradients[name].grad, rtol=tolerance, atol=tolerance)
        output = engine.predict(batch[0], everywhere=True)
        assert output.dtype is torch.float32
        found[enabled] = loss
    assert not torch.equal(found[True], found[False])


class Moody(nn.Module):
    """A module kept whole, whose result is of a dtype that no example shows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.halve = False

    def forward(self, x):
        x = self.inner(x)
        return x.half() if self.halve else x


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest, self.last = Moody(), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.rest(self.first(x).float())))


def promised_outputs(rank):
    """A stage that gives another dtype than the plan has is named, with the tensor."""
    torch.manual_seed(0)
    model = Chain()
    options = {"mesh": {"pp": 2}, "hardware": "cpu", "boundaries": ["first"], "microbatches": 2}
    weights = {"first": 3.0, "rest": 1.0, "last": 1.0}
    part = partition_model(model, (torch.randn(2, 16),), profile=weights, **options)
    assert part.stages[0].outputs[0].name == "first"
    engine = parallelize_model(model, part, loss_fn=lambda y, t: (y.mean(1) - t).square().mean())
    engine.step(torch.randn(4, 16), torch.randn(4))
    model.first.halve = True
    with pytest.raises((ParallelError, RuntimeError)) as caught:
        engine.step(torch.randn(4, 16), torch.randn(4))
    if rank == 0:
        text = r"stage 0 gives first as \(2, 16\) float16, and stage 1 waits for \(2, 16\) float32"
        assert caught.match(text)


class Scaled(Chain):
    def forward(self, x):
        return super().forward(x) * x[:, :4]


def gradients_of_inputs(rank):
    """An input that the last stage reads too has its whole gradient if the example's required one."""
    torch.manual_seed(0)
    model, x, target = Scaled(), torch.randn(4, 16, requires_grad=True), torch.randn(4, 4)
    (wanted,) = torch.autograd.grad(nn.functional.mse_loss(model(x), target), x)
    for requires in (True, False):
        example = torch.randn(2, 16, requires_grad=requires)
        part = partition_model(model, example, mesh={"pp": 2}, hardware="cpu", microbatches=2)
        engine = parallelize_model(model, part, loss_fn=nn.functional.mse_loss)
        if requires:
            engine.step(x, target)
            if rank == 0:
                torch.testing.assert_close(x.grad, wanted)
            continue
        with pytest.raises((ParallelError, RuntimeError)) as caught:
            engine.step(x, target)
        if rank == 0:
            assert caught.match("stage 0 gives .* with a gradient to compute, and stage 1 sends none back")


def own_loop(rank, *, mesh, name="vit", **options):
    """The user's own loop over the module, against one process; accumulation with one reduction."""
    model, inputs = build(name)
    reference = copy.deepcopy(model)
    plan = partition(model, inputs, mesh, count=1)
    engine = parallelize_model(model, plan, **options)
    assert isinstance(engine, nn.Module)
    if "tp" not in mesh:
        own = engine.module.module if options.get("data_parallel") == "ddp" else engine.module
        assert own is model
        assert [key for key, _ in engine.named_parameters()] == [key for key, _ in model.named_parameters()]
    kind = {"ddp": DistributedDataParallel, "fsdp": FSDPModule, None: nn.Module}
    assert any(isinstance(one, kind[options.get("data_parallel")]) for one in engine.modules())
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.002, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.002, momentum=0.9)
    dp = engine.devices.shape.dp
    for step in range(2):
        batches = [
            [draw(inputs, 1, 100 * step + 10 * replica + turn) for turn in range(2)] for replica in range(dp)
        ]
        for batch, target in (one for replica in batches for one in replica):
            (loss_fn(zoo.call(reference, batch), target) / (2 * dp)).backward()
        (first, then) = batches[engine.devices.dp]
        with engine.no_sync():
            (loss_fn(zoo.call(engine, first[0]), first[1]) / 2).backward()
        (loss_fn(zoo.call(engine, then[0]), then[1]) / 2).backward()
        wanted = {key: value.grad for key, value in reference.named_parameters()}
        largest = max(float(one.abs().max()) for one in wanted.values() if one is not None)
        for key, parameter in engine.named_parameters():
            if wanted[key] is not None:
                torch.testing.assert_close(
                    joined(engine, key, parameter.grad), wanted[key], rtol=1e-4, atol=1e-5 * largest
                )
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    engine.eval()
    assert not model.training or "tp" in mesh
    state = engine.state_dict(full=True)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def hooks_of_ddp(rank):
    """The DDP object is there: a communication hook compresses its gradients, and nothing warns."""
    model, inputs, engine = make(mesh={"dp": 2}, data_parallel="ddp")
    assert isinstance(engine.module, DistributedDataParallel)
    assert engine.module.module is model
    assert not engine.module.find_unused_parameters
    batch, target = draw(inputs, 4, rank)
    engine.step(*batch, target)
    exact = {name: parameter.grad.clone() for name, parameter in engine.named_parameters()}
    engine.zero_grad()
    engine.module.register_comm_hook(None, fp16_compress_hook)
    engine.step(*batch, target)
    for name, parameter in engine.named_parameters():
        assert not torch.equal(parameter.grad, exact[name]) or not parameter.grad.any()
        torch.testing.assert_close(parameter.grad, exact[name], rtol=2e-3, atol=1e-5)
    with pytest.raises(ConfigError, match="find_unused_parameters is an option of"):
        make(mesh={"dp": 2}, data_parallel="fsdp", find_unused_parameters=True)
    _, _, engine = make(mesh={"dp": 2}, data_parallel="ddp", find_unused_parameters=True)
    assert engine.module.find_unused_parameters


def row_loss(output, target):
    """The mean over rows of what each row says alone."""
    return (output.mean(1) - target).square().mean()


def small(rank, *, rows=3, mesh, **options):
    """The last batch of an epoch: loss and gradients are those of one process over its rows."""
    _, _, engine = make(mesh=mesh, loss_fn=row_loss, **options)
    reference = build("mlp")[0]
    x, target = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)), torch.arange(8.0)
    for count in (8, rows, 8):
        engine.zero_grad()
        reference.zero_grad()
        loss = engine.step(x[:count], target[:count])
        wanted = row_loss(reference(x[:count]), target[:count])
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
        gradients = dict(reference.named_parameters())
        for name, parameter in engine.named_parameters():
            gradient = joined(engine, name, parameter.grad)
            torch.testing.assert_close(gradient, gradients[name].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(engine.evaluate(x[:count], target[:count]), wanted.detach())
        torch.testing.assert_close(engine.predict(x[:count], everywhere=True), reference(x[:count]).detach())


def uneven_replicas(rank):
    """Means of unequal batches are refused on every rank; sums over a count are right."""
    _, _, engine = make(mesh={"dp": 2}, data_parallel="ddp", loss_fn=row_loss)
    rows = (8, 5)[rank]
    x, target = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)), torch.arange(8.0)
    with pytest.raises(BatchError, match="different sizes"):
        engine.step(x[:rows], target[:rows])
    _, _, engine = make(mesh={"dp": 2}, data_parallel="fsdp", loss_fn=row_loss)
    few = (8, 2)[rank]  # no row for two of the microbatches, in which the other replica gathers parameters
    with pytest.raises(BatchError, match="different numbers of microbatches"):
        engine.step(x[:few], target[:few])
    _, _, engine = make(
        mesh={"dp": 2},
        data_parallel="ddp",
        loss_fn=lambda output, goal: (output.mean(1) - goal).square().sum(),
        count_tokens=len,
    )
    loss = engine.step(x[:rows], target[:rows])
    reference = build("mlp")[0]
    xs = [torch.randn(8, 16, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    whole, goals = torch.cat([xs[0], xs[1][:5]]), torch.cat([target, target[:5]])
    wanted = row_loss(reference(whole), goals)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    gradients = dict(reference.named_parameters())
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5)


def batch_norms_refuse(rank):
    """Rows that fill up a microbatch would count in its statistics."""
    _, inputs, engine = make("resnet", mesh={"pp": 2})
    batch, target = draw(inputs, 4, 0)
    short = {k: v[:3] for k, v in batch.items()} if isinstance(batch, dict) else [v[:3] for v in batch]
    with pytest.raises(BatchError, match=r"batch_norm.* takes statistics over rows"):
        call_engine(engine.step, short, target[:3])
    engine.eval()
    call_engine(engine.evaluate, short, target[:3])
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 8))
    plan = partition(model, torch.randn(4, 8), {"pp": 2}, 2)
    engine = parallelize_model(model, plan, loss_fn=F.mse_loss)
    for mode in (True, False):  # it keeps no statistics that it could use in eval mode
        with pytest.raises(BatchError, match=r"statistics over rows, .* change; drop the last batch$"):
            engine.train(mode).evaluate(torch.randn(6, 8), torch.randn(6, 8))


def tokens(rank, *, mesh, **options):
    """Padding is uneven over ranks and microbatches, and the loss is exactly one process's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 11)).double()
    reference = copy.deepcopy(model)
    example = torch.randint(11, (2, 6))
    plan = partition(model, (example,), mesh)
    engine = parallelize_model(
        model,
        plan,
        loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=-1, reduction="sum"),
        count_tokens=lambda t: (t != -1).sum(),
        **options,
    )
    dp = engine.devices.shape.dp
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (8 * dp, 6), generator=generator)
    goals = torch.randint(11, (8 * dp, 6), generator=generator)
    for row in range(8 * dp):
        goals[row, 6 - row % 7 :] = -1
    goals[2:4] = -1  # a microbatch without a token
    mine = slice(8 * engine.devices.dp, 8 * engine.devices.dp + 8)
    loss = engine.step(ids[mine], goals[mine])
    wanted = F.cross_entropy(reference(ids).flatten(0, 1), goals.flatten(), ignore_index=-1)
    wanted.backward()
    assert loss.dtype is torch.float64
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    gradients = dict(reference.named_parameters())
    for name, parameter in engine.named_parameters():
        gradient = joined(engine, name, parameter.grad)
        torch.testing.assert_close(gradient, gradients[name].grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(engine.evaluate(ids[mine], goals[mine]), wanted.detach(), rtol=1e-12, atol=0)
    with pytest.raises(BatchError, match="gave 0 for the batches of all replicas"):
        engine.step(ids[mine], torch.full_like(goals[mine], -1))


def norms(rank, *, mesh, **options):
    """Norms of every kind, in the model's dtype, are those of one process."""
    model, inputs = build("mlp", double=True)
    reference = copy.deepcopy(model)
    plan = partition(model, inputs, mesh)
    engine = parallelize_model(model, plan, loss_fn=loss_fn, **options)
    dp = engine.devices.shape.dp
    for replica in range(dp):
        batch, target = draw(inputs, 4, replica)
        for part, goal in zip(batch[0].chunk(4), target.chunk(4), strict=True):
            (loss_fn(reference(part), goal) / (4 * dp)).backward()
    kept = [parameter.grad.clone() for parameter in reference.parameters()]
    batch, target = draw(inputs, 4, engine.devices.dp)
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        engine.zero_grad()
        loss = engine.step(*batch, target)
        assert loss.dtype is torch.float64
        for parameter, gradient in zip(reference.parameters(), kept, strict=True):
            parameter.grad = gradient.clone()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type=norm_type)
        found = engine.clip_grad_norm_(0.01, norm_type=norm_type)
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
        gradients = dict(reference.named_parameters())
        for name, parameter in engine.named_parameters():
            gradient = joined(engine, name, parameter.grad)
            torch.testing.assert_close(gradient, gradients[name].grad, rtol=1e-9, atol=1e-14)
    with pytest.raises(ConfigError, match="norm_type=0"):
        engine.clip_grad_norm_(1.0, norm_type=0)


def pipelines_own_the_backward(rank):
    """An engine with stages is a module too, and says that it is not to be called."""
    _, _, engine = make(mesh={"pp": 2})
    assert isinstance(engine, nn.Module)
    assert set(engine.state_dict()) == {name for name, _ in engine.named_parameters()}
    with pytest.raises(ParallelError, match=r"a pipeline's schedule runs forward and backward .* call step"):
        engine(torch.randn(2, 16))
    with pytest.raises(ParallelError, match=r"no_sync\(\) is for loss.backward"):
        engine.no_sync()
