"""Time the Triton kernels beside cuBLAS, torch.compile and the dense layer; JSON lines and a Markdown report.

On a machine that is there for minutes, with no network and nothing installed but torch and Triton, from the
root of the repository:

    make gpu              # compile, test and measure: benchmarks/README.md has the plan for 30 minutes
    make gpu-bench ARGS="--seconds 540 --output FOLDER --no-compiled --commit NAME"

A second command goes on where the first stopped, with the same folder or with --resume FILE.

A kernel that reads beyond its memory ends the CUDA context: the files are written, and the exit code is 3;
the next command goes on behind it. Elsewhere:

    python benchmarks/kernels.py                        everything: hours, most of them in torch.compile
    python benchmarks/kernels.py --quick                one shape of each kind
    python benchmarks/kernels.py --device cpu --quick   a smoke run of everything but Triton
    python benchmarks/kernels.py --resume FILE --report-only --output FOLDER   the report anew, on any machine

Contenders: "triton" (the operator, PANTHER_COMPILE_KERNEL=triton; left out where no kernel serves the size),
"two products" (plain torch: cuBLAS or cuDNN), "compiled" (torch.compile of the latter) and "dense" (the layer
replaced). What the user gets, PANTHER_COMPILE_KERNEL=auto, is one of the first two: `picks` says which.
"int8" and "fp8" are two products in these types (kernel_low_precision.py). Of whole models (kernel_models.py)
"auto" is timed itself, and "compiled dense" besides.

A time is what the device takes, the median of many runs with a cold L2 cache (of 16 rows and fewer, of
replays of a CUDA graph of many layers), and its 20th and 80th percentile; "host" is what the processor
takes to launch it. The roofline is max(operations / rate, bytes / bandwidth), the rate of a large product
and the bandwidth of a large copy measured first on the same device; bytes are the inputs, factors and
outputs, without the latent. Factors are random: their values do not change the time. "difference" is how
far the results of "triton" are from those of "two products", relatively.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_cases import CHEAP, COMPILED, DTYPES, LOW, MODELS, PASSES, Case
from kernel_clock import Clock
from kernel_measure import (
    Bench,
    backward_of,
    ceilings,
    failures,
    forward_of,
    kernel_mode,
    make_up,
    measure,
    set_precision,
)
from kernel_order import all_cases, in_order, shows_low_precision
from kernel_report import details, summary

from panther_compile.kernels import dispatch

KEY = ("device", "torch", "dtype", "op", "model", "shape", "rows", "form", "ratio", "contender", "pass")
GUESSES = {"cuda": {CHEAP: 20.0, LOW: 30.0, COMPILED: 120.0}, "cpu": {CHEAP: 1.0, LOW: 30.0, COMPILED: 30.0}}
BROKEN = 3
FAKE = dispatch.DeviceClass(linear=True, attention=True)  # of a dry run


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if it is not there; a last line that was cut short does not count."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def key_of(record: dict[str, Any]) -> tuple[str, ...]:
    """What tells a measurement from others."""
    return tuple(str(record[name]) for name in KEY)


def about_machine(device: torch.device, commit: str, *, fake: bool = False) -> dict[str, Any]:
    """What every record says of where and when it was measured."""
    cuda = device.type == "cuda"
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    return {
        "device": "no device, all times are made up" if fake else name,
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def commit_here() -> str:
    """The commit of this checkout, or "unknown"."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError):
        asked = ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
        return found.stdout.strip() or "unknown"
    return "unknown"


class Session:
    """One command: what is measured already, and what it adds.

    Attributes:
        records: of the files resumed from, then new ones.
        left: cases of a type and stage for which there was no time.
        broken: whether the device no longer answers.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.fake = options.device == "fake"
        self.about = about_machine(device, options.commit or commit_here(), fake=self.fake)
        self.clock = Clock(options.seconds, GUESSES["cuda" if device.type == "cuda" else "cpu"])
        self.file = options.output / "kernels.jsonl" if options.output else None
        self.begun = options.output / "begun.jsonl" if options.output else None
        self.records: list[dict[str, Any]] = []
        self.done: set[tuple[str, ...]] = set()
        self.left = 0
        self.asked = 0
        self.broken = False
        for record in read(self.file) if self.file else []:
            self.note(record)
        if self.file and self.file.exists() and not self.file.read_bytes().endswith(b"\n"):
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n")  # after a line that was cut short
        for path in options.resume:
            for record in read(path):
                if key_of(record) not in self.done:
                    self.note(record)
                    self.write(record)

        for record in read(self.begun) if self.begun else []:
            if key_of(record) not in self.done:  # the process ended in it, and would again
                self.note(record)
                self.write(record)

    def note(self, record: dict[str, Any]) -> None:
        """Remember that this was measured."""
        self.records.append(record)
        self.done.add(key_of(record))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to the file at once: the machine may be taken away."""
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def run(self, cases: Collection[Case], dtypes: Sequence[str], *, compiled: bool) -> None:
        """Measure what is not measured, type after type, as far as the time goes."""
        for name in dtypes:
            bench = Bench(self.device, name, self.options.quick, self.fake)
            set_precision(name)
            ceiling: dict[str, float] = {}
            for case, stage in in_order(list(cases), compiled=compiled):
                found = {**self.about, "dtype": name, **case.labels}
                wanted = [
                    (one, direction)
                    for one in case.contenders(stage, name, on_cuda=bench.on_cuda or self.fake)
                    for direction in case.passes(one)
                    if key_of({**found, "contender": one, "pass": direction}) not in self.done
                ]
                if not wanted:
                    continue
                if self.broken or not self.clock.fits(stage):
                    self.left += 1
                    continue
                ceiling = ceiling or ceilings(bench)
                self.measure(case, stage, wanted, bench, found | ceiling)

    def measure(
        self,
        case: Case,
        stage: str,
        wanted: Sequence[tuple[str, str]],
        bench: Bench,
        found: dict[str, Any],
    ) -> None:
        """Measure one case, and say so."""
        begin = time.monotonic()
        floor = 1e6 * max(
            case.operations / found["operations_per_second"],
            case.traffic * bench.draw.dtype.itemsize / found["bytes_per_second"],
        )
        device = FAKE if self.fake else dispatch.device_class(self.device) if bench.on_cuda else None
        more = {"sizes": case.sizes, "vectors": case.vectors, "width": case.width}
        picks = {one: case.picks(bench.name, device, trains=one == "backward") for one in PASSES}
        self.begin(found | more | {"picks": picks["forward"]}, wanted, floor)
        timings = make_up(case, wanted, bench, {"bound": floor / 1e6}) if self.fake else None
        for timed in timings or measure(case, wanted, bench):
            if self.fake and self.options.faults:
                timed = self.with_faults(timed)
            # A backward is two products for each one, and reads and writes about twice as much.
            bound = floor * (1 if timed["pass"] == "forward" else 2)
            record = {**found, **more, "picks": picks[timed["pass"]], **timed, "roofline": bound}
            self.note(record)
            self.write(record)
            said = record.get("error") or f"{record['microseconds']:.1f} us"
            print(*(record[name] for name in KEY[2:]), said, flush=True)
            self.broken = "error" in record and not self.answers()
            if self.broken:
                break
        if bench.on_cuda and not self.broken:
            gc.collect()  # what a failure or a compiler left in cycles
            torch.cuda.empty_cache()
        self.clock.took(stage, time.monotonic() - begin)

    def begin(self, found: dict[str, Any], wanted: Sequence[tuple[str, str]], floor: float) -> None:
        """Write down what is measured now: if the process ends in it, the next one goes on behind it."""
        if self.begun is None:
            return
        self.begun.parent.mkdir(parents=True, exist_ok=True)
        given = {**found, "roofline": floor, "error": "the process ended while this was measured"}
        lines = (json.dumps({**given, "contender": name, "pass": one}) + "\n" for name, one in wanted)
        self.begun.write_text("".join(lines), encoding="utf-8")

    def with_faults(self, timed: dict[str, Any]) -> dict[str, Any]:
        """Every so often a fault, by turns one that is reported and the end of the process."""
        self.asked += 1
        if self.asked < self.options.faults:
            return timed
        if sum("error" in one for one in self.records) % 2:
            os._exit(134)
        return {**{name: timed[name] for name in ("contender", "pass")}, "error": "CUDA error: made up"}

    def end(self) -> None:
        """Note that this process comes to its end."""
        if self.begun is not None:
            self.begun.unlink(missing_ok=True)

    def answers(self) -> bool:
        """Whether the device still works after an error; one in a kernel ends what this process can do."""
        if self.fake:
            return False
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            print(f"the device does not answer any more: {error}", flush=True)
            return False
        return True


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "fake"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one shape of each kind")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[])
    parser.add_argument("--rows", nargs="+", type=int, default=[], help="of linear layers")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES))
    parser.add_argument("--no-compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--low-precision", action="store_true", help="only layers int8 and fp8 are shown on")
    parser.add_argument("--seconds", type=float, help="begin no case that would probably end later")
    parser.add_argument("--output", type=Path, help="folder of kernels.jsonl and kernels.md")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="records measured before")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument("--faults", type=int, help="of the fake device, so many times to each")
    parser.add_argument("--warm", type=int, nargs=2, help="only compile: the part and the number of parts")
    parser.add_argument("--commit", help="of the code, where there is no git")
    options = parser.parse_args(arguments)
    if missing := [str(path) for path in options.resume if not path.exists()]:
        parser.error(f"--resume: no such file: {', '.join(missing)}")
    if not options.report_only:
        if options.device == "cuda" and not torch.cuda.is_available():
            sys.exit("benchmarks/kernels.py needs a CUDA device; --device cpu --quick runs all but Triton")
        if options.device == "cpu" and not options.quick:
            sys.exit("on a CPU there is only the smoke run: add --quick")
    return options


def warm(options: argparse.Namespace) -> int:
    """Run the kernels of a part of the first tier once, so that their code is in Triton's cache."""
    part, parts = options.warm
    bench = Bench(torch.device("cpu" if options.device == "fake" else options.device), "bf16", options.quick)
    cases = [case for case in all_cases(options.models, options.rows, quick=options.quick) if case.tier == 0]
    mine = cases[part::parts] if bench.on_cuda else []
    with kernel_mode("triton"):
        for case in mine:
            with contextlib.suppress(*failures()):  # the benchmark will say so
                ours = case.build(bench.draw).ours
                forward_of(ours)()
                if not case.is_model:
                    backward_of(ours)()
    print(f"{len(mine)} cases compiled by part {part} of {parts}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """See the head of the file; returns the exit code, 3 when the device stopped answering."""
    options = options_of(arguments)
    if options.report_only:
        options.device = "cpu"
    if options.warm:
        return warm(options)
    session = Session(options, torch.device("cpu" if options.device == "fake" else options.device))
    if not options.report_only:
        dtypes = options.dtypes or (["fp32"] if options.device == "cpu" else list(DTYPES))
        cases = list(all_cases(options.models, options.rows, quick=options.quick))
        if options.low_precision:
            cases = [case for case in cases if case.quantize and shows_low_precision(case)]
        compiled = options.device != "cpu" and not options.no_compiled
        session.run(cases, dtypes, compiled=compiled)
        session.end()
    text = summary(session.records, left=session.left)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "kernels.md"
        path.write_text(f"{text}\n{details(session.records)}", encoding="utf-8")
    return BROKEN if session.broken else 0


if __name__ == "__main__":
    sys.exit(main())
