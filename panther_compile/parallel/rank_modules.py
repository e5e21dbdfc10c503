"""The modules of one rank: its stages, sharded and computed again as asked, and what runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from panther_compile.parallel.activation_checkpointing import checkpoint_unit
from panther_compile.parallel.batch_norms import synchronize_batch_norms
from panther_compile.parallel.crossing import CrossingTensors
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.engine import Runner
from panther_compile.parallel.losses import Loss
from panther_compile.parallel.options import Options
from panther_compile.parallel.pipeline import Pipeline
from panther_compile.parallel.replicas import (
    SharedGradients,
    check_uniform,
    find_shared,
    replicate,
    shard_replicas,
)
from panther_compile.parallel.stage_module import StageModule, find_graph_mode
from panther_compile.parallel.tensor import shard_stage, share_random_state
from panther_compile.parallel.units import find_module_units
from panther_compile.parallel.whole_model import GraphModel, OneModule
from panther_compile.partition import Partition
from panther_compile.partition.graph.reached import unreached_parameters


@dataclass(frozen=True, slots=True)
class RankModules:
    """What one rank trains.

    Attributes:
        outermost: the module that the user trains: holds all parameters of this rank.
        stages: of this rank, by index; the model itself is stage 0 where its own modules are trained.
        runner: what runs them in a step.
        shared: sums of gradients of parameters that several stages read.
    """

    outermost: nn.Module
    stages: Mapping[int, nn.Module]
    runner: Runner
    shared: SharedGradients


def trains_own_modules(part: Partition) -> bool:
    """Whether the model's own modules are trained, with dp alone, in place of stages of its graph."""
    return part.mesh.pp == part.mesh.tp == 1


def stages_of_shared(part: Partition) -> dict[str, tuple[int, ...]]:
    """The stages that read each parameter of several."""
    return {parameter.name: parameter.stages for parameter in part.shared}


def make_modules(
    model: nn.Module,
    graphs: Sequence[fx.GraphModule],
    part: Partition,
    options: Options,
    places: Sequence[int],
    devices: Devices,
    loss: Loss | None,
) -> RankModules:
    """The modules of this rank, in place of the model where its own are trained.

    Args:
        model: the user's.
        graphs: of all stages, as every rank has them.
        part: they are split by.
        options: that were checked.
        places: of the stages along the pp axis.
        devices: of the mesh.
        loss: of one microbatch; None if nothing is trained.
    """
    # Of graphs as every rank has them; stages write into those of their own.
    policy = options.mp_policy if part.mesh.dp > 1 else None
    crossing = CrossingTensors(graphs, part, policy) if part.mesh.pp > 1 else None
    unreached = unreached_parameters(part.captured)
    stages: dict[int, StageModule] = {}
    if trains_own_modules(part):
        _prepare_tree(model, part, options, devices)
    else:
        stages = _graph_stages(graphs, part, options, places, devices, unreached)
    if part.mesh.tp > 1:
        share_random_state(devices.device, devices.group("tp"))
    shared = find_shared(stages_of_shared(part), places, stages, devices)
    if crossing is not None:
        pipeline = Pipeline(stages, places, part, devices, options.schedule, loss, crossing)
        return RankModules(nn.ModuleList(stages.values()), stages, pipeline, shared)
    form = part.captured.form
    module: nn.Module = GraphModel(stages[0], form, part.stages[0].inputs) if stages else model
    if options.data_parallel == "ddp" and part.mesh.dp > 1:
        finds = options.find_unused_parameters
        if finds is None:
            finds = bool(part.unused or unreached)
        module = replicate(module, devices, find_unused_parameters=finds)
    keeps_whole = options.data_parallel == "fsdp" and not options.reshards(part)
    return RankModules(
        module, stages or {0: model}, OneModule(module, form, loss, keeps_whole=keeps_whole), shared
    )


def _graph_stages(
    graphs: Sequence[fx.GraphModule],
    part: Partition,
    options: Options,
    places: Sequence[int],
    devices: Devices,
    unreached: frozenset[str],
) -> dict[int, StageModule]:
    """The stages of the graph that this rank runs."""
    mode = find_graph_mode(graphs)
    divide = options.data_parallel == "fsdp" or options.activation_checkpointing != "none"
    stages = {
        index: StageModule(
            _of_rank(graph, part, index, options, devices), mode, index, divide=divide, unreached=unreached
        )
        for index, graph in enumerate(graphs)
        if places[index] == devices.pp
    }
    for stage in stages.values():
        _prepare_stage(stage, part, options, devices)
    return stages


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
