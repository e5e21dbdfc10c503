"""A layout of any number of ranks checked in one process, without data: one rank of each kind.

Replicas are alike, so ranks differ by their stage and their place on the tp axis. The stage of each kind is
made as `parallelize_model` makes it, and runs forward and backward on fake tensors, in a process group that
sends nothing. Then

    what it holds        is what the plan counts, in bytes
    what it returns      is what the next stage takes, in shape, dtype and whether a gradient comes back
    its collectives      are those of the plan, in kind and bytes
    its gradients        come out for all that the stage before waits for, and for parameters that it trains
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
from panther_compile.partition import Partition, Stage, TensorSpec
from panther_compile.partition.shards.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

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
        raise ConfigTypeError(f"part is a {type(part).__name__}; it must be what partition_model gives")
    check_axes(part.mesh)
    if dist.is_initialized():
        raise ParallelError("check_layout makes a process group of its own, and this process is in one")
    staged, checked = part.split(), []
    trained = any(stage.gradient_bytes for stage in part.stages)
    for place in range(part.mesh.tp):
        with _fake_group(place, part.mesh.tp) as group:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            for index, whole in enumerate(staged.stages):
                assert isinstance(whole, fx.GraphModule)
                with fake, torch.random.fork_rng(devices=[]):
                    stage = shard_stage(_without_data(whole, fake), part, index, group)
                    where = f"stage {index}, tp {place}"
                    checked.append(_check(stage, part, part.stages[index], place, where, trained=trained))
    return tuple(checked)


def _check(
    stage: nn.Module, part: Partition, record: Stage, place: int, where: str, *, trained: bool
) -> CheckedRank:
    held = sum(tensor.nbytes for tensor in (*stage.parameters(), *stage.buffers()))
    _agree(where, "bytes of parameters and buffers", held, record.parameter_bytes)
    precision = part.captured.precision
    device = part.captured.example[0].device if part.captured.example else torch.device("cpu")
    forward, backward = _Collectives(), _Collectives()
    inputs = [_tensor_of(spec, device) for spec in record.inputs]
    with torch.set_grad_enabled(trained), precision.context(), forward:
        outputs = stage(*inputs)
    for spec, output in zip(record.outputs, outputs, strict=True):
        _agree(where, f"what comes out as {spec.name}", _shown(output), _shown(_tensor_of(spec, device)))
    if trained:
        ends = [output for output in outputs if output.requires_grad]
        with backward:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        _check_gradients(where, stage, record, inputs)
    planned = [one for one in part.collectives if one.stage == record.index]
    for phase, found in (("forward", forward.sent), ("backward", backward.sent)):
        wanted: _Sent = Counter((one.kind, one.bytes) for one in planned if one.phase == phase)
        _agree(where, f"collectives of the {phase}", _listed(found), _listed(wanted))
    return CheckedRank(record.index, place, part.mesh.dp, held, forward.sent.total(), backward.sent.total())


def _check_gradients(where: str, stage: nn.Module, record: Stage, inputs: Sequence[Tensor]) -> None:
    waited = [
        (spec.name, tensor)
        for spec, tensor in zip(record.inputs, inputs, strict=True)
        if spec.requires_grad and record.index in spec.used_in
    ]
    for name, tensor in (*waited, *stage.named_parameters()):
        if tensor.requires_grad and (tensor.grad is None or tensor.grad.shape != tensor.shape):
            raise ParallelError(f"{where}: no gradient comes out for {name}")


def _agree(where: str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ParallelError(f"{where}: {what}: {found}, and the plan has {wanted}")


def _shown(tensor: Tensor) -> str:
    flows = ", with a gradient" if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}{flows}"


def _listed(sent: _Sent) -> str:
    lines = (f"{count} x {kind} of {size} bytes" for (kind, size), count in sorted(sent.items()))
    return ", ".join(lines) or "none"


def _tensor_of(spec: TensorSpec, device: torch.device) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    return torch.empty(spec.shape, dtype=dtype, device=device, requires_grad=spec.requires_grad)


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
