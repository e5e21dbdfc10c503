"""Before any other collective: the process group fits, and every rank was given the same plan."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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
    told = {
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
        "tensors": [
            (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()
        ],
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()


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
            f"{dist.get_rank()}): every rank must build the same model and call partition_model and "
            "parallelize_model with the same arguments"
        )


def find_timeout(device: torch.device) -> timedelta:
    """The timeout of the user's process group, which the groups made from it are to keep."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    timeout: timedelta = backend.options._timeout
    return timeout


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """Turn a collective that another rank left unanswered into an error that says where it happened.

    Args:
        where: rank, stage and step, as "rank 1 (stage 1), step 3".

    Raises:
        CommunicationError: with the error of torch as its cause.
    """
    try:
        yield
    except RuntimeError as error:
        silence = _find_silence(error)
        if silence is None:
            raise
        raise CommunicationError(
            f"{where}: another rank did not answer within the timeout of the process group, or has failed; "
            f"look for the first error of the other ranks. Here: {silence}"
        ) from error


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
