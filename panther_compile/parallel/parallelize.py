"""From a partition to an engine: agree, lay out, broadcast, shard, wrap, schedule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from panther_compile.errors import ConfigError, ConfigTypeError, ParallelError, ProcessGroupError
from panther_compile.parallel.agreement import (
    check_agreement,
    check_process_group,
    digest,
    find_timeout,
    named_failures,
)
from panther_compile.parallel.devices import Devices, lay_out, place_stages
from panther_compile.parallel.engine import Names, ParallelEngine
from panther_compile.parallel.pipeline import (
    SPLIT_BACKWARD,
    Pipeline,
    Runner,
    SingleStage,
    check_schedule,
    mean_loss,
)
from panther_compile.parallel.replicas import broadcast_tensors, find_shared, replicate, shard_replicas
from panther_compile.parallel.stage_module import StageModule, find_graph_mode
from panther_compile.parallel.tensor import parameter_layouts, shard_stage, share_random_state
from panther_compile.partition import Partition, StagedModel

_DATA_PARALLEL = (None, "ddp", "fsdp")


def parallelize_model(
    model: nn.Module,
    part: Partition,
    *,
    data_parallel: str | None = None,
    schedule: str | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    reshard_after_forward: bool | None = None,
    shard_size: int | None = None,
    broadcast: bool = True,
) -> ParallelEngine:
    """Give this rank its stages of a partition, replicated or sharded, and a schedule that drives them.

    Every rank of the user's process group (torchrun, `init_process_group`) calls this with the same model and
    the same partition. The model has to be on this rank's device before it is partitioned. Ranks of one tp
    group go on with the state of torch's generators of the first of them: they have to drop out alike.

        >>> torch.distributed.init_process_group("gloo")
        >>> part = pc.partition_model(model, example, mesh={"dp": 2, "pp": 2}, microbatches=4)
        >>> engine = pc.parallelize_model(model, part, data_parallel="fsdp", loss_fn=loss_fn)
        >>> loss = engine.step(batch, target)

    Args:
        model: that `part` was made from.
        part: of `partition_model`; its mesh must be of as many devices as there are ranks.
        data_parallel: over the dp axis, "ddp" (equal replicas) or "fsdp" (`fully_shard`); None if dp is 1.
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zbv"; the partition's if None.
        loss_fn: of the model's output and the target, the mean over a batch; needed to train.
        reshard_after_forward: for "fsdp": True frees whole parameters between forward and backward (ZeRO-3),
            False keeps them (ZeRO-2). True if None without a pipeline; with one, where each microbatch would
            gather them again, False.
        shard_size: for "fsdp": replicas that share one set of parameters, of which dp / shard_size are
            kept equal (hybrid sharding); all of dp if None.
        broadcast: start with the parameters and buffers of rank 0; False if they are known to be equal.

    Raises:
        ProcessGroupError: no process group, or not of the mesh's size or the model's device.
        RankMismatchError: the ranks were given different plans, models or options.
        ScheduleError: the schedule cannot run these stages or microbatches.
        CommunicationError: another rank did not answer in time.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model is a {type(model).__name__}; it must be an nn.Module")
    if not isinstance(part, Partition):
        raise ConfigTypeError(f"part is a {type(part).__name__}; it must be what partition_model gives")
    device = _find_device(model)
    check_process_group(device)
    schedule = part.schedule if schedule is None else schedule
    options = {
        "data_parallel": data_parallel,
        "schedule": schedule,
        "reshard_after_forward": reshard_after_forward,
        "shard_size": shard_size,
        "broadcast": broadcast,
        "trains": loss_fn is not None,
    }
    with named_failures(f"rank {dist.get_rank()}, parallelize_model"):
        check_agreement(digest(model, part, options), device)
        # From here on all ranks have the same arguments, so that all of them pass or all of them raise.
        _check(part, data_parallel, schedule, reshard_after_forward, shard_size)
        devices = lay_out(part.mesh, device, find_timeout(device))
        staged = part.split()
        _check_tensors(model, staged)
        if broadcast:
            broadcast_tensors(staged.stages)
        places = place_stages(len(part.stages), part.mesh.pp, zigzag=schedule == "zbv")
        graphs = list(cast(Iterable[fx.GraphModule], staged.stages))
        mode = find_graph_mode(graphs)
        stages = {
            index: StageModule(_shard(graph, part, index, devices), mode)
            for index, graph in enumerate(graphs)
            if places[index] == devices.pp
        }
        if part.mesh.tp > 1:
            share_random_state(device, devices.group("tp"))
        is_sharded = data_parallel == "fsdp" and part.mesh.dp > 1
        if is_sharded:
            keep = part.mesh.pp > 1 if reshard_after_forward is None else not reshard_after_forward
            for stage in stages.values():
                shard_replicas(stage, devices, shard_size=shard_size, reshard_after_forward=not keep)
        shared = {parameter.name: parameter.stages for parameter in part.shared}
        sums = find_shared(shared, places, stages, devices)
        form, count = part.captured.form, part.microbatches
        # Without a loss_fn the engine refuses to train before it comes to this.
        loss = mean_loss(loss_fn or _no_loss, form.unflatten, count)
        runner: Runner
        if part.mesh.pp > 1:
            runner = Pipeline(stages, places, part, devices, schedule, loss)
        else:
            runner = SingleStage(stages[0], loss, count)
            if data_parallel == "ddp" and part.mesh.dp > 1:
                runner.with_loss = replicate(runner.with_loss, devices)
    return ParallelEngine(
        devices=devices,
        stages=stages,
        runner=runner,
        loss=loss if loss_fn is not None else None,
        flatten=lambda *args, **kwargs: form.flatten(args, kwargs),
        unflatten=form.unflatten,
        inputs=part.stages[0].inputs,
        outputs=part.stages[-1].outputs,
        count=count,
        last_place=places[-1],
        shared=sums,
        owned=_owned(stages, shared),
        names=_names(model, staged),
        layouts={name: layout for name, layout in parameter_layouts(part).items() if layout is not None},
        along_tp=sorted({one.kind for one in part.collectives if one.stage in stages}),
        averages=data_parallel == "ddp" and part.mesh.dp > 1 and part.mesh.pp > 1,
    )


def _shard(graph: fx.GraphModule, part: Partition, index: int, devices: Devices) -> fx.GraphModule:
    """A stage with this rank's shards of its parameters, as plain tensors of its own.

    Everything behind this (DDP, `fully_shard`, sums over the dp axis and over stages) works on whatever
    parameters the graph holds.
    """
    return shard_stage(graph, part, index, devices.group("tp")) if part.mesh.tp > 1 else graph


def _find_device(model: nn.Module) -> torch.device:
    """Of all parameters and buffers."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(found) > 1:
        raise ParallelError(
            f"the model is spread over {', '.join(sorted(map(str, found)))}; it must be on one"
        )
    device = found.pop() if found else torch.device("cpu")
    if device.type == "meta":
        raise ParallelError("the model is on the meta device, without values; move it to the rank's device")
    return device


def _check(
    part: Partition,
    data_parallel: str | None,
    schedule: str,
    reshard_after_forward: bool | None,
    shard_size: int | None,
) -> None:
    mesh, ranks = part.mesh, dist.get_world_size()
    if mesh.devices != ranks:
        raise ProcessGroupError(
            f"the partition is for {mesh}, {mesh.devices} devices, and the process group has {ranks} ranks; "
            f"start {mesh.devices} processes, or partition for mesh sizes that multiply to {ranks}"
        )
    if data_parallel not in _DATA_PARALLEL:
        raise ConfigError(f"data_parallel={data_parallel!r} is none of 'ddp', 'fsdp', None")
    if data_parallel is None and mesh.dp > 1:
        raise ConfigError(f"the mesh is {mesh}: with dp={mesh.dp}, data_parallel must be 'ddp' or 'fsdp'")
    check_schedule(schedule, part)
    if data_parallel != "fsdp" and (reshard_after_forward is not None or shard_size is not None):
        raise ConfigError("reshard_after_forward and shard_size are options of data_parallel='fsdp'")
    if reshard_after_forward and mesh.pp > 1 and schedule in SPLIT_BACKWARD:
        raise ConfigError(
            f"schedule={schedule!r} keeps whole parameters: reshard_after_forward must be False"
        )
    if shard_size is not None and (shard_size < 1 or mesh.dp % shard_size):
        raise ConfigError(f"shard_size={shard_size!r} does not divide dp={mesh.dp}")


def _check_tensors(model: nn.Module, staged: StagedModel) -> None:
    """The stages hold the model's own tensors, unless the partition is that of another model."""
    own = {id(parameter) for parameter in model.parameters()}
    for stage in staged.stages:
        for name, parameter in stage.named_parameters():
            if id(parameter) not in own:
                raise ParallelError(
                    f"the partition was made from another model: its {name} is no parameter of this one"
                )


def _no_loss(output: Any, target: Any) -> Tensor:
    raise ParallelError("there is no loss: give loss_fn to parallelize_model")


def _names(model: nn.Module, staged: StagedModel) -> Names:
    """Tied tensors go by their first name, as the partition has them."""
    first = {id(tensor): name for name, tensor in model.named_buffers()}
    first |= {id(tensor): name for name, tensor in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    held = {name for stage in staged.stages for name in stage.state_dict()}
    names = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    rest = {names[name]: tensor for name, tensor in state.items() if names[name] not in held}
    return Names(names, rest)


def _owned(stages: Mapping[int, StageModule], shared: Mapping[str, tuple[int, ...]]) -> frozenset[int]:
    """Parameters of this rank that count in a norm: of several copies, that of the first stage."""
    return frozenset(
        id(parameter)
        for index, stage in stages.items()
        for name, parameter in stage.graph.named_parameters()
        if shared.get(name, (index,))[0] == index
    )
