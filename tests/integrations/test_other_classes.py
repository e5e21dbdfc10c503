"""Folders of sketches that are read as another class than was saved, or written by another model."""

import copy

import pytest
import torch
import transformers
from torch.nn.utils import prune
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BitConfig, BitForImageClassification

import panther_compile as pc
from panther_compile.errors import CheckpointError, CheckpointMismatchError
from panther_compile.integrations.pretrained import empty_weights

IDS = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))
WIDTHS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OPTIONS = {"min_params": 0, "allow_slower": True, "synthetic": False}
BODIES = {
    "bert": ("BertForMaskedLM", WIDTHS | {"intermediate_size": 64}),
    "distilbert": ("DistilBertForMaskedLM", {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4}),
    "llama": ("LlamaForCausalLM", WIDTHS | {"intermediate_size": 64, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def built(name):
    torch.manual_seed(0)
    head, options = BODIES[name]
    return getattr(transformers, head)(AutoConfig.for_model(name, **options)).eval()


def everything(model):
    return pc.sketchify(model, 0.6, include="*", **OPTIONS)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_whose_table_is_tied_to_a_head(name, tmp_path):
    small = everything(built(name))
    small.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(body(IDS).last_hidden_state, small.base_model(IDS).last_hidden_state)
    again = type(small).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, small(IDS).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # others have a head with weights of its own besides
def test_a_head_that_is_tied_to_the_table_of_a_body(name, tmp_path):
    small = everything(built(name))
    small.base_model.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path).eval()
    assert type(again.get_output_embeddings()).__name__ == "SketchedLinear"
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, small(IDS).logits)
    again.save_pretrained(tmp_path / "again")
    third = type(small).from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(third(IDS).logits, small(IDS).logits)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_dense_model_of_tied_sketches_is_saved_as_any(loaded, tmp_path):
    small = everything(built("llama"))
    if loaded:
        small.save_pretrained(tmp_path / "small")
        small = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    dense = pc.densify(small)
    dense.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, dense(IDS).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("loaded", [False, True])
def test_a_dense_model_is_not_saved_for_a_class_that_standardizes_its_weights(loaded, tmp_path):
    config = BitConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4, num_labels=4)
    small = pc.sketchify(BitForImageClassification(config).eval(), 0.5, **OPTIONS)
    if loaded:
        small.save_pretrained(tmp_path / "small")
        small = BitForImageClassification.from_pretrained(tmp_path / "small").eval()
    for dense in (pc.densify(small), copy.deepcopy(pc.densify(small, inplace=True))):
        with pytest.raises(CheckpointError, match=r"was densified, and is a WeightStandardizedConv2d"):
            dense.save_pretrained(tmp_path / "dense")
    BitForImageClassification(config).save_pretrained(tmp_path / "other")


def test_a_dense_model_of_the_config_of_a_sketch(tmp_path):
    pc.sketchify(built("llama"), 0.6, **OPTIONS).save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointMismatchError, match=r"no factors.*take quantization_config out"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dense")


@pytest.mark.parametrize("part", ["CLIPVisionModel", "CLIPTextModel"])
def test_a_part_with_a_config_of_its_own_is_refused(part, tmp_path):
    """It reads no more than its own share of config.json, which says nothing of a sketch."""
    text = {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {"image_size": 16, "patch_size": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config=sizes | text, vision_config=sizes | vision, projection_dim=32
    )
    small = pc.sketchify(transformers.CLIPModel(config).eval(), 0.6, **OPTIONS)
    small.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatched"):
        getattr(transformers, part).from_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path)


def test_experts_alone_are_refused_and_come_back(tmp_path):
    torch.manual_seed(0)
    widths = {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**WIDTHS, **widths)).eval()
    small = pc.sketchify(model, 0.6, exclude="*self_attn*", **OPTIONS)
    assert [name for name in empty_weights(small) if "experts" in name] == [
        f"model.layers.{place}.mlp.experts.gate_up_proj" for place in range(2)
    ]
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, small(IDS).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    with pytest.raises(RuntimeError, match="mismatched"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config, quantization_config=None)


def test_a_state_dict_that_is_given_is_what_is_saved(tmp_path):
    small = pc.sketchify(built("llama"), 0.6, **OPTIONS)
    average = {name: 2 * value for name, value in small.state_dict().items()}  # as of weights' averages
    small.save_pretrained(tmp_path, state_dict=average)
    again = type(small).from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, 2 * small.state_dict()[name]), name


def test_factors_that_make_their_weight_are_not_saved(tmp_path):
    """They were, and transformers drew these factors at random when it loaded the folder."""
    small = pc.sketchify(built("llama"), 0.6, **OPTIONS).eval()
    up = small.model.layers[0].self_attn.q_proj.up
    prune.l1_unstructured(up, "weight", 0.5)
    with pytest.raises(CheckpointError, match=r"q_proj\.up makes its weight of other tensors: call save_pre"):
        small.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    prune.remove(up, "weight")
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, small(IDS).logits)


@pytest.mark.parametrize("part", ["model", "model.layers.0"])
def test_a_part_that_was_sketched_by_itself(part, tmp_path):
    model = built("llama")
    model.set_submodule(part, pc.sketchify(model.get_submodule(part), 0.6, **OPTIONS))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
