"""Folders whose weights transformers merges or splits when it loads them, sketched without being loaded."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import panther_compile as pc
from panther_compile.errors import ModelSourceError

OPTIONS = {"progress": False, "allow_slower": True, "min_params": 0}
SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def experts():
    """Weights of single experts in the file, of all experts in the model."""
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=11, max_position_embeddings=32
    )
    return transformers.MixtralForCausalLM(config)


def projections():
    """One weight for queries, keys and values in the file, three in the model."""
    if not hasattr(transformers, "NomicBertModel"):
        pytest.skip("a later transformers")
    config = transformers.NomicBertConfig(**SMALL, intermediate_size=48, max_position_embeddings=32)
    return transformers.NomicBertModel(config)


def saved(build, folder, **options):
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, **options)
    return type(model).from_pretrained(folder).eval()


def all_layers(module, name):
    return True


def some_tensors(module, name):
    return name.endswith(("q_proj", "up_proj"))


def the_second_block(module, name):
    return ".1." in name


@pytest.mark.parametrize("include", [all_layers, some_tensors, the_second_block])
@pytest.mark.parametrize("build", [experts, projections])
def test_the_same_as_in_memory(build, include, tmp_path):
    model = saved(build, tmp_path / "dense", max_shard_size="20KB")
    wanted = pc.sketchify(model, 0.5, synthetic=False, include=include, **OPTIONS)
    plan = pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "small", 0.5, include=include, **OPTIONS)
    assert plan.choices == pc.sketch_report(wanted).plan.choices
    found, told = type(model).from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for key, value in wanted.state_dict().items():
        assert torch.equal(state[key], value), key


def test_other_sizes_and_parts_that_lack_are_refused(tmp_path):
    model = saved(experts, tmp_path / "dense")
    model.config.intermediate_size = 64
    model.config.save_pretrained(tmp_path / "dense")
    with pytest.raises(
        ModelSourceError, match=r"gate_up_proj \(\(11, 96, 32\) in place of \(11, 128, 32\)\)"
    ):
        pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "small", 0.5, **OPTIONS)
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith("experts.3.w1.weight"))]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelSourceError, match=r"has no model.layers.\d.mlp.experts.gate_up_proj"):
        pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "small", 0.5, **OPTIONS)
