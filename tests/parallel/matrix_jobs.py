"""One cell of the matrix of docs/parallel.md: a model on a mesh trains as one process does."""

import torch
from parallel.prepared import made
from parallel.training import OneProcess, call_engine, draw, joined, loss_fn, optimizer_of, plan_training
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from panther_compile import parallelize_model

MICROBATCHES, ACCUMULATED, STEPS = 2, 2, 2
WAYS = ("exact", "autocast")
WITHOUT_FLOAT64 = ("mixtral",)  # torch's grouped products have none
WITH_BATCH_NORMS = ("resnet",)  # computed again they would count a batch twice: refused


def train_both_ways(rank, *, name, mesh, zero1=False, ways=WAYS, **options):
    """Accumulation, clipping and an optimizer; computed again in float64, and under autocast."""
    worst = {}
    for way in ways:
        asked = {"name": name, "mesh": mesh, "count": MICROBATCHES, **precision(name, way)}
        model, inputs, plan = made(plan_training, **asked)
        reference = OneProcess(model, mesh.get("dp", 1), MICROBATCHES, optimizer_of)
        again = way == "exact" and name not in WITH_BATCH_NORMS
        engine = parallelize_model(
            model, plan, loss_fn=loss_fn, activation_checkpointing="full" if again else "none", **options
        )
        around = torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast")
        worst[way] = _train(engine, reference, inputs, around, zero1=zero1)
        near = 1e-10 if asked["double"] else 1e-5
        if way == "autocast" and mesh.keys() != {"dp"}:
            # A graph adds gradients up in another order, shards once a rank, each rounded to bfloat16, and
            # routers and ReLUs then choose otherwise here and there.
            near = 0.2 if "tp" in mesh else 0.01
        assert worst[way] <= near, f"{name}, {way}: off by {worst[way]:.1e}"
    return worst


def precision(name, way):
    """What a model is read and trained in: a graph has the dtypes that the model chose when it was read."""
    return {"double": way == "exact" and name not in WITHOUT_FLOAT64, "autocast": way == "autocast"}


def _train(engine, reference, inputs, around, *, zero1):
    """The largest error of a loss, norm, gradient or parameter, as a share of the largest of its kind."""
    replicas, place = engine.devices.shape.dp, engine.devices.dp
    if zero1:
        optimizer = ZeroRedundancyOptimizer(
            engine.parameters(),
            torch.optim.SGD,
            process_group=engine.devices.group("dp"),
            lr=0.002,
            momentum=0.9,
        )
    else:
        optimizer = optimizer_of(engine.parameters())
    errors = []
    for step in range(STEPS):
        for part in range(ACCUMULATED):
            seeds = [1000 * step + 100 * part + replica for replica in range(replicas)]
            batches = [draw(inputs, MICROBATCHES, seed) for seed in seeds]
            with around:
                wanted = reference.backward(batches)
                found = call_engine(engine.step, *batches[place])
            errors.append(_relative(found, wanted))
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in reference.models]
        errors.append(_relative(engine.clip_grad_norm_(0.1), norms[place]))
        errors.append(_compare(engine, reference.models[place], "grad"))
        optimizer.step()
        optimizer.zero_grad()
        reference.update()
    errors.append(_compare(engine, reference.models[place], "data"))
    return max(errors)


def _compare(engine, model, kind):
    """Of all gradients or parameters of this rank, the largest error beside the largest number."""
    wanted = {name: getattr(one, kind) for name, one in model.named_parameters()}
    scale = max(float(one.abs().max()) for one in wanted.values() if one is not None)
    worst = 0.0
    for name, parameter in engine.named_parameters():
        found = parameter.grad if kind == "grad" else parameter.detach()
        if wanted[name] is None or found is None:
            assert found is None or not found.any()
            assert wanted[name] is None or not wanted[name].any()
            continue
        worst = max(worst, float((joined(engine, name, found) - wanted[name]).abs().max()) / scale)
    return worst


def _relative(found, wanted):
    return float((found - wanted).abs() / wanted.abs())
