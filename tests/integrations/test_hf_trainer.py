"""transformers' Trainer over an engine, beside the Trainer itself in one process."""

import pytest
import torch

pytest.importorskip("accelerate")

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """What transformers' own Trainer gives for the same batches of so many replicas."""
    from accelerate.state import AcceleratorState
    from integrations import hf_trainer_jobs as jobs
    from transformers import Trainer

    folder, found = tmp_path_factory.mktemp("alone"), {}

    def run(replicas):
        if replicas not in found:
            AcceleratorState._reset_state(True)
            rows = replicas * jobs.ROWS
            options = {f"per_device_{kind}_batch_size": rows for kind in ("train", "eval")}
            options["save_strategy"] = "no"
            model = jobs.small_llama()
            data = {"train_dataset": jobs.Texts(), "eval_dataset": jobs.Texts(12)}
            trainer = Trainer(model, jobs.arguments(folder, **options), **data)
            trainer.train()
            weights = folder / f"{replicas}.pt"
            torch.save(model.state_dict(), weights)
            found[replicas] = {
                "logged": jobs.logged(trainer),
                "eval_loss": trainer.evaluate()["eval_loss"],
                "weights": str(weights),
            }
        return found[replicas]

    return run


@pytest.mark.parametrize(
    ("count", "mesh", "parallel"),
    [
        (2, {"dp": 2}, {"data_parallel": "ddp"}),
        (2, {"dp": 2}, {"data_parallel": "fsdp"}),
        (2, {"tp": 2}, {}),
        (4, {"dp": 2, "tp": 2}, {"data_parallel": "fsdp"}),
    ],
)
def test_the_same_training(ranks, one_process, tmp_path, count, mesh, parallel):
    from integrations import hf_trainer_jobs

    wanted = one_process(mesh.get("dp", 1))
    ranks(count).run(hf_trainer_jobs.train, folder=str(tmp_path), mesh=mesh, parallel=parallel, wanted=wanted)


def test_the_best_model_and_another_mesh(ranks, tmp_path):
    from integrations import hf_trainer_jobs

    ranks(2).run(hf_trainer_jobs.best, folder=str(tmp_path))


def test_smoothed_labels_are_shifted(ranks, tmp_path):
    from integrations import hf_trainer_jobs

    ranks(2).run(hf_trainer_jobs.smoothed, folder=str(tmp_path))


def test_a_loss_is_a_mean_over_tokens(ranks, tmp_path):
    from integrations import hf_trainer_jobs

    ranks(2).run(hf_trainer_jobs.per_token, folder=str(tmp_path))


def test_ranks_of_a_tp_group_draw_alike_once_resumed(ranks, tmp_path):
    from integrations import hf_trainer_jobs

    ranks(2).run(hf_trainer_jobs.alike, folder=str(tmp_path))


def test_a_pipeline_is_refused_by_name(ranks, tmp_path):
    from integrations import hf_trainer_jobs

    ranks(2).run(hf_trainer_jobs.refusals, folder=str(tmp_path))
