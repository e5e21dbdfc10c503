"""`objective="cache"`: keys and values of one input factor, in numbers that a latent cache then keeps."""

import functools

import pytest
import torch
import transformers
from torch import nn

import panther_compile as pc
from panther_compile.errors import ConfigError
from panther_compile.factorization import cost
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.models.cached import head_outputs
from panther_compile.planning.cached import stack_cached, unstack, with_rest
from panther_compile.planning.plan import plan_units
from panther_compile.records import Cached, Choice, LayerPlan, SketchPlan, Unit

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}
WIDTHS = dict(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    initializer_range=0.15,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
T5 = dict(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=1)
GPT2 = dict(vocab_size=99, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0)
OPT = dict(vocab_size=99, hidden_size=64, ffn_dim=96, num_hidden_layers=1, num_attention_heads=4)
# What is built, from what; who writes the cache of the first layer, and how many times less there is to keep.
MODELS = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**WIDTHS, num_key_value_heads=2),
        [("k_proj", "v_proj")],
        2.6,
    ),
    "opt": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig(**OPT, word_embed_proj_dim=64, max_position_embeddings=64),
        [("k_proj", "v_proj")],
        4.5,
    ),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2), [("c_attn",)], 4.0),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**WIDTHS, num_key_value_heads=2, head_dim=16),
        [(), ("v_proj",)],
        1.2,
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(**T5),
        [("SelfAttention.k", "SelfAttention.v")],
        4.5,
    ),
}


def dense_model(name):
    torch.manual_seed(1)
    return MODELS[name][0](MODELS[name][1]).eval()


def texts(name="llama", count=4):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 99, (4, 16), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "decoder_input_ids": one[:, :10]} for one in ids] if name == "t5" else ids


@functools.cache
def sketched(name, **options):
    return pc.sketchify(
        dense_model(name), 0.5, data=texts(name), **OPTIONS | {"objective": "cache"} | options
    )


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("opt", "t5", "gpt2", "qwen3") else name
        for name in MODELS
    ],
)
def test_what_a_latent_cache_keeps_is_what_the_report_says(name):
    small = sketched(name)
    report = pc.sketch_report(small)
    writers, times = MODELS[name][2:]
    found = [one.names for one in report.plan.cached]
    assert len(found[: len(writers)]) == len(writers)
    for names, wanted in zip(found, writers, strict=False):
        assert [one.endswith(end) for one, end in zip(names, wanted, strict=True)] == [True] * len(wanted)
    assert report.achieved_ratio <= 0.5
    kept, whole = report.latent_cache_bytes, report.dense_cache_bytes
    assert whole >= times * kept
    assert f"cache: {kept:,} of {whole:,} bytes a token" in str(report)

    cache = pc.LatentCache(small)
    given = texts(name)[0]
    ids = given["input_ids"] if name == "t5" else given
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    latent = small.generate(ids, past_key_values=cache, **options)
    assert torch.equal(latent, small.generate(ids, **options))
    assert sum(line.kept_bytes for line in cache.report().layers) == kept
    assert cache.report().whole_bytes_per_token == whole


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_keys_and_values_share_their_factor_and_have_half_of_their_numbers():
    small = sketched("llama")
    attention = small.model.layers[0].self_attn
    assert attention.k_proj.down is attention.v_proj.down
    assert attention.q_proj.down is not attention.v_proj.down
    lines = [
        line
        for line in pc.sketch_report(small).plan.layers
        if ".k_proj" in line.name or ".v_proj" in line.name
    ]
    stored, dense = sum(line.stored_numbers for line in lines), sum(line.dense_numbers for line in lines)
    assert 0.47 * dense < stored <= 0.5 * dense
    parts = [attention.k_proj.up.weight, attention.v_proj.up.weight, attention.k_proj.down.weight]
    assert sum(part.numel() for part in parts) == sum(
        line.stored_numbers for line in lines if ".0." in line.name
    )


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_the_plan_is_a_recipe_and_a_saved_model_knows_its_cache(tmp_path):
    small = sketched("llama")
    report = pc.sketch_report(small)
    small.save_pretrained(tmp_path)
    again = pc.sketch_report(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert again.latent_cache_bytes == report.latent_cache_bytes
    plan = SketchPlan.from_json(report.plan.to_json())
    twin = pc.sketchify(dense_model("llama"), plan=plan, data=texts(), **OPTIONS)
    assert pc.sketch_report(twin).latent_cache_bytes == report.latent_cache_bytes


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_a_factor_that_keys_and_values_share_has_no_more_ranks_than_either_has_outputs():
    small = pc.sketchify(dense_model("llama"), 0.85, data=texts(), objective="cache", **OPTIONS)
    report = pc.sketch_report(small)
    assert small.model.layers[0].self_attn.k_proj.rank == 32
    assert 0.84 < report.achieved_ratio <= 0.85  # the other layers have what that leaves
    assert report.dense_cache_bytes == 2 * report.latent_cache_bytes


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
@pytest.mark.parametrize("share", [0.3, pytest.param(0.45, marks=pytest.mark.slow)])
def test_the_share_of_the_cache_is_kept_to_whatever_the_ratio(share):
    small = sketched("llama", cache_ratio=share)
    report = pc.sketch_report(small)
    kept, whole = report.latent_cache_bytes, report.dense_cache_bytes
    assert share - 0.05 < kept / whole <= share  # a rank is 1 / 64 of it
    assert 0.48 < report.achieved_ratio <= 0.5


def test_a_share_of_the_cache_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"cache_ratio=0\.3: at least 0\.5\d+ of the numbers of a token"):
        sketched("qwen3", cache_ratio=0.3)
    with pytest.raises(ConfigError, match=r"cache_ratio=0\.3 is for objective='cache' and a single ratio"):
        pc.sketchify(dense_model("llama"), 0.5, data=texts(), cache_ratio=0.3)
    with pytest.raises(ConfigError, match=r"cache_ratio=0\.3 is for objective='cache' and a single ratio"):
        pc.plan_sketch(dense_model("llama"), {"*": 0.5}, objective="cache", cache_ratio=0.3)
    with pytest.raises(ConfigError, match="cache_ratio leaves nothing to the layers that write no cache"):
        with_rest(
            0.1,
            [LayerPlan("k", "Linear", (64, 64), 4096, Choice("pair", 30, (30,), 3840, 0.1), "")],
            [(Unit("q", (64, 64), 4096, 0, (), cost.CPU), "Linear")],
        )


def test_without_data_or_a_cache_it_is_refused():
    with pytest.raises(ConfigError, match="objective='cache' needs data="):
        pc.sketchify(dense_model("llama"), 0.5, objective="cache")
    with pytest.raises(ConfigError, match="objective='cache' needs data="):
        pc.plan_sketch(dense_model("llama"), 0.5, objective="cache")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    with pytest.raises(ConfigError, match="Sequential returns no past_key_values"):
        pc.sketchify(model, 0.5, data=[torch.randn(8, 16) for _ in range(4)], **OPTIONS, objective="cache")
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM returns no past_key_values that its layers write as they are"
    ):
        sketched("llama", exclude=("*.k_proj", "*.v_proj"))


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_labels_do_not_hide_the_cache_of_an_encoder_decoder():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=99, d_model=64, max_position_embeddings=32, **sizes, **heads)
    torch.manual_seed(1)
    model = transformers.BartForConditionalGeneration(config).eval()
    data = [{"input_ids": ids, "labels": ids[:, :10]} for ids in texts()]
    data[0]["labels"] = data[0]["labels"].masked_fill(torch.arange(10) > 6, -100)
    small = pc.sketchify(model, 0.5, data=data, objective="cache", **OPTIONS)
    cached = pc.sketch_report(small).plan.cached
    layers = [f"model.decoder.layers.0.{one}" for one in ("self_attn", "encoder_attn")]
    assert [one.names for one in cached] == [(f"{one}.k_proj", f"{one}.v_proj") for one in layers]


def test_head_outputs_of_separate_fused_and_interleaved_layers():
    assert [one.tolist() for one in head_outputs(4, 2, 2)] == [[0, 1, 2, 3]]
    assert [one.tolist() for one in head_outputs(10, 2, 2)] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert [2, 3, 8, 9] in [one.tolist() for one in head_outputs(12, 2, 2)]
    assert list(head_outputs(6, 2, 2)) == []


def test_a_stack_has_one_budget_and_its_lines_add_up():
    def unit(name, outputs):
        candidate = LinearCandidate(outputs, 64, "pivoted")
        return Unit(name, (outputs, 64), outputs * 64 + outputs, outputs, (candidate,), cost.CPU)

    pool = [(unit(name, outputs), "Linear") for name, outputs in (("q", 64), ("k", 32), ("v", 32), ("u", 32))]
    cached = [Cached(("k", "v"), 64), Cached(("u",), 32), Cached((), 8), Cached(("q", "gone"), 128)]
    values = {"k + v": torch.linspace(2, 1, 64)}
    stacks, rest = stack_cached(pool, cached, values)
    assert [one.name for one, _ in stacks] == ["k + v", "u", "q"]
    assert rest == []
    lines = list(unstack(plan_units(stacks, 0.5, 1, True), pool, cached))
    assert [line.name for line in lines] == ["k", "v", "u", "q"]
    key, value = (line.choice for line in lines[:2])
    assert key.sharing == value.sharing == ("k", "v")
    assert key.rank == value.rank
    assert key.stored_numbers == key.rank * (32 + 64 - key.rank) + 32
    assert value.stored_numbers == key.rank * 32 + 32
    plan = SketchPlan(tuple(lines), "0.5", "", cached=tuple(cached))
    apart = [min(line.choice.rank, 32) for line in lines[2:3]]
    query = min(lines[3].choice.rank, 64) + 64
    assert plan.cached_numbers == (232, key.rank + sum(apart) + 8 + query)
    assert SketchPlan.from_json(plan.to_json()) == plan
