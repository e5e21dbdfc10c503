"""Train a model on many ranks and in one process, and compare every loss, gradient and buffer."""

import copy

import torch
import torch.distributed as dist
import zoo
from parallel.prepared import made
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from panther_compile import parallelize_model, partition_model, sketchify
from panther_compile.parallel.tensor import join_shards
from panther_compile.partition import Hardware, Link

RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Work is dear and messages are free, so that small models are divided wherever they can be.
EAGER = Hardware("eager", 1e9, 1e9, 10**12, Link(1e12, 0.0), Link(1e12, 0.0), launch_seconds=0.0)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [16, 32, 32, 32, 32, 32, 8]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(name, *, sketched=False, training=True, double=False):
    if name == "mlp":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, inputs = Mlp(), (torch.randn(2, 16),)
    else:
        model, inputs = zoo.ZOO[name].build(), zoo.ZOO[name].inputs()
    if sketched:
        model = sketchify(model, ratio=0.5, min_params=0, allow_slower=True, progress=False)
    if double:
        inputs = tree_map(lambda one: one.double() if one.is_floating_point() else one, inputs)
        model = model.double()
    return model.train(training), inputs


def draw(inputs, count, seed):
    """A batch of as many microbatches like the example, and a target for each row."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(example):
        shape = (example.shape[0] * count, *example.shape[1:])
        if example.is_floating_point():
            return torch.randn(shape, generator=generator).to(example.dtype)
        if example.max() > 1:
            return torch.randint(4, zoo.VOCAB, shape, generator=generator)
        return torch.cat([example] * count)

    if isinstance(inputs, dict):
        batch = {key: tensor(value) for key, value in inputs.items()}
        rows = next(iter(batch.values())).shape[0]
    else:
        batch = tuple(map(tensor, inputs))
        rows = batch[0].shape[0]
    return batch, torch.randn(rows, generator=generator)


def loss_fn(output, target):
    """Every output counts, and every row has a target of its own."""
    rows = zoo.tensors(output)[0].reshape(len(target), -1).mean(1)
    return zoo.scalar(output) + (rows - target).square().mean()


def chunks(batch, count):
    if isinstance(batch, dict):
        columns = {key: value.chunk(count) for key, value in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    return list(zip(*(value.chunk(count) for value in batch), strict=True))


def call_engine(method, batch, *target, **options):
    if isinstance(batch, dict):
        return method(**batch, **options, **({"target": target[0]} if target else {}))
    return method(*batch, *target, **options)


class OneProcess:
    """The same training without ranks: a model for each replica, equal but for the buffers."""

    def __init__(self, model, dp, count, optimizer):
        self.models = [copy.deepcopy(model) for _ in range(dp)]
        self.optimizers = [optimizer(one.parameters()) for one in self.models]
        self.count = count

    def backward(self, batches):
        """Gradients are added to those that are there, as the sum over the replicas on each."""
        held = [parameter.grad for parameter in self.models[0].parameters()]
        for model in self.models:
            model.zero_grad()
        losses = []
        for model, (batch, target) in zip(self.models, batches, strict=True):
            for inputs, part in zip(chunks(batch, self.count), target.chunk(self.count), strict=True):
                loss = loss_fn(zoo.call(model, inputs), part) / (self.count * len(self.models))
                loss.backward()
                losses.append(loss.detach())
        replicas = zip(*(model.parameters() for model in self.models), strict=True)
        for before, parameters in zip(held, replicas, strict=True):
            if parameters[0].grad is not None:
                total = torch.stack([parameter.grad for parameter in parameters]).sum(0)
                if before is not None:
                    total += before
                for parameter in parameters:
                    parameter.grad = total.clone()
        return torch.stack(losses).sum()

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joined(engine, name, tensor):
    """The whole of what replicas and the tp axis divide; what the latter does not divide is equal on it."""
    tensor, tp = whole(tensor), engine.devices.group("tp")
    if name in engine.layouts:
        return join_shards(tensor, engine.layouts[name], tp)
    if tp.size() > 1:
        first = tensor.clone()
        dist.broadcast(first, group=tp, group_src=0)
        assert torch.equal(first, tensor), f"{name} differs on the tp axis"
    return tensor


def partition(model, inputs, mesh, count=4, **options):
    """On hardware that makes tp worth it, where the mesh has it."""
    hardware = EAGER if "tp" in mesh else "cpu"
    return partition_model(
        model, inputs, mesh=mesh, **{"hardware": hardware, "microbatches": count, **options}
    )


def plan_training(
    name, mesh, *, count=4, sketched=False, training=True, double=False, autocast=False, part=None
):
    """A model, example inputs, and the plan of it."""
    model, inputs = build(name, sketched=sketched, training=training, double=double)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model, inputs, partition(model, inputs, mesh, count, **(part or {}))


def assert_near(found, wanted, scale, name):
    worst = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert worst <= RELATIVE[found.dtype] * scale, f"{name}: off by {worst:.2e}, of {scale:.2e}"


def assert_same(value):
    """On every rank, to the bit."""
    first = value.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, value)


def optimizer_of(parameters):
    # Small steps: with large ones a sketched ViT makes rounding a thousand times larger in three.
    return torch.optim.SGD(parameters, lr=0.002, momentum=0.9)


def train_and_compare(
    rank,
    *,
    name,
    mesh,
    count=4,
    steps=3,
    sketched=False,
    training=True,
    double=False,
    part=None,
    predict=True,
    **options,
):
    """Steps of an engine against those of one process."""
    asked = {"count": count, "sketched": sketched, "training": training, "double": double, "part": part}
    model, inputs, plan = made(plan_training, name=name, mesh=mesh, **asked)
    dp = mesh.get("dp", 1)
    reference = OneProcess(model, dp, count, optimizer_of)
    if rank:  # rank 0's values count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    engine = parallelize_model(model, plan, loss_fn=loss_fn, **options)
    optimizer = optimizer_of(engine.parameters())
    for step in range(steps):
        batches = [draw(inputs, count, seed=100 * step + replica) for replica in range(dp)]
        wanted = reference.backward(batches)
        batch, target = batches[engine.devices.dp]
        loss = call_engine(engine.step, batch, target)
        assert_near(loss, wanted, float(wanted.abs()), f"loss of step {step}")
        assert_same(loss)
        own = reference.models[engine.devices.dp]
        gradients = {key: value.grad for key, value in own.named_parameters() if value.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for key, parameter in engine.named_parameters():
            if key not in gradients:
                assert parameter.grad is None or not whole(parameter.grad).any()
                continue
            assert parameter.grad is not None, f"{key} has no gradient in step {step}"
            scale = max(float(gradients[key].abs().max()), 0.1 * largest)
            found = joined(engine, key, parameter.grad)
            assert_near(found, gradients[key], scale, f"{key} in step {step}")
        optimizer.step()
        optimizer.zero_grad()
        reference.update()
    own = reference.models[engine.devices.dp]
    buffers = dict(own.named_buffers())
    for key, buffer in engine.named_buffers():
        if key in buffers:
            torch.testing.assert_close(buffer, buffers[key], rtol=1e-5, atol=1e-5)
    if predict:
        compare_predictions(engine, own, inputs, count)
    return {
        "parameters": [key for key, _ in engine.named_parameters()],
        "shards": set(engine.layouts),
        "kinds": {shard.kind for shard in plan.shards},
    }


def compare_predictions(engine, own, inputs, count):
    """Forward alone, after the training."""
    batch, target = draw(inputs, count, seed=7)
    state = copy.deepcopy(own.state_dict())
    with torch.no_grad():
        parts = [zoo.call(own, part) for part in chunks(batch, count)]
        wanted = [torch.cat(column) for column in zip(*map(zoo.tensors, parts), strict=True)]
        losses = [loss_fn(*pair) for pair in zip(parts, target.chunk(count), strict=True)]
    output = call_engine(engine.predict, batch, everywhere=True)
    assert type(output) is type(parts[0])
    for found, expected in zip(zoo.tensors(output), wanted, strict=True):
        assert_near(found, expected, float(expected.abs().max()), "output")
    own.load_state_dict(state)
    if engine.devices.shape.dp == 1:
        loss = call_engine(engine.evaluate, batch, target)
        wanted_loss = torch.stack(losses).mean()
        assert_near(loss, wanted_loss, float(wanted_loss.abs()), "loss of evaluate")
