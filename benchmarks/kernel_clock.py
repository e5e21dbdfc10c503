"""How long something takes on a GPU, with a cold L2 cache; on a processor; and on a GPU that is not there."""

import math
import statistics
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

SAMPLING_SECONDS = 0.15
FILLER_BYTES = 2**30  # beyond any L2 cache, and 0.2 ms or more to read
FILLER_SECONDS = 2e-4
MOST_FILLING = 20  # times a launch; one that waits for the device is never over before it
REPLAYS = 20
MOST_COPIES = 64
MARGIN = 1.5


def device_times(run: Callable[[], Any], device: torch.device) -> tuple[list[float], float]:
    """Seconds of several runs on the device, each with a cold L2 cache, and seconds of a launch.

    As triton.testing.do_bench, which clears the cache for 0.08 ms before each run; an operator written in
    Python, or a backward, takes the processor longer than that, and the device would be seen waiting for it.
    So it is kept busy here for as long as a launch takes, and longer where it came to the run before that was
    launched. And it reads: a buffer that was just written is written back to memory during the run.
    """
    filler = torch.zeros(FILLER_BYTES // 4, dtype=torch.float32, device=device)
    for _ in range(3):  # compiles
        run()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(5):
        run()
    host = (time.perf_counter() - begin) / 5
    torch.cuda.synchronize(device)
    count = int(SAMPLING_SECONDS * 5 / (time.perf_counter() - begin))
    fillers, most = math.ceil(1.5 * host / FILLER_SECONDS), math.ceil(MOST_FILLING * host / FILLER_SECONDS)
    pairs = []
    while len(pairs) < max(10, min(count, 100)):
        start, end = _events()
        for _ in range(fillers):
            filler.sum()
        start.record()
        run()
        end.record()
        if start.query() and fillers < most:
            fillers *= 2
        else:
            pairs.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs], host


def replay_times(runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Seconds of one of the runs on the device, in a CUDA graph of all of them, replayed several times.

    For a few rows, where launches would hide the kernels: each run has weights of its own, together more than
    the L2 cache holds, so that each finds its weights in memory, as it does within a model.
    """
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for run in (*runs[:1], *runs):  # compiles, and takes memory, ahead of the capture
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    pairs = [_events() for _ in range(REPLAYS)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 / len(runs) for start, end in pairs]


def copies_wanted(traffic: float, device: torch.device) -> int:
    """How many runs that move so many bytes do not fit into the L2 cache of a device twice over."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_COPIES, math.ceil(2 * cache / max(traffic, 1))))


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def processor_times(run: Callable[[], Any]) -> tuple[list[float], float]:
    """Seconds of several runs on the processor, and 0 for a launch."""
    run()
    samples = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return samples, 0.0


def made_up_times(bound: float, *what: object) -> dict[str, float]:
    """Times of a device that is not there: one to three times a bound, the same for the same thing."""
    factor = 1 + 2 * (zlib.crc32(repr(what).encode()) % 1000) / 1000
    seconds = bound * factor
    return in_microseconds([0.9 * seconds, seconds, 1.1 * seconds], 5e-6)


def in_microseconds(samples: Sequence[float], host: float) -> dict[str, float]:
    """Median, 20th and 80th percentile, and the processor's time for a launch, all in microseconds."""
    low, *_, high = statistics.quantiles(samples, n=5)
    times = {"microseconds": statistics.median(samples), "p20": low, "p80": high, "host": host}
    return {name: seconds * 1e6 for name, seconds in times.items()}


class Clock:
    """What is left of the time, and what a case of each stage is likely to take.

    Attributes:
        seconds: from now on, or None for no limit.
    """

    def __init__(self, seconds: float | None, guesses: dict[str, float]) -> None:
        self.seconds = seconds
        self.begin = time.monotonic()
        self.guesses = guesses
        self.recent: dict[str, deque[float]] = {stage: deque(maxlen=6) for stage in guesses}

    def fits(self, stage: str) -> bool:
        """Whether a case will probably end in time: as the longest of the last ones, with a margin."""
        if self.seconds is None:
            return True
        likely = MARGIN * max(self.recent[stage], default=self.guesses[stage])
        return time.monotonic() - self.begin + likely <= self.seconds

    def took(self, stage: str, seconds: float) -> None:
        """Note what a case took."""
        self.recent[stage].append(seconds)
