"""What threads have freed goes back to the system, and what they hold stays."""

import sys
import threading

import pytest

from panther_compile.calibration.freed_memory import FreedMemory, _is_glibc, _resident

MB = 1 << 20


@pytest.mark.skipif(not _is_glibc(), reason="another allocator than glibc's")
def test_what_a_thread_has_freed_is_given_back():
    """It keeps a block in a hundred, all over its arena."""
    freed, held = FreedMemory(), []

    def work():
        blocks = [bytearray(100_000) for _ in range(5000)]
        blocks[0][:] = b"x" * 100_000
        held.extend(blocks[::100])

    before = _resident()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    idle = _resident() - before
    freed.give_back()
    assert idle > 200 * MB
    assert _resident() - before < idle / 4
    assert held[0] == b"x" * 100_000
    assert not any(map(any, held[1:]))


def test_elsewhere_nothing_is_done(monkeypatch):
    _is_glibc.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        FreedMemory().give_back()
        assert _resident() == 0
    finally:
        _is_glibc.cache_clear()
