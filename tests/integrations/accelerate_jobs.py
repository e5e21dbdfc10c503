"""accelerate's loop over an engine; each function runs on every rank."""

import copy

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from integrations.launched import as_of_torchrun
from parallel.training import EAGER, joined
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import panther_compile as pc
from panther_compile.errors import BatchError, ConfigError, ParallelError

ROWS, TURNS = 4, 2  # of a batch; batches of an optimizer step


def small_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def texts(count):
    return torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))


def make_engine(mesh, **options):
    model = small_llama()
    reference = copy.deepcopy(model)
    hardware = EAGER if "tp" in mesh else "cpu"
    ids = texts(ROWS)
    part = pc.partition_model(
        model,
        {"input_ids": ids, "labels": ids},
        mesh=mesh,
        microbatches=mesh.get("pp", 1),
        hardware=hardware,
    )
    return model, reference, pc.parallelize_model(model, part, **options)


def batches_of_replicas(dp, ids):
    """As accelerate deals them: one batch after the other, each to the next replica."""
    dealt = ids.split(ROWS)
    return [dealt[start : start + dp] for start in range(0, len(dealt), dp)]


def loop(rank, *, mesh, precision="no", **options):
    """Losses, norms and weights of accelerate's loop are those of one process."""
    with as_of_torchrun(rank):
        AcceleratorState._reset_state(True)
        accelerator = pc.PantherAccelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=TURNS
        )
        _, reference, engine = make_engine(mesh, **options)
        dp, ids = engine.devices.shape.dp, texts(16 * mesh.get("dp", 1))
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = DataLoader(TensorDataset(ids), batch_size=ROWS)
        prepared = accelerator.prepare(loader, scheduler, optimizer, engine)
        loader, scheduler, optimizer, same = prepared
        assert same is engine
        other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        near = {"rtol": 1e-5, "atol": 1e-6}
        rates, turns = [1e-2, 1e-2 * 0.5**dp], iter(batches_of_replicas(dp, ids))
        for (batch,) in loader:
            with accelerator.accumulate(engine):
                loss = engine(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                gathered = accelerator.gather(loss.detach().reshape(1))
                # A cache of the weights in bfloat16 would add the gradients of two batches up in bfloat16.
                with torch.autocast("cpu", torch.bfloat16, precision == "bf16", cache_enabled=False):
                    wanted = [reference(input_ids=one, labels=one).loss for one in next(turns)]
                (sum(wanted) / dp / TURNS).backward()
                torch.testing.assert_close(gathered, torch.stack(wanted).detach().float(), **near)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(engine.parameters(), 0.5)
                    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                    assert expected > 0.5
                    torch.testing.assert_close(norm, expected, **near)
                    gradients = {name: value.grad for name, value in reference.named_parameters()}
                    for name, parameter in engine.named_parameters():
                        torch.testing.assert_close(
                            joined(engine, name, parameter.grad), gradients[name], **near
                        )
                    other.param_groups[0]["lr"] = rates.pop(0)
                    other.step()
                    other.zero_grad()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert next(turns, None) is None
        assert not rates
        state = accelerator.get_state_dict(engine)
        # Adam divides by the gradient: where that is rounding, so is the step.
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0.0, atol=1e-4)


def schedules(rank, **options):
    """A rate falls as often as accelerate says, whatever the tp axis."""
    with as_of_torchrun(rank):
        AcceleratorState._reset_state(True)
        accelerator = pc.PantherAccelerator(cpu=True, gradient_accumulation_steps=TURNS, **options)
        *_, engine = make_engine({"tp": 2})
        optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        _, optimizer, scheduler = accelerator.prepare(engine, optimizer, scheduler)
        for call in range(1, 4 * TURNS):
            with accelerator.accumulate(engine):
                optimizer.step()
                scheduler.step()
            halves = call // TURNS if accelerator.step_scheduler_with_optimizer else call
            assert scheduler.get_last_lr() == [0.5**halves]
        AcceleratorState._reset_state(True)


def metrics(rank):
    """Copies on a tp axis count once, as tensors, as objects and in sums."""
    with as_of_torchrun(rank):
        AcceleratorState._reset_state(True)
        accelerator = pc.PantherAccelerator(cpu=True)
        *_, engine = make_engine({"tp": 2})
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=ROWS)
        engine, loader = accelerator.prepare(engine, loader)
        tensors, objects, turns = [], [], 0
        for (numbers,) in loader:
            tensors += accelerator.gather_for_metrics(numbers).tolist()
            objects += accelerator.gather_for_metrics([f"text {one}" for one in numbers.tolist()])
            turns += 1
        assert tensors == list(range(10))
        assert objects == [f"text {one}" for one in range(10)]
        counted = {"turns": torch.tensor(turns)}
        assert accelerator.reduce(counted)["turns"] == accelerator.reduce(counted, "max")["turns"] == 3
        with accelerator.split_between_processes([1, 2, 3]) as share:
            assert share == [1, 2, 3]
        stream = accelerator.prepare(DataLoader(Stream(), batch_size=ROWS))
        assert [batch.tolist() for batch in stream] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        last = texts(ROWS - 1)
        with pytest.raises(BatchError, match=r"input_ids has the shape \(3, 8\); with tp a graph runs"):
            engine(input_ids=last, labels=last)
        AcceleratorState._reset_state(True)
        accelerator = pc.PantherAccelerator(cpu=True)
        accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=ROWS))
        with pytest.raises(ParallelError, match=r"a loader or a scheduler was prepared before the engine"):
            accelerator.prepare(engine)
        AcceleratorState._reset_state(True)
        sends = DataLoaderConfiguration(dispatch_batches=True)
        accelerator = pc.PantherAccelerator(cpu=True, dataloader_config=sends)
        with pytest.raises(ConfigError, match="would give each rank of a tp group other rows"):
            accelerator.prepare(engine, DataLoader(Stream(), batch_size=ROWS))


class Stream(IterableDataset):
    """What a loader cannot divide by itself."""

    def __iter__(self):
        return iter(range(10))


def refusals(rank):
    with as_of_torchrun(rank):
        AcceleratorState._reset_state(True)
        *_, engine = make_engine({"dp": 2}, data_parallel="ddp")
        with pytest.raises(ParallelError, match=r"use panther_compile\.PantherAccelerator"):
            Accelerator(cpu=True).prepare(engine)
        AcceleratorState._reset_state(True)
        accelerator = pc.PantherAccelerator(cpu=True)
        accelerator.prepare(engine)
        with pytest.raises(ParallelError, match=r"TrainingCheckpoints\(folder\)\.save"):
            accelerator.save_state("anywhere")
        engine(input_ids=texts(ROWS), labels=texts(ROWS)).loss.backward()
        with pytest.raises(ParallelError, match=r"is given 1 of the engine's \d+ parameters"):
            accelerator.clip_grad_norm_(next(engine.parameters()), 1.0)
        *_, engine = make_engine({"pp": 2})
        with pytest.raises(ParallelError, match=r"write the loop with engine\.step"):
            pc.PantherAccelerator(cpu=True).prepare(engine)
        AcceleratorState._reset_state(True)
        *_, engine = make_engine({"tp": 2})
        accelerator = pc.PantherAccelerator(cpu=True)
        accelerator.state._mixed_precision = "fp16"  # accelerate itself refuses it on a CPU
        with pytest.raises(ConfigError, match="would skip different steps"):
            accelerator.prepare(engine)
