"""A layout of any number of ranks checked in one process, without data: one rank of each kind.

Replicas are alike, so ranks differ by their stage and their place on the tp axis. The stage of each kind is
made as `parallelize_model` makes it, and runs forward and backward on fake tensors, in a process group that
sends nothing. Then

    what it holds        is what the plan counts, in bytes
    what it returns      is what the next stage takes, in shape, dtype and whether a gradient comes back
    its collectives      are those of the plan, in kind and bytes
    its gradients        come out where those of the stage without shards do, and for every parameter that the
                         backward of the model reaches
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from panther_compile.errors import ConfigTypeError, ParallelError
from panther_compile.parallel.devices import check_axes
from panther_compile.parallel.tensor import shard_stage
from panther_compile.partition import Partition, Stage
from panther_compile.partition.graph.reached import unreached_parameters
from panther_compile.partition.shards.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from panther_compile.partition.stages.split import StagedModel

_KINDS = {
    "all_reduce": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
}
# Kind of a collective, and bytes of the whole tensor.
_Sent = Counter[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class CheckedRank:
    """A kind of rank that agrees with the plan.

    Attributes:
        stage: of the pipeline.
        tp: place on the tp axis.
        alike: ranks of the mesh that are of this kind: one a replica.
        parameter_bytes: that it holds of the stage.
        forward: collectives of one microbatch.
        backward: likewise.
    """

    stage: int
    tp: int
    alike: int
    parameter_bytes: int
    forward: int
    backward: int


def check_layout(part: Partition) -> tuple[CheckedRank, ...]:
    """Run every stage, for every place on the tp axis, without its ranks and without data.

    Args:
        part: for any mesh, of any model, also on the meta device.

    Raises:
        ConfigTypeError: it is no partition.
        ParallelError: a rank does not do what the plan says, this process is in a process group, or the mesh
            divides sequences (cp), which is planned alone.
    """
    if not isinstance(part, Partition):
        raise ConfigTypeError(f"part is a {type(part).__name__}, wanted what partition_model gives")
    check_axes(part.mesh)
    if dist.is_initialized():
        raise ParallelError("check_layout makes a process group of its own, and this process is in one")
    staged, checked = part.split(), []
    trained = any(stage.gradient_bytes for stage in part.stages)
    learned = _learned(staged, part) if trained else None
    for place in range(part.mesh.tp):
        with _fake_group(place, part.mesh.tp) as group:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            for index, whole in enumerate(staged.stages):
                assert isinstance(whole, fx.GraphModule)
                with fake, torch.random.fork_rng(devices=[]):
                    stage = shard_stage(_without_data(whole, fake), part, index, group)
                    checked.append(_check(stage, part, index, place, learned[index] if learned else None))
    return tuple(checked)


def _learned(staged: StagedModel, part: Partition) -> list[frozenset[str]]:
    """Inputs and parameters of each stage that gradients come out for, before it is sharded."""
    fake, learned = FakeTensorMode(allow_non_fake_inputs=True), []
    for index, whole in enumerate(staged.stages):
        assert isinstance(whole, fx.GraphModule)
        with fake, torch.random.fork_rng(devices=[]), part.captured.precision.context():
            stage, inputs = _without_data(whole, fake), _inputs(part, index)
            _run_backward(stage(*inputs))
            given = _named(stage, part.stages[index], inputs)
            learned.append(frozenset(name for name, tensor in given if tensor.grad is not None))
    reached = frozenset[str]().union(*learned)
    unreached = unreached_parameters(part.captured)
    for index, whole in enumerate(staged.stages):
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad and name not in reached | unreached:
                raise ParallelError(f"stage {index}: no gradient comes out for {name}")
    return learned


def _check(
    stage: nn.Module, part: Partition, index: int, place: int, learned: frozenset[str] | None
) -> CheckedRank:
    record, where, trained = part.stages[index], f"stage {index}, tp {place}", learned is not None
    held = sum(tensor.nbytes for tensor in (*stage.parameters(), *stage.buffers()))
    _agree(where, "bytes of parameters and buffers", held, record.parameter_bytes)
    precision, device = part.captured.precision, _device(part)
    forward, backward = _Collectives(), _Collectives()
    inputs = _inputs(part, index)
    with torch.set_grad_enabled(trained), precision.context(), forward:
        outputs = stage(*inputs)
    for spec, output in zip(record.outputs, outputs, strict=True):
        _agree(where, f"what comes out as {spec.name}", _shown(output), _shown(spec.empty(device)))
    if learned is not None:
        with backward:
            _run_backward(outputs)
        for name, tensor in _named(stage, record, inputs):
            if name in learned and (tensor.grad is None or tensor.grad.shape != tensor.shape):
                raise ParallelError(f"{where}: no gradient comes out for {name}")
    planned = [one for one in part.collectives if one.stage == record.index]
    for phase, found in (("forward", forward.sent), ("backward", backward.sent)):
        wanted: _Sent = Counter((one.kind, one.bytes) for one in planned if one.phase == phase)
        _agree(where, f"collectives of the {phase}", _listed(found), _listed(wanted))
    return CheckedRank(record.index, place, part.mesh.dp, held, forward.sent.total(), backward.sent.total())


def _run_backward(outputs: Sequence[Tensor]) -> None:
    ends = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


def _named(stage: nn.Module, record: Stage, inputs: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What a stage is given and what it holds."""
    yield from zip((f"input {spec.name}" for spec in record.inputs), inputs, strict=True)
    yield from stage.named_parameters()


def _inputs(part: Partition, index: int) -> list[Tensor]:
    """What a stage is given, without data."""
    return [spec.empty(_device(part)) for spec in part.stages[index].inputs]


def _device(part: Partition) -> torch.device:
    return part.captured.example[0].device if part.captured.example else torch.device("cpu")


def _agree(where: str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ParallelError(f"{where}: {what}: {found}, and the plan has {wanted}")


def _shown(tensor: Tensor) -> str:
    flows = ", with a gradient" if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}{flows}"


def _listed(sent: _Sent) -> str:
    lines = (f"{count} x {kind} of {size} bytes" for (kind, size), count in sorted(sent.items()))
    return ", ".join(lines) or "none"


def _without_data(graph: fx.GraphModule, fake: FakeTensorMode) -> fx.GraphModule:
    """A copy whose parameters and buffers are fake."""
    memo: dict[int, Tensor] = {}
    for tensor in (*graph.parameters(), *graph.buffers()):
        made: Tensor = fake.from_tensor(tensor.detach(), static_shapes=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copy.deepcopy(graph, memo)


class _Collectives(TorchDispatchMode):
    """Counts what is sent between the ranks of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: _Sent = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in _KINDS:
            whole = result if name == "all_gather_into_tensor" else args[0]
            self.sent[_KINDS[name], whole.nbytes] += 1
        return result


@contextmanager
def _fake_group(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    """A group of so many ranks that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
