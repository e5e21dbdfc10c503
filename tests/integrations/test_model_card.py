"""The model card beside a sketched model, and the folder that goes to the hub."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import panther_compile as pc
from panther_compile.integrations.model_card import OURS, model_card

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def llama():
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    llama().save_pretrained(folder)
    data = [torch.randint(0, 99, (4, 16)) for _ in range(4)]
    return pc.sketchify(LlamaForCausalLM.from_pretrained(folder), 0.5, data=data, **OPTIONS)


def test_the_card_says_what_was_done(small, tmp_path):
    small.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    report = pc.sketch_report(small)
    for number in (report.dense_numbers, report.stored_numbers, report.dense_bytes, report.stored_bytes):
        assert f"{number:,}" in text
    assert f"Ratio asked for: 0.5; found: {report.achieved_ratio:.4f}." in text
    assert str(report.closeness) in text
    assert "# `tiny-llama`, sketched" in text
    assert str(tmp_path.parent) not in text
    code = text.split("```python\n")[1].split("```")[0].replace("this folder", str(tmp_path))
    names = {}
    exec(code, names)  # as the card says
    assert torch.equal(names["model"](torch.arange(8)[None]).logits, small(torch.arange(8)[None]).logits)
    # Loaded, it still knows what it was made of.
    names["model"].save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == text


def test_the_head_of_the_card_is_what_the_hub_reads(small):
    card = model_card(pc.sketch_report(small), "LlamaForCausalLM", "someone/tiny-llama")
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "someone/tiny-llama"
    assert head["library_name"] == "transformers"
    assert "panther_compile" in head["tags"]


def test_a_card_of_the_user_stays(small, tmp_path):
    card = tmp_path / "README.md"
    card.write_text("# mine")
    small.save_pretrained(tmp_path)
    assert card.read_text() == "# mine"
    card.write_bytes("# größer".encode("latin-1"))  # and is of any encoding
    small.save_pretrained(tmp_path)
    assert card.read_bytes() == "# größer".encode("latin-1")
    card.write_text(f"{OURS}\nof an earlier ratio")
    small.save_pretrained(tmp_path)
    assert "Ratio asked for: 0.5" in card.read_text()


def test_a_dense_model_gets_none(small, tmp_path):
    pc.densify(small).save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("data", [None, [torch.arange(8)[None] + place for place in range(2)]])
def test_a_streamed_folder_has_its_own(data, tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "README.md").write_text("# of the dense model")
    pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "small", 0.5, data=data, **OPTIONS)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "small")
    text = (tmp_path / "small" / "README.md").read_text()
    assert "# `dense`, sketched" in text
    assert f"{pc.sketch_report(again).stored_numbers:,}" in text


def test_the_folder_that_goes_to_the_hub_loads(small, tmp_path, monkeypatch):
    """`push_to_hub` as it is, but for the upload, which copies what it would send."""
    sent = tmp_path / "sent"

    class Repository:
        repo_id = "someone/small"

    class Api:
        def create_repo(self, *args, **options):
            return Repository

    def upload(self, folder, *args, **options):
        shutil.copytree(folder, sent)

    hub = pytest.importorskip("transformers.utils.hub")
    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    template = hub.ModelCard("---\ntags: []\n---\n# of the hub")
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **options: template)
    small.push_to_hub("someone/small")
    files = {file.name for file in Path(sent).iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= files
    again = AutoModelForCausalLM.from_pretrained(sent)
    for name, value in small.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    # transformers puts its own card, or that of the repository, over ours.
    assert (sent / "README.md").read_text() == str(template)
