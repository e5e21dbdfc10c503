"""Metrics of a step: bytes of collectives against the plan's, bandwidth, files."""

import math

import pytest
from parallel import metrics_jobs

from panther_compile.parallel.metrics import bus_factor

PARAMETERS = sum(a * b + b for a, b in ((16, 32), (32, 32), (32, 32), (32, 32), (32, 32), (32, 8)))

LOSS = 3 * 8  # bytes that are summed for it


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1), ("send", 1)],
)
def test_bus_factors_are_those_of_nccl_tests(kind, factor):
    assert bus_factor(kind, 4) == factor


def test_replicas_send_what_the_plan_says(ranks, tmp_path):
    options = {"mesh": {"dp": 2}, "data_parallel": "ddp", "kinds": ["all_reduce"], "folder": str(tmp_path)}
    for found, sent, predicted in ranks(2).run(metrics_jobs.watched, **options):
        assert found["all_reduce"] == 4 * PARAMETERS + LOSS
        assert sent == pytest.approx(predicted, rel=1e-2)


@pytest.mark.slow
def test_a_pipeline_and_shards_send_what_the_plan_says(ranks):
    first, second = ranks(2).run(metrics_jobs.watched, mesh={"pp": 2}, kinds=["send", "recv"])
    # The first step of a schedule begins with an empty message.
    assert first[0]["send"] + second[0]["send"] == pytest.approx(2 * first[2], abs=8)
    for found, sent, predicted in ranks(2).run(metrics_jobs.watched, mesh={"tp": 2}, kinds=["all_reduce"]):
        assert found["all_gather"]
        assert sent == predicted + LOSS


@pytest.mark.parametrize(
    ("mesh", "kind", "shard_size"),
    [
        ({"dp": 2}, "zero2", None),
        pytest.param({"dp": 4}, "zero3", 2, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 2}, "zero2", None, marks=pytest.mark.slow),
        ({"dp": 2, "pp": 2}, "zero3", None),
        pytest.param({"dp": 2}, "zero3", None, marks=pytest.mark.slow),
        pytest.param({"dp": 4}, "zero2", 2, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, "zero3", None, marks=pytest.mark.slow),
    ],
)
def test_shared_states_send_what_the_plan_says(ranks, mesh, kind, shard_size):
    """Every gather of the forward and of the backward is in it, and none that is not."""
    count = math.prod(mesh.values())
    sent = ranks(count).run(metrics_jobs.shared, mesh=mesh, kind=kind, shard_size=shard_size)
    # The loss, and before it how many microbatches each replica has.
    loss = 2 * LOSS * 2 * (count - 1) / count if mesh.keys() == {"dp"} else 0
    for measured, predicted in sent:
        assert measured == predicted + loss


@pytest.mark.integrations
def test_tensorboard(ranks, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"mesh": {"dp": 2}, "data_parallel": "ddp", "kinds": ["all_reduce"], "folder": str(tmp_path)}
    ranks(2).run(metrics_jobs.watched, board=True, **options)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [one.step for one in events.Scalars("panther/dp all_reduce bytes")] == [1, 2]
