"""Lightning's Trainer over an engine, beside Lightning in one process."""

import pytest

import panther_compile as pc
from panther_compile.errors import ConfigTypeError, MeshError

pytest.importorskip("lightning")

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Losses of four batches at a time, and the state at the end."""
    from integrations import lightning_jobs as jobs

    module = jobs.Classifier()
    folder = str(tmp_path_factory.mktemp("alone"))
    jobs.fit(module, "auto", folder, batch=4 * jobs.ROWS, keep=False)
    known = {"losses": module.losses, "checked": module.checked, "norms": module.norms}
    return known | {"state": module.state_dict()}


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


def test_a_model_in_shards_after_its_fit(ranks, tmp_path):
    from integrations import lightning_jobs

    ranks(2).run(lightning_jobs.after_shards, folder=str(tmp_path))


def test_a_file_over_that_of_another_training(ranks, tmp_path):
    from integrations import lightning_jobs

    ranks(2).run(lightning_jobs.one_name, folder=str(tmp_path))


def test_a_model_in_half_types(ranks, tmp_path):
    from integrations import lightning_jobs

    ranks(2).run(lightning_jobs.half_types, folder=str(tmp_path))


def test_what_it_cannot_take_is_refused_by_name(ranks, tmp_path):
    from integrations import lightning_jobs

    ranks(2).run(lightning_jobs.refusals, folder=str(tmp_path))


def test_a_mesh_that_is_none():
    with pytest.raises(ConfigTypeError, match="mesh=2 is a int, wanted Mapping"):
        pc.PantherStrategy(2, model="net")
    with pytest.raises(MeshError, match=r"mesh\['pp'\] is 0, wanted a whole number of devices"):
        pc.PantherStrategy({"pp": 0})


def test_options_that_are_unknown():
    with pytest.raises(ConfigTypeError, match=r"partition: unknown option microbatch; .* boundaries"):
        pc.PantherStrategy({"pp": 2}, partition={"microbatch": 2})
    with pytest.raises(ConfigTypeError, match="partition: unknown option mesh; those of partition_model"):
        pc.PantherStrategy({"pp": 2}, partition={"mesh": {"pp": 2}})
    with pytest.raises(ConfigTypeError, match="parallel: unknown option dp; those of parallelize_model"):
        pc.PantherStrategy({"dp": 2}, parallel={"dp": "ddp"})
    with pytest.raises(ConfigTypeError, match="parallel='fsdp' is a str, wanted Mapping"):
        pc.PantherStrategy({"dp": 2}, parallel="fsdp")
