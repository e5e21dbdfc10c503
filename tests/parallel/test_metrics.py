"""Metrics of a step: bytes of collectives against the plan's, bandwidth, files."""

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


def test_a_pipeline_and_shards_send_what_the_plan_says(ranks):
    first, second = ranks(2).run(metrics_jobs.watched, mesh={"pp": 2}, kinds=["send", "recv"])
    # The first step of a schedule begins with an empty message.
    assert first[0]["send"] + second[0]["send"] == pytest.approx(2 * first[2], abs=8)
    for found, sent, predicted in ranks(2).run(metrics_jobs.watched, mesh={"tp": 2}, kinds=["all_reduce"]):
        assert found["all_gather"]
        assert sent == predicted + LOSS


def test_sharded_states_are_gathered_and_scattered(ranks):
    options = {"mesh": {"dp": 2}, "data_parallel": "fsdp", "kinds": ["all_gather", "reduce_scatter"]}
    for found, _, _ in ranks(2).run(metrics_jobs.watched, **options):
        assert found["reduce_scatter"] == pytest.approx(4 * PARAMETERS, rel=0.02)  # shards are padded
        assert found["all_gather"] > 2 * found["reduce_scatter"]  # each microbatch, forward and backward


@pytest.mark.integrations
def test_tensorboard(ranks, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"mesh": {"dp": 2}, "data_parallel": "ddp", "kinds": ["all_reduce"], "folder": str(tmp_path)}
    ranks(2).run(metrics_jobs.watched, board=True, **options)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [one.step for one in events.Scalars("panther/dp all_reduce bytes")] == [1, 2]
