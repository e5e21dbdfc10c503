"""`sketchify` on Hugging Face models: their own methods go on working."""

import copy

import pytest
import torch
from any_model.sketching import sketch
from safetensors.torch import load_file
from zoo import ZOO, call, generate, tensors

import panther_compile as pc


@pytest.fixture(
    scope="module",
    params=["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "t5"))],
)
def hugging_face(request):
    entry = ZOO[request.param]
    return entry, sketch(entry.build(), 0.6)


def test_hf_model_is_saved(hugging_face, tmp_path):
    entry, small = hugging_face
    small.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "config.json").exists()
    twin = copy.deepcopy(small)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(small.state_dict())
    found, wanted = (tensors(call(model, entry.inputs())) for model in (twin, small))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_hf_model_that_shares_an_input_factor_is_saved(hugging_face, tmp_path):
    entry, small = hugging_face
    model = copy.deepcopy(small)
    by_shape: dict[torch.Size, pc.SketchedLinear] = {}
    for layer in model.modules():
        if isinstance(layer, pc.SketchedLinear):
            layer.down = by_shape.setdefault(layer.down.weight.shape, layer).down
    model.save_pretrained(tmp_path)
    wanted = tensors(call(model, entry.inputs()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    missing, unexpected = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert missing  # an alias of what is there
    assert unexpected == []
    found = tensors(call(model, entry.inputs()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_hf_model_generates(hugging_face):
    entry, small = hugging_face
    if entry.generate is None:
        pytest.skip("does not generate")
    assert torch.equal(generate(small, entry), generate(pc.densify(small), entry))


def test_hf_model_checkpoints_gradients(hugging_face):
    entry, small = hugging_face
    gradients = []
    for on in (False, True):
        model = copy.deepcopy(small).train()
        if on:
            model.gradient_checkpointing_enable()
        entry.loss(call(model, entry.inputs())).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-2, atol=1e-4)


def test_hf_model_is_moved_and_cast(hugging_face):
    entry, small = hugging_face
    model = copy.deepcopy(small).half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    found = tensors(call(model.to("cpu", torch.bfloat16), entry.inputs()))
    assert all(bool(torch.isfinite(t).all()) for t in found)
    assert all(t.is_meta for t in model.to("meta").parameters())


def test_hf_layers_left_alone_have_reasons(hugging_face):
    _, small = hugging_face
    report = pc.sketch_report(small)
    assert all(row.reason for row in report.skipped)
    heads = [row.name for row in report.skipped if "head" in row.reason or "embedding" in row.reason]
    assert heads
