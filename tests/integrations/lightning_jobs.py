"""Lightning's Trainer over an engine; each function runs on every rank."""

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from integrations.launched import as_of_torchrun
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from parallel.training import EAGER, whole
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import panther_compile as pc
from panther_compile.errors import ParallelError

ROWS = 4  # of a batch; an optimizer step is of four


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Classifier(LightningModule):
    """As its user writes it; nothing of it knows of a mesh."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.register_buffer("scale", torch.tensor(1.0))
        self.example_input_array = torch.zeros(ROWS, 16)
        self.losses, self.checked, self.norms = [], [], []

    def on_before_optimizer_step(self, _):
        if isinstance(self.net, pc.ParallelEngine):
            self.norms.append(float(self.net.clip_grad_norm_(math.inf)))
        else:
            self.norms.append(float(grad_norm(self.net, 2)["grad_2.0_norm_total"]))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y) * self.scale
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("checked", F.cross_entropy(self.net(x), y), sync_dist=True)
        self.log("rows", float(len(x)), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self):
        self.checked.append(float(self.trainer.callback_metrics["checked"]))
        assert self.trainer.callback_metrics["rows"] == 8  # of all data, however often ranks have them

    test_step = validation_step

    def predict_step(self, batch, _):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Piped(Classifier):
    """Where the schedule owns the backward."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, _):
        x, y = batch
        loss = self.net.step(x, target=y)
        self.net.clip_grad_norm_(0.5)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.losses.append(loss.item())

    def validation_step(self, batch, _):
        x, y = batch
        self.log("checked", self.net.evaluate(x, target=y))
        self.log("rows", float(len(x)), sync_dist=True, reduce_fx="sum")


class Outside(Classifier):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


class SaveAt(Callback):
    """Writes a file under one name at a step."""

    def __init__(self, step, file):
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


def fit(
    module,
    strategy,
    folder,
    *,
    batch,
    epochs=2,
    resume=None,
    devices=1,
    accumulate=1,
    keep=True,
    callbacks=(),
    **options,
):
    if module.automatic_optimization:
        options |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate}
    data = rows(64, 1)
    # Lightning shuffles what it divides over ranks; one process gets the same order.
    sampler = DistributedSampler(data, 1, 0) if devices == 1 else None
    options.setdefault("enable_checkpointing", keep)
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        callbacks=[saving, *callbacks] if keep else list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(
        module,
        DataLoader(data, batch_size=batch, sampler=sampler),
        DataLoader(rows(8, 2), batch_size=batch),
        ckpt_path=resume,
        weights_only=False,
    )
    return trainer


def strategy_of(mesh, parallel, **options):
    hardware = {"hardware": EAGER} if mesh.get("tp", 1) > 1 else {}
    return pc.PantherStrategy(mesh, model="net", parallel=parallel, partition=hardware | options)


def train(rank, *, folder, mesh, parallel, wanted, kind="Classifier", **options):
    """Losses, the checkpoint and what is resumed from it are those of one process."""
    kind, devices = globals()[kind], torch.Size(mesh.values()).numel()
    if kind is Piped:
        parallel = {**parallel, "loss_fn": F.cross_entropy}
        options["microbatches"] = 4
        batch = 4 * ROWS
    else:
        batch = ROWS
    with as_of_torchrun(rank):
        module = kind()
        own = module.net
        turns = 1 if kind is Piped else 4 // mesh.get("dp", 1)
        same = {"batch": batch, "devices": devices, "accumulate": turns}
        fit(module, strategy_of(mesh, parallel, **options), folder, **same)
        assert module.net is own
        for name, value in module.state_dict().items():
            torch.testing.assert_close(whole(value), wanted["state"][name], rtol=0.0, atol=1e-3)
        steps = [sum(part) / turns for part in zip(*[iter(module.losses)] * turns, strict=True)]
        torch.testing.assert_close(steps, wanted["losses"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(module.checked, wanted["checked"], rtol=1e-4, atol=1e-5)
        if kind is not Piped:  # which clips first
            torch.testing.assert_close(module.norms, wanted["norms"], rtol=1e-4, atol=1e-5)
        alone = kind.load_from_checkpoint(f"{folder}/epoch=1.ckpt", weights_only=False)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(value, wanted["state"][name], rtol=0.0, atol=1e-3)
        again = kind()
        strategy = strategy_of(mesh, parallel, **options)
        file = f"{folder}/epoch=0.ckpt"
        fit(again, strategy, f"{folder}/again", resume=file, **same)
        assert again.losses == module.losses[len(module.losses) // 2 :]


def other_mesh(rank, *, folder):
    """A checkpoint of replicas is read by shards: losses go on as they were."""
    with as_of_torchrun(rank):
        module, again = Classifier(), Classifier()
        same = {"batch": ROWS, "devices": 2}
        ddp, tp = strategy_of({"dp": 2}, {"data_parallel": "ddp"}), strategy_of({"tp": 2}, {})
        fit(module, ddp, folder, accumulate=2, **same)
        fit(again, tp, f"{folder}/again", accumulate=4, resume=f"{folder}/epoch=0.ckpt", **same)
        for name, value in again.state_dict().items():
            torch.testing.assert_close(value, module.state_dict()[name], rtol=0.0, atol=1e-3)
        torch.testing.assert_close(again.checked[-1], module.checked[-1], rtol=1e-4, atol=1e-5)


def after_shards(rank, *, folder):
    """What FSDP has trained is tested, loaded into, predicts, and is saved whole; and not fitted again."""
    fsdp = {"data_parallel": "fsdp"}
    with as_of_torchrun(rank):
        module = Classifier()
        trainer = fit(module, strategy_of({"dp": 2}, fsdp), folder, batch=ROWS, devices=2)
        loader, wanted = DataLoader(rows(8, 2), batch_size=ROWS), module.checked[-1]
        trainer.save_checkpoint(f"{folder}/after.ckpt")
        assert trainer.test(module, loader, verbose=False)[0]["checked"] == pytest.approx(wanted, rel=1e-5)
        (first,) = trainer.test(
            module, loader, ckpt_path=f"{folder}/epoch=0.ckpt", verbose=False, weights_only=False
        )
        assert first["checked"] == pytest.approx(module.checked[1], rel=1e-5)
        alone = Classifier.load_from_checkpoint(f"{folder}/epoch=0.ckpt", weights_only=False)
        (shown,) = trainer.predict(module, loader)
        torch.testing.assert_close(shown, alone.net(rows(8, 2).tensors[0][rank::2]), rtol=1e-4, atol=1e-5)
        last, after = (
            Classifier.load_from_checkpoint(f"{folder}/{name}.ckpt", weights_only=False).state_dict()
            for name in ("epoch=1", "after")
        )
        assert all(torch.equal(after[name], value) for name, value in last.items())
        with pytest.raises(ParallelError, match=r"net\.embed\.weight of Classifier is in shards already"):
            trainer.fit(module, loader)


def one_name(rank, *, folder):
    """A file over that of a training which had come further has its own state beside it."""
    ddp, file = {"data_parallel": "ddp"}, f"{folder}/one.ckpt"
    with as_of_torchrun(rank):
        same = {"batch": ROWS, "devices": 2, "keep": False}
        first, second = Classifier(), Classifier()
        fit(first, strategy_of({"dp": 2}, ddp), folder, callbacks=[SaveAt(6, file)], **same)
        second.net.head.bias.data += 1.0
        fit(second, strategy_of({"dp": 2}, ddp), folder, callbacks=[SaveAt(3, file)], **same)
        written = torch.load(file, weights_only=False)["state_dict"]
        for name, value in pc.read_state_dict(f"{file}.training").items():
            assert torch.equal(value, written[f"net.{name}"])
        other = f"{folder}/other.ckpt"
        fit(first, strategy_of({"dp": 2}, ddp), folder, callbacks=[SaveAt(6, other)], **same)
        cut_off(rank, file, other, folder, same)
        light = ModelCheckpoint(dirpath=f"{folder}/light", save_weights_only=True)
        fit(first, strategy_of({"dp": 2}, ddp), folder, callbacks=[light], enable_checkpointing=True, **same)
        assert not list(Path(folder, "light").glob("*.training"))


class StateAtStart(Callback):
    def on_train_start(self, trainer, module):
        self.state = module.net.state_dict(full=True)


def cut_off(rank, file, other, folder, same):
    """A file goes with the state of its own step, however far a save came that was cut off."""
    states, written = Path(f"{file}.training"), torch.load(file, weights_only=False)["state_dict"]
    step, later = states / "step-000000003", Path(f"{other}.training", "step-000000006")
    strategy = {"mesh": {"dp": 2}, "parallel": {"data_parallel": "ddp"}}
    if rank == 0:
        shutil.copytree(later, states / later.name)  # as of a save that was killed before its file
        Path(folder, "link.ckpt").symlink_to(file)
    dist.barrier()
    for name in (file, f"{folder}/link.ckpt"):
        begun = StateAtStart()
        fit(Classifier(), strategy_of(**strategy), folder, callbacks=[begun], resume=name, **same)
        for key, value in begun.state.items():
            assert torch.equal(value, written[f"net.{key}"])
    if rank == 0:
        content = torch.load(file, weights_only=False)
        del content["state_dict"]["scale"]
        torch.save(content, f"{folder}/lacking.ckpt")
        shutil.copytree(states, f"{folder}/lacking.ckpt.training")
        shutil.rmtree(step)
    dist.barrier()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        fit(Classifier(), strategy_of(**strategy), folder, resume=f"{folder}/lacking.ckpt", **same)
    with pytest.raises(ParallelError, match=r"one\.ckpt\.training has no training state of step 3, which"):
        fit(Classifier(), strategy_of(**strategy), folder, resume=file, **same)


def half_types(rank, *, folder):
    """The example is converted as batches are."""
    with as_of_torchrun(rank):
        module, strategy = Classifier(), strategy_of({"dp": 2}, {"data_parallel": "ddp"})
        fit(module, strategy, folder, batch=ROWS, devices=2, keep=False, precision="bf16-true")
        assert module.net.head.weight.dtype == torch.bfloat16
        assert module.losses[-1] < module.losses[0]


def refusals(rank, *, folder):
    with as_of_torchrun(rank):
        strategy = strategy_of({"dp": 2}, {"data_parallel": "fsdp"})
        with pytest.raises(ParallelError, match="EMAWeightAveraging averages a whole model, of which a rank"):
            fit(Classifier(), strategy, folder, batch=ROWS, devices=2, callbacks=[EMAWeightAveraging()])
        with pytest.raises(
            ParallelError, match=r"set automatic_optimization = False, and call self\.net\.step"
        ):
            fit(Classifier(), strategy_of({"pp": 2}, {}), folder, batch=ROWS, devices=2)
        with pytest.raises(ParallelError, match="temperature of Outside is trained outside of net"):
            fit(Outside(), strategy_of({"dp": 2}, {"data_parallel": "ddp"}), folder, batch=ROWS, devices=2)
