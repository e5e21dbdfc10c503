"""Continuous batching of transformers on sketched decoders: the tokens of `generate`, one text at a time."""

import inspect

import pytest
import torch

import panther_compile as pc

pytest.importorskip("psutil")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integrations

NEW = 12
WIDTHS = dict(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
)
MODELS = {"Llama": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 8}}


@pytest.fixture(params=MODELS)
def small(request):
    torch.manual_seed(1)
    config = getattr(transformers, f"{request.param}Config")(**WIDTHS, **MODELS[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    return pc.sketchify(model, 0.5, progress=False, min_params=0, allow_slower=True)


def batched(model, prompts, **options):
    """What continuous batching adds to each prompt, in a cache of a few pages."""
    names = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in names else "block_size"  # before transformers 5.20
    found = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False),
        # Without num_blocks it takes 60 % of the machine's memory.
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64, **{page: 16}
        ),
        **options,
    )
    assert [output.error for output in found.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in found.values()]


def alone(model, prompt, **options):
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **options)
    return ids[0, len(prompt) :].tolist()


def test_tokens_are_those_of_generate(small):
    prompts = [torch.randint(3, 99, (length,)).tolist() for length in (5, 9, 13)]
    wanted = [alone(small, prompt) for prompt in prompts]
    assert batched(small, prompts) == wanted
    assert alone(small, prompts[0]) == wanted[0]  # and the model is as it was


def test_a_latent_cache_is_not_looked_at(small):
    """transformers has pages of its own for the cache, and drops the argument."""
    prompts = [torch.randint(3, 99, (length,)).tolist() for length in (5, 9)]
    wanted = [alone(small, prompt) for prompt in prompts]
    cache = pc.LatentCache(small)
    assert batched(small, prompts, past_key_values=cache) == wanted
    assert cache.get_seq_length() == 0
    assert alone(small, prompts[0], past_key_values=cache) == wanted[0]  # nor does it harm it
