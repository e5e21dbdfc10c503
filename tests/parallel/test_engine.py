"""Errors, states, clipping, modes: what an engine does beside its steps."""

import copy
import pickle
import random
from functools import partial

import pytest
import torch
from parallel import behavior
from parallel.prepared import prepares
from parallel.training import plan_training
from torch import fx, nn

from panther_compile import TrainingCheckpoints, parallelize_model, partition_model
from panther_compile.errors import BatchError, ConfigError, ConfigTypeError, ParallelError, ProcessGroupError
from panther_compile.parallel.devices import place_stages
from panther_compile.parallel.microbatches import divide_target, merge, read_batch, take_rows
from panther_compile.parallel.stage_module import StageModule, contiguous_gradients
from panther_compile.partition import TensorSpec


@pytest.fixture
def two(ranks):
    return ranks(2)


@pytest.fixture
def four(ranks):
    return ranks(4)


@pytest.mark.parametrize(
    "job",
    [
        behavior.differing_plans,
        behavior.refusals,
        behavior.batches,
        behavior.modes,
        behavior.structured_targets,
        behavior.other_dtypes,
    ],
)
def test_on_two_ranks(two, job):
    two.run(job)


SEND = r"send activations of microbatch 0 to rank 1 \(stage 0; \(2, 32\) float32\)"
RECEIVE = r"receive activations of microbatch 0 from rank 0 \(stage 1; \(2, 32\) float32\)"
STEP = r"stage \d; .*step 2, forward and backward: "
QUIET = 2  # seconds until a rank that waits gives up
NUMBER = r", number [1-9]\d* of their group"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ({0: rf"{STEP}send and receive along pp \(ranks 0, 1\), in {SEND}"}, {}),
        ({1: f"{STEP}.*, in {RECEIVE}"}, {"absent": 0}),
        (
            {1: rf"predict, in recv of \(2, 32\) float32 from rank 0 between the ranks \[0, 1\]{NUMBER}"},
            {"absent": 0, "call": "predict"},
        ),
        (
            {0: rf"{STEP}all-reduce along dp \(ranks 0, 1\)"},
            {"mesh": {"dp": 2}, "data_parallel": "ddp"},
        ),
        (
            {0: rf"stage 0; .*step 2, all-reduce of the sizes of batches, in all_reduce .*\[0, 1\]{NUMBER}"},
            {"mesh": {"dp": 2}, "data_parallel": "fsdp"},
        ),
        (
            {0: rf"{STEP}all-.* along tp \(ranks 0, 1\), in all_reduce of .*\[0, 1\]{NUMBER}"},
            {"mesh": {"tp": 2}},
        ),
    ],
    ids=["send", "receive", "predict", "ddp", "fsdp", "tp"],
)
def test_every_wait_says_for_what(two, where, options):
    two.run(behavior.silence, timeout=QUIET, where=where, **options)


def test_a_loss_that_is_no_number_is_named(two):
    gradients = r"receive gradients of microbatch 0 from rank 1 \(stage 0; \(2, 32\) float32\)"
    where = rf"step 1, forward and backward: send and receive along pp \(ranks 0, 1\), in {gradients}"
    two.run(behavior.wrong_losses, timeout=QUIET, where=where)


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_every_rank_of_a_mesh_hears_of_silence(four, data_parallel):
    options = {"mesh": {"dp": 2, "pp": 2}, "data_parallel": data_parallel}
    where = {
        "ddp": {
            2: r"step 2, all-reduce of gradients, in all_reduce of .* between the ranks \[0, 2\]" + NUMBER,
            3: r"step 2, all-reduce of gradients, in all_reduce of .* between the ranks \[1, 3\]" + NUMBER,
        },
        # The send of one replica may fail in its turn once the other has gone.
        "fsdp": {
            2: "step 2, .*, in .*rank.*",
            3: r"step 2, .*, in all_gather.* between the ranks \[1, 3\]" + NUMBER,
        },
    }[data_parallel]
    four.run(behavior.silence, timeout=QUIET, where={0: f"step 2, .*, in {SEND}", **where}, **options)


@prepares(plan_training, lambda options: behavior.asked(**options))
@pytest.mark.parametrize(
    "options",
    [
        {"name": "bert", "mesh": {"dp": 2, "pp": 2}, "data_parallel": "fsdp"},
        pytest.param(
            {"name": "gpt2", "mesh": {"dp": 2, "pp": 2}, "data_parallel": "ddp"}, marks=pytest.mark.slow
        ),
        pytest.param({"name": "gpt2", "mesh": {"pp": 2, "tp": 2}}, marks=pytest.mark.slow),
        pytest.param(
            {"name": "gpt2", "mesh": {"dp": 2, "tp": 2}, "data_parallel": "fsdp"}, marks=pytest.mark.slow
        ),
    ],
)
def test_states(four, options):
    four.run(behavior.states, **options)


def named(options):
    return {"name": "bert" if "pp" in options["mesh"] else "mlp", **options}


@prepares(plan_training, lambda options: behavior.asked(**named(options)))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mesh": {"dp": 2, "pp": 2}, "data_parallel": "ddp"}, marks=pytest.mark.slow),
        {"mesh": {"dp": 2, "pp": 2}, "data_parallel": "fsdp", "part": {"schedule": "interleaved"}},
        {"mesh": {"dp": 4}, "data_parallel": "fsdp", "shard_size": 2},
        pytest.param({"mesh": {"pp": 2, "tp": 2}}, marks=pytest.mark.slow),
        pytest.param({"mesh": {"dp": 2, "tp": 2}, "data_parallel": "fsdp"}, marks=pytest.mark.slow),
    ],
)
def test_clipping_and_accumulation(four, options):
    four.run(behavior.clipping, **named(options))


@pytest.mark.parametrize("inner", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_ranks_of_a_tp_group_drop_out_alike(two, inner):
    two.run(behavior.dropout_on_shards, mesh={"tp": 2}, inner=inner)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_fn": nn.MSELoss}, "loss_fn=.*MSELoss.*, wanted a function"),
        ({"count_tokens": 3}, "count_tokens=3, wanted a function"),
        ({"broadcast": None}, "broadcast=None is a NoneType, wanted bool"),
        ({"sync_batchnorm": "no"}, "sync_batchnorm='no' is a str, wanted bool"),
        ({"data_parallel": "fsdp", "reshard_after_forward": "no"}, "reshard_after_forward='no' is a str"),
        ({"data_parallel": "fsdp", "shard_size": "2"}, "shard_size='2' is a str, wanted an integer"),
        ({"data_parallel": "fsdp", "units": "0"}, "units='0', wanted a list"),
        ({"data_parallel": "fsdp", "units": 3}, "units=3, wanted a list"),
    ],
)
def test_options_of_another_type_are_refused(one_rank, options, text):
    with pytest.raises(ConfigTypeError, match=text):
        parallelize_model(*one_rank, **options)


@pytest.fixture
def one_rank(tmp_path):
    """A model and its partition, in a process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    model = nn.Linear(4, 4)
    yield model, partition_model(model, torch.randn(2, 4), mesh={}, hardware="cpu", microbatches=1)
    torch.distributed.destroy_process_group()


def test_clipping_reads_numbers_as_torch_does(one_rank):
    engine = parallelize_model(*one_rank, loss_fn=nn.functional.mse_loss)
    engine.step(torch.randn(2, 4), torch.randn(2, 4))
    norm = torch.nn.utils.clip_grad_norm_(engine.parameters(), 1e9, "inf")
    torch.testing.assert_close(engine.clip_grad_norm_(1e9, "inf"), norm)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"max_norm={wrong}, wanted"):
            engine.clip_grad_norm_(wrong)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel])
def test_an_engine_is_not_copied(one_rank, copied):
    with pytest.raises(
        ParallelError, match=r"neither copied \(AveragedModel, deepcopy\) nor pickled: copy its"
    ):
        copied(parallelize_model(*one_rank))


def test_a_step_without_gradients_is_refused(one_rank):
    engine = parallelize_model(*one_rank, loss_fn=nn.functional.mse_loss)
    with torch.no_grad(), pytest.raises(ParallelError, match="turned off here; evaluate"):
        engine.step(torch.randn(2, 4), torch.randn(2, 4))


def test_what_is_saved_beside_a_training_comes_back_as_it_was(one_rank, tmp_path):
    """JSON makes texts of a MultiStepLR's milestones, at which no rate would fall."""
    engine = parallelize_model(*one_rank)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2, 2])
    checkpoints = TrainingCheckpoints(tmp_path / "run")
    extra = {
        "scheduler": scheduler.state_dict(),
        "random": random.getstate(),
        "list": [(1, "a"), {"(tuple)": 3}],
    }
    checkpoints.save(engine, optimizer, step=1, extra=extra)
    assert checkpoints.load(engine, optimizer).extra == extra
    endless = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        checkpoints.save(engine, optimizer, step=2, extra={"endless": endless})


def test_a_warm_up_before_milestones_is_resumed(one_rank, tmp_path):
    """Where `SequentialLR` begins with a MultiStepLR, that asks its milestones, a Counter, for elements."""
    engine = parallelize_model(*one_rank)

    def made():
        optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2, 2])
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, steps], [2])

    (optimizer, scheduler), (resumed, other) = made(), made()
    optimizer.step()
    scheduler.step()
    checkpoints = TrainingCheckpoints(tmp_path / "run")
    checkpoints.save(engine, optimizer, step=1, extra=scheduler.state_dict())
    other.load_state_dict(checkpoints.load(engine, resumed).extra)
    for _ in range(4):
        for one in (scheduler, other):
            one.step()
        assert other.get_last_lr() == scheduler.get_last_lr()


def test_a_scheduler_of_a_rate_that_is_a_tensor_is_saved(one_rank, tmp_path):
    engine = parallelize_model(*one_rank)

    def made():
        optimizer = torch.optim.SGD(engine.parameters(), lr=torch.tensor(0.3))
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)

    (optimizer, scheduler), (resumed, other) = made(), made()
    optimizer.step()
    scheduler.step()
    checkpoints = TrainingCheckpoints(tmp_path / "run")
    drawn = torch.get_rng_state()
    checkpoints.save(engine, optimizer, step=1, extra={"scheduler": scheduler.state_dict(), "drawn": drawn})
    extra = checkpoints.load(engine, resumed).extra
    other.load_state_dict(extra["scheduler"])
    for one in (scheduler, other):
        one.step()
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == torch.tensor(0.3) * 0.1 * 0.1
    assert torch.equal(extra["drawn"], drawn)


def test_checkpoints_of_one_save_leave_no_group_behind(one_rank, tmp_path):
    engine = parallelize_model(*one_rank)
    optimizer = torch.optim.SGD(engine.parameters())
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    for step in (1, 2, 3):
        with TrainingCheckpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(engine, optimizer, step=step)
    with TrainingCheckpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.load(engine, optimizer).step == 3
        assert checkpoints.load(engine, optimizer, step=2).step == 2
        assert checkpoints.load(engine, optimizer, step=1) is None
    assert len(torch.distributed.distributed_c10d._world.pg_map) == groups


def test_checkpoints_are_of_an_engine_and_an_optimizer(one_rank, tmp_path):
    engine = parallelize_model(*one_rank)
    optimizer = torch.optim.SGD(engine.parameters())
    checkpoints = TrainingCheckpoints(tmp_path / "run")
    for call in (checkpoints.load, partial(checkpoints.save, step=1)):
        with pytest.raises(ConfigTypeError, match="engine is a Linear, wanted a ParallelEngine"):
            call(one_rank[0], optimizer)
        with pytest.raises(ConfigTypeError, match="optimizer is a NoneType, wanted an Optimizer"):
            call(engine, None)


def test_a_process_group_is_needed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part = partition_model(model, torch.randn(2, 4), mesh={"pp": 2}, hardware="cpu")
    with pytest.raises(ProcessGroupError, match="torchrun"):
        parallelize_model(model, part)
    with pytest.raises(ParallelError, match="on the meta device"):
        parallelize_model(model.to("meta"), part)
    with pytest.raises(ConfigTypeError, match="part is a str"):
        parallelize_model(model, "part")


def test_stages_are_placed_round_after_round_or_there_and_back():
    assert place_stages(6, 3, zigzag=False) == (0, 1, 2, 0, 1, 2)
    assert place_stages(6, 3, zigzag=True) == (0, 1, 2, 2, 1, 0)


def test_gradients_become_contiguous_and_outputs_are_no_views():
    x, mask = torch.randn(3, 4, requires_grad=True), torch.ones(3, dtype=torch.bool)
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
    y, same = contiguous_gradients([x, mask])
    assert same is mask
    assert not y._is_view()
    assert y.data_ptr() == x.data_ptr()
    (y.t() * torch.randn(4, 3)).sum().backward()
    plain = torch.autograd.grad((x.t() * torch.randn(4, 3)).sum(), x)[0]
    assert seen[0]
    assert not plain.is_contiguous()  # else the test proves nothing


def test_masks_that_a_stage_gives_are_no_views():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x * 2).t(), mask[None].expand(2, -1)

    stage = StageModule(fx.symbolic_trace(Masked()), None)
    x, mask = torch.randn(3, 4, requires_grad=True), torch.ones(3)
    for given, wanted in zip(stage(x, mask), (2 * x.t(), mask.repeat(2, 1)), strict=True):
        assert torch.equal(given, wanted)
        given.detach_()  # as torch's zero-bubble schedules do


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x):
        self.state.add_(1)
        return x, self.state[:1]


def test_what_shows_a_buffer_is_as_it_was_in_its_microbatch(one_rank):
    """It is sent, or joined with the others, when the next microbatch has written to the buffer."""
    model = Counting()
    part = partition_model(model, torch.randn(1, 2), mesh={}, hardware="cpu", microbatches=3)
    stage = StageModule(part.split().stages[0], None)
    shown = [stage(torch.randn(1, 2))[1] for _ in range(3)]
    assert torch.cat(shown).tolist() == [1, 2, 3]
    model.state.zero_()
    assert parallelize_model(model, part).predict(torch.randn(3, 2))[1].tolist() == [1, 2, 3]


def _spec(name, *shape):
    return TensorSpec(name, shape, "float32", False, None, (0,))


def test_batches_are_checked():
    x, table = torch.randn(6, 2), torch.randn(5)
    specs = [_spec("x", 2, 2), _spec("table", 5)]
    batch = read_batch([x, table], specs, 3)
    assert [tuple(value.shape) for value in batch.joined()] == [(6, 2), (15,)]
    assert torch.equal(batch.joined()[1].chunk(3)[1], table)
    assert not batch.is_filled_up
    with pytest.raises(BatchError, match=r"x has a batch of 8; .* 3 microbatches of 2, 6 in all"):
        read_batch([torch.randn(8, 2), table], specs, 3)
    with pytest.raises(BatchError, match=r"different numbers of rows: x \(6, 2\), y \(4, 2\)"):
        read_batch([x, x[:4]], [_spec("x", 2, 2), _spec("y", 2, 2)], 3)
    with pytest.raises(BatchError, match="is a number"):
        read_batch([torch.tensor(1.0)], [_spec("t")], 3)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_the_last_batch_may_be_smaller(rows):
    """Graphs get their microbatches filled up; a module of any shape gets as many rows as there are."""
    x, table = torch.arange(2.0 * rows).view(rows, 2), torch.randn(5)
    specs = [_spec("x", 2, 2), _spec("table", 5)]
    batch = read_batch([x, table], specs, 3)
    assert batch.is_filled_up
    assert batch.rows == rows
    counted = [inputs[0][:size] for inputs, size in zip(batch.microbatches(), batch.sizes, strict=True)]
    assert torch.equal(torch.cat(counted), x)
    assert all(inputs[0].shape == (2, 2) and inputs[1] is table for inputs in batch.microbatches())
    target = torch.arange(rows * 4)
    assert [len(part) for part in divide_target(target, batch)] == [4 * size for size in batch.sizes]
    free = read_batch([x, table], specs, 3, any_shape=True)
    assert not free.is_filled_up
    assert torch.equal(torch.cat([inputs[0] for inputs in free.microbatches()]), x)
    assert max(free.sizes) - min(free.sizes) <= 1
    assert len(free.sizes) == (1 if rows == 2 else min(rows, 3))


def test_a_last_batch_of_a_microbatch_is_not_divided_beside_another_length(one_rank):
    """Sources as long as the example's were given whole to microbatches of a row of their targets."""
    model = nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)
    part = partition_model(
        model, (torch.randn(2, 5, 8), torch.randn(2, 4, 8)), mesh={}, hardware="cpu", microbatches=3
    )
    engine = parallelize_model(model, part, loss_fn=nn.functional.mse_loss)
    for length in (4, 3):
        source, target = torch.randn(2, 5, 8), torch.randn(2, length, 8)
        torch.testing.assert_close(engine.predict(source, target), model(source, target))


def test_rows_of_outputs_that_count():
    x, both, number = torch.arange(4), torch.arange(8), torch.tensor(1.0)
    taken = take_rows([x, both, number], 3, 4)
    assert [one.tolist() for one in taken] == [[0, 1, 2], [0, 1, 2, 3, 4, 5], 1.0]
    assert take_rows([x], None, 4)[0] is x


def test_targets_are_divided_and_outputs_merged():
    batch = read_batch([torch.randn(6, 2)], [_spec("x", 2, 2)], 3)
    parts = divide_target({"a": torch.arange(6), "b": "same"}, batch)
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert {part["b"] for part in parts} == {"same"}
    assert divide_target(None, batch) == [None] * 3
    with pytest.raises(BatchError, match=r"shape \(7,\); .* divisible by the 6 rows"):
        divide_target(torch.arange(7), batch)
    merged = merge([(torch.ones(2), torch.tensor(1.0)), (torch.zeros(2), torch.tensor(3.0))])
    assert merged[0].tolist() == [1, 1, 0, 0]
    assert float(merged[1]) == 2
