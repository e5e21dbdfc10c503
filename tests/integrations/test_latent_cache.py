"""A latent cache: the tokens of transformers' own cache in fewer bytes; what is left whole has a reason."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import DynamicCache

import panther_compile as pc

WIDTHS = dict(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
HALF = dict(num_key_value_heads=2)
SPEECH = dict(
    vocab_size=99,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=200,
    decoder_start_token_id=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    init_std=0.15,
)
T5 = dict(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=1)
GPT2 = dict(vocab_size=99, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15)
NEOX = WIDTHS | {"rotary_pct": 0.5}
NEO = WIDTHS | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
OSS = WIDTHS | {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
# What is built, from what, and how keys and values of it are kept.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", WIDTHS | HALF, "latent"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "together"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", WIDTHS | HALF, "latent"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", WIDTHS | HALF | {"head_dim": 16}, "normalised"),
    "mistral": ("MistralForCausalLM", "MistralConfig", WIDTHS | HALF | {"sliding_window": 8}, "latent"),
    "phi": ("PhiForCausalLM", "PhiConfig", WIDTHS, "latent"),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", WIDTHS | HALF, "together"),
    "gemma": (
        "GemmaForCausalLM",
        "GemmaConfig",
        WIDTHS | {"num_key_value_heads": 1, "head_dim": 32},
        "latent",
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, "together"),
    "gpt-neo": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO | {"window_size": 8}, "latent"),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", OSS, "latent"),  # one angle for two dimensions
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "latent"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH, "latent"),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def small_model(name):
    return copy.deepcopy(_sketched(name))


@functools.cache
def _sketched(name):
    architecture, config, widths, _ = MODELS[name]
    torch.manual_seed(1)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**widths)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn_like(parameter)  # biases that matter
    return pc.sketchify(model, 0.4, progress=False, min_params=0, allow_slower=True)


def inputs(name):
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))}
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padded on the left: the rows are at different positions
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, name, tokens=40, **options):
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False) | options
    return model.generate(**inputs(name), **options)


# Each keeps keys and values as one that stays does.
SELDOM = ("qwen2", "mistral", "phi", "phi3", "gemma", "gpt-neox", "whisper")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in MODELS]
)
def test_the_same_tokens_in_fewer_bytes(name):
    small = small_model(name)
    cache = pc.LatentCache(small)
    assert torch.equal(generate(small, name, past_key_values=cache), generate(small, name))
    report = cache.report()
    assert report.bytes_per_token < report.whole_bytes_per_token
    for line in report.layers:
        assert line.values.startswith("with the keys" if MODELS[name][3] == "together" else "latent")
        if MODELS[name][3] == "normalised":
            assert line.keys == "whole: normalised after their projection"
        else:
            assert line.keys.startswith("latent")
            assert line.kept_bytes < 0.75 * line.whole_bytes
    assert f"{report.bytes_per_token:,} of {report.whole_bytes_per_token:,} bytes a token" in str(report)


COMPLEX = WIDTHS | HALF | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2}


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_keys_turned_by_complex_numbers_are_whole():
    torch.manual_seed(1)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**COMPLEX)).eval()
    small = pc.sketchify(model, 0.4, include="*_proj", progress=False, min_params=0, allow_slower=True)
    cache = pc.LatentCache(small)
    found = generate(small, "llama4", 12, past_key_values=cache)
    assert torch.equal(found, generate(small, "llama4", 12))
    for line in cache.report().layers:
        assert line.keys.startswith("whole: ")
        assert line.values.startswith("latent")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_same_500_tokens(name):
    small = small_model(name)
    tokens = 180 if name == "whisper" else 500
    cache = pc.LatentCache(small)
    found = generate(small, name, tokens, past_key_values=cache)
    assert torch.equal(found, generate(small, name, tokens))


def held_bytes(cache):
    layers = [layer.inner for layer in cache.layers] + [group.kept for group in cache.groups]
    tensors = [t for layer in layers for t in (layer.keys, layer.values)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_the_report_counts_what_is_held():
    small = small_model("llama")
    cache = pc.LatentCache(small)
    small(torch.arange(3, 35)[None], past_key_values=cache)
    for token in range(3, 9):
        small(torch.tensor([[token]]), past_key_values=cache)
    assert cache.get_seq_length() == 38
    assert held_bytes(cache) == 38 * cache.report().bytes_per_token


def test_what_is_read_is_what_was_given():
    small = small_model("llama")
    latent, whole = pc.LatentCache(small), DynamicCache(config=small.config)
    ids = torch.randint(3, 99, (2, 20))
    for part in ids.split([1, 1, 5, 13], dim=1):  # nothing is known from one token at position 0
        for cache in (latent, whole):
            small(part, past_key_values=cache)
    assert latent.report().layers[0].keys.startswith("latent")
    for mine, theirs in zip(latent.layers, whole.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow), "gpt2", "t5"])
def test_beams_and_samples_are_the_same(name):
    small = small_model(name)
    options = [dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)]
    for option in options:
        drawn = []
        for cache in ({}, {"past_key_values": pc.LatentCache(small)}):
            torch.manual_seed(5)
            drawn.append(generate(small, name, 12, **option, **cache))
        assert torch.equal(*drawn)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "mistral"])
def test_assisted_generation_crops_it(name):
    small, assistant = small_model(name), small_model(name)
    one = {key: value[:1] for key, value in inputs(name).items()}
    wanted = small.generate(**one, max_new_tokens=20, do_sample=False)
    found = small.generate(
        **one,
        max_new_tokens=20,
        do_sample=False,
        assistant_model=assistant,
        past_key_values=pc.LatentCache(small),
    )
    assert torch.equal(found, wanted)


def test_a_copy_goes_on_without_the_first():
    small = small_model("llama")
    cache = pc.LatentCache(small)
    ids = torch.randint(3, 99, (1, 12))
    small(ids[:, :8], past_key_values=cache)
    twin = copy.deepcopy(cache)
    del cache
    found = small(ids[:, 8:], past_key_values=twin).logits
    torch.testing.assert_close(found, small(ids).logits[:, 8:], rtol=1e-4, atol=1e-5)


def test_the_model_keeps_no_hook():
    small = small_model("llama")
    cache = pc.LatentCache(small)
    generate(small, "llama", 3, past_key_values=cache)
    assert any(module._forward_pre_hooks for module in small.modules())
    del cache
    assert not any(module._forward_pre_hooks for module in small.modules())


def test_a_cache_is_used_again_after_a_reset():
    small = small_model("llama")
    cache = pc.LatentCache(small)
    first = generate(small, "llama", 5, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(small, "llama", 5, past_key_values=cache), first)


@pytest.mark.slow
def test_narrow_values_are_kept_at_their_width():
    config = transformers.LlamaConfig(**WIDTHS | {"num_hidden_layers": 1})
    dense = transformers.LlamaForCausalLM(config).eval()
    data = [torch.randint(3, 99, (4, 16)) for _ in range(4)]
    small = pc.sketchify(dense, 0.5, data=data, progress=False, min_params=0, allow_slower=True)
    narrow = [layer.self_attn.v_proj for layer in small.model.layers]
    if not all(type(layer).__name__ == "NarrowLinear" for layer in narrow):
        pytest.skip("data left no values out")
    cache = pc.LatentCache(small)
    assert torch.equal(generate(small, "llama", past_key_values=cache), generate(small, "llama"))
    for line, layer in zip(cache.report().layers, narrow, strict=True):
        assert line.values == f"latent {layer.ranks[-1]} of 64" or line.values == "with the keys"


def test_a_shared_input_factor_is_kept_once():
    small = pc.densify(small_model("llama"))
    for layer in small.model.layers:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            sketched = pc.SketchedLinear.from_dense(getattr(attention, name), rank=12, form="pair")
            setattr(attention, name, sketched)
        attention.v_proj.down = attention.k_proj.down
    cache = pc.LatentCache(small)
    assert torch.equal(generate(small, "llama", past_key_values=cache), generate(small, "llama"))
    assert {line.values for line in cache.report().layers} == {"with the keys"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_kept_to_their_rounding(dtype):
    small = small_model("llama").to(dtype)
    latent, whole = pc.LatentCache(small), DynamicCache(config=small.config)
    ids = torch.randint(3, 99, (1, 24))
    for part in ids.split([16, 8], dim=1):
        for cache in (latent, whole):
            small(part, past_key_values=cache)
    assert latent.report().layers[0].keys.startswith("latent")
    for mine, theirs in zip(latent.layers[:1], whole.layers, strict=False):
        error = (mine.keys - theirs.keys).norm() / theirs.keys.norm()
        assert error < 3 * torch.finfo(dtype).eps


def test_a_layer_that_is_dense_is_whole_and_says_so():
    dense = small_model("llama")
    small = copy.deepcopy(dense)
    small.model.layers[0] = pc.densify(dense).model.layers[0]
    cache = pc.LatentCache(small)
    assert torch.equal(generate(small, "llama", past_key_values=cache), generate(small, "llama"))
    first, second = cache.report().layers
    assert first.keys == first.values == "whole: no sketched layer writes them"
    assert second.keys.startswith("latent")
    with pytest.raises(pc.PantherError, match="no attention of LlamaForCausalLM has a sketched layer"):
        pc.LatentCache(pc.densify(dense))
    with pytest.raises(pc.PantherError, match="wanted a model of transformers"):
        pc.LatentCache(torch.nn.Linear(3, 3))


def test_a_cache_of_other_states_alone_is_refused():
    config = transformers.MambaConfig(vocab_size=99, hidden_size=64, state_size=8, num_hidden_layers=2)
    options = {"synthetic": False, "progress": False, "min_params": 0, "allow_slower": True}
    small = pc.sketchify(transformers.MambaForCausalLM(config).eval(), 0.5, **options)
    with pytest.raises(pc.PantherError, match="no layer that holds keys and values alone: LinearAttentionL"):
        pc.LatentCache(small)


def test_a_rank_that_saves_nothing_is_whole_and_says_so():
    dense = pc.densify(small_model("llama"))
    attention = dense.model.layers[0].self_attn
    attention.v_proj = pc.SketchedLinear.from_dense(attention.v_proj, rank=32)
    cache = pc.LatentCache(dense)
    generate(dense, "llama", 4, past_key_values=cache)
    assert "rank of the layer that writes them" in cache.report().layers[0].values


def steps(model, ids, cache, prefix=4):
    """The logits of tokens that come one by one behind a prefix."""
    model(ids[:, :prefix], past_key_values=cache)
    each = ids[:, prefix:].split(1, dim=1)
    return torch.cat([model(token, past_key_values=cache).logits for token in each], dim=1)


def test_later_tokens_that_do_not_read_back_are_kept_whole():
    model = small_model("llama")
    key = model.model.layers[1].self_attn.k_proj
    ids = torch.randint(3, 99, (2, 24), generator=torch.Generator().manual_seed(5))
    largest, of_all = (
        max(float(key(x).abs().max()) for x in inputs_of(key, model, some)) for some in (ids[:, :4], ids)
    )
    assert of_all > 1.1 * largest  # a later token is beyond what the first call shows
    key.register_forward_hook(lambda layer, args, out: out.clamp(-1.01 * largest, 1.01 * largest))
    cache = pc.LatentCache(model)
    found = steps(model, ids, cache)
    torch.testing.assert_close(
        found, steps(model, ids, DynamicCache(config=model.config)), rtol=1e-4, atol=1e-4
    )
    assert "changed later tokens" in str(cache.report())
    assert cache.layers[0].form.keys is not None


@pytest.mark.slow  # Dynamo is slow
def test_a_compiled_model_fills_it(fresh_dynamo):
    model = small_model("llama")
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(4))
    cache, whole = pc.LatentCache(model), DynamicCache(config=model.config)
    found = steps(torch.compile(model, backend="eager"), ids, cache, prefix=10)
    torch.testing.assert_close(found, steps(model, ids, whole, prefix=10), rtol=1e-4, atol=1e-4)
    assert all(line.keys.startswith("latent") for line in cache.report().layers)


def inputs_of(layer, model, ids):
    """What reaches a layer."""
    seen = []
    handle = layer.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    model(ids)
    handle.remove()
    return seen


def test_what_an_adapter_writes_is_kept_whole_in_half_types():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(small_model("llama"), config).bfloat16().eval().base_model.model
    cache = pc.LatentCache(tuned)
    tuned(torch.arange(3, 13)[None], past_key_values=cache)
    assert [layer.form.keys for layer in cache.layers] == [None, None]
    assert all(layer.form.values is not None for layer in cache.layers)
