"""PEFT's LoRA on a divided model, beside one process."""

import pytest

pytest.importorskip("peft")

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, "data_parallel": "ddp"}),
        (2, {"mesh": {"dp": 2}, "data_parallel": "fsdp"}),
        (2, {"mesh": {"tp": 2}}),
        (2, {"mesh": {"pp": 2}}),
        (2, {"mesh": {"pp": 2}, "sketched": True}),
        (4, {"mesh": {"dp": 2, "pp": 2}, "data_parallel": "fsdp"}),
    ],
)
def test_adapters(ranks, tmp_path, count, options):
    from integrations import peft_jobs

    ranks(count).run(peft_jobs.train, folder=str(tmp_path), **options)
