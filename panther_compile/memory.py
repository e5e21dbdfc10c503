"""How much memory there is, and what was freed of it, which glibc would keep for what comes.

glibc lets threads allocate from arenas of their own, and in lockstep one of many threads runs at a time, so
most of what they freed lies idle: more than half of all that a fit of the benchmark's GPT took.

    memory_of          bytes that a device has
    FreedMemory        gives back what has gathered, now and then; next to no time
    freed_given_back   has large tensors give back theirs at once, which a model that fits into memory would
                       run a quarter longer for
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_SHARE, _LEAST = 1 / 8, 64 << 20  # of what the process had, and bytes, that are given back
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h: from so many bytes on, freed memory is given back
_LARGE, _USUAL = 1 << 20, 32 << 20  # bytes; the usual one is what glibc comes to by itself


def memory_of(device: torch.device) -> float:
    """Bytes that a device has in all, or that this process's control group may take; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return math.inf
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return min(
        float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        math.inf if limit == "max" else float(limit),
    )


class FreedMemory:
    """What the process may have freed since it was made; where there is no glibc nothing is given back."""

    def __init__(self) -> None:
        self._had = _resident()

    def give_back(self) -> None:
        """Give it back, if the process has grown by so much that it is worth the time."""
        has = _resident()
        if has > self._had * (1 + _SHARE) + _LEAST:
            ctypes.CDLL(None).malloc_trim(0)
            has = self._had = _resident()
        self._had = min(self._had, has)


@contextmanager
def freed_given_back() -> Iterator[None]:
    """While it is open, memory of large tensors is given back to the system as soon as they are freed."""
    if _is_glibc():
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        if _is_glibc():
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _USUAL)


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where there is no glibc."""
    if not _is_glibc():
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@cache
def _is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
