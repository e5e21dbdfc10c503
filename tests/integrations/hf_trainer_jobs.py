"""transformers' Trainer over an engine; each function runs on every rank."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from integrations.accelerate_jobs import small_llama
from integrations.launched import as_of_torchrun
from parallel.training import EAGER
from transformers import AutoModelForCausalLM, TrainingArguments

import panther_compile as pc
from panther_compile.errors import CheckpointError, ConfigError, ConfigTypeError, ParallelError

ROWS = 2


class Texts(torch.utils.data.Dataset):
    """Of one length; some tokens of each count, and not as many in every text."""

    def __init__(self, count=48):
        self.ids = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[8 - index % 5 :] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 4,
            "logging_steps": 1,
            "save_steps": 2,
            "per_device_train_batch_size": ROWS,
            "per_device_eval_batch_size": ROWS,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 0,
            **options,
        },
    )


def make_trainer(folder, mesh, parallel, **options):
    options = {"ddp_backend": "gloo", **options}
    AcceleratorState._reset_state(True)
    model = small_llama()
    rows = Texts()
    example = {key: torch.stack([rows[at][key] for at in range(ROWS)]) for key in ("input_ids", "labels")}
    hardware = EAGER if "tp" in mesh else "cpu"
    if "tp" in mesh:
        example["num_items_in_batch"] = torch.tensor(8)
    part = pc.partition_model(model, example, mesh=mesh, microbatches=mesh.get("pp", 1), hardware=hardware)
    data = {"train_dataset": Texts(), "eval_dataset": Texts(12)}
    return pc.PantherTrainer(model, arguments(folder, **options), **data, part=part, parallel=parallel)


def logged(trainer):
    return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "grad_norm" in one]


def train(rank, *, folder, mesh, parallel, wanted):
    """Losses and norms of each step, the evaluation and the saved model are those of one process."""
    with as_of_torchrun(rank):
        trainer = make_trainer(folder, mesh, parallel)
        trainer.train()
        torch.testing.assert_close(logged(trainer), wanted["logged"], rtol=1e-4, atol=1e-4)
        evaluated = trainer.evaluate()["eval_loss"]
        torch.testing.assert_close(evaluated, wanted["eval_loss"], rtol=1e-4, atol=1e-4)
        trainer.save_model(f"{folder}/trained")
        saved = AutoModelForCausalLM.from_pretrained(f"{folder}/trained")
        assert type(saved).__name__ == "LlamaForCausalLM"
        assert saved.config.architectures == ["LlamaForCausalLM"]
        state = torch.load(wanted["weights"])
        for name, value in saved.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0.0, atol=1e-3)
        dist.barrier()
        resumed = make_trainer(f"{folder}/resumed", mesh, parallel)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        assert logged(resumed)[-2:] == logged(trainer)[-2:]
        for name, value in trainer.engine.state_dict(full=True).items():
            assert torch.equal(resumed.engine.state_dict(full=True)[name], value)


def refusals(rank, *, folder):
    with as_of_torchrun(rank):
        with pytest.raises(ParallelError, match=r"write the loop with engine\.step"):
            make_trainer(folder, {"pp": 2}, {})
        alone = {"load_best_model_at_end": True, "save_only_model": True, "eval_strategy": "steps"}
        with pytest.raises(ConfigError, match="load_best_model_at_end=True reads the training state"):
            make_trainer(folder, {"dp": 2}, {"data_parallel": "ddp"}, **alone)
        with pytest.raises(ConfigTypeError, match="parallel: unknown option fsdp; those of parallelize"):
            make_trainer(folder, {"dp": 2}, {"fsdp": True})
        with pytest.raises(ConfigError, match=r"neftune_noise_alpha=5\.0 hooks into the model's embedding"):
            make_trainer(folder, {"tp": 2}, {}, neftune_noise_alpha=5.0)
        trainer = make_trainer(folder, {"dp": 2}, {"data_parallel": "ddp"})
        with pytest.raises(CheckpointError, match="none has no folder training/: it was not written by"):
            trainer.train(resume_from_checkpoint=f"{folder}/none")


def smoothed(rank, *, folder):
    """A decoder's labels are shifted where they are smoothed."""
    with as_of_torchrun(rank):
        ddp = {"data_parallel": "ddp"}
        trainer = make_trainer(folder, {"dp": 2}, ddp, label_smoothing_factor=0.1)
        batch = {key: torch.stack([one[key] for one in Texts(ROWS)]) for key in ("input_ids", "labels")}
        logits = small_llama()(input_ids=batch["input_ids"]).logits[:, :-1].transpose(1, 2)
        wanted = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:], label_smoothing=0.1)
        torch.testing.assert_close(trainer.compute_loss(trainer.engine, batch), wanted)


def per_token(rank, *, folder):
    """Over a tp axis a loss is the mean over tokens, whether they are counted over all ranks or not."""
    with as_of_torchrun(rank):
        batch = {key: torch.stack([one[key] for one in Texts(ROWS)]) for key in ("input_ids", "labels")}
        wanted = small_llama()(**batch).loss
        for counts_all in (True, False):
            options = {"average_tokens_across_devices": counts_all}
            trainer = make_trainer(folder, {"tp": 2}, {}, **options)
            items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
            loss = trainer.compute_loss(trainer.engine, dict(batch), num_items_in_batch=items)
            torch.testing.assert_close(loss, wanted)


def alike(rank, *, folder):
    """Ranks of a tp group draw alike after a checkpoint of ranks that drew otherwise."""
    with as_of_torchrun(rank):
        trainer = make_trainer(folder, {"tp": 2}, {})
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(rank)
        trainer._save_rng_state(folder)
        dist.barrier()
        trainer._load_rng_state(folder)
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        everyone = [None, None]
        dist.all_gather_object(everyone, drawn)
        assert everyone[0] == everyone[1]


def best(rank, *, folder):
    """The best model is loaded at the end, and another kind of replicas goes on from a checkpoint."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    with as_of_torchrun(rank):
        chosen = {"load_best_model_at_end": True, "greater_is_better": True}  # so that it is not the last one
        trainer = make_trainer(folder, {"dp": 2}, {"data_parallel": "fsdp"}, **options, **chosen)
        trainer.train()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
        state = trainer.engine.state_dict(full=True)
        for name, value in (
            AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-2").state_dict().items()
        ):
            assert torch.equal(state[name], value), name
        again = make_trainer(f"{folder}/again", {"dp": 2}, {"data_parallel": "ddp"}, **options)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        torch.testing.assert_close(logged(again)[-2:], logged(trainer)[-2:], rtol=1e-4, atol=1e-4)
