"""An engine is a module: the user's own loop, autocast, any number of rows, any norm, a count of tokens."""

import pytest
from parallel import module_jobs
from parallel import ranks as processes

DDP, FSDP = {"data_parallel": "ddp"}, {"data_parallel": "fsdp"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("captured", [pytest.param(False, marks=SLOW), True])
def test_autocast_across_a_cut(ranks, captured):
    ranks(2).run(module_jobs.autocast_across_a_cut, captured=captured, mesh={"pp": 2})


@pytest.mark.slow
def test_autocast_with_tensor_parallelism(ranks):
    ranks(2).run(module_jobs.autocast_across_a_cut, captured=True, mesh={"tp": 2})
    ranks(4).run(module_jobs.autocast_across_a_cut, captured=True, mesh={"pp": 2, "tp": 2})


def test_a_stage_keeps_its_promise(ranks):
    ranks(2).run(module_jobs.promised_outputs, timeout=2)


def test_gradients_of_inputs_across_a_cut(ranks):
    ranks(2).run(module_jobs.gradients_of_inputs, timeout=2)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, **DDP, "name": "mlp"}),
        (2, {"mesh": {"dp": 2}, **FSDP, "name": "mlp"}),
        (2, {"mesh": {"tp": 2}, "name": "mlp"}),
        pytest.param(2, {"mesh": {"dp": 2}, **FSDP}, marks=SLOW),
        pytest.param(2, {"mesh": {"dp": 2}, **DDP}, marks=SLOW),
        pytest.param(2, {"mesh": {"tp": 2}}, marks=SLOW),
        pytest.param(4, {"mesh": {"dp": 2, "tp": 2}, **FSDP}, marks=SLOW),
        pytest.param(4, {"mesh": {"dp": 2, "tp": 2}, **DDP, "name": "gpt2"}, marks=SLOW),
        pytest.param(2, {"mesh": {"dp": 2}, **DDP, "name": "bert"}, marks=SLOW),
        pytest.param(2, {"mesh": {"dp": 2}, **FSDP, "name": "gpt2"}, marks=SLOW),
    ],
)
def test_own_loop(ranks, count, options):
    ranks(count).run(module_jobs.own_loop, **options)


def test_ddp_is_reachable(ranks):
    ranks(2).run(module_jobs.hooks_of_ddp)


def test_a_pipelines_schedule_owns_the_backward(ranks):
    ranks(2).run(module_jobs.pipelines_own_the_backward)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"pp": 2}},
        pytest.param({"mesh": {"dp": 2}, **FSDP, "rows": 5}, marks=SLOW),
        pytest.param({"mesh": {"tp": 2}, "rows": 1}, marks=SLOW),
        pytest.param({"mesh": {"pp": 2}, "schedule": "gpipe", "rows": 7}, marks=SLOW),
    ],
)
def test_the_last_batch_of_an_epoch(ranks, options):
    ranks(2).run(module_jobs.small, **options)


def test_replicas_of_unequal_batches(ranks):
    ranks(2).run(module_jobs.uneven_replicas)


@pytest.mark.slow
def test_batch_norms_take_no_part(ranks):
    ranks(2).run(module_jobs.batch_norms_refuse)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, **DDP}),
        (2, {"mesh": {"pp": 2}}),
        pytest.param(4, {"mesh": {"dp": 2, "pp": 2}, **FSDP}, marks=SLOW),
    ],
)
def test_loss_over_all_tokens(ranks, count, options):
    if count == 4:
        processes.stop()  # torch remembers meshes of groups that are gone
    ranks(count).run(module_jobs.tokens, **options)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, **FSDP}),
        (2, {"mesh": {"pp": 2}}),
        pytest.param(4, {"mesh": {"dp": 2, "tp": 2}, **FSDP}, marks=SLOW),
        pytest.param(4, {"mesh": {"dp": 4}, **FSDP, "shard_size": 2}, marks=SLOW),
    ],
)
def test_norms_of_any_kind(ranks, count, options):
    if count == 4:
        processes.stop()  # torch remembers meshes of groups that are gone
    ranks(count).run(module_jobs.norms, **options)
