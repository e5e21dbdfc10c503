"""The minutes on a machine with a GPU, in order: compile in parallel, test in parallel, measure, judge.

    python benchmarks/kernel_protocol.py --minutes 9.5 --output FOLDER          what `make gpu` runs
    python benchmarks/kernel_protocol.py --device fake --output FOLDER          a dry run, on any machine

Each part is a process of its own. A test that fails does not keep the benchmark from running. A CUDA fault
ends the process that measures; a new one goes on behind the case in which it happened, from the records that
every measurement appends to FOLDER/kernels.jsonl at once, and so does a second command with the same folder.
benchmarks/README.md has the plan for 30 minutes. The exit code is 0, 1 where a test failed, 3 where measuring
could not go on.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("warm", "tests", "bench")
GPU_TESTS = (
    "tests/kernels",
    "tests/test_on_a_gpu.py",
    "tests/layers/test_operators_on_cuda.py",
    "tests/test_backend_graphs.py",
)
BROKEN = 3
MOST_RESTARTS = 20
# Shares of the time: what the parts ahead of the benchmark may take at most.
SHARES = {"warm": 0.2, "tests": 0.3}


class Protocol:
    """One command's worth of the protocol.

    Attributes:
        options: the command line.
        codes: the exit code of each part that ran.
        restarts: how often measuring went on in a new process.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + 60 * options.minutes
        self.codes: dict[str, int] = {}
        self.restarts = 0

    @property
    def left(self) -> float:
        """Seconds of the command that are left."""
        return max(0.0, self.end - time.monotonic())

    def run(self) -> int:
        """Run the parts; returns the exit code."""
        for part in self.options.parts:
            print(f"== {part}, {self.left:.0f} s left", flush=True)
            self.codes[part] = {"warm": self.warm, "tests": self.tests, "bench": self.bench}[part]()
        return self.codes.get("bench", 0) or int(self.codes.get("tests", 0) != 0)

    def warm(self) -> int:
        """Compile what the first cases need, in parallel, into the cache that all processes share."""
        jobs = self.options.jobs
        limit = time.monotonic() + SHARES["warm"] * 60 * self.options.minutes
        workers = [
            subprocess.Popen([*self.measuring(), "--warm", str(place), str(jobs)]) for place in range(jobs)
        ]
        codes = []
        for worker in workers:
            try:
                codes.append(worker.wait(max(1.0, limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                worker.kill()
                codes.append(worker.wait())
        return max(codes, key=abs)

    def tests(self) -> int:
        """The tests that need a GPU; all of them, whatever fails."""
        # -P: the package as installed, or as build/gpu has it, and not the folder of its name here.
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(self.options.jobs)]
        return self.timed(command, SHARES["tests"] * 60 * self.options.minutes)

    def bench(self) -> int:
        """Measure until the time is up, in a new process after each fault."""
        while True:
            before = self.count()
            seconds = ["--seconds", f"{self.left:.0f}", "--output", str(self.options.output)]
            code = self.timed([*self.measuring(), *seconds, *self.options.rest], self.left + 30)
            if code == 0:
                return 0
            self.restarts += 1
            # A process that added nothing, not even the fault that it met, would do so again.
            if self.count() == before and not (self.options.output / "begun.jsonl").exists():
                return BROKEN
            if self.restarts > MOST_RESTARTS or self.left < 1:
                return BROKEN
            print(f"== a new process goes on ({self.restarts})", flush=True)

    def measuring(self) -> list[str]:
        """The beginning of a command that measures."""
        return [sys.executable, str(HERE / "kernels.py"), "--device", self.options.device]

    def count(self) -> int:
        """How many records there are."""
        path = self.options.output / "kernels.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def timed(self, command: Sequence[str], seconds: float) -> int:
        """Run a command for so long at most; returns its exit code."""
        try:
            return subprocess.run(
                command, timeout=max(1.0, min(seconds, self.left + 30)), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return BROKEN


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what is not known here goes to benchmarks/kernels.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of warm and tests")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-results"))
    options, options.rest = parser.parse_known_args(arguments)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """See the head of the file."""
    protocol = Protocol(options_of(arguments))
    code = protocol.run()
    print(f"== done: {protocol.codes}, {protocol.restarts} new processes, exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
