"""Batch norms take statistics over all replicas, on gloo as on any backend."""

import pytest
from parallel import batch_norm_jobs

DP, PP, TP = {"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"layouts": [(DP, "ddp")], "rows": (8, 5)}),
        (4, {"layouts": [(PP, "fsdp")]}),
        pytest.param(2, {"layouts": [(DP, "fsdp")], "rows": (4, 2)}, marks=pytest.mark.slow),
        pytest.param(4, {"layouts": [(PP, "ddp"), (TP, "ddp"), (TP, "fsdp")]}, marks=pytest.mark.slow),
    ],
)
def test_statistics_of_all_replicas(ranks, count, options):
    ranks(count).run(batch_norm_jobs.like_one_process, **options)


def test_what_is_not_synchronised_is_named(ranks):
    ranks(2).run(batch_norm_jobs.refusals)
