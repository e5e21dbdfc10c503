"""Memory that threads have freed, given back to the system.

glibc lets threads allocate from arenas of their own, and keeps what they free for others of the same arena.
In lockstep one of many threads runs at a time, so most of that lies idle: more than half of all that a fit of
the GPT of `benchmarks/accuracy_models` took.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

_SHARE, _LEAST = 1 / 8, 64 << 20  # of what the process had, and bytes, that are freed for


class FreedMemory:
    """What the process may have freed since it was made; where there is no glibc nothing is given back."""

    def __init__(self) -> None:
        self._had = _resident()

    def give_back(self) -> None:
        """Give it back, if the process has grown by so much that it is worth the time."""
        has = _resident()
        if has > self._had * (1 + _SHARE) + _LEAST:
            _trim()
            has = _resident()
            self._had = has
        self._had = min(self._had, has)


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    if not _is_glibc():
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


@cache
def _is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
