"""Loading by a device map, as accelerate dispatches it: the CPU, "auto", and layers left on disk."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import panther_compile as pc
from panther_compile.errors import NoTargetError, WeightError

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.integrations

IDS = torch.arange(20).reshape(2, 10)
ALL_ON_DISK = {"": "disk"}
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize(
    "device_map", ["cpu", "auto", ON_DISK, ALL_ON_DISK], ids=["cpu", "auto", "disk", "all on disk"]
)
def test_a_device_map_gives_the_same_model(device_map, tmp_path):
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    options = {"min_params": 0, "allow_slower": True, "synthetic": False, "progress": False}
    small = pc.sketchify(model, 0.5, include="*", **options)  # the embedding too
    small.save_pretrained(tmp_path / "small", max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    placed = {p.device.type for p in again.model.layers[1].parameters()}
    assert placed == ({"meta"} if device_map in (ON_DISK, ALL_ON_DISK) else {"cpu"})
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, small(IDS).logits)
        if device_map is ALL_ON_DISK:
            with pytest.raises(WeightError, match="meta device"):
                pc.densify(again)
        again.save_pretrained(tmp_path / "saved again")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved again")
        assert torch.equal(loaded(IDS).logits, small(IDS).logits)


@pytest.mark.parametrize("options", [{}, {"synthetic": False}, {"data": [IDS]}], ids=str)
def test_what_accelerate_hooks_is_said_before_the_model_is_run(options):
    config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(NoTargetError, match=r"accelerate .* hooks it"):
        pc.sketchify(model, 0.5, min_params=0, progress=False, **options)
