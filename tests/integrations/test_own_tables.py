"""Tables that scale what they read, of Gemma and BART: saved, loaded, streamed, generated with."""

import pytest
import torch
import transformers

import panther_compile as pc

pytestmark = pytest.mark.integrations
OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True}
V = 96


def gemma():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3TextConfig(**sizes, vocab_size=V, head_dim=16, num_key_value_heads=2)
    return transformers.Gemma3ForCausalLM(config).eval(), ["model.embed_tokens", "lm_head"]


def m2m100():
    layers = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")}
    config = transformers.M2M100Config(vocab_size=V, d_model=32, **layers, **heads, **widths)
    include = ["model.shared", "model.*coder.embed_tokens", "lm_head"]
    return transformers.M2M100ForConditionalGeneration(config).eval(), include


MODELS = {"gemma": gemma, "m2m100": m2m100}


def texts(name, count=4):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, V, (count, 2, 12), generator=generator)
    return [
        {"input_ids": one} | ({} if name == "gemma" else {"decoder_input_ids": one.flip(1)}) for one in ids
    ]


@torch.no_grad()
def logits(model, name):
    return model(**texts(name)[0]).logits


@pytest.fixture(params=MODELS)
def case(request):
    """A model's name, the model, and the tables and heads that share one weight."""
    torch.manual_seed(0)
    return request.param, *MODELS[request.param]()


@pytest.mark.parametrize("with_data", [True, False])
def test_saved_loaded_and_streamed(case, with_data, tmp_path):
    name, model, include = case
    options = OPTIONS | {"include": include, "data": texts(name) if with_data else None}
    small = pc.sketchify(model, 0.5, synthetic=with_data, **options)
    numbers = [sum(one.numel() for one in each.parameters()) for each in (model, small)]
    assert numbers[1] <= numbers[0] - V * 32 // 2
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small").eval()
    assert torch.equal(logits(again, name), logits(small, name))
    assert len(list(again.parameters())) == len(list(small.parameters()))
    model.save_pretrained(tmp_path / "dense")
    pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "streamed", 0.5, **options)
    streamed = type(model).from_pretrained(tmp_path / "streamed").eval()
    assert torch.equal(logits(streamed, name), logits(small, name))


def test_generates_and_is_dense_again(case, tmp_path):
    name, model, include = case
    small = pc.sketchify(model, 0.5, include=include, **OPTIONS)
    ids = texts(name)[0]["input_ids"]
    tokens = small.generate(ids, max_new_tokens=4, do_sample=False)
    dense = pc.densify(small)
    torch.testing.assert_close(logits(dense, name), logits(small, name), rtol=1e-4, atol=1e-4)
    assert torch.equal(dense.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    dense.save_pretrained(tmp_path / "dense")
    again = type(model).from_pretrained(tmp_path / "dense").eval()
    assert torch.equal(logits(again, name), logits(dense, name))


def test_a_base_models_table_is_the_head_of_one_that_has_it(tmp_path):
    model, _ = gemma()
    pc.sketchify(model.model, 0.5, include=["embed_tokens"], **OPTIONS).save_pretrained(tmp_path / "base")
    whole = type(model).from_pretrained(tmp_path / "base").eval()
    assert whole.lm_head.up.weight is whole.model.embed_tokens.weight.layer.codes.weight
