"""Torch's GradScaler, activation offload, deterministic algorithms and compiler around an engine."""

import pytest
from parallel import torch_tools_jobs

DDP, FSDP = {"data_parallel": "ddp"}, {"data_parallel": "fsdp"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("options", [pytest.param(DDP, marks=SLOW), FSDP])
def test_ranks_skip_a_step_together(ranks, options):
    ranks(2).run(torch_tools_jobs.scaler, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"pp": 2}},
        *(pytest.param(one, marks=SLOW) for one in ({"mesh": {"dp": 2}, **FSDP}, {"mesh": {"tp": 2}})),
    ],
)
def test_activations_on_the_cpu(ranks, options):
    ranks(2).run(torch_tools_jobs.activations_on_cpu, **options)


@pytest.mark.parametrize(
    "options", [{"mesh": {"pp": 2}}, pytest.param({"mesh": {"dp": 2}, **FSDP}, marks=SLOW)]
)
def test_the_same_bits_twice(ranks, options):
    ranks(2).run(torch_tools_jobs.twice, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"mesh": {"dp": 2}, **DDP}, {"mesh": {"dp": 2}, **FSDP}, {"mesh": {"tp": 2}}]
)
def test_compiled(ranks, options):
    ranks(2).run(torch_tools_jobs.compiled, **options)


def test_a_replica_has_fewer_batches(ranks):
    ranks(2).run(torch_tools_jobs.uneven_numbers_of_batches)
