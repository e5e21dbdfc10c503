"""The verb: a model and a cluster become pipeline stages, shards and strategies."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from panther_compile.config import check_is_module, check_type, is_integer, read_integer
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    MeshError,
    PartitionError,
    StageMemoryError,
    check_choice,
)
from panther_compile.models.batches import copy_object, with_tensors
from panther_compile.partition.assemble import count_samples
from panther_compile.partition.graph.budget import check_mode
from panther_compile.partition.graph.capture import example_arguments, quiet
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graph.hardware import Hardware, find_hardware, read_bytes, slowest_of
from panther_compile.partition.graph.modes import check_batch_norms, differs_by_mode
from panther_compile.partition.graphs import read_graphs, with_paces
from panther_compile.partition.options import AUTO, PlanOptions
from panther_compile.partition.records import Mesh
from panther_compile.partition.replicas import find_context
from panther_compile.partition.result import Partition
from panther_compile.partition.search import partition_mesh, search_meshes
from panther_compile.partition.stages.units import RECOMPUTE

TIED = (AUTO, "shared", "together")
SEQUENCE_PARALLEL = (AUTO, True, False)
# Of a step over all replicas, where devices are divided and no global batch is asked for.
MICROBATCHES_PER_DEVICE = 2
_CONTEXTS = (1, 2, 4, 8)  # devices that divide a sequence, where the planner is to choose


def partition_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    devices: int | None = None,
    hardware: Hardware | str | Sequence[Hardware | str] = "h100",
    memory_per_device: int | str | None = None,
    microbatches: int | None = None,
    global_batch: int | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    schedule: str | None = None,
    stages_per_device: int | None = None,
    training: bool = True,
    optimizer: str = "adam",
    recompute: bool | str | float | None = None,
    data_parallel: str = AUTO,
    shard_size: int | None = None,
    master_weights: bool = False,
    compiled: bool = False,
    products: str | None = None,
    keeps: str | None = None,
    tied: str = AUTO,
    profile: bool | Mapping[str, float] = False,
    boundaries: Sequence[str] = (),
    sequence_parallel: bool | str = AUTO,
    context_parallel: int | str = 1,
    progress: bool | None = None,
) -> Partition:
    """Cut a model into pipeline stages, and the layers of a stage into shards, by minimum cuts.

    The slowest stage, its transfers included, is made as fast as the memory allows; then as few bytes as
    possible cross the cuts. The model is left as it is: `partition.split()` makes the stages' modules.

    Args:
        model: any model whose graph can be read, also on the meta device.
        example_inputs: of one microbatch of one replica: a tensor, a tuple, or a mapping of keywords.
        mesh: {"dp": 2, "pp": 4, "tp": 2}; axes not named are 1. Layers are sharded over "tp". "cp" divides
            the sequences of each replica (context parallelism), which is planned and cannot be run.
        devices: without a mesh, the devices to divide into dp x pp x tp, as is predicted to be fastest at the
            global batch; tp is at most 8, and stays within a node. They divide sequences where
            `context_parallel` says so.
        hardware: a preset, "cpu", "h100" or "h200", or your own; or one for each place along the pipeline,
            where devices differ: faster ones get more of the model, larger ones what needs more memory.
        memory_per_device: as "40GiB" or in bytes; all the hardware has if None.
        microbatches: of a step, through each replica; four for each device of the pipeline if None.
        global_batch: samples of a step over all replicas, in place of microbatches: each replica gets
            global_batch / (dp * the first dimension of the first example input) of them. With devices= and
            without this, two microbatches for each device.
        microbatch_sizes: numbers of samples of a microbatch to compare, in place of the example's, as is
            predicted to be fastest at the global batch; the graph is read once for each.
        schedule: "gpipe", "1f1b" or "interleaved"; None is "1f1b" with mesh=, what is faster with devices=.
        stages_per_device: for "interleaved"; None is 2, or what is faster where the schedule is chosen.
        training: count backward, gradients and optimizer states.
        optimizer: "adam", "momentum" or "sgd", for its states.
        recompute: activation checkpointing: True or "full" keeps what units of the model read and computes
            the rest again in the backward, "selective" also keeps results that are narrower than what they
            are computed from (`graph.narrowing`), a budget, as 0.6, results that take long to compute again,
            at most that share of the bytes that a unit would keep without checkpointing (`graph.budget`).
            False or "none" keeps all, "auto" takes what is fastest where it fits, budgets among it. None is
            "none" with mesh= and "auto" with devices=.
        data_parallel: what replicas share: "ddp" nothing, "zero1" optimizer states, "zero2" gradients too,
            "zero3" parameters too; "auto" what is fastest where it fits.
        shard_size: replicas that share one set of states; None for what is faster of all and those in a node.
        master_weights: hold float32 copies of parameters of fewer bits, train those, and sum gradients in
            float32, as mixed precision does.
        compiled: predict the model under `torch.compile`: elementwise operations and reductions between
            products are fused, read and write once, and are computed again for the backward from the fewest
            bytes that do.
        products: "fp8" runs the products of all layers but the last, forward and for both gradients, at the
            hardware's rate for eight bits; attention stays at that of the model's dtype. None: all do.
        keeps: with products="fp8", "fp8" keeps what they read for the backward in one byte a number, as
            Transformer Engine does; None in the model's dtype, as torchao does.
        tied: "shared" holds a parameter used by several stages in each and sums its gradients, "together"
            keeps its users on one stage, "auto" takes what is predicted to be faster.
        profile: True measures each node here on the example, forward and backward, in place of estimates; or
            seconds by node, forward.
        boundaries: modules to keep whole, where no graph can be read without.
        progress: show progress bars while devices= are divided; None shows them on a terminal.
        sequence_parallel: whether norms, sums and the like run on shards of the sequence over "tp", between
            layers that are sharded: "auto" where that is predicted to be faster, or where nothing else fits;
            True wherever it saves memory; False nowhere.
        context_parallel: with devices=, how many divide each sequence, the cp of the mesh; "auto" is 1, 2, 4
            or 8, as is predicted to be fastest.

    Raises:
        CaptureError: no graph can be read; the message names the construct, or what it does not run on.
        ConfigError, ConfigTypeError: an option is none of what is wanted, or of another type.
        MeshError: the mesh does not multiply to the devices, or the schedule cannot run on it; or cp does not
            divide what the model attends to.
        StageCountError: more stages than places to cut.
        StageMemoryError: a stage cannot fit; the message says by how much and what would help.
    """
    check_is_module("model", model)
    _check_lists(boundaries=boundaries)
    check_type("profile", profile, bool, Mapping)
    check_choice("tied", tied, TIED)
    check_choice("sequence_parallel", sequence_parallel, SEQUENCE_PARALLEL)
    _check_devices(mesh, devices, microbatches, global_batch)
    devices, microbatches, global_batch, stages_per_device, shard_size = _read_numbers(
        devices=devices,
        microbatches=microbatches,
        global_batch=global_batch,
        stages_per_device=stages_per_device,
        shard_size=shard_size,
    )
    microbatch_sizes = _read_sizes(microbatch_sizes, global_batch)
    fixed = None if mesh is None else Mesh.read(mesh, devices)
    places = _read_places(hardware, mesh)
    differ = len(places) > 1
    chosen = slowest_of(places)
    costs = Costs(
        chosen,
        training,
        optimizer,
        master_weights=master_weights,
        compiled=compiled,
        products=products,
        keeps=keeps,
    )
    _check_rates(products, places)
    if profile:
        _check_profile(costs, places)
    memory = chosen.memory_bytes if memory_per_device is None else read_bytes(memory_per_device)
    # A graph is read by running the model's code on what stands for tensors, which it may write into objects.
    example_inputs = with_tensors(example_inputs, lambda tensor: tensor, copy_object)
    samples = count_samples(example_inputs)
    if mesh is None and global_batch is None:
        global_batch = MICROBATCHES_PER_DEVICE * (devices or 1) * samples
    options = PlanOptions(
        hardware=chosen,
        memory_bytes=memory,
        places=places if differ else (),
        spare_bytes=tuple(one.memory_bytes - memory for one in places)
        if differ and memory_per_device is None
        else (),
        microbatches=microbatches,
        global_batch=global_batch,
        samples=samples,
        schedule=(AUTO if mesh is None else "1f1b") if schedule is None else schedule,
        stages_per_device=stages_per_device,
        training=training,
        recompute=_read_recompute(recompute, AUTO if mesh is None else "none", training=training),
        data_parallel=data_parallel,
        shard_size=shard_size,
        master_weights=master_weights,
        context_parallel=_read_contexts(context_parallel, mesh),
    )

    def plan(inputs: Any) -> Partition:
        own = replace(options, samples=count_samples(inputs))
        if fixed is not None:
            own.check(fixed)
        graphs = read_graphs(model, inputs, boundaries, costs, tied, profile, sequence_parallel)
        if fixed is None:
            return search_meshes(graphs, own, devices or 1, progress=progress)
        graphs = graphs.in_context(find_context(chosen, fixed))
        return partition_mesh(with_paces(graphs, places) if differ else graphs, own, fixed)

    if microbatch_sizes is None:
        found = plan(example_inputs)
    else:
        found = _fastest(plan, [_with_samples(example_inputs, size) for size in microbatch_sizes])
    if fixed is not None and sequence_parallel is True:
        _check_sequence(found)
    if found.mesh.pp * found.mesh.tp > 1 and model.training:
        check_batch_norms(model)
        _warn_of_modes(model, example_inputs)
        _warn_of_hooks(model, found)
    return found


def _check_sequence(found: Partition) -> None:
    """Raise MeshError where layers are sharded, and nothing between them can run on shards of a sequence."""
    if found.sharding and not found.sharding.sequence_fits:
        reasons = "".join(f"\n  {layer}: {reason}" for layer, reason in found.whole)
        raise MeshError(
            f"sequence_parallel=True, and nothing of {found.model} can run on shards of it:{reasons}"
        )


def _warn_of_modes(model: nn.Module, example_inputs: Any) -> None:
    """Warn of a model whose graph, read in train mode, is not what it does in eval mode."""
    args, kwargs = example_arguments(example_inputs)
    with quiet():
        differs = differs_by_mode(model, args, kwargs)
    if differs is not None:
        warnings.warn(
            f"{differs} in {type(model).__name__} does something else in eval mode than in train mode, where "
            "its graph was read: stages and shards go on as in train mode after eval(). To predict as the "
            "model does, partition it in eval mode",
            stacklevel=3,
        )


def _warn_of_hooks(model: nn.Module, found: Partition) -> None:
    """Warn of what a model does in its backward that stages and shards do not."""
    sharded = found.sharding.plan.parameters if found.sharding is not None else {}
    lost = list(found.captured.lost)
    for name, parameter in model.named_parameters():
        if name in sharded and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            lost.append(f"the hooks of {name}, which is divided")
    if lost:
        warnings.warn(
            f"stages and shards of {type(model).__name__} leave out, in their backward: {'; '.join(lost)}. "
            "What changes gradients may be a torch.autograd.Function of tensors and numbers, which is kept",
            stacklevel=3,
        )


def _read_places(
    hardware: Hardware | str | Sequence[Hardware | str], mesh: Mapping[str, int] | None
) -> tuple[Hardware, ...]:
    """The hardware of all devices, or of each place along the pipeline where they differ."""
    if isinstance(hardware, Hardware | str):
        return (find_hardware(hardware),)
    if not isinstance(hardware, Sequence):
        raise ConfigTypeError(f"hardware={hardware!r}, wanted a preset, a Hardware, or a list of such")
    if not hardware or not all(isinstance(one, Hardware | str) for one in hardware):
        raise ConfigError(f"hardware={hardware!r}, wanted presets or Hardware, one for each place")
    if mesh is None:
        raise MeshError("hardware= for each place along the pipeline needs mesh=, which says how many")
    if len(hardware) != mesh.get("pp", 1):
        raise MeshError(
            f"hardware= names {len(hardware)}, one for each place along the pipeline; pp={mesh.get('pp', 1)}"
        )
    places = tuple(map(find_hardware, hardware))
    return places[:1] if len(set(places)) == 1 else places


def _check_rates(products: str | None, places: Sequence[Hardware]) -> None:
    """Refuse products in eight bits where no rate of theirs is known."""
    for one in places if products is not None else ():
        if one.fp8_flops_per_second is None or one.rates:
            lacking = "has measured rates, of its own dtype" if one.rates else "has no fp8_flops_per_second"
            raise ConfigError(f"products={products!r}, and hardware {one.name!r} {lacking}")


def _check_profile(costs: Costs, places: Sequence[Hardware]) -> None:
    """Refuse options that ask for other seconds than those of single operations on this device."""
    others = {
        "compiled=True": costs.compiled,
        f"products={costs.products!r}": costs.products is not None,
        "hardware= for each place": len(places) > 1,
    }
    for option, given in others.items():
        if given:
            raise ConfigError(
                "profile= takes the seconds of single operations on this device, "
                f"and {option} asks for others: give one"
            )


def _read_recompute(given: bool | str | float | None, default: str, *, training: bool) -> str | float:
    """The activation checkpointing to plan for; without a backward there is none."""
    if isinstance(given, bool):
        given = "full" if given else "none"
    check_mode("recompute", given, (None, AUTO, *RECOMPUTE))
    if not training:
        return "none"
    return default if given is None else given


def _read_contexts(context_parallel: int | str, mesh: Mapping[str, int] | None) -> tuple[int, ...]:
    """The sizes of cp to compare."""
    if context_parallel == AUTO and mesh is None:
        return _CONTEXTS
    if not is_integer(context_parallel) or context_parallel < 1:
        raise MeshError(f"context_parallel={context_parallel!r}, wanted a whole number, 1 or more, or 'auto'")
    if mesh is not None and context_parallel != 1:
        raise MeshError(f"context_parallel={context_parallel!r} is for devices=; with mesh= give it as 'cp'")
    return (int(context_parallel),)


def _fastest(plan: Callable[[Any], Partition], tried: Sequence[Any]) -> Partition:
    """The plan of the least predicted time; what the last one is refused for, if all are."""
    found: list[Partition] = []
    refused: PartitionError | None = None
    for inputs in tried:
        try:
            found.append(plan(inputs))
        except (MeshError, StageMemoryError) as error:
            refused = error
    if refused is not None and not found:
        raise refused
    return min(found, key=lambda one: one.step_seconds)


def _with_samples(example_inputs: Any, samples: int) -> Any:
    """The example with its samples repeated, or some left out."""
    held = count_samples(example_inputs)
    rows = torch.arange(samples) % held

    def resize(leaf: Any) -> Any:
        has_samples = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == held
        return leaf[rows.to(leaf.device)] if has_samples else leaf

    return pytree.tree_map(resize, example_inputs)


def _check_lists(**options: object) -> None:
    """Refuse what is no list, where several are asked for."""
    for name, given in options.items():
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigTypeError(f"{name}={given!r}, wanted a list")


def _read_sizes(sizes: Sequence[int] | None, global_batch: int | None) -> list[int] | None:
    """Sizes of microbatches; refuses those that are none, or that nothing makes comparable."""
    if sizes is None:
        return None
    _check_lists(microbatch_sizes=sizes)
    read = [read_integer(f"microbatch_sizes[{place}]", size) for place, size in enumerate(sizes)]
    if min(read, default=0) < 1:
        raise MeshError(f"microbatch_sizes={sizes!r}, wanted whole numbers, 1 or more")
    if global_batch is None:
        raise MeshError(f"microbatch_sizes={sizes!r} are compared at one global_batch=, which is not given")
    return read


def _check_devices(
    mesh: Mapping[str, int] | None,
    devices: int | None,
    microbatches: int | None,
    global_batch: int | None,
) -> None:
    """Refuse devices and batches that contradict or miss each other."""
    if mesh is None and devices is None:
        raise MeshError("give mesh={'dp': 1, 'pp': 4} or devices=4")
    if microbatches is not None and (global_batch is not None or mesh is None):
        raise MeshError(
            f"microbatches={microbatches} is of each replica; give global_batch= alone where devices= are "
            "divided, and one of the two with mesh="
        )


def _read_numbers(**given: int | None) -> list[int | None]:
    """Whole numbers, as Python's own, or None; refuses what counts nothing."""
    read = [None if number is None else read_integer(name, number) for name, number in given.items()]
    for name, number in zip(given, read, strict=True):
        if number is not None and number < 1:
            raise MeshError(f"{name}={number}, wanted 1 or more")
    return read
