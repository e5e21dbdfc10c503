"""Before any other collective: the process group fits, and every rank was given the same plan."""

import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group

from panther_compile.errors import CommunicationError, ProcessGroupError, RankMismatchError
from panther_compile.partition import Partition

# What the messages of torch say when another rank does not answer.
_SILENCE = (
    "timed out",
    "timeout",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket",
    "nccl error",
)


def check_process_group(device: torch.device) -> None:
    """The user's process group exists and carries tensors of the device.

    Raises:
        ProcessGroupError: it does not.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError(
            "no process group: start the script with torchrun, and call "
            "torch.distributed.init_process_group(...) before parallelize_model"
        )
    served = [str(kind) for kind in dist.distributed_c10d._get_default_group()._device_types]
    if device.type not in served:
        raise ProcessGroupError(
            f"the model is on {device}, and the process group's backend, {dist.get_backend()}, carries only "
            f"tensors on {', '.join(served)}; move the model before partition_model, or give "
            "init_process_group another backend (gloo for cpu, nccl for cuda)"
        )


def digest(model: nn.Module, part: Partition, options: Mapping[str, Any]) -> bytes:
    """32 bytes that are equal where plan, parameters and options are; predicted seconds do not count."""
    plan = json.loads(part.to_json())
    described = {
        "mesh": plan["mesh"],
        "schedule": plan["schedule"],
        "microbatches": plan["microbatches"],
        "shared": plan["shared"],
        "stages": [
            {key: stage[key] for key in ("nodes", "parameters", "buffers", "inputs", "outputs")}
            for stage in plan["stages"]
        ],
        "shards": [
            {key: shard[key] for key in ("node", "kind", "parameters", "blocks")} for shard in plan["shards"]
        ],
        "sequence": plan["sequence"],
        "tensors": [
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in model.state_dict(keep_vars=True).items()
        ],
        "training": [module.training for module in model.modules()],
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def check_agreement(mine: bytes, device: torch.device) -> None:
    """Compare digests over all ranks.

    Raises:
        RankMismatchError: they differ; the ranks are named.
    """
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    table = torch.stack(everyone).cpu()
    differing = [rank for rank, row in enumerate(table) if not torch.equal(row, table[0])]
    if differing:
        raise RankMismatchError(
            f"ranks {differing} were given another plan, model or options than rank 0 (this is rank "
            f"{dist.get_rank()}): every rank must build the same model, in the same mode and with the same "
            "parameters frozen, and call partition_model and parallelize_model with the same arguments"
        )


def find_timeout(device: torch.device) -> timedelta:
    """The timeout of the user's process group, which the groups made from it are to keep."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    timeout: timedelta = backend.options._timeout
    return timeout


@contextmanager
def named_failures(where: str, pending: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn the error of a rank that did not answer into one that says where and in which exchange.

    Args:
        where: rank, stage and step, as "rank 1 (stage 1), step 3".
        pending: what a schedule of torch has last asked of other ranks, and waits for.

    Raises:
        CommunicationError: with the error of torch as its cause.
    """
    try:
        yield
    except RuntimeError as error:
        silence = _find_silence(error)
        if silence is None:
            raise
        operation = find_operation(error, pending)
        raise CommunicationError(
            f"{where}{f', in {operation}' if operation else ''}: another rank did not answer within the "
            "timeout of the process group, or has failed; look for the first error of the other ranks. "
            f"Here: {silence}"
        ) from error


def find_operation(error: BaseException, pending: Callable[[], str]) -> str:
    """The communication that an error came from; empty where torch's C++ started it, as DDP does.

    torch's flight recorder sees no sends and receives of gloo, and has to be turned on before the process
    group is made. The frames that the error went through are there in any case.

    Args:
        error: of torch.
        pending: what a schedule of torch waits for.
    """
    innermost: FrameType | None = None
    caller: FrameType | None = None
    link: BaseException | None = error
    while link is not None:
        before: FrameType | None = None
        for frame, _ in traceback.walk_tb(link.__traceback__):
            name = frame.f_globals.get("__name__", "")
            if name.startswith("torch.distributed.") and name != "torch.distributed.c10d_logger":
                innermost, caller = frame, before
            elif not name.startswith("torch."):
                before = frame
        link = link.__cause__
    if innermost is None:
        return ""
    module, function = innermost.f_globals["__name__"], innermost.f_code.co_name
    if module == dist.distributed_c10d.__name__:
        return _describe(function, innermost.f_locals)
    if (
        function == "wait_tensor" and caller is not None
    ):  # functional collectives wait for what is named outside
        return _describe(caller.f_code.co_name.lstrip("_"), caller.f_locals)
    return pending() if module.startswith("torch.distributed.pipelining") else f"{module}.{function}"


def _describe(function: str, values: Mapping[str, Any]) -> str:
    """A call of torch.distributed from what its variables hold."""
    words = [function]
    tensor = next((value for value in values.values() if isinstance(value, Tensor)), None)
    if tensor is not None:
        words.append(f"of {describe_tensor(tensor)}")
    group = values.get("group")
    if isinstance(group, str):  # as functional collectives take it
        group = _resolve_process_group(values["group"])
    ranks = dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)
    for name, way in (("group_src", "from"), ("group_dst", "to")):
        if isinstance(values.get(name), int):
            words.append(f"{way} rank {ranks[values[name]]}")
    return f"{' '.join(words)} between the ranks {ranks}{_number(group)}"


def _number(group: object) -> str:
    """The number of the last operation of a group, for those backends that count."""
    group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if group is None or dist.get_backend(group) not in ("gloo", "nccl"):
        return ""
    number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return f", number {number} of their group"


def describe_tensor(tensor: Tensor) -> str:
    """Shape and dtype, as "(4, 8) float32"."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _find_silence(error: BaseException) -> str | None:
    """The message of the first error of a chain that speaks of another rank."""
    found: BaseException | None = error
    while found is not None:
        message = " ".join(str(found).split())
        is_known = any(sign in message.lower() for sign in _SILENCE)
        # An error of the model that was wrapped by torch names its arguments, not a connection.
        if isinstance(found, dist.DistError) or (type(found) is RuntimeError and is_known):
            return message[:300]
        found = found.__cause__
    return None
