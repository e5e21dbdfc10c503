"""LoRA on a divided model; each function runs on every rank."""

import copy

import torch
import torch.distributed as dist
from integrations.accelerate_jobs import small_llama, texts
from parallel.training import EAGER, joined, whole
from peft import LoraConfig, PeftModel, get_peft_model

import panther_compile as pc

COUNT, ROWS = 2, 2  # microbatches of a step, rows of each


def adapted(*, sketched):
    model = small_llama()
    if sketched:
        model = pc.sketchify(model, 0.5, min_params=0, allow_slower=True, progress=False)
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def loss_fn(output, target):
    logits = output.logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def train(rank, *, folder, mesh, sketched=False, **options):
    """Adapters are those of one process, nothing else has changed, and PEFT reads what it saved."""
    model = adapted(sketched=sketched)
    reference, frozen = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    hardware = EAGER if "tp" in mesh else "cpu"
    part = pc.partition_model(
        model, {"input_ids": texts(ROWS)}, mesh=mesh, microbatches=COUNT, hardware=hardware
    )
    engine = pc.parallelize_model(model, part, loss_fn=loss_fn, **options)
    trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    named = {name for name, parameter in engine.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in named)
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    other = torch.optim.SGD(
        [one for one in reference.parameters() if one.requires_grad], lr=0.1, momentum=0.9
    )
    dp = engine.devices.shape.dp
    for step in range(3):
        ids = torch.randint(0, 64, (dp * COUNT * ROWS, 8), generator=torch.Generator().manual_seed(step))
        own = ids.chunk(dp)[engine.devices.dp]
        loss = engine.step(input_ids=own, target=own)
        wanted = loss_fn(reference(input_ids=ids), ids)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
        norm = engine.clip_grad_norm_(1.0)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        gradients = {name: one.grad for name, one in reference.named_parameters()}
        for name, parameter in engine.named_parameters():
            if parameter.requires_grad:
                gradient = joined(engine, name, parameter.grad)
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
            else:
                assert parameter.grad is None or not whole(parameter.grad).any()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    state = engine.state_dict(full=True)
    for name, value in reference.state_dict().items():
        if "lora_" in name:
            assert not torch.equal(value, frozen[name])
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(state[name], frozen[name]), name
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    base = adapted(sketched=sketched).unload()
    loaded = PeftModel.from_pretrained(base, folder)
    with torch.no_grad():
        found, wanted = loaded(input_ids=texts(2)).logits, reference(input_ids=texts(2)).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
