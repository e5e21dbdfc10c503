"""Gradients over replicas, and over the stages that share a parameter.

    pp = 1   DDP: gradients are averaged while the backward still runs.
    pp > 1   One all-reduce of flat buckets behind the schedule. DDP reduces in hooks of `loss.backward()`;
             zero-bubble schedules call `torch.autograd.grad`, which runs none, and with every other
             schedule the hooks must hold back all microbatches but one.
    fsdp     `fully_shard` of units and of what holds them. It shards dimension 0 of each parameter and
             leaves buffers alone.

A parameter that several stages use has a copy in each. All of them get the sum of their gradients, so that
equal copies stay equal.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from panther_compile.errors import ParallelError, some_names
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.model_state import held_parameters
from panther_compile.parallel.stage_module import StageModule

_BUCKET_BYTES = 25 * 2**20


def broadcast_tensors(modules: Iterable[nn.Module]) -> None:
    """Give every rank the parameters and buffers of rank 0.

    Args:
        modules: the same on every rank.
    """
    seen: set[int] = set()
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                value = tensor.detach().contiguous()
                dist.broadcast(value, 0)
                if value.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(value)


def check_uniform(root: nn.Module, units: Sequence[nn.Module]) -> None:
    """Check that `fully_shard` can gather each unit as one message; every rank has to call this.

    Args:
        root: as of `shard_replicas`.
        units: likewise.

    Raises:
        ParallelError: parameters that learn are of several dtypes in one unit, or some is a number.
    """
    names = {id(parameter): name for name, parameter in held_parameters(root)}
    problem = None
    for unit in (*reversed(units), root):
        own = [(names.pop(id(one)), one) for one in unit.parameters() if id(one) in names]
        numbers = [name for name, one in own if not one.ndim]
        dtypes = {one.dtype: name for name, one in own if one.requires_grad}
        if numbers:
            problem = f"{some_names(numbers)} has no dimension to be sharded along: give it the shape (1,)"
        elif len(dtypes) > 1:
            listed = [f"{name} {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items()]
            problem = f"parameters that are gathered together have several dtypes ({', '.join(listed)})"
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    problem = next((one for one in found if one is not None), None)
    if problem is not None:
        raise ParallelError(f"data_parallel='fsdp' cannot shard this model: {problem}; or use 'ddp'")


def check_dense(model: nn.Module, data_parallel: str | None, *, is_own: bool) -> None:
    """Check that replicas can add up the gradients of a model.

    Args:
        model: the user's.
        data_parallel: how several replicas share it.
        is_own: whether the model itself is trained, and no graph of it.

    Raises:
        ParallelError: some are sparse, which DDP adds up of the model itself alone.
    """
    if data_parallel == "ddp" and is_own:
        return
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ParallelError(
                f"{name} gives sparse gradients, which data_parallel='ddp' adds up without pp and tp, and "
                "'fsdp' on no mesh: make it sparse=False"
            )


def shard_replicas(
    root: nn.Module,
    units: Sequence[nn.Module],
    devices: Devices,
    *,
    shard_size: int | None,
    reshard_after_forward: bool,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
) -> None:
    """`fully_shard` units and what holds them over the dp axis, in place; each gathers the next one ahead.

    Args:
        root: the model, or one stage of the pipeline, which becomes an `FSDPModule`.
        units: modules in it, in the order in which they run; one inside of another comes after it.
        devices: of the mesh.
        shard_size: replicas that share one set of parameters, for hybrid sharding.
        reshard_after_forward: whether the whole parameters are freed between forward and backward (ZeRO-3).
        mp_policy: dtypes to compute and to reduce in.
        offload_policy: `CPUOffloadPolicy` keeps parameters, gradients and optimizer states on the CPU.
    """
    options: dict[str, Any] = {
        "mesh": devices.replica_mesh(shard_size),
        "reshard_after_forward": reshard_after_forward,
    }
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    root.register_forward_hook(_copy_held)  # ahead of those of `fully_shard`, which free what is held
    for unit in (*reversed(units), root):
        fully_shard(unit, **options)
    for first in cast(Sequence[FSDPModule], units[:1]):
        # Of itself, which is there: torch would gather what ran before it, the last of an earlier microbatch.
        first.set_modules_to_backward_prefetch([first])
    for one, following in pairwise(cast(Sequence[FSDPModule], units)):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


def _copy_held(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    """A copy of what is a parameter, or a view of one, in a result: torch reads freed memory there."""
    del module, args

    def is_held(one: Any) -> bool:
        return isinstance(one, Tensor) and isinstance(one if one._base is None else one._base, nn.Parameter)

    if not any(map(is_held, tree_leaves(result))):
        return result
    return tree_map(lambda one: one.clone() if is_held(one) else one, result)


def replicate(
    module: nn.Module, devices: Devices, *, find_unused_parameters: bool
) -> DistributedDataParallel:
    """DDP over the dp axis; parameters and buffers are equal already and stay so.

    Args:
        module: of the model's call.
        devices: of the mesh.
        find_unused_parameters: let DDP look in each forward for parameters that get no gradient.
    """
    # Buffers are not sent again each step: sketches never change, and statistics are each replica's own.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
    return DistributedDataParallel(
        module,
        process_group=devices.group("dp"),
        init_sync=False,
        find_unused_parameters=find_unused_parameters,
        **buffers,
    )


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce gradients in flat buckets, in place.

    Args:
        parameters: the same of every replica; those without a gradient are passed over.
        group: the replicas.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    size = dist.get_world_size(group)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        offset = 0
        for gradient in bucket:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, up to 25 MiB."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


@dataclass
class SharedGradients:
    """Sums the gradients of parameters that several stages hold.

    Attributes:
        copies: for each, this rank's copies: one, or one a stage where `fully_shard` made two of it.
        groups: for each, the ranks that hold one; None if it is this rank alone.
    """

    copies: Sequence[Sequence[nn.Parameter]]
    groups: Sequence[dist.ProcessGroup | None]
    _before: list[Tensor | None] = field(default_factory=list)

    def set_aside(self) -> None:
        """What earlier steps have left is summed already; call this before a step."""
        self._before = [copies[0].grad for copies in self.copies]
        for copies in self.copies:
            for parameter in copies:
                parameter.grad = None

    def sum(self) -> None:
        """Give every copy the sum of the step's gradients, and what was set aside.

        What gets no gradient on any rank, and what is frozen, is left without: weight decay would move it.
        """
        for copies, group, before in zip(self.copies, self.groups, self._before, strict=True):
            if not (copies[0].requires_grad and _reached(copies, group)):
                for parameter in copies:
                    parameter.grad = before
                continue
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in copies
            ]
            total = gradients[0].detach()
            for gradient in gradients[1:]:
                total = total + gradient
            if group is not None:
                dist.all_reduce(total.to_local() if isinstance(total, DTensor) else total, group=group)
            if before is not None:
                total = total + before
            for parameter in copies:
                parameter.grad = total.clone() if len(copies) > 1 else total
        self._before = []


def _reached(copies: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> bool:
    """Whether a copy has a gradient, on this rank or another of the group."""
    reached = any(parameter.grad is not None for parameter in copies)
    if group is None:
        return reached
    flag = torch.tensor(int(reached), device=copies[0].device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def find_shared(
    names: Mapping[str, Sequence[int]],
    places: Sequence[int],
    stages: Mapping[int, StageModule],
    devices: Devices,
) -> SharedGradients:
    """Make a group for each set of devices that share parameters; every rank has to call this.

    Args:
        names: of the parameters that several stages hold -> those stages.
        places: the device of each stage, along the pp axis.
        stages: of this rank, by index.
        devices: of the mesh.
    """
    sets = {name: tuple(sorted({places[stage] for stage in held})) for name, held in names.items()}
    groups = {key: devices.subgroup(key) for key in sorted(set(sets.values())) if len(key) > 1}
    copies, found = [], []
    for name, held in sorted(names.items()):
        holding = [dict(stages[stage].held_parameters()) for stage in held if stage in stages]
        mine = {id(own[name]): own[name] for own in holding}
        if mine:
            copies.append(tuple(mine.values()))
            found.append(groups.get(sets[name]))
    return SharedGradients(copies, found)
