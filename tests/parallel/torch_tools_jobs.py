"""What torch has for any loop, around an engine; each function runs on every rank."""

import torch
from parallel.behavior import make
from parallel.training import build, call_engine, draw, joined, loss_fn


def gradients(engine):
    return {name: joined(engine, name, one.grad).clone() for name, one in engine.named_parameters()}


def scaler(rank, **options):
    """A GradScaler gives the gradients of one process; all ranks skip a step that one overflows in."""
    _, inputs, engine = make(mesh={"dp": 2}, count=1, **options)
    reference, _ = build("mlp")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    batches = [draw(inputs, 1, seed) for seed in range(2)]
    for batch, target in batches:
        (loss_fn(reference(*batch), target) / 2).backward()
    for overflows in (False, True):
        before = engine.state_dict(full=True)
        (x,), target = batches[rank]
        loss = loss_fn(engine(x), target)
        if overflows and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not overflows:
            for name, wanted in reference.named_parameters():
                torch.testing.assert_close(gradients(engine)[name], wanted.grad, rtol=1e-5, atol=1e-6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(before[name], one) for name, one in engine.state_dict(full=True).items()]
        assert not any(changed) if overflows else all(changed)
    assert scaler.get_scale() == 2.0**3


def activations_on_cpu(rank, **options):
    """`save_on_cpu` around a step changes no bit."""
    _, inputs, engine = make(**options)
    batch, target = draw(inputs, 4, engine.devices.dp)
    loss = call_engine(engine.step, batch, target)
    wanted = gradients(engine)
    engine.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(call_engine(engine.step, batch, target), loss)
    for name, found in gradients(engine).items():
        assert torch.equal(found, wanted[name]), name


def twice(rank, **options):
    """Two trainings under torch's deterministic algorithms end in the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        states = []
        for _ in range(2):
            _, inputs, engine = make(**options)
            optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
            for step in range(2):
                batch, target = draw(inputs, 4, 10 * step + engine.devices.dp)
                call_engine(engine.step, batch, target)
                optimizer.step()
                optimizer.zero_grad()
            states.append(engine.state_dict(full=True))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def compiled(rank, **options):
    """`torch.compile` of what runs: outputs and gradients are those of the engine."""
    _, inputs, engine = make(count=1, **options)
    batch, target = draw(inputs, 1, engine.devices.dp)
    output = engine(*batch)
    loss_fn(output, target).backward()
    wanted = gradients(engine)
    engine.zero_grad()
    faster = torch.compile(engine.module, backend="aot_eager")
    found = faster(*batch)
    torch.testing.assert_close(found, output)
    loss_fn(found, target).backward()
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7)


def uneven_numbers_of_batches(rank):
    """Under DDP's `join` a replica without batches shadows the others' collectives, to one process's end."""
    _, inputs, engine = make(mesh={"dp": 2}, count=1, data_parallel="ddp")
    reference, _ = build("mlp")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (engine, reference)]
    batches = {
        (step, replica): draw(inputs, 1, 10 * step + replica) for step in range(3) for replica in (0, 1)
    }
    del batches[2, 1]
    with engine.module.join():
        for step in range(3 - rank):
            (x,), target = batches[step, rank]
            loss_fn(engine(x), target).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    for step in range(3):
        for (when, _), ((x,), target) in batches.items():
            if when == step:
                (loss_fn(reference(x), target) / 2).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    found = engine.state_dict(full=True)
    for name, wanted in reference.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)
