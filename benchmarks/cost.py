"""What a fit costs: runs of the model, processor time and memory, on the models of the accuracy benchmarks.

    python benchmarks/cost.py [--models minilm gpt ...] [--ratio 0.5] [--output docs/benchmarks]

Each model is a process of its own, with one thread, and a call as README has it: `sketchify(model, ratio,
data=data)`. A run of the dense or of the sketched model on all of the data is a pass, on a fifth of it a
fifth of one, and runs on what is made up beside count as they are as large. Memory is what the process gains
between the call and its peak, as Linux counts it (VmHWM). Writes cost.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accuracy_models import GAUNTLET, SUBJECTS, load_subject
from peers.budget import count_numbers
from peers.calibration import call
from process_memory import process_memory, watch_peak
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import panther_compile as pc

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "measured: "
HEADER = """# What a fit costs

`python benchmarks/cost.py {options}`, float32, one thread of {processor},
torch {torch}, commit {commit}: `sketchify(model, {ratio}, data=data)`. A run on all of the data is a
pass, of the dense model or of the sketched one, and a run on what is made up beside counts as it is as large.
Seconds are the processor's: of one pass of the dense model, and of the whole fit. Memory is what the process
gains at its peak, over the model and the data.

| model | numbers | data | passes | with gradients | s a pass | s in all | GB |
|---|--:|---|--:|--:|--:|--:|--:|
"""


def count_numbers_read(args: object) -> int:
    """How many numbers the first tensor of a call has."""
    return next((leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), 0)


class Runs:
    """Counts what a class of models runs on, in any copy and thread, while it is open."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.numbers: Counter[bool] = Counter()
        self._kind = kind

    def __enter__(self) -> "Runs":
        self._forward = forward = self._kind.forward

        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.numbers[torch.is_grad_enabled()] += count_numbers_read((args, kwargs))
            return forward(module, *args, **kwargs)

        self._kind.forward = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._kind.forward = self._forward  # type: ignore[method-assign]


def measure(name: str, ratio: float) -> dict[str, Any]:
    """One fit of one model, in this process."""
    torch.set_num_threads(1)
    subject = load_subject(name)
    data = list(subject.calibration("in", 0))
    model = subject.model.eval()
    with Runs(type(model)) as one, torch.no_grad():
        start = time.process_time()
        for batch in data:
            call(model, batch)
        seconds = time.process_time() - start
    watch_peak()
    before, start = process_memory("VmRSS"), time.process_time()
    with Runs(type(model)) as runs:
        pc.sketchify(model, ratio, data=data, progress=False)
    whole = one.numbers.total()
    return {
        "title": subject.title,
        "numbers": count_numbers(model),
        "data": subject.in_domain,
        "passes": runs.numbers[False] / whole,
        "gradients": runs.numbers[True] / whole,
        "pass_seconds": seconds,
        "seconds": time.process_time() - start,
        "peak": (process_memory("VmHWM") - before) / 1e9,
    }


def row(line: dict[str, Any]) -> str:
    """A line of the table."""
    title = line["title"].split(",")[0]
    return (
        f"| {title} | {line['numbers'] / 1e6:.2f} M | {line['data']} | {line['passes']:.1f} | "
        f"{line['gradients']:.1f} | {line['pass_seconds']:.2f} | {line['seconds']:.0f} | {line['peak']:.2f} |"
    )


def main() -> None:
    """Parse the options, measure, and write the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--models", nargs="+", choices=(*SUBJECTS, *GAUNTLET), default=list(SUBJECTS))
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--within", action="store_true", help="measure here, and print a line of JSON")
    options = parser.parse_args()
    if options.within:
        print(PREFIX + json.dumps(measure(options.models[0], options.ratio)))
        return
    rows = []
    for name in options.models:
        command = [sys.executable, __file__, "--within", "--models", name, "--ratio", str(options.ratio)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        said = next(line for line in done.stdout.splitlines() if line.startswith(PREFIX))
        rows.append(row(json.loads(said.removeprefix(PREFIX))))
        print(rows[-1], flush=True)
    if options.output is not None:
        write(options.output / "cost.md", options, rows)


def write(path: Path, options: argparse.Namespace, rows: list[str]) -> None:
    """Write the table."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    header = HEADER.format(
        options=f"--models {' '.join(options.models)}",
        processor=platform.machine(),
        torch=torch.__version__,
        commit=commit,
        ratio=options.ratio,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
