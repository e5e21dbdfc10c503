"""What a training step takes: seconds, tokens, products, memory, and what each collective sends.

Bytes are counted where torch dispatches a collective, so that those of DDP, `fully_shard`, pipelines and
shards are all seen; seconds are read off torch's profiler. Bus bandwidth is that of nccl-tests: of n ranks,

    all-reduce                                2 (n - 1) / n   of its bytes cross the slowest link
    all-gather, reduce-scatter, all-to-all      (n - 1) / n   of the whole tensor's
    broadcast, reduce, send, receive                      1
"""

import csv
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from panther_compile.config import read_number
from panther_compile.errors import ConfigError, MissingExtraError
from panther_compile.models.outputs import tensors_in
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.engine import ParallelEngine
from panther_compile.partition import Partition
from panther_compile.partition.graph.observe import observe
from panther_compile.partition.records import RUN_AXES
from panther_compile.reporting.tables import render_table

# By the beginning of the names of torch's operators, without their underscores.
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
_PURPOSES = {"dp": ("replicas",), "pp": ("pipeline", "tied"), "tp": ("shards",)}


def bus_factor(kind: str, ranks: int) -> float:
    """Share of a collective's bytes that cross the slowest link, as nccl-tests count them.

    Args:
        kind: what is done, as "all_reduce".
        ranks: number of ranks that take part.
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


@dataclass(frozen=True)
class Communication:
    """Collectives of one kind that a rank took part in.

    Attributes:
        axis: axis of the mesh, "dp", "pp" or "tp"; "all" of groups along several.
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send" or
            "recv".
        ranks: number of ranks in the group.
        calls: number of calls in a step.
        bytes: bytes of the whole tensors, in a step.
        seconds: time from start to end, in a step, waiting for other ranks included; None where the backend
            does not tell the profiler.
    """

    axis: str
    kind: str
    ranks: int
    calls: float
    bytes: float
    seconds: float | None

    @property
    def sent_bytes(self) -> float:
        """Over the slowest link."""
        return self.bytes * bus_factor(self.kind, self.ranks)

    @property
    def bandwidth(self) -> float | None:
        """Bytes of tensors a second, "algbw" of nccl-tests."""
        return self.bytes / self.seconds if self.seconds else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second over the slowest link, "busbw" of nccl-tests."""
        return self.sent_bytes / self.seconds if self.seconds else None


class TrainingMetrics:
    """What training steps take on this rank, beside what the plan predicts; `print` shows a table.

        >>> metrics = pc.TrainingMetrics(engine, part, tokens=rows * length, csv="metrics.csv")
        >>> for batch, target in loader:
        ...     with metrics.step():
        ...         engine.step(batch, target)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> print(metrics)

    Every `every`-th step is watched: what it sends is counted under torch's profiler, and its seconds, which
    that lengthens, count only where all steps are watched. No rank waits for another here.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        part: Partition,
        *,
        tokens: int | None = None,
        peak_flops: float | None = None,
        every: int = 10,
        csv: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        """Take what is trained, and where figures go; rank 0 writes files.

        Args:
            engine: of `parallelize_model`.
            part: that it was made from.
            tokens: number of tokens of a step, over all replicas.
            peak_flops: of one device, as its maker gives them in the precision that is trained in, for the
                share of it that is used (MFU).
            every: steps from one that is watched to the next.
            csv: a file to add lines "step,name,value" to.
            tensorboard: a folder for its event files.

        Raises:
            ConfigError, ConfigTypeError: a number is not positive, or none.
            MissingExtraError: tensorboard is not installed.
        """
        for name, value in (("tokens", tokens), ("peak_flops", peak_flops), ("every", every)):
            if value is not None and not read_number(name, value) > 0:
                raise ConfigError(f"{name}={value!r}, wanted a number above 0")
        self.steps = 0
        self._devices, self._part = engine.devices, part
        self._tokens, self._peak_flops, self._every = tokens, peak_flops, every
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether they were watched
        self._sent: dict[tuple[str, str, int], list[tuple[int, float | None]]] = defaultdict(list)
        self._peak_bytes = 0
        is_first = engine.devices.rank == 0
        self._csv = Path(csv) if csv is not None and is_first else None
        self._board = _open_board(tensorboard) if tensorboard is not None and is_first else None
        # A backward is two products for each of the forward's.
        products = sum(one.macs for note in observe(part.captured).values() for one in note.products)
        self.model_flops = 6 * products * part.microbatches * part.mesh.dp

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch what is done in here as one step."""
        self.steps += 1
        watched = self.steps % self._every == 0
        device = self._devices.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        calls = _Collectives(self._devices)
        with ExitStack() as stack:
            if watched:
                profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
                stack.enter_context(calls)
            started = time.perf_counter()
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._seconds[watched].append(time.perf_counter() - started)
        self._peak_bytes = max(self._peak_bytes, _peak_bytes(device))
        if watched:
            for key, size, seconds in calls.timed(profiler.events()):
                self._sent[key].append((size, seconds))
        self._write()

    @property
    def step_seconds(self) -> float:
        """The median of the steps behind the first, which are not watched unless all are."""
        seconds = self._seconds[False] or self._seconds[True]
        return statistics.median(seconds[1:] or seconds or [float("nan")])

    @property
    def communication(self) -> tuple[Communication, ...]:
        """What this rank sends in a step, the mean of those that were watched, by axis and kind."""
        watched = max(1, len(self._seconds[True]))
        found = []
        for (axis, kind, ranks), calls in sorted(self._sent.items()):
            times = [seconds for _, seconds in calls if seconds is not None]
            seconds = sum(times) / watched if len(times) == len(calls) else None
            size = sum(size for size, _ in calls) / watched
            found.append(Communication(axis, kind, ranks, len(calls) / watched, size, seconds))
        return tuple(found)

    @property
    def measured(self) -> dict[str, float]:
        """Figures by name; of those that need tokens or a peak, those that were given."""
        found = self._figures(self.step_seconds, self._peak_bytes)
        for axis in RUN_AXES:
            sent = sum(
                one.sent_bytes for one in self.communication if one.axis == axis and one.kind != "recv"
            )
            if getattr(self._part.mesh, axis) > 1 and self._seconds[True]:
                found[f"sent bytes, {axis}"] = sent
        return found

    @property
    def predicted(self) -> dict[str, float]:
        """The same by the plan: bytes held by this rank's device, and what a device sends on average."""
        part = self._part
        held = sum(stage.memory_bytes for stage in part.stages if stage.device == self._devices.pp)
        found = self._figures(part.step_seconds, held)
        sent = {one.purpose: one.intra_node_bytes + one.inter_node_bytes for one in part.traffic}
        for axis, purposes in _PURPOSES.items():
            if getattr(part.mesh, axis) > 1:
                found[f"sent bytes, {axis}"] = sum(sent[one] for one in purposes) / part.mesh.devices
        return found

    def _figures(self, seconds: float, peak_bytes: int) -> dict[str, float]:
        """What follows from the seconds of a step, and its peak of memory."""
        flops = self.model_flops / seconds / self._part.mesh.devices
        found = {"step seconds": seconds, "FLOP/s a device": flops, "peak bytes": float(peak_bytes)}
        if self._tokens is not None:
            found["tokens a second"] = self._tokens / seconds
        if self._peak_flops is not None:
            found["MFU"] = flops / self._peak_flops
        return found

    def __str__(self) -> str:
        """A table of collectives, and below it figures beside those predicted."""
        columns = [("collective", "left"), ("axis", "left")]
        columns += [(one, "right") for one in ("ranks", "calls", "MB", "ms", "GB/s", "bus GB/s")]
        rows = [
            (
                *(one.kind, one.axis, str(one.ranks), f"{one.calls:g}", f"{one.bytes / 1e6:,.3f}"),
                *(_number(value, scale) for value, scale in ((one.seconds, 1e3), (one.bandwidth, 1e-9))),
                _number(one.bus_bandwidth, 1e-9),
            )
            for one in self.communication
        ]
        title = f"{self._part.model} on {self._part.mesh}, rank {self._devices.rank}, {self.steps} steps"
        predicted = self.predicted
        figures = [
            (name, f"{value:,.4g}", f"{predicted[name]:,.4g}") for name, value in self.measured.items()
        ]
        sent = render_table(f"{title}: sent in one", columns, rows, ())
        headings = [("", "left"), ("measured", "right"), ("predicted", "right")]
        return f"{sent}\n\n{render_table('and taken', headings, figures, ())}"

    def _write(self) -> None:
        if self._csv is None and self._board is None:
            return
        last = (self._seconds[self.steps % self._every == 0])[-1]
        values = {"last step seconds": last, **self.measured}
        values |= {f"predicted {name}": value for name, value in self.predicted.items()}
        for one in self.communication:
            name = f"{one.axis} {one.kind}"
            values |= {f"{name} calls": one.calls, f"{name} bytes": one.bytes}
            if one.seconds is not None and one.bus_bandwidth is not None:
                values |= {f"{name} seconds": one.seconds, f"{name} bus bytes a second": one.bus_bandwidth}
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"panther/{name}", value, self.steps)
            self._board.flush()
        if self._csv is not None:
            is_new = not self._csv.exists()
            with self._csv.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(("step", "name", "value"))
                writer.writerows((self.steps, name, value) for name, value in values.items())


class _Collectives(TorchDispatchMode):
    """Notes each collective that torch dispatches: axis and kind and ranks, and bytes."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        groups = {axis: dist.get_process_group_ranks(devices.group(axis)) for axis in RUN_AXES}
        self._axes = {axis: frozenset(ranks) for axis, ranks in groups.items()}
        self.calls: list[tuple[tuple[str, str, int], int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace not in ("c10d", "_c10d_functional"):
            return result
        name = func._schema.name.split("::")[1].replace("_", "")
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        group = _group_of(func, args)
        if kind is not None and group is not None:
            size = max(sum(one.nbytes for one in tensors_in(tree)) for tree in (*args, result))
            ranks = frozenset(dist.get_process_group_ranks(group))
            axis = next((axis for axis, members in self._axes.items() if ranks <= members), "all")
            self.calls.append(((axis, kind, len(ranks)), size, dist.get_backend(group)))
        return result

    def timed(self, events: Sequence[Any]) -> Iterator[tuple[tuple[str, str, int], int, float | None]]:
        """Each call with its seconds, where gloo has told the profiler of as many as were called."""
        times: dict[str, list[float]] = defaultdict(list)
        for event in sorted(events, key=lambda event: event.time_range.start):
            if event.name.startswith("gloo:"):
                times[event.name].append(event.time_range.elapsed_us() * 1e-6)
        titles = [f"{backend}:{_TITLES.get(key[1], key[1])}" for key, _, backend in self.calls]
        complete = {title: len(found) == titles.count(title) for title, found in times.items()}
        for (key, size, _), title in zip(self.calls, titles, strict=True):
            yield key, size, times[title].pop(0) if complete.get(title) else None


# Gloo scatters what it has reduced whole.
_TITLES = {"reduce_scatter": "all_reduce"}


def _group_of(func: Any, args: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group among the arguments of a collective; None if it has none."""
    if func.namespace == "_c10d_functional":
        named = any(argument.name == "group_name" for argument in func._schema.arguments)
        return _resolve_process_group(args[-1]) if named else None
    kinds = [str(argument.type) for argument in func._schema.arguments]
    found = next((arg for arg, kind in zip(args, kinds, strict=False) if "ProcessGroup" in kind), None)
    return None if found is None else dist.ProcessGroup.unbox(found)


def _peak_bytes(device: torch.device) -> int:
    """Most bytes held: on a GPU by torch's allocator in this step; else by the process, from its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _open_board(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "tensorboard is not installed: pip install 'panther-compile[integrations]'"
        ) from error
    return SummaryWriter(str(folder))


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:,.3f}"
