"""The largest batch that every rank of a mesh has the memory for.

    rank 0   trial(64) in a process of its own ─┐ a process group of their own     fits
    rank 1   trial(64) in a process of its own ─┘  ✗ out of memory
                 │
                 └──► a flag in the store: the others' processes are killed, none waits in a collective
                      all ranks agree that 64 rows do not fit, and try 32 next

A process that is out of memory is lost with all it holds, and nothing else is: the memory and the process
group of the training stay as they are. What the kernel kills for want of memory counts as well.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from panther_compile.errors import BatchError, ConfigError, ConfigTypeError, ParallelError
from panther_compile.parallel.agreement import find_timeout

_FITS, _OVER, _FAILED, _STOPPED = 3, 2, 1, 0
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 30.0  # of a process that has answered, before it is killed
# What torch says for want of memory on a CPU, in a RuntimeError.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def find_batch_size(
    trial: Callable[[int], object],
    *,
    start: int = 1,
    predicted: Callable[[int], bool] | None = None,
    multiple_of: int = 1,
    maximum: int = 2**20,
) -> int:
    """Find the largest batch whose step no rank runs out of memory in; the same number on every rank.

    Each try runs in a new process of each rank, with a process group of these processes and the timeout of
    the user's: the trial builds the model, as the training will, and takes two steps (the second has the
    optimizer's states). Where one rank is out of memory the others' processes end at once. Sizes double while
    they fit, then the gap is halved.

        >>> def trial(rows):
        ...     engine, optimizer = build(rows)  # partition_model, parallelize_model
        ...     for _ in range(2):
        ...         engine.step(*random_batch(rows))
        ...         optimizer.step()
        >>> if __name__ == "__main__":
        ...     torch.distributed.init_process_group()
        ...     rows = pc.find_batch_size(trial, multiple_of=8)

    Args:
        trial: of a number of rows; a function of a module, since the new processes import it. The script that
            is run needs the guard of `__main__`.
        start: tried first.
        predicted: whether a plan says that a number of rows fits, without a process: the search starts from
            the largest such number, in place of `start`.
        multiple_of: the size has to be a multiple of this, as of the microbatches of a step.
        maximum: never exceeded.

    Raises:
        BatchError: not even the smallest batch fits.
        ParallelError: a trial failed for another reason; with the text of its error.
        ConfigError: a number is below 1, or the smallest batch above the maximum.
        ConfigTypeError: the trial cannot be sent to another process, as a lambda or a number.
    """
    for name, value in (("start", start), ("multiple_of", multiple_of), ("maximum", maximum)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}, wanted a whole number, 1 or more")
    if maximum < multiple_of:
        raise ConfigError(f"maximum={maximum} is below multiple_of={multiple_of}, the smallest batch")
    top = maximum // multiple_of
    first = min(max(1, start // multiple_of), top)
    _check_trial(trial)
    if predicted is not None:
        first = max(1, search(lambda units: predicted(units * multiple_of), first, top))
    trials = _Trials(trial)
    found = search(lambda units: trials.fits(units * multiple_of), first, top)
    if found == 0:
        raise BatchError(f"a batch of {multiple_of} does not fit into the memory of every rank")
    return found * multiple_of


def _check_trial(trial: object) -> None:
    if not callable(trial):
        raise ConfigTypeError(f"trial is a {type(trial).__name__}, wanted a function of a number of rows")
    try:
        ForkingPickler.dumps(trial)
    except (PicklingError, AttributeError, TypeError) as error:
        raise ConfigTypeError(
            f"trial={trial!r} cannot be sent to another process, wanted a function of a module: {error}"
        ) from error


def search(fits: Callable[[int], bool], start: int, maximum: int) -> int:
    """Find the largest number from 1 that fits, where what is smaller fits too; 0 if none does.

    Args:
        fits: asked for each number once at most.
        start: asked first; then twice as much while it fits, and halves of the gap.
        maximum: of the numbers.
    """
    fitting, failing, number = 0, maximum + 1, start
    while failing - fitting > 1:
        if fits(number):
            fitting = number
        else:
            failing = number
        is_bounded = failing <= maximum
        number = (fitting + failing) // 2 if is_bounded else min(2 * fitting, maximum)
    return fitting


class _Trials:
    """Tries of all ranks, numbered, that share a store."""

    def __init__(self, trial: Callable[[int], object]) -> None:
        self._trial = trial
        self._count = 0
        self._is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if self._is_many else 0
        if self._is_many:
            self._device = next(iter(dist.distributed_c10d._get_default_group()._device_types))
            self._timeout = find_timeout(torch.device(self._device))
            self._address = self._make_store()

    def _make_store(self) -> tuple[str, int]:
        """A store of rank 0 beside that of the training, which restarts and rendezvous use."""
        timeout = self._timeout
        host = os.environ.get("MASTER_ADDR", "localhost")
        port: list[int] = [0]
        if self._rank == 0:
            self._store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            port = [self._store.port]
        dist.broadcast_object_list(port, 0)
        if self._rank:
            self._store = TCPStore(host, port[0], None, False, timeout)
        return host, port[0]

    def fits(self, rows: int) -> bool:
        """Try so many rows: whether the trial ends on every rank."""
        self._count += 1
        outcome, text = self._run(rows)
        if not self._is_many:
            texts, outcomes = [text], [outcome]
        else:
            gathered: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
            dist.all_gather_object(gathered, (outcome, text))
            outcomes, texts = [one for one, _ in gathered], [one for _, one in gathered]
        failed = [f"rank {rank}: {texts[rank]}" for rank, one in enumerate(outcomes) if one == _FAILED]
        if failed and _OVER not in outcomes:
            raise ParallelError(f"the trial of {rows} rows failed, {'; '.join(failed)}")
        return all(one == _FITS for one in outcomes)

    def _run(self, rows: int) -> tuple[int, str]:
        """The outcome of this rank's process, and its error."""
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe(duplex=False)
        group = None
        if self._is_many:
            place = self._count, self._rank, dist.get_world_size()
            group = self._address, *place, dist.get_backend_config(), self._timeout
        process = context.Process(target=_try, args=(self._trial, rows, group, theirs))
        process.start()
        theirs.close()
        over = f"trial {self._count} is over"
        try:
            while not wait([process.sentinel, mine], _SECONDS_BETWEEN_LOOKS):
                if self._is_many and self._store.check([over]):
                    return _STOPPED, ""
            outcome, text = _answer(mine, process)
            if outcome == _FITS:
                process.join(_SECONDS_TO_END)
            elif self._is_many:
                self._store.set(over, "")
            return outcome, text
        finally:
            process.kill()
            process.join()
            mine.close()


def _answer(pipe: Connection, process: multiprocessing.process.BaseProcess) -> tuple[int, str]:
    """What a process has said, or how it died: the kernel kills what takes the last of the memory."""
    try:
        answer: tuple[int, str] = pipe.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            return _OVER, "killed"
        return _FAILED, f"its process ended with {process.exitcode}"
    return answer


def _try(
    trial: Callable[[int], object],
    rows: int,
    group: tuple[tuple[str, int], int, int, int, str, timedelta] | None,
    pipe: Connection,
) -> None:
    """Run a trial in a process of its own."""
    try:
        if group is not None:
            (host, port), number, rank, size, backend, timeout = group
            store = PrefixStore(f"trial {number}", TCPStore(host, port, None, False, timeout))
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        trial(rows)
        if group is not None:
            dist.barrier()
            dist.destroy_process_group()
    except (MemoryError, torch.OutOfMemoryError) as error:
        pipe.send((_OVER, str(error)))
    except BaseException as error:
        is_memory = isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
        pipe.send((_OVER if is_memory else _FAILED, traceback.format_exc()))
    else:
        pipe.send((_FITS, ""))
    finally:
        pipe.close()
