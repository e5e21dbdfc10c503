"""Make an engine of a partition: agree, lay out, broadcast, shard, wrap, schedule."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from panther_compile.config import check_is_module
from panther_compile.errors import ConfigTypeError, ParallelError
from panther_compile.parallel.agreement import (
    check_agreement,
    check_process_group,
    digest,
    find_timeout,
    named_failures,
)
from panther_compile.parallel.batch_norms import check_batch_norms
from panther_compile.parallel.devices import check_axes, lay_out, place_stages
from panther_compile.parallel.engine import ParallelEngine, Task
from panther_compile.parallel.losses import weighted_loss
from panther_compile.parallel.model_state import Names, held_parameters, specs_of
from panther_compile.parallel.options import Options
from panther_compile.parallel.rank_modules import make_modules, stages_of_shared, trains_own_modules
from panther_compile.parallel.replicas import broadcast_tensors, check_dense
from panther_compile.parallel.stage_module import find_own_statistics, find_row_mixing
from panther_compile.parallel.tensor import parameter_layouts
from panther_compile.partition import Partition, StagedModel


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
        ConfigError, ConfigTypeError: an option is unknown, of another type, or does not go with another.
        ScheduleError: the schedule cannot run these stages or microbatches.
        CommunicationError: another rank did not answer in time.
        ParallelError: the mesh divides sequences (cp), which is planned alone; a stage has no parameters to
            train; or "fsdp" is to gather parameters of several dtypes, or numbers, with others.
    """
    check_is_module("model", model)
    if not isinstance(part, Partition):
        raise ConfigTypeError(f"part is a {type(part).__name__}, wanted what partition_model gives")
    for option, given in (("loss_fn", loss_fn), ("count_tokens", count_tokens)):
        if given is not None and (isinstance(given, type) or not callable(given)):
            raise ConfigTypeError(
                f"{option}={given!r}, wanted a function, or an object that is called as one"
            )
    check_axes(part.mesh)
    device = _find_device(model)
    check_process_group(device)
    options = Options.of(
        part,
        data_parallel=data_parallel,
        schedule=schedule,
        reshard_after_forward=reshard_after_forward,
        shard_size=shard_size,
        units=units,
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
            _check_parameters(part, places)
        if sync_batchnorm:
            check_batch_norms(model, graphs, is_own=trains_own_modules(part))
        _check_tensors(model, staged)
        if part.mesh.dp > 1:
            check_dense(model, options.data_parallel, is_own=trains_own_modules(part))
        devices = lay_out(part.mesh, device, find_timeout(device))
        if broadcast:
            broadcast_tensors([model])
        names, dtype = _names(model, staged, is_own=trains_own_modules(part)), _loss_dtype(model)
        loss = weighted_loss(loss_fn) if loss_fn is not None else None
        modules = make_modules(model, graphs, part, options, places, devices, loss)
    return ParallelEngine(
        modules.outermost,
        devices=devices,
        stages=modules.stages,
        runner=modules.runner,
        task=Task(
            form=part.captured.form,
            inputs=part.stages[0].inputs,
            microbatches=part.microbatches,
            loss=loss,
            count_tokens=count_tokens,
            mixes_rows=mixing,
            mixes_always=find_own_statistics(graphs),
            any_shape=trains_own_modules(part),
            dtype=dtype,
            unread=frozenset(part.unused),
            in_step=options.data_parallel == "fsdp" or sync_batchnorm,
        ),
        last_place=places[-1],
        shared=modules.shared,
        owned=_owned(modules.stages, stages_of_shared(part)),
        names=names,
        layouts={name: layout for name, layout in parameter_layouts(part).items() if layout is not None},
        along_tp=sorted({one.kind for one in part.collectives if one.stage in modules.stages}),
        averages=options.data_parallel == "ddp" and part.mesh.dp > 1 and part.mesh.pp > 1,
    )


def _find_device(model: nn.Module) -> torch.device:
    """The one device of all parameters and buffers."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(found) > 1:
        raise ParallelError(
            f"the model is spread over {', '.join(sorted(map(str, found)))}, wanted one device"
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


def _check_parameters(part: Partition, places: Sequence[int]) -> None:
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
    """The type in which losses and norms are added up: as wide as the widest parameter, at least float32."""
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in model.parameters())
    return torch.float64 if is_double else torch.float32


def _names(model: nn.Module, staged: StagedModel, *, is_own: bool) -> Names:
    """Tied tensors go by their first name, as the partition has them."""
    first = {id(tensor): name for name, tensor in model.named_buffers()}
    first |= {id(tensor): name for name, tensor in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    names = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    if is_own:
        return Names(names, {}, specs_of(state))
    held = {name for stage in staged.stages for name in stage.state_dict()}
    rest = {names[name]: tensor for name, tensor in state.items() if names[name] not in held}
    return Names(names, rest, specs_of(state))


def _owned(stages: Mapping[int, nn.Module], shared: Mapping[str, tuple[int, ...]]) -> frozenset[int]:
    """Parameters of this rank that count in a norm: of several copies, that of the first stage."""
    return frozenset(
        id(parameter)
        for index, stage in stages.items()
        for name, parameter in held_parameters(stage)
        if shared.get(name, (index,))[0] == index
    )
