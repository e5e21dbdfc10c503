"""diffusers: models with sketched layers are saved and loaded, alone and in a pipeline."""

import copy

import pytest
import torch
import torch.nn.utils.prune
from safetensors.torch import load_file, save_file

import panther_compile as pc
from panther_compile.errors import CheckpointError, CheckpointMismatchError
from panther_compile.layers.narrow import NarrowLinear

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.integrations

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).eval()


def run(model):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(x.to(model.dtype), 5).sample


def test_a_model_comes_back(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    kinds = {type(layer).__name__ for layer in small.modules()}
    assert {"SketchedLinear", "SketchedConv2d"} <= kinds
    small.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert [type(m) for m in again.modules()] == [type(m) for m in small.modules()]
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in small.state_dict().items())
    torch.testing.assert_close(run(again), run(small), rtol=1e-5, atol=1e-5)
    half = diffusers.UNet2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    again.train()(torch.randn(1, 3, 8, 8), 5).sample.sum().backward()
    again.save_pretrained(tmp_path / "once more")
    torch.testing.assert_close(
        run(diffusers.UNet2DModel.from_pretrained(tmp_path / "once more")), run(small), rtol=1e-5, atol=1e-5
    )


def test_shared_factors_come_back(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    by_shape = {}
    for layer in small.modules():
        if isinstance(layer, pc.SketchedLinear):
            layer.down = by_shape.setdefault(layer.down.weight.shape, layer).down
    data = [{"sample": torch.randn(2, 3, 8, 8), "timestep": 5} for _ in range(2)]
    small = pc.heal(small, teacher=unet(), data=data, steps=20)
    small.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert len(list(again.parameters())) == len(list(small.parameters()))
    torch.testing.assert_close(run(again), run(small), rtol=1e-5, atol=1e-5)


def test_a_pipeline_comes_back(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    pipeline = diffusers.DDPMPipeline(small, diffusers.DDPMScheduler(num_train_timesteps=20))
    pipeline.save_pretrained(tmp_path)
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    images = [
        one(generator=torch.Generator().manual_seed(3), num_inference_steps=2, output_type="np").images
        for one in (pipeline, again)
    ]
    torch.testing.assert_close(torch.as_tensor(images[1]), torch.as_tensor(images[0]), rtol=1e-4, atol=1e-4)


def test_a_densified_model_is_saved_as_a_dense_one(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    dense = pc.densify(copy.deepcopy(small))
    dense.save_pretrained(tmp_path)
    assert "panther_compile" not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(
        run(diffusers.UNet2DModel.from_pretrained(tmp_path)), run(dense), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rank", [4, 48])  # the merged layer is a sketch of more ranks, or dense
def test_it_is_saved_as_it_is_with_an_adapter_merged(rank, tmp_path):
    peft = pytest.importorskip("peft")
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    config = peft.LoraConfig(r=rank, target_modules=["to_q"], init_lora_weights=False)
    tuned = peft.get_peft_model(small, config).merge_and_unload()
    tuned.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    torch.testing.assert_close(run(again), run(tuned), rtol=1e-5, atol=1e-5)


def test_a_part_that_was_sketched_by_itself_comes_back(tmp_path):
    model = unet()
    model.mid_block = pc.sketchify(model.mid_block, 0.5, synthetic=False, **OPTIONS)
    model.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    torch.testing.assert_close(run(again), run(model), rtol=1e-5, atol=1e-5)


def test_a_sketch_is_made_of_its_config_and_its_average_is_saved(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    made = diffusers.UNet2DModel.from_config(small.config)
    assert [type(m) for m in made.modules()] == [type(m) for m in small.modules()]
    assert all(bool(p.isfinite().all()) for p in made.parameters())
    made.load_state_dict(small.state_dict())
    torch.testing.assert_close(run(made.eval()), run(small), rtol=1e-5, atol=1e-5)
    training = pytest.importorskip("diffusers.training_utils")
    average = training.EMAModel(
        small.parameters(), model_cls=diffusers.UNet2DModel, model_config=small.config
    )
    average.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    torch.testing.assert_close(run(again), run(small), rtol=1e-5, atol=1e-5)


def test_a_config_does_not_tell_what_narrow_layers_keep(tmp_path):
    model = unet()
    model.set_submodule("mid_block.attentions.0.to_out.0", NarrowLinear(64, 64, 40, side="in"))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="narrow layers"):
        diffusers.UNet2DModel.from_config(model.config)
    torch.testing.assert_close(
        run(diffusers.UNet2DModel.from_pretrained(tmp_path)), run(model), rtol=1e-5, atol=1e-5
    )


def test_weights_without_a_factor_are_refused(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    small.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("to_q.up.weight"))
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=gone):
        diffusers.UNet2DModel.from_pretrained(tmp_path)


def test_factors_that_make_their_weight_are_not_saved(tmp_path):
    small = pc.sketchify(unet(), 0.5, **OPTIONS)
    torch.nn.utils.prune.l1_unstructured(small.conv_in.up, "weight", 0.5)
    with pytest.raises(
        CheckpointError, match=r"^conv_in\.up makes its weight of other tensors: call save_pre"
    ):
        small.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small").exists()
