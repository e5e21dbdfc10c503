"""What threads have freed goes back to the system, and what they hold stays."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.freed_memory import FreedMemory, _is_glibc, _resident, freed_given_back

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


WAITING = """
import threading
import torch
from panther_compile.freed_memory import _resident, freed_given_back

came, end = threading.Barrier(9), threading.Event()
def run():
    tensors = [torch.ones(500_000) for _ in range(12)]
    del tensors
    came.wait()
    end.wait()

with freed_given_back():
    before = _resident()
    threads = [threading.Thread(target=run) for _ in range(8)]
    for one in threads:
        one.start()
    came.wait()
    print(_resident() - before)
    end.set()
"""


@pytest.mark.skipif(not _is_glibc(), reason="another allocator than glibc's")
def test_what_waiting_threads_have_freed_is_given_back_at_once():
    """As the lockstep has one for each batch and model; in a process where nothing was freed before."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000_000  # 24 MB each


def test_elsewhere_nothing_is_done(monkeypatch):
    _is_glibc.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        with freed_given_back():
            FreedMemory().give_back()
        assert _resident() == 0
    finally:
        _is_glibc.cache_clear()


def test_a_fit_gives_back_after_each_stage(monkeypatch):
    """What the gradients or a trial have freed would lie idle under the next stage."""
    stages = set()
    monkeypatch.setattr(FreedMemory, "give_back", lambda _: stages.add(sys._getframe(1).f_code.co_name))
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8))
    data = list(torch.randn(8, 16, 64))
    pc.sketchify(model, 0.5, data=data, min_params=0, allow_slower=True, progress=False)
    assert {"study_model", "study_layers", "tried", "go_on"} <= stages
