"""Seconds that calls take on a device."""

import time
from collections.abc import Callable

import torch


def seconds_of(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds of so many calls, all together.

    One thread of a CPU is timed by what it works, so that other processes do not count; else it is wall time,
    on an accelerator until its queue is empty. The clock of a thread stands still now and then on a virtual
    machine: the calls are then made again.

    Args:
        run: what is called; run more than once if the clock stood still.
        device: that it runs on.
        calls: made one after the other.
    """
    on_cpu = device.type == "cpu"
    clock = time.thread_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    taken = 0.0
    while taken <= 0.0:
        if not on_cpu:
            torch.accelerator.synchronize(device)
        begin = clock()
        for _ in range(calls):
            run()
        if not on_cpu:
            torch.accelerator.synchronize(device)
        taken = clock() - begin
    return taken
