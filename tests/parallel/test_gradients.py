"""Gradients that are there, and not, as in one process; and what is said where they cannot be."""

import pytest
from parallel import gradient_jobs
from parallel import ranks as processes

SLOW = pytest.mark.slow
NEW = pytest.mark.skipif(not processes.SENDS_ALL, reason="this torch sends no tensor that has no gradient")
FSDP = {"data_parallel": "fsdp"}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"pp": 2}, "is_complex": True}),
        (2, {"mesh": {"dp": 2}, "data_parallel": "ddp", "is_complex": True}),
        (4, {"mesh": {"dp": 2, "pp": 2}, **FSDP}),
        pytest.param(2, {"mesh": {"tp": 2}}, marks=SLOW),
        pytest.param(4, {"mesh": {"pp": 2, "tp": 2}}, marks=SLOW),
        pytest.param(4, {"mesh": {"dp": 2, "tp": 2}, **FSDP}, marks=SLOW),
    ],
)
def test_odd_parameters(ranks, count, options):
    if count == 4:
        processes.stop()  # torch remembers meshes of groups that are gone
    ranks(count).run(gradient_jobs.odd_parameters, timeout=20, **options)


@pytest.mark.parametrize(
    "job",
    [
        gradient_jobs.dtypes_of_a_batch,
        pytest.param(gradient_jobs.detached_stage, marks=NEW),
        gradient_jobs.refused_gradients,
        gradient_jobs.own_functions,
    ],
)
def test_on_two_ranks(ranks, job):
    ranks(2).run(job, timeout=20)
