"""Models whose own code multiplies by their weights, through the folders of transformers and diffusers."""

import pytest
import torch
import transformers

import panther_compile as pc
from panther_compile.layers import SketchedConv3d, SketchedLinear
from panther_compile.layers.own_weights import Kernel, Matrices

diffusers = pytest.importorskip("diffusers")
OPTIONS = {"progress": False, "allow_slower": True, "min_params": 0}
IDS = torch.arange(3, 51).reshape(4, 12)
TEXTS = [torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(n)) for n in range(5)]


def draw(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def llama4():
    config = transformers.Llama4TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return draw(transformers.Llama4ForCausalLM(config))


def jetmoe():
    config = transformers.JetMoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    return draw(transformers.JetMoeForCausalLM(config))


@pytest.fixture(
    params=[llama4, pytest.param(jetmoe, marks=pytest.mark.slow)], ids=lambda build: build.__name__
)
def model(request):
    return request.param()


@pytest.mark.parametrize("data", [None, TEXTS], ids=["weights", "data"])
@pytest.mark.parametrize("exclude", [(), ("*.1",)], ids=["all", "some"])
def test_from_folder_to_folder(model, data, exclude, tmp_path):
    wanted = pc.sketchify(model, 0.5, data=data, synthetic=False, exclude=exclude, **OPTIONS)
    stacks = [one for one in wanted.modules() if isinstance(one, Matrices)]
    assert any(isinstance(layer, SketchedLinear) for one in stacks for layer in one.layers)
    wanted.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert list(again.state_dict()) == list(wanted.state_dict())
    torch.testing.assert_close(again(IDS).logits, wanted(IDS).logits)
    model.save_pretrained(tmp_path / "dense")
    options = {"synthetic": False, "exclude": exclude, **OPTIONS}
    pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "small", 0.5, data=data, **options)
    small = type(model).from_pretrained(tmp_path / "small")
    assert set(small.state_dict()) == set(wanted.state_dict())
    torch.testing.assert_close(small(IDS).logits, wanted(IDS).logits)
    dense = pc.densify(small)
    assert set(dense.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(dense(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-4)


def test_generates_and_heals(model):
    small = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    found = small.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, pc.densify(small).generate(IDS, max_new_tokens=3, do_sample=False))
    better = pc.heal(small, teacher=model, data=TEXTS, steps=2, progress=False)
    assert better(IDS).logits.shape == small(IDS).logits.shape


def wan():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()


@torch.no_grad()
def test_causal_convolutions_of_a_video_autoencoder(tmp_path):
    model, video = wan(), torch.rand(1, 3, 5, 16, 16)
    small = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    kernels = [one for one in small.modules() if isinstance(one, Kernel)]
    assert kernels
    assert all(isinstance(one.layer, SketchedConv3d) for one in kernels)
    held = sum(tensor.numel() for tensor in small.state_dict().values())
    assert held < 0.56 * sum(tensor.numel() for tensor in model.state_dict().values())
    found = small(video).sample  # frames in chunks, with caches of those before
    torch.testing.assert_close(found, pc.densify(small)(video).sample, rtol=1e-4, atol=1e-5)
    small.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(video).sample, found)
