"""Predicted against measured seconds of pipeline stages, on the models of the tests, on one CPU core.

    python benchmarks/stage_times.py [--models bert vit ...] [--rounds 20] [--output docs/benchmarks]

Each model is cut into two stages, once by the rates of this device (`measure_hardware`, once for all models)
and once by a profile of the model (`profile=True`). The modules of `split()` then run forward and backward;
the best of the rounds counts, in processor time. Writes stage_times.md.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from panther_compile import partition_model
from panther_compile.partition import Hardware, Partition, measure_hardware
from panther_compile.partition.graph.measure import run_whole

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import zoo

CPU = torch.device("cpu")
WITHIN = 0.25


def measure_stages(part: Partition, inputs: zoo.Inputs, rounds: int) -> list[tuple[float, float]]:
    """Forward and backward seconds of each stage, the best of the rounds."""
    staged = part.split()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    first = staged.flatten_inputs(*args, **kwargs)
    best = [(float("inf"), float("inf"))] * len(part.stages)
    for _ in range(rounds):
        values: list[Tensor] = first
        for number, (module, record) in enumerate(zip(staged.stages, part.stages, strict=True)):
            values = [
                value.detach().requires_grad_(spec.requires_grad)
                for value, spec in zip(values, record.inputs, strict=True)
            ]
            *seconds, values = run_whole(module, values, CPU)
            best[number] = tuple(map(min, best[number], seconds))
    return best


def compare(name: str, here: Hardware, rounds: int) -> list[tuple[str, list[float]]]:
    """A line of the table for each stage, with how far the two predictions are off."""
    entry = zoo.ZOO[name]
    model, inputs = entry.build().train(), entry.inputs()
    lines = []
    plain = partition_model(model, inputs, mesh={"pp": 2}, hardware=here)
    profiled = partition_model(model, inputs, mesh={"pp": 2}, hardware="cpu", profile=True)
    found = [(part, measure_stages(part, inputs, rounds)) for part in (plain, profiled)]
    for number in range(2):
        cells, offs = [name, str(number)], []
        for part, measured in found:
            stage, (forward, backward) = part.stages[number], measured[number]
            off = stage.compute_seconds / (forward + backward) - 1
            offs.append(off)
            cells += [
                f"{stage.forward_seconds * 1e3:.2f} / {forward * 1e3:.2f}",
                f"{stage.backward_seconds * 1e3:.2f} / {backward * 1e3:.2f}",
                f"{off:+.0%}" if abs(off) <= WITHIN else f"**{off:+.0%}**",
            ]
        lines.append((f"| {' | '.join(cells)} |", offs))
    return lines


def tell_rates(here: Hardware) -> str:
    """The measured rates, as a table."""
    lines = ["| kind | phase | start, microseconds | GMAC/s | GB/s |", "|---|---|--:|--:|--:|"]
    for rate in here.rates:
        cells = [rate.kind, rate.phase, f"{rate.launch_seconds * 1e6:.1f}"]
        cells += [f"{1e-9 / one:.1f}" if one else "" for one in (rate.seconds_per_mac, rate.seconds_per_byte)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_TEXT = """\
# Stages of the zoo: predicted and measured

Made by `benchmarks/stage_times.py`: two stages of each model of `tests/zoo/` in train mode, forward and
backward of one microbatch, predicted / measured in milliseconds of one CPU core, best of {rounds} rounds.
The first three columns are by the rates of this device, measured once on sequences of random operations
(`measure_hardware`, {seconds:.0f} s of processor time) that know nothing of these models; the others by a
profile of each model. Bold: more than {within:.0%} off.

* Rates of the device: {measured} of {all} stages are within {within:.0%}, on average {mean_measured:.0%} off.
* Profile of the model: {profiled} of {all}, on average {mean_profiled:.0%} off.
* The constants of the `cpu` preset were fitted to layers of real size. In these small models starting an
  operation is most of it, and takes longer than the preset's 8 microseconds: 3 of 52 were within 25%, the
  others 30% to 86% too low.

{table}

What the rates miss: a kind of operation has one time to start, whatever its shape; an LSTM, which torch shows
as one operation, is counted by what it is made of.

{rates}

torch {version}. The cut of a column is that of its own prediction, so stages of the two may differ.
"""


def main() -> None:
    """Run every model and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[name for name in zoo.names() if name != "early_exit"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    head = ["model", "stage", "forward", "backward", "off"]
    head += ["forward, profiled", "backward, profiled", "off, profiled"]
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    start = time.process_time()
    here = measure_hardware("cpu")
    seconds = time.process_time() - start
    both: list[list[float]] = []
    for name in arguments.models:
        for line, offs in compare(name, here, arguments.rounds):
            lines.append(line)
            both.append(offs)
            print(line, flush=True)
    measured, profiled = ([abs(off) for off in column] for column in zip(*both, strict=True))
    text = _TEXT.format(
        rounds=arguments.rounds,
        within=WITHIN,
        seconds=seconds,
        measured=sum(off <= WITHIN for off in measured),
        profiled=sum(off <= WITHIN for off in profiled),
        mean_measured=sum(measured) / len(both),
        mean_profiled=sum(profiled) / len(both),
        all=len(both),
        rates=tell_rates(here),
        table="\n".join(lines),
        version=torch.__version__,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "stage_times.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
