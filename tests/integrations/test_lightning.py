"""Lightning's Trainer over an engine, beside Lightning in one process."""

import pytest

pytest.importorskip("lightning")

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Losses of four batches at a time, and the state at the end."""
    from integrations import lightning_jobs as jobs

    module = jobs.Classifier()
    folder = str(tmp_path_factory.mktemp("alone"))
    jobs.fit(module, "auto", folder, batch=4 * jobs.ROWS, keep=False)
    return {"losses": module.losses, "checked": module.checked, "state": module.state_dict()}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, "parallel": {"data_parallel": "ddp"}}),
        (2, {"mesh": {"dp": 2}, "parallel": {"data_parallel": "fsdp"}}),
        (2, {"mesh": {"tp": 2}, "parallel": {}}),
        (2, {"mesh": {"pp": 2}, "parallel": {}, "kind": "Piped"}),
        (4, {"mesh": {"dp": 2, "tp": 2}, "parallel": {"data_parallel": "fsdp"}}),
    ],
)
def test_the_same_training(ranks, one_process, tmp_path, count, options):
    from integrations import lightning_jobs

    ranks(count).run(lightning_jobs.train, folder=str(tmp_path), wanted=one_process, **options)


def test_a_checkpoint_on_another_mesh(ranks, tmp_path):
    from integrations import lightning_jobs

    ranks(2).run(lightning_jobs.other_mesh, folder=str(tmp_path))


def test_what_it_cannot_take_is_refused_by_name(ranks, tmp_path):
    from integrations import lightning_jobs

    ranks(2).run(lightning_jobs.refusals, folder=str(tmp_path))
