"""Sharding by units and activations computed again, against one process; each function runs on every rank."""

import copy
import gc
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
import zoo
from parallel.training import build, call_engine, chunks, draw, joined, loss_fn, partition
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from panther_compile import TrainingCheckpoints, parallelize_model, partition_model, sketchify
from panther_compile.errors import ConfigError, ScheduleError
from panther_compile.parallel.activation_checkpointing import checkpoint_unit


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Equal blocks; with `recomputed` the model computes some of them again by itself, in either way."""

    def __init__(self, depth=4, width=16, hidden=64, recomputed=()):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        self.recomputed = recomputed

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            again = number in self.recomputed
            x = checkpoint(block, x, use_reentrant=number % 2 == 1) if again else block(x)
        return self.head(x)


class Averaged(nn.Module):
    """Takes off an average over all batches, which it writes."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.average


def deep(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Deep(**options), (torch.randn(2, 16),)


class SavedBytes(saved_tensors_hooks):
    """Counts what autograd keeps for the backward, parameters and what shares their memory apart."""

    def __init__(self, module):
        seen = {p.untyped_storage()._cdata: p for p in module.parameters()}  # which keeps addresses apart
        self.bytes = 0

        def pack(tensor):
            if (
                tensor.is_floating_point()
                and seen.setdefault(tensor.untyped_storage()._cdata, tensor) is tensor
            ):
                self.bytes += tensor.untyped_storage().nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self


def trained(engine, inputs, count=4, seed=0):
    """Loss, gradients and bytes kept of one step."""
    batch, target = draw(inputs, count, seed)
    with SavedBytes(engine) as saved:
        loss = call_engine(engine.step, batch, target)
    gradients = {
        name: joined(engine, name, p.grad) for name, p in engine.named_parameters() if p.grad is not None
    }
    return loss, gradients, saved.bytes


def in_one_process(model, inputs, count=4, seed=0):
    """Loss and gradients of one process on the same batch."""
    batch, target = draw(inputs, count, seed)
    losses = []
    for part, wanted in zip(chunks(batch, count), target.chunk(count), strict=True):
        losses.append(loss_fn(zoo.call(model, part), wanted) / count)
    torch.stack(losses).sum().backward()
    return torch.stack(losses).sum().detach(), {name: p.grad for name, p in model.named_parameters()}


def compare(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    largest = max(float(one.abs().max()) for one in wanted[1].values() if one is not None)
    for name, gradient in found[1].items():
        if wanted[1][name] is not None:
            scale = tolerance * max(largest, 1e-3)
            torch.testing.assert_close(gradient, wanted[1][name], rtol=10 * tolerance, atol=scale, msg=name)


def recomputed(rank, *, mesh, mode, name="deep", sketched=False, **options):
    """Activation checkpointing changes nothing but what is kept."""
    kept = {}
    for asked in ("none", mode):
        model, inputs = deep() if name == "deep" else build(name, sketched=sketched)
        reference = copy.deepcopy(model)
        plan = partition(model, inputs, mesh)
        engine = parallelize_model(model, plan, loss_fn=loss_fn, activation_checkpointing=asked, **options)
        loss, gradients, kept[asked] = trained(engine, inputs)
        compare((loss, gradients), in_one_process(reference, inputs))
        evaluated = call_engine(engine.evaluate, *draw(inputs, 4, 0))
        torch.testing.assert_close(evaluated, loss)
    assert kept[mode] < 0.7 * kept["none"], kept
    return kept


def recompute_of_the_plan(rank):
    """What the plan computes again is: all, nothing, or what the budget that it found leaves."""
    kept, held = {}, {}
    for asked in (False, True):
        model, inputs = deep()
        plan = partition(model, inputs, {"pp": 2}, recompute=asked)
        held[asked] = max(plan.held_bytes)
        engine = parallelize_model(model, plan, loss_fn=loss_fn)
        kept[asked] = trained(engine, inputs)[2]
    assert kept[True] < 0.6 * kept[False], kept
    model, inputs = deep()
    limit = (held[True] + 3 * held[False]) // 4
    plan = partition(model, inputs, {"pp": 2}, recompute="auto", memory_per_device=limit)
    assert isinstance(plan.recompute, float)
    with mock.patch("panther_compile.parallel.rank_modules.checkpoint_unit", wraps=checkpoint_unit) as called:
        engine = parallelize_model(model, plan, loss_fn=loss_fn)
    assert {call.args[1] for call in called.call_args_list} == {plan.recompute}
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    plan = partition(model, inputs, {"pp": 2}, recompute=True)
    with pytest.raises(ConfigError, match=r"batch_norm.* would count each batch twice .*='none'"):
        parallelize_model(model, plan, loss_fn=loss_fn)
    parallelize_model(model, plan, loss_fn=loss_fn, activation_checkpointing="none")
    model = nn.Sequential(nn.Linear(16, 16), Averaged(16), nn.Linear(16, 4))
    for mesh in ({"pp": 2}, {"dp": 2}):
        plan = partition(model, inputs, mesh, recompute=True)
        options = {"loss_fn": loss_fn, "data_parallel": "ddp" if "dp" in mesh else None}
        with pytest.raises(ConfigError, match=r"write the buffer 1\.average twice for each batch; .*='none'"):
            parallelize_model(model, plan, **options)
        parallelize_model(model, plan, activation_checkpointing="none", **options)
    model, inputs = deep()
    plan = partition(model, inputs, {"pp": 2})
    with pytest.raises(ScheduleError, match="'zero_bubble' divides the backward"):
        parallelize_model(model, plan, schedule="zero_bubble", activation_checkpointing="full")
    with pytest.raises(ConfigError, match="activation_checkpointing='some' is none of 'none', 'selective'"):
        parallelize_model(model, plan, activation_checkpointing="some")
    for given in (1.5, True, float("nan")):
        with pytest.raises(
            ConfigError, match=rf"activation_checkpointing={given} is none of .* and no budget"
        ):
            parallelize_model(model, plan, activation_checkpointing=given)


def users_own(rank, *, mesh, **options):
    """What the user's model computes again by itself is computed again, in stages and shards too."""
    kept = {}
    for blocks in ((), (0, 1, 2, 3)):
        model, inputs = deep(recomputed=blocks)
        reference = copy.deepcopy(model)
        plan = partition(model, inputs, mesh)
        engine = parallelize_model(model, plan, loss_fn=loss_fn, **options)
        loss, gradients, kept[bool(blocks)] = trained(engine, inputs)
        compare((loss, gradients), in_one_process(reference, inputs))
        assert len(gradients) == len(list(engine.parameters()))
    assert kept[True] < 0.8 * kept[False], kept
    if "pp" in mesh:
        model, inputs = deep(recomputed=(0, 3))
        with pytest.raises(ScheduleError, match=r"the model's torch.utils.checkpoint would compute"):
            parallelize_model(model, partition(model, inputs, mesh), schedule="zero_bubble", **options)


def hugging_face(rank):
    """gradient_checkpointing_enable() is respected in a pipeline."""
    kept = {}
    for enabled in (False, True):
        model, inputs = build("gpt2")
        if enabled:
            model.gradient_checkpointing_enable()
        reference = copy.deepcopy(model)
        engine = parallelize_model(model, partition(model, inputs, {"pp": 2}), loss_fn=loss_fn)
        loss, gradients, kept[enabled] = trained(engine, inputs)
        compare((loss, gradients), in_one_process(reference, inputs))
    assert kept[True] < 0.5 * kept[False], kept


def policies(rank, *, mesh, name="deep"):
    """torch's MixedPrecisionPolicy against the same policy in one process, and CPUOffloadPolicy."""
    options = {"data_parallel": "fsdp", "loss_fn": loss_fn}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, inputs = deep()
    plain = copy.deepcopy(model).to(torch.bfloat16)
    engine = parallelize_model(model, partition(model, inputs, mesh), mp_policy=mixed, **options)
    loss, gradients, _ = trained(engine, inputs)
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    half = tuple(one.bfloat16() for one in draw(inputs, 4, 0)[0])
    target = draw(inputs, 4, 0)[1]
    losses = [
        loss_fn(plain(part), wanted) / 4
        for part, wanted in zip(half[0].chunk(4), target.chunk(4), strict=True)
    ]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(loss.float(), torch.stack(losses).sum().detach().float(), rtol=2e-2, atol=1e-3)
    wanted = dict(plain.named_parameters())
    for key, gradient in gradients.items():
        worst = float((gradient - wanted[key].grad.float()).abs().max())
        assert worst <= 0.05 * float(wanted[key].grad.abs().max()) + 1e-4, key
    model, inputs = deep()
    reference = copy.deepcopy(model)
    offload = CPUOffloadPolicy(pin_memory=False)
    engine = parallelize_model(model, partition(model, inputs, mesh), offload_policy=offload, **options)
    loss, gradients, _ = trained(engine, inputs)
    compare((loss, gradients), in_one_process(reference, inputs))
    assert engine.clip_grad_norm_(1.0) > 0
    unused = again(mesh)
    with pytest.raises(ConfigError, match=r"mp_policy is an option of data_parallel='fsdp', and it is 'ddp'"):
        parallelize_model(*unused, data_parallel="ddp", mp_policy=mixed)
    with pytest.raises(ConfigError, match=r"mp_policy is a str, wanted torch's MixedPrecisionPolicy"):
        parallelize_model(*unused, data_parallel="fsdp", mp_policy="bf16")


def again(mesh):
    model, inputs = deep()
    return model, partition(model, inputs, mesh)


def units_of(rank, *, mesh):
    """Blocks are units; with a pipeline parts of a stage; names are the user's."""
    model, inputs = deep()
    names = [name for name, _ in model.named_parameters()]
    engine = parallelize_model(model, partition(model, inputs, mesh), data_parallel="fsdp", loss_fn=loss_fn)
    units = [module for module in engine.modules() if isinstance(module, FSDPModule)]
    assert all(isinstance(parameter, DTensor) for parameter in engine.parameters())
    if "pp" in mesh:
        assert len(units) >= 4
        assert set(engine.state_dict()) < set(names)
        return [name for name, _ in engine.named_parameters()]
    assert engine.module is model
    assert [name for name, _ in engine.named_parameters()] == names
    assert [isinstance(block, FSDPModule) for block in model.blocks] == [True] * 4
    asked = parallelize_model(
        *again(mesh), data_parallel="fsdp", units=["blocks.0", "blocks.1"], loss_fn=loss_fn
    )
    assert sum(isinstance(block, FSDPModule) for block in asked.module.blocks) == 2
    unused = again(mesh)
    with pytest.raises(ConfigError, match="units names 'blocks', which does not run once"):
        parallelize_model(*unused, data_parallel="fsdp", units=["blocks"])
    with pytest.raises(ConfigError, match="units names 'bricks', which is no module"):
        parallelize_model(*unused, data_parallel="fsdp", units=["bricks"])
    return names


class ReturnsItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.centres = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, self.centres, self.centres[2:]


def own_results(rank):
    """Parameters that a model returns are whole, and learn of what is made of them."""
    model, x = ReturnsItsOwn(), torch.randn(4, 8)
    alone = copy.deepcopy(model)
    plan = partition_model(model, x, mesh={"dp": 2}, microbatches=1, hardware="cpu")
    engine = parallelize_model(model, plan, data_parallel="fsdp", reshard_after_forward=True)
    for run in (engine, alone):
        out, centres, some = run(x)
        assert type(centres) is not DTensor
        (out.square().mean() + (centres - 1.0).square().mean() + some.sum()).backward()
    for (name, one), (_, wanted) in zip(engine.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(joined(engine, name, one.grad), wanted.grad)


def plans_choice(rank, *, kind):
    """data_parallel="auto" does as the plan has it."""
    model, inputs = deep()
    plan = partition(model, inputs, {"dp": 2}, data_parallel=kind)
    engine = parallelize_model(model, plan, data_parallel="auto", loss_fn=loss_fn)
    sharded = [module for module in engine.modules() if isinstance(module, FSDPModule)]
    assert bool(sharded) == (kind in ("zero2", "zero3"))
    assert isinstance(engine.module, DistributedDataParallel) == (not sharded)
    if sharded:
        state = model.blocks[0]._get_fsdp_state()._fsdp_param_group
        kept = state._reshard_after_forward
        assert kept == (kind == "zero3")
    loss, gradients, _ = trained(engine, inputs)
    compare((loss, gradients), in_one_process(deep()[0], inputs))


def zero1(lr):
    model, inputs = deep()
    engine = parallelize_model(
        model, partition(model, inputs, {"dp": 2}), data_parallel="ddp", loss_fn=loss_fn
    )
    group = engine.devices.group("dp")
    return engine, ZeroRedundancyOptimizer(
        engine.parameters(), optimizer_class=torch.optim.AdamW, process_group=group, lr=lr
    )


def divided_states(rank, folder):
    """ZeRO-1: torch's optimizer divides its states over the replicas, and trains as one process does."""
    reference, inputs = deep()
    engine, optimizer = zero1(1e-3)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(2):
        trained(engine, inputs, seed=step)
        in_one_process(reference, inputs, seed=step)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    held = sum(value.numel() for state in optimizer.optim.state.values() for value in state.values())
    whole = sum(value.numel() for state in other.state.values() for value in state.values())
    assert held < 0.6 * whole
    for (name, found), wanted in zip(engine.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
    checkpoints = TrainingCheckpoints(folder)
    checkpoints.save(engine, optimizer, step=2)
    checkpoints.wait()
    again, resumed = zero1(0.1)
    assert checkpoints.load(again, resumed).step == 2
    assert resumed.param_groups[0]["lr"] == 1e-3
    plain = torch.optim.AdamW(again.parameters())
    checkpoints.load(again, plain)
    for parameter, wanted in zip(again.parameters(), reference.parameters(), strict=True):
        for key, value in other.state[wanted].items():
            torch.testing.assert_close(plain.state[parameter][key], value)
    for one, state in ((engine, optimizer), (again, resumed)):
        trained(one, inputs, seed=2)
        state.step()
    for (name, found), wanted in zip(again.named_parameters(), engine.parameters(), strict=True):
        assert torch.equal(found, wanted), name


class LargestMemory(TorchDispatchMode):
    """The most bytes of storages that live at once, of those that some operation has seen in here."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        self.most = max(self.most, self.alive())
        return result

    def alive(self):
        """Bytes that live now."""
        self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
        held = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._known.values()]
        return sum(storage.nbytes() for storage in held if storage is not None)


def peak(rank, *, units, depth=6):
    """Most bytes of a training step that are not there before it, beside those of the parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Deep(depth=depth, width=128, hidden=512)
    example = torch.randn(1, 128)
    plan = partition_model(model, (example,), mesh={"dp": 2}, hardware="cpu", microbatches=1)
    whole = sum(p.numel() * 4 for p in model.parameters())
    block = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    options = {} if units is None else {"units": units}
    engine = parallelize_model(
        model, plan, data_parallel="fsdp", loss_fn=lambda y, t: y.square().mean(), **options
    )
    engine.step(example, torch.zeros(1))
    engine.zero_grad()
    gc.collect()
    with LargestMemory() as memory:
        engine.step(example, torch.zeros(1))
    return {"peak": memory.most, "whole": whole, "block": block}


def sketches(rank):
    """Selective checkpointing keeps the r numbers between the factors of sketched blocks, and is exact."""
    kept, products = {}, {}
    for mode in ("none", "selective", "full"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = sketchify(
                Deep(depth=4, width=64, hidden=256),
                ratio=0.25,
                min_params=0,
                allow_slower=True,
                progress=False,
            )
        example = (torch.randn(16, 64),)
        reference = copy.deepcopy(model)
        plan = partition(model, example, {"dp": 2}, count=1)

        def loss_of(output, target, mode=mode):
            gc.collect()
            kept[mode] = memory.alive()  # behind the forward: parameters, and what the backward needs
            return loss_fn(output, target)

        engine = parallelize_model(
            model, plan, data_parallel="ddp", loss_fn=loss_of, activation_checkpointing=mode
        )
        with LargestMemory() as memory, Products() as counted:
            loss, gradients, _ = trained(engine, example, count=1)
        products[mode] = counted.macs
        kept[mode] -= sum(parameter.numel() * 4 for parameter in engine.parameters())
        compare((loss, gradients), in_one_process(reference, example, count=1))
    assert kept["full"] < kept["selective"] < 0.7 * kept["none"], kept
    assert products["none"] < products["selective"] < products["full"], products
    return kept, products


class Products(TorchDispatchMode):
    """Counts multiply-adds."""

    macs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm"):
            self.macs += result.numel() * args[0 if name == "aten::mm" else 1].shape[-1]
        return result
