"""accelerate's loop over an engine, beside one process: losses, norms, weights."""

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import panther_compile as pc

accelerate = pytest.importorskip("accelerate")

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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataloader_config": accelerate.DataLoaderConfiguration(split_batches=True)},
        {"step_scheduler_with_optimizer": False},
    ],
)
def test_schedulers_keep_their_pace_over_tp(ranks, options):
    from integrations import accelerate_jobs

    ranks(2).run(accelerate_jobs.schedules, **options)


def test_copies_count_once(ranks):
    from integrations import accelerate_jobs

    ranks(2).run(accelerate_jobs.metrics)


def test_what_it_cannot_take_is_refused_by_name(ranks):
    from integrations import accelerate_jobs

    ranks(2).run(accelerate_jobs.refusals)


def test_a_saved_sketch_loads_strictly_and_not_into_another(tmp_path):
    """accelerate writes of all empty tensors the first, as if they shared memory."""

    def sketch_of(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        return pc.sketchify(model, 0.6, synthetic=False, min_params=1, allow_slower=True)

    small, x = sketch_of(0), torch.randn(3, 12)
    starts = [layer.start for layer in small]
    assert starts.count(8) > 1
    accelerate.Accelerator(cpu=True).save_model(small, str(tmp_path))
    same = sketch_of(0)
    assert load_model(same, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(same(x), small(x))
    others = (sketch_of(seed) for seed in range(1, 50))
    other = next(one for one in others if any(a > b.start for a, b in zip(starts, one, strict=True)))
    with pytest.raises(pc.errors.CheckpointMismatchError, match="the trailing inputs, here the leading"):
        load_model(other, tmp_path / "model.safetensors", strict=False)
