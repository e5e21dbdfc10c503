"""From a partition to an engine: agree, lay out, broadcast, shard, wrap, schedule."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from panther_compile.errors import ConfigTypeError, ParallelError
from panther_compile.parallel.activation_checkpointing import checkpoint_unit
from panther_compile.parallel.agreement import (
    check_agreement,
    check_process_group,
    digest,
    find_timeout,
    named_failures,
)
from panther_compile.parallel.batch_norms import check_batch_norms, synchronize_batch_norms
from panther_compile.parallel.crossing import CrossingTensors
from panther_compile.parallel.devices import Devices, check_axes, lay_out, place_stages
from panther_compile.parallel.engine import ParallelEngine, Runner, Task
from panther_compile.parallel.losses import weighted_loss
from panther_compile.parallel.model_state import Names, held_parameters
from panther_compile.parallel.options import Options, replication_of
from panther_compile.parallel.pipeline import Pipeline
from panther_compile.parallel.replicas import (
    broadcast_tensors,
    check_uniform,
    find_shared,
    replicate,
    shard_replicas,
)
from panther_compile.parallel.stage_module import StageModule, find_graph_mode, find_row_mixing
from panther_compile.parallel.tensor import parameter_layouts, shard_stage, share_random_state
from panther_compile.parallel.units import find_module_units
from panther_compile.parallel.whole_model import GraphModel, OneModule
from panther_compile.partition import Partition, StagedModel
from panther_compile.partition.graph.reached import unreached_parameters


def parallelize_model(
    model: nn.Module,
    part: Partition,
    *,
    data_parallel: str | None = None,
    schedule: str | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    count_tokens: Callable[[Any], int | Tensor] | None = None,
    reshard_after_forward: bool | None = None,
    shard_size: int | None = None,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    find_unused_parameters: bool | None = None,
    activation_checkpointing: str | float | None = None,
    sync_batchnorm: bool = False,
    broadcast: bool = True,
) -> ParallelEngine:
    """Give this rank its part of a model, replicated or sharded, as one module to train.

    Every rank of the user's process group (torchrun, `init_process_group`) calls this with the same model and
    the same partition. The model has to be on this rank's device before it is partitioned. Ranks of one tp
    group go on with the state of torch's generators of the first of them: they have to drop out alike.

    With dp alone the model itself is trained, not its graph: in `DistributedDataParallel`, or sharded in
    place by `fully_shard`. With pp or tp the graph is, in stages and shards.

        >>> torch.distributed.init_process_group("gloo")
        >>> part = pc.partition_model(model, example, mesh={"dp": 2, "pp": 2}, microbatches=4)
        >>> engine = pc.parallelize_model(model, part, data_parallel="fsdp", loss_fn=loss_fn)
        >>> loss = engine.step(batch, target)

    Args:
        model: that `part` was made from.
        part: of `partition_model`; its mesh must be of as many devices as there are ranks.
        data_parallel: over the dp axis, "ddp" (equal replicas) or "fsdp" (`fully_shard`); None if dp is 1;
            "auto" as the plan has it: ZeRO-2 and 3 are "fsdp", ZeRO-1 is "ddp" with an optimizer that divides
            its states (torch's `ZeroRedundancyOptimizer`).
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zbv"; the partition's if None.
        loss_fn: of the model's output and the target, the mean over a batch; needed for `step`.
        count_tokens: of a microbatch's target, the number of its tokens: then loss_fn gives the sum over
            them, and the loss is the sum of all microbatches and replicas divided by the number of tokens.
        reshard_after_forward: for "fsdp": True frees whole parameters between forward and backward (ZeRO-3),
            False keeps them (ZeRO-2). True if None without a pipeline; with one, where each microbatch would
            gather them again, False.
        shard_size: for "fsdp": replicas that share one set of parameters; dp / shard_size sets
            are kept equal (hybrid sharding); all of dp if None.
        units: for "fsdp" with dp alone: names of the modules that are gathered one at a time; blocks of even
            bytes if None. With pp or tp they are cut on the graph.
        mp_policy: for "fsdp": torch's `MixedPrecisionPolicy`, dtypes to compute and to reduce in.
        offload_policy: for "fsdp": torch's `CPUOffloadPolicy`.
        find_unused_parameters: for "ddp" without a pipeline, of DDP itself: needed where a parameter gets no
            gradient in some step. If None, where no gradient of the graph's outputs reaches some.
        activation_checkpointing: "none"; "full": of each unit its inputs are kept for the backward, and the
            rest is computed again; "selective": results narrower than what they are computed from are kept
            too, as the r numbers between a sketched layer's factors; a budget, as 0.6: results that take
            long to compute again are kept too, at most that share of the bytes that a unit would keep without
            checkpointing. As the plan has it if None. The user's own `torch.utils.checkpoint` calls are
            respected in any case.
        sync_batchnorm: in train mode, batch norms take statistics over the microbatches of all replicas, on
            any backend: BatchNorm1d, 2d and 3d of the model itself with dp alone, else those of its graph.
        broadcast: start with the parameters and buffers of rank 0; False if they are known to be equal.

    Raises:
        ProcessGroupError: no process group, or not of the mesh's size or the model's device.
        RankMismatchError: the ranks were given different plans, models or options.
        ConfigError: an option is unknown, or does not go with another.
        ScheduleError: the schedule cannot run these stages or microbatches.
        CommunicationError: another rank did not answer in time.
        ParallelError: the mesh divides sequences (cp), which is planned alone; a stage has no parameters to
            train; or "fsdp" is to gather parameters of several dtypes, or numbers, with others.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model is a {type(model).__name__}; it must be an nn.Module")
    if not isinstance(part, Partition):
        raise ConfigTypeError(f"part is a {type(part).__name__}; it must be what partition_model gives")
    check_axes(part.mesh)
    device = _find_device(model)
    check_process_group(device)
    if activation_checkpointing is None:
        activation_checkpointing = part.recompute
    if data_parallel == "auto":
        chosen = replication_of(part)
        data_parallel = chosen.data_parallel
        if data_parallel == "fsdp":
            shard_size = chosen.shard_size if shard_size is None else shard_size
            if reshard_after_forward is None:
                reshard_after_forward = chosen.reshard_after_forward
    options = Options(
        data_parallel=data_parallel,
        schedule=part.schedule if schedule is None else schedule,
        reshard_after_forward=reshard_after_forward,
        shard_size=shard_size,
        units=None if units is None else tuple(units),
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        find_unused_parameters=find_unused_parameters,
        activation_checkpointing=activation_checkpointing,
        sync_batchnorm=sync_batchnorm,
        broadcast=broadcast,
    )
    with named_failures(f"rank {dist.get_rank()}, parallelize_model"):
        described = {**options.as_record(), "trains": loss_fn is not None, "counts": count_tokens is not None}
        check_agreement(digest(model, part, described), device)
        # From here on all ranks have the same arguments, so that all of them pass or all of them raise.
        staged = part.split()
        graphs = list(cast(Iterable[fx.GraphModule], staged.stages))
        mixing = find_row_mixing(graphs)
        options.check(part, mixing)
        places = place_stages(len(part.stages), part.mesh.pp, zigzag=options.schedule == "zbv")
        if loss_fn is not None:
            _check_held(part, places)
        is_own = part.mesh.pp == part.mesh.tp == 1
        if sync_batchnorm:
            check_batch_norms(model, graphs, is_own=is_own)
        _check_tensors(model, staged)
        devices = lay_out(part.mesh, device, find_timeout(device))
        if broadcast:
            broadcast_tensors([model])
        shared = {parameter.name: parameter.stages for parameter in part.shared}
        unreached = unreached_parameters(part.captured)
        names, dtype = _names(model, staged, is_own=is_own), _loss_dtype(model)
        # Of graphs as every rank has them; stages write into those of their own.
        policy = mp_policy if part.mesh.dp > 1 else None
        crossing = CrossingTensors(graphs, part, policy) if part.mesh.pp > 1 else None
        stages: Mapping[int, nn.Module]
        graph_stages: dict[int, StageModule] = {}
        if is_own:
            stages = {0: model}
            _prepare_tree(model, part, options, devices)
        else:
            mode = find_graph_mode(graphs)
            divide = data_parallel == "fsdp" or activation_checkpointing != "none"
            stages = graph_stages = {
                index: StageModule(
                    _of_rank(graph, part, index, options, devices),
                    mode,
                    index,
                    divide=divide,
                    unreached=unreached,
                )
                for index, graph in enumerate(graphs)
                if places[index] == devices.pp
            }
            for stage in graph_stages.values():
                _prepare_stage(stage, part, options, devices)
        if part.mesh.tp > 1:
            share_random_state(device, devices.group("tp"))
        sums = find_shared(shared, places, graph_stages, devices)
        form = part.captured.form
        loss = weighted_loss(loss_fn) if loss_fn is not None else None
        module: nn.Module
        runner: Runner
        if crossing is not None:
            module = nn.ModuleList(graph_stages.values())
            runner = Pipeline(graph_stages, places, part, devices, options.schedule, loss, crossing)
        else:
            module = model if is_own else GraphModel(graph_stages[0], form)
            if data_parallel == "ddp" and part.mesh.dp > 1:
                finds = find_unused_parameters
                if finds is None:
                    finds = bool(part.unused or unreached)
                module = replicate(module, devices, find_unused_parameters=finds)
            keeps_whole = data_parallel == "fsdp" and not options.reshards(part)
            runner = OneModule(module, form, loss, keeps_whole=keeps_whole)
    return ParallelEngine(
        module,
        devices=devices,
        stages=stages,
        runner=runner,
        task=Task(
            form=form,
            inputs=part.stages[0].inputs,
            microbatches=part.microbatches,
            loss=loss,
            count_tokens=count_tokens,
            mixes_rows=mixing,
            any_shape=is_own,
            dtype=dtype,
            unread=frozenset(part.unused),
            in_step=data_parallel == "fsdp" or sync_batchnorm,
        ),
        last_place=places[-1],
        shared=sums,
        owned=_owned(stages, shared),
        names=names,
        layouts={name: layout for name, layout in parameter_layouts(part).items() if layout is not None},
        along_tp=sorted({one.kind for one in part.collectives if one.stage in stages}),
        averages=data_parallel == "ddp" and part.mesh.dp > 1 and part.mesh.pp > 1,
    )


def _prepare_tree(model: nn.Module, part: Partition, options: Options, devices: Devices) -> None:
    """Shard the user's own modules, and let them be computed again, in place."""
    if options.sync_batchnorm and part.mesh.dp > 1:
        synchronize_batch_norms(model, devices.group("dp").group_name)
    sharded = options.data_parallel == "fsdp" and part.mesh.dp > 1
    mode = options.activation_checkpointing
    if not sharded and mode == "none":
        return
    units = find_module_units(model, part.captured.graph_module, options.units)
    if mode != "none":
        for unit in units:
            if unit.is_whole and unit.is_repeatable:
                checkpoint_unit(model.get_submodule(unit.name), mode, part.hardware.device)
    if sharded:
        _shard_units(model, [model.get_submodule(unit.name) for unit in units], part, options, devices)


def _prepare_stage(stage: StageModule, part: Partition, options: Options, devices: Devices) -> None:
    """Shard the units of a stage, and let them be computed again, in place."""
    mode = options.activation_checkpointing
    for name, unit in stage.units():
        if name in stage.recomputed or mode != "none":
            own = "full" if name in stage.recomputed else mode
            checkpoint_unit(unit, own, part.hardware.device)
    if options.data_parallel == "fsdp" and part.mesh.dp > 1:
        held = [unit for _, unit in stage.units() if next(unit.parameters(), None) is not None]
        _shard_units(stage, held, part, options, devices)


def _shard_units(
    root: nn.Module, units: Sequence[nn.Module], part: Partition, options: Options, devices: Devices
) -> None:
    check_uniform(root, units)
    shard_replicas(
        root,
        units,
        devices,
        shard_size=options.shard_size,
        reshard_after_forward=options.reshards(part),
        mp_policy=options.mp_policy,
        offload_policy=options.offload_policy,
    )


def _of_rank(
    graph: fx.GraphModule, part: Partition, index: int, options: Options, devices: Devices
) -> fx.GraphModule:
    """A stage with this rank's shards of its parameters, as plain tensors of its own.

    Everything behind this (DDP, `fully_shard`, sums over the dp axis and over stages) works on whatever
    parameters the graph holds.
    """
    if part.mesh.tp > 1:
        graph = shard_stage(graph, part, index, devices.group("tp"))
    if options.sync_batchnorm and part.mesh.dp > 1:
        synchronize_batch_norms(graph, devices.group("dp").group_name)
    return graph


def _find_device(model: nn.Module) -> torch.device:
    """The one device of all parameters and buffers."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(found) > 1:
        raise ParallelError(
            f"the model is spread over {', '.join(sorted(map(str, found)))}; it must be on one"
        )
    device = found.pop() if found else torch.device("cpu")
    if device.type == "meta":
        raise ParallelError("the model is on the meta device, without values; move it to the rank's device")
    return device


def _check_tensors(model: nn.Module, staged: StagedModel) -> None:
    """The stages hold the model's own tensors, unless the partition is that of another model."""
    own = {id(parameter) for parameter in model.parameters()}
    for stage in staged.stages:
        for name, parameter in stage.named_parameters():
            if id(parameter) not in own:
                raise ParallelError(
                    f"the partition was made from another model: its {name} is no parameter of this one"
                )


def _check_held(part: Partition, places: Sequence[int]) -> None:
    """Every device has a parameter, without which no optimizer of torch can be made."""
    without = set(places) - {
        place for place, stage in zip(places, part.stages, strict=True) if stage.parameters
    }
    if without and len(without) < part.mesh.pp:
        stages = [str(stage) for stage, place in enumerate(places) if place in without]
        raise ParallelError(
            f"stage {', '.join(stages)} of the partition has no parameters: its ranks have nothing to make "
            "an optimizer of while the others train; partition for fewer stages, or give no loss_fn if "
            "nothing is trained"
        )


def _loss_dtype(model: nn.Module) -> torch.dtype:
    """In which losses and norms are added up: as wide as the widest parameter, at least float32."""
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in model.parameters())
    return torch.float64 if is_double else torch.float32


def _names(model: nn.Module, staged: StagedModel, *, is_own: bool) -> Names:
    """Tied tensors go by their first name, as the partition has them."""
    first = {id(tensor): name for name, tensor in model.named_buffers()}
    first |= {id(tensor): name for name, tensor in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    names = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    if is_own:
        return Names(names, {})
    held = {name for stage in staged.stages for name in stage.state_dict()}
    rest = {names[name]: tensor for name, tensor in state.items() if names[name] not in held}
    return Names(names, rest)


def _owned(stages: Mapping[int, nn.Module], shared: Mapping[str, tuple[int, ...]]) -> frozenset[int]:
    """Parameters of this rank that count in a norm: of several copies, that of the first stage."""
    return frozenset(
        id(parameter)
        for index, stage in stages.items()
        for name, parameter in held_parameters(stage)
        if shared.get(name, (index,))[0] == index
    )
