"""What threads have freed goes back to the system, and what they hold stays."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile import memory
from panther_compile.kinds import row_space
from panther_compile.memory import FreedMemory, _is_glibc, _resident, freed_given_back, memory_of

MB = 1 << 20


def test_there_is_as_much_as_the_machine_or_its_group_has(tmp_path, monkeypatch):
    cpu, limit = torch.device("cpu"), tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_LIMIT", limit)
    there = memory_of(cpu)
    assert there > _resident()
    for text, wanted in (("max\n", there), ("1048576\n", MB), (f"{1 << 62}\n", there)):
        limit.write_text(text)
        assert memory_of(cpu) == wanted
    assert memory_of(torch.device("meta")) == float("inf")


@pytest.mark.parametrize(("inputs", "there"), [(300, 299), (300, 63), (64, 63)])
def test_layers_of_more_inputs_than_memory_has_moments_of(monkeypatch, inputs, there):
    """As the first linear layer of VGG-16, of 25,088 inputs and 4,096 outputs: a fit of it takes 70 GB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, inputs), nn.ReLU(), nn.Linear(inputs, 64)).eval()
    data = [torch.randn(128, 48) for _ in range(8)]
    options = {"min_params": 64, "allow_slower": True, "include": ["0", "2"], "narrow": False}
    usual = pc.sketchify(model, 0.5, data=data, **options)
    monkeypatch.setattr(row_space, "memory_of", lambda _: 112 * there**2)
    small = pc.sketchify(model, 0.5, data=data, **options)
    one, other = pc.sketch_report(usual).sketched[1], pc.sketch_report(small).sketched[1]
    assert pc.sketch_report(small).sketched[0].predicted_error is not None
    if there < 64:  # nor of its outputs
        assert "data leaves it alone: to fit it takes 0 GB of memory, and there are 0" in other.note
        return
    assert other.ranks == one.ranks
    assert small[2].form == usual[2].form == "pivoted"
    assert other.output_error == pytest.approx(one.output_error, rel=0.02)
    assert other.error == pytest.approx(one.error, rel=0.02)
    with torch.no_grad():
        wanted = model(data[0])
        errors = [float((made(data[0]) - wanted).norm() / wanted.norm()) for made in (usual, small)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


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
from panther_compile.memory import _resident, freed_given_back

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
