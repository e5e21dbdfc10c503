"""What a step sends and takes, as it is counted on every rank."""

import csv

import pytest
import torch
from parallel.training import EAGER, build, call_engine, draw, loss_fn, partition
from torch import nn

from panther_compile import TrainingMetrics, parallelize_model, partition_model
from panther_compile.parallel.metrics import bus_factor


def watched(rank, *, mesh, kinds, folder=None, board=False, **options):
    """The bytes of two steps are those that the plan has, and go where they are asked to."""
    model, inputs = build("mlp")
    part = partition(model, inputs, mesh)
    engine = parallelize_model(model, part, loss_fn=loss_fn, **options)
    metrics = TrainingMetrics(
        engine,
        part,
        tokens=64,
        peak_flops=1e12,
        every=1,
        csv=f"{folder}/metrics.csv" if folder else None,
        tensorboard=folder if board else None,
    )
    for step in range(2):
        batch, target = draw(inputs, 4, 10 * step + engine.devices.dp)
        with metrics.step():
            call_engine(engine.step, batch, target)
    axis = next(iter(mesh))
    found = {one.kind: one for one in metrics.communication if one.axis == axis}
    assert set(kinds) <= set(found)
    for kind in kinds:
        assert found[kind].ranks == 2
        assert found[kind].seconds > 0
        wanted = found[kind].bandwidth * bus_factor(kind, 2)
        assert found[kind].bus_bandwidth == pytest.approx(wanted)
    name = f"sent bytes, {axis}"
    figures = metrics.measured
    assert figures["tokens a second"] * figures["step seconds"] == pytest.approx(64)
    assert 0 < figures["MFU"] < 1
    assert figures["peak bytes"] > 0
    told = str(metrics)
    assert all(text in told for text in (*kinds, "measured", "predicted", "MFU"))
    if folder and rank == 0:
        with open(f"{folder}/metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows if row["name"] == "MFU"] == ["1", "2"]
        assert float(rows[-1]["value"]) > 0
    return {kind: one.bytes for kind, one in found.items()}, figures[name], metrics.predicted[name]


def shared(rank, *, mesh, kind, shard_size):
    """Bytes that this rank sends to replicas in the second step, and those of the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    options = {"data_parallel": kind, "shard_size": shard_size}
    part = partition_model(model, torch.randn(2, 32), mesh=mesh, hardware=EAGER, microbatches=3, **options)
    engine = parallelize_model(model, part, data_parallel="auto", loss_fn=loss_fn)
    metrics = TrainingMetrics(engine, part, every=2)
    for step in range(2):
        batch, target = draw((torch.randn(2, 32),), 3, step)
        with metrics.step():
            engine.step(*batch, target)
    return metrics.measured["sent bytes, dp"], metrics.predicted["sent bytes, dp"]
