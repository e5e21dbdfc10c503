"""LoRA of PEFT on sketched layers, by the names of the dense ones."""

import copy

import pytest
import torch
import transformers
from packaging import version

import panther_compile as pc
from panther_compile.calibration import branch_fit
from panther_compile.errors import ConfigError, WrappedModelError

peft = pytest.importorskip("peft")
init_lora_from_dense = pytest.importorskip("panther_compile.integrations.adapters").init_lora_from_dense
pytestmark = pytest.mark.integrations

WIDTHS = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
IDS = torch.arange(3, 23).reshape(2, 10)
OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**WIDTHS, num_key_value_heads=2, initializer_range=0.1)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)
    ).eval()


def sketch(model, ratio=0.5, **options):
    return pc.sketchify(model, ratio, **OPTIONS, **options)


def adapt(small, targets=("q_proj", "v_proj"), rank=4, **options):
    options = {"target_modules": list(targets), "lora_alpha": 2 * rank} | options
    return peft.get_peft_model(copy.deepcopy(small), peft.LoraConfig(r=rank, **options)).eval()


def disturb(model):
    """Adapters that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("build", "targets"),
    [(llama, ("q_proj", "v_proj", "down_proj")), (gpt2, ("c_attn", "c_proj"))],
)
def test_lora_by_the_dense_names_merges_exactly(build, targets):
    small = sketch(build())
    tuned = adapt(small, targets, fan_in_fan_out=build is gpt2)
    assert torch.equal(logits(tuned), logits(small))  # it starts as the sketch
    disturb(tuned)
    wanted = logits(tuned)
    assert error(wanted, logits(small)) > 0.01
    tuned.merge_adapter()
    assert error(logits(tuned), wanted) < 1e-5
    tuned.unmerge_adapter()
    assert torch.equal(logits(tuned), wanted)
    merged = tuned.merge_and_unload(safe_merge=True)
    assert error(logits(merged), wanted) < 1e-5
    assert not any("lora" in name for name, _ in merged.named_parameters())
    sketched = [m for m in merged.modules() if isinstance(m, pc.SketchedLinear)]
    assert sketched  # of a larger rank, and still low


def test_only_the_adapters_are_trained():
    tuned = adapt(sketch(llama())).train()
    tuned(IDS, labels=IDS).loss.backward()
    trained = {name for name, p in tuned.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in tuned.named_parameters() if "lora_" in name}
    assert len(trained) == 8


def test_merged_models_are_saved_and_loaded(tmp_path):
    merged = disturb(adapt(sketch(llama()))).merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(merged))


def test_parameters_that_are_factors_now_are_refused(tmp_path):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**WIDTHS, num_key_value_heads=2, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config).eval()
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapt(model, target_parameters=experts).save_pretrained(tmp_path)
    small = sketch(model, synthetic=False)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts\.\w+_proj, of which .* only factors"):
        peft.PeftModel.from_pretrained(small, tmp_path)
    with pytest.raises(ConfigError, match=r"experts\.down_proj"):
        adapt(small, target_parameters=["experts.down_proj"])
    apart = sketch(model, exclude="*.experts", synthetic=False)  # dense experts take adapters as they did
    tuned = peft.PeftModel.from_pretrained(apart, tmp_path)
    assert any(".experts." in name and "lora_A" in name for name, _ in tuned.named_parameters())


@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter"])
def test_adapters_are_saved_and_loaded(way, tmp_path):
    small = sketch(llama())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if way == "get_peft_model":
        tuned = disturb(peft.get_peft_model(copy.deepcopy(small), config)).eval()
        tuned.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(small), tmp_path)
    else:
        least = transformers.integrations.peft.MIN_PEFT_VERSION  # the library's own demand
        if version.parse(peft.__version__) < version.parse(least):
            pytest.skip(f"add_adapter of transformers {transformers.__version__} wants peft {least}")
        tuned = copy.deepcopy(small)
        tuned.add_adapter(config)
        disturb(tuned).eval().save_pretrained(tmp_path)
        again = copy.deepcopy(small)
        again.load_adapter(str(tmp_path))
    assert torch.equal(logits(again.eval()), logits(tuned))


def test_an_adapter_of_the_dense_model_fits_the_sketch(tmp_path):
    model = llama()
    tuned = disturb(adapt(model))
    tuned.save_pretrained(tmp_path)
    small = sketch(model, 0.8)
    again = peft.PeftModel.from_pretrained(small, tmp_path).eval()
    assert error(logits(again), logits(tuned)) < error(logits(sketch(model, 0.8)), logits(tuned))


def test_narrow_layers_are_adapted_between_their_widths(tmp_path):
    data = [torch.randint(0, 99, (4, 16)) for _ in range(4)]
    small = sketch(llama(), data=data)
    narrow = [m for m in small.modules() if type(m).__name__ == "NarrowLinear"]
    assert {layer.padded for layer in narrow} == {True, False}
    tuned = disturb(adapt(small, ("v_proj", "o_proj", "up_proj", "down_proj")))
    wanted = logits(tuned)
    assert error(wanted, logits(small)) > 0.01
    assert error(rows_of(tuned, ["__base__", "default"]), torch.stack([logits(small)[0], wanted[1]])) < 1e-5
    with pytest.raises(ConfigError, match="narrow"):
        adapt(small, ("v_proj",), init_lora_weights="eva")
    merged = tuned.merge_and_unload()
    assert error(logits(merged), wanted) < 1e-5
    merged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(merged))


def rows_of(tuned, names):
    """What each row gives with the adapter of its own."""
    with torch.no_grad():
        return tuned(input_ids=IDS, adapter_names=names).logits


def test_an_adapter_is_taken_out_again_after_a_cast():
    small = sketch(llama())
    tuned = disturb(adapt(small))
    tuned.merge_adapter()
    tuned.double().unmerge_adapter()
    with tuned.disable_adapter():
        assert error(logits(tuned), logits(copy.deepcopy(small).double())) < 1e-6


def test_it_starts_from_what_the_sketch_left_out():
    model = llama()
    data = [torch.randint(0, 99, (4, 16)) for _ in range(4)]
    small = sketch(model)
    distances = [error(logits(small), logits(model))]
    for given in (None, data):
        tuned = adapt(small, ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj"), rank=8)
        init_lora_from_dense(tuned, model, data=given)
        distances.append(error(logits(tuned), logits(model)))
    assert distances[1] < 0.9 * distances[0]
    assert distances[2] < distances[1]


def texts(count):
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(0, 99, (4, 16), generator=draws) for _ in range(count)]


@pytest.mark.parametrize("build", [llama, gpt2])
def test_it_starts_nearer_than_a_sketch_that_was_fitted(build):
    model, data = build(), texts(60)
    small = sketch(model, 0.4, data=data, narrow=False)
    targets = ("q_proj", "o_proj", "up_proj", "down_proj") if build is llama else ("c_attn", "c_proj", "c_fc")
    tuned = adapt(small, targets, rank=8)
    init_lora_from_dense(tuned, model, data=data)
    assert error(logits(tuned), logits(model)) < 0.97 * error(logits(small), logits(model))


def test_what_brings_results_no_closer_starts_it_as_peft_does(monkeypatch):
    monkeypatch.setattr(branch_fit, "_SHARES", (30.0,))
    model, data = gpt2(), texts(2)
    small = sketch(model, 0.7, data=data, narrow=False)
    tuned = adapt(small, ("c_attn", "c_proj", "c_fc"), rank=8)
    started = copy.deepcopy(tuned.state_dict())
    with pytest.warns(pc.SketchQualityWarning, match="no closer to the dense model's on others"):
        init_lora_from_dense(tuned, model, data=data)
    assert torch.equal(logits(tuned), logits(small))
    assert all(torch.equal(value, started[name]) for name, value in tuned.state_dict().items())  # A learns


def test_few_data_start_a_share_of_what_they_would(monkeypatch):
    model, data = gpt2(), texts(4)
    small = sketch(model, 0.4, data=data, narrow=False)
    starts = []
    for shares in (branch_fit._SHARES, (1.0,)):
        monkeypatch.setattr(branch_fit, "_SHARES", shares)
        tuned = adapt(small, ("c_attn", "c_proj", "c_fc"), rank=8)
        init_lora_from_dense(tuned, model, data=data)
        starts.append(tuned)
    sizes = [[v.norm() for name, v in one.state_dict().items() if "lora_B" in name] for one in starts]
    taken = {round(float(some / whole), 4) for some, whole in zip(*sizes, strict=True)}
    assert len(taken) == 1
    assert taken <= {0.25, 0.5, 0.75}
    assert error(logits(starts[0]), logits(model)) < error(logits(small), logits(model))


@pytest.mark.parametrize("build", [llama, gpt2])
def test_an_adapter_of_full_rank_is_the_dense_layer(build):
    model = build()
    names = ("q_proj",) if build is llama else ("c_attn",)
    small = copy.deepcopy(model)
    for name, layer in list(small.named_modules()):
        if name.endswith(names):
            kind = pc.SketchedLinear if build is llama else type(pc.sketchify(layer, 0.5, **OPTIONS))
            small.set_submodule(name, kind.from_dense(layer, ratio=0.5))
    tuned = adapt(small, names, rank=64)
    init_lora_from_dense(tuned, model)
    assert error(logits(tuned), logits(model)) < 1e-5
    merged = tuned.merge_and_unload()
    assert error(logits(merged), logits(model)) < 1e-5
    assert not any(isinstance(m, pc.SketchedLinear) for m in merged.modules())  # dense stores less


def adapted(model):
    return {name for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}


@pytest.mark.parametrize("build", [llama, gpt2])
def test_all_linear_means_the_layers_that_it_means_for_the_dense_model(build):
    model = build()
    options = {"target_modules": "all-linear", "fan_in_fan_out": build is gpt2}
    tuned = disturb(adapt(sketch(model), **options)).double()  # so that rounding hides nothing
    assert adapted(tuned) == adapted(adapt(model, **options))
    wanted = logits(tuned)
    assert error(logits(tuned.merge_and_unload()), wanted) < 1e-12
    second = peft.LoraConfig(r=2, target_modules="all-linear")
    twice = adapt(sketch(model), **options)
    before = adapted(twice)
    twice.add_adapter("second", second)
    assert adapted(twice) == before


def test_factors_are_no_targets():
    small = sketch(llama())
    tuned = adapt(small, ("up", "down", "q_proj"))
    assert {name.rpartition(".")[2] for name in adapted(tuned)} == {"q_proj"}
    assert "_check_target_module_exists" not in vars(tuned.base_model)


def test_orthogonal_adapters_start_as_the_sketch():
    small = sketch(llama())
    tuned = adapt(small, init_lora_weights="orthogonal")
    assert all(bool(p.any()) for name, p in tuned.named_parameters() if "lora_" in name)
    assert error(logits(tuned), logits(small)) < 1e-5


def test_what_cannot_be_is_refused():
    model = llama()
    small = sketch(model)
    with pytest.raises(pc.PantherError, match="init_lora_weights='pissa' changes the weight"):
        adapt(small, init_lora_weights="pissa")
    with pytest.raises(ConfigError, match="use_dora=True is more than plain LoRA"):
        adapt(small, use_dora=True)
    with pytest.raises(pc.PantherError, match="no sketched layer"):
        init_lora_from_dense(adapt(model), model)
    with pytest.raises(pc.PantherError, match="wanted a dense layer"):
        init_lora_from_dense(adapt(small), small)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
@pytest.mark.parametrize("narrow", [False, True])
def test_trained_biases_are_saved_by_their_dense_names(bias, narrow, tmp_path):
    data = [IDS, IDS.flip(0)] if narrow else None
    small = sketch(gpt2(), data=data, synthetic=False)
    tuned = disturb(adapt(small, ("c_attn", "c_fc"), bias=bias))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter += 0.1
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(small), tmp_path)
    assert torch.equal(logits(again), logits(tuned))
    if not narrow:
        other = peft.PeftModel.from_pretrained(pc.densify(small), tmp_path)
        assert error(logits(other), logits(tuned)) < 1e-5
        other.save_pretrained(tmp_path / "dense")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(small), tmp_path / "dense")
        assert torch.equal(logits(again), logits(tuned))


@pytest.mark.parametrize(
    ("build", "targets"),
    [(llama, ("q_proj", "v_proj", "down_proj")), (gpt2, ("c_attn", "c_proj"))],
)
def test_a_densified_model_keeps_its_adapters(build, targets):
    tuned = disturb(adapt(sketch(build()), targets, fan_in_fan_out=build is gpt2))
    wanted = logits(tuned)
    dense = pc.densify(tuned)
    assert error(logits(dense), wanted) < 1e-5
    dense.merge_adapter()
    assert error(logits(dense), wanted) < 1e-5
    dense.unmerge_adapter()
    assert error(logits(dense), wanted) < 1e-5
    assert error(logits(dense.merge_and_unload()), wanted) < 1e-5


@pytest.mark.parametrize("merged", [False, True])
def test_narrow_layers_with_adapters_are_not_densified(merged):
    """They were, around adapters of other sizes: an error of torch when the model was called."""
    small = sketch(llama(), data=[IDS, IDS.flip(0)], synthetic=False)
    tuned = disturb(adapt(small, ("up_proj", "down_proj")))
    if merged:
        tuned.merge_adapter()
    with pytest.raises(WrappedModelError, match=r"up_proj is a narrow layer with a PEFT adapter.*merge_and_"):
        pc.densify(tuned)
    wanted = logits(tuned)
    assert error(logits(pc.densify(tuned.merge_and_unload())), wanted) < 1e-5


PROMPTS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "cpt": peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1, 2, 3], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1] * 3
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_before_the_words_of_a_sketched_table(kind, tmp_path):
    small = sketch(llama(), include="*")
    tuned = peft.get_peft_model(copy.deepcopy(small), PROMPTS[kind]).eval()
    assert tuned.word_embeddings is tuned.base_model.get_input_embeddings()
    with torch.no_grad():
        for parameter in tuned.prompt_encoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert logits(tuned).shape[1] > IDS.shape[1]
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(small), tmp_path).eval()
    assert torch.equal(logits(again), logits(tuned))


def test_a_mixed_model_is_merged():
    small = sketch(llama())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    tuned = disturb(peft.get_peft_model(copy.deepcopy(small), config, mixed=True).eval())
    wanted = tuned(input_ids=IDS).logits
    merged = tuned.merge_and_unload()
    assert error(logits(merged), wanted) < 1e-5
    assert error(logits(small), wanted) > 1e-3
