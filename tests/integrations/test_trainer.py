"""transformers' Trainer on a sketched model: checkpoints, resuming, and the best model at the end."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import panther_compile as pc

pytestmark = pytest.mark.integrations


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(3, 99, (16, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def small_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    return pc.sketchify(model, 0.5, progress=False, min_params=0, allow_slower=True)


def trainer(model, folder, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    return transformers.Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts())


def test_checkpoints_load_and_training_resumes(tmp_path):
    whole = trainer(small_model(), tmp_path)
    whole.train()
    middle = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert isinstance(middle.model.layers[0].mlp.up_proj, pc.SketchedLinear)
    for start in (small_model(), middle):  # what was sketched, and what was loaded
        resumed = trainer(start, tmp_path / "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        for name, value in whole.model.state_dict().items():
            torch.testing.assert_close(resumed.model.state_dict()[name], value, msg=name)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = dict(eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
    best = trainer(small_model(), tmp_path, **options)
    best.train()
    again = AutoModelForCausalLM.from_pretrained(best.state.best_model_checkpoint)
    for name, value in best.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
