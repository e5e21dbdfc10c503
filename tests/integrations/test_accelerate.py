"""accelerate's loop over an engine, beside one process: losses, norms, weights."""

import pytest

pytest.importorskip("accelerate")

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, "data_parallel": "ddp"}),
        (2, {"mesh": {"dp": 2}, "data_parallel": "fsdp"}),
        (2, {"mesh": {"dp": 2}, "data_parallel": "ddp", "precision": "bf16"}),
        (2, {"mesh": {"tp": 2}}),
        (4, {"mesh": {"dp": 2, "tp": 2}, "data_parallel": "fsdp"}),
    ],
)
def test_a_plain_loop(ranks, count, options):
    from integrations import accelerate_jobs

    ranks(count).run(accelerate_jobs.loop, **options)


def test_copies_count_once(ranks):
    from integrations import accelerate_jobs

    ranks(2).run(accelerate_jobs.metrics)


def test_what_it_cannot_take_is_refused_by_name(ranks):
    from integrations import accelerate_jobs

    ranks(2).run(accelerate_jobs.refusals)
