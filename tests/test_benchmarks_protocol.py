"""The protocol of the minutes on a GPU, on one that is not there: it ends, resumes and judges."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: it has an onnx.py
import kernel_clock
import kernel_protocol

BENCHMARKS = Path(kernel_protocol.__file__).parent


def run(folder, *options, minutes="20"):
    command = [
        sys.executable,
        str(BENCHMARKS / "kernel_protocol.py"),
        "--device",
        "fake",
        "--output",
        str(folder),
    ]
    command += ["--minutes", minutes, "--jobs", "1", "--models", "ResNet-50", "--dtypes", "bf16", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def records(folder):
    return [json.loads(line) for line in (folder / "kernels.jsonl").read_text().splitlines()]


def key(record):
    return tuple(str(record[name]) for name in ("shape", "rows", "form", "ratio", "contender", "pass"))


@pytest.mark.slow
def test_a_dry_run_ends_resumes_and_judges(tmp_path):
    """A fault that is reported, and an end without a word: each time a new process goes on behind it."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, "--parts", "warm", "bench").returncode == 0
    done = run(broken, "--parts", "bench", "--faults", "70")
    assert done.returncode == 0, done.stderr[-2000:]
    wanted, found = records(whole), records(broken)
    assert {key(one) for one in found} == {key(one) for one in wanted}
    assert len(found) == len(wanted)  # nothing was measured twice
    errors = [one["error"] for one in found if "error" in one]
    assert "CUDA error: made up" in errors
    assert "the process ended while this was measured" in errors
    assert done.stdout.count("a new process goes on") >= 2
    measured = {key(one): one["microseconds"] for one in found if "error" not in one}
    assert measured == {key(one): one["microseconds"] for one in wanted if key(one) in measured}
    text = (broken / "kernels.md").read_text()
    assert "what dispatch picks is at least 0.97 x" in text
    assert "## Missed" in text
    assert run(broken, "--parts", "bench").returncode == 0
    assert len(records(broken)) == len(found)  # all was measured


@pytest.mark.slow
def test_no_time_left_ends_it(tmp_path):
    done = run(tmp_path, "--parts", "bench", minutes="0")
    assert done.returncode == 0
    assert "Nothing was measured" in done.stdout


@pytest.fixture
def protocol(tmp_path, monkeypatch):
    """A protocol whose commands are not run; returns it and a function that sets their exit codes."""
    ran = []

    def answer(*codes):
        left = list(codes)

        def start(command, **_):
            ran.append(command)
            code, added = left.pop(0)
            with (tmp_path / "kernels.jsonl").open("a") as file:
                file.write("{}\n" * added)
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(kernel_protocol.subprocess, "run", start)

    options = kernel_protocol.options_of(["--output", str(tmp_path), "--parts", "tests", "bench", "--quick"])
    return SimpleNamespace(one=kernel_protocol.Protocol(options), answer=answer, ran=ran)


def test_the_benchmark_runs_although_a_test_failed(protocol):
    protocol.answer((1, 0), (0, 5))
    assert protocol.one.run() == 1
    assert "pytest" in protocol.ran[0]
    assert "--quick" in protocol.ran[1]


@pytest.mark.slow
def test_the_tests_find_the_kernels_where_nothing_is_installed(protocol, tmp_path, monkeypatch):
    """The root of a checkout, where the tests run, holds the package without its kernels."""
    root, tree = BENCHMARKS.parent, tmp_path / "panther_compile"
    tree.mkdir()
    for path in (
        *(root / "panther_compile").iterdir(),
        root / "passes",
        root / "kernels",
    ):  # as make build/gpu
        (tree / path.name).symlink_to(path)
    protocol.answer((0, 0), (0, 1))
    protocol.one.run()
    monkeypatch.undo()  # commands run again
    options = protocol.ran[0][1 : protocol.ran[0].index("tests/kernels")]
    # -S: without what is installed for editing, which is found from everywhere.
    command = [sys.executable, "-S", *options, "--collect-only", "tests/kernels/test_autotune.py"]
    path = os.pathsep.join((str(tmp_path), sysconfig.get_path("purelib")))
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_process_that_adds_nothing_is_not_started_for_ever(protocol):
    protocol.answer((0, 0), (3, 2), (3, 0))
    assert protocol.one.run() == 3
    assert protocol.one.restarts == 2


@pytest.mark.parametrize("later", [0.003, 0.006], ids=["steady", "slower"])
def test_the_clock_of_a_device(later, monkeypatch):
    """A device that runs for 1 ms, and a processor that takes 3 ms to launch, or 6 from the ninth time on.

    The cache is only read, and no time has the device waiting for the launch.
    """
    now, busy, read, launched = [0.0], [0.0], [], []

    def work(seconds):
        busy[0] = max(now[0], busy[0]) + seconds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(now[0], busy[0])

        def query(self):
            return now[0] >= self.at

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    def launch():
        launched.append(0)
        now[0] += 0.003 if len(launched) <= 8 else later
        work(0.001)

    def synchronize(device):
        now[0] = max(now[0], busy[0]) + 0.015

    def fill(filler):
        read.append(filler.nbytes)
        work(0.0002)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.Tensor, "sum", fill)
    monkeypatch.setattr(torch.Tensor, "zero_", None)
    monkeypatch.setattr(kernel_clock, "FILLER_BYTES", 100)
    monkeypatch.setattr(kernel_clock.time, "perf_counter", lambda: now[0])
    samples, host = kernel_clock.device_times(launch, torch.device("cpu"))
    assert host == pytest.approx(0.003)
    assert samples == pytest.approx([0.001] * len(samples))
    assert len(samples) == 24  # 0.15 s of 6.2 ms each
    # At 0.2 ms each, for longer than a launch; twice as long from the run on that was slower.
    assert read == [100] * (23 * 24 if later == 0.003 else 23 + 46 * 24)
