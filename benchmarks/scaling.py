"""A training step of Llama-70B on 1 to 512 H100, dense and sketched, as predicted by `partition_model`.

    python benchmarks/scaling.py [--layers 80] [--devices 1 8 16 ...] [--output docs/benchmarks]

The model is on the meta device and no GPU is used: every number is a prediction from data sheets. Its graph
is read once; each number of devices is then divided into dp x pp x tp, as is predicted to be fastest, the
largest number first. Writes scaling.md and scaling.png.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from panther_compile.errors import PartitionError
from panther_compile.partition import Partition
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graph.hardware import H100
from panther_compile.partition.graphs import read_graphs
from panther_compile.partition.options import PlanOptions
from panther_compile.partition.search import search_meshes
from panther_compile.skeleton import sketch_skeleton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from large_models import TOKENS, llama_70b

SEQUENCES = 1024  # of a step on any mesh: 4 million tokens
KINDS = ("dense", "sketched at .5")
DEVICES = (1, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Result:
    """What came of one number of devices; no partition where the model does not fit."""

    kind: str
    devices: int
    part: Partition | None
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Over all replicas; 0 where the model does not fit."""
        if self.part is None:
            return 0.0
        return self.part.microbatches_per_second * TOKENS

    def cells(self) -> list[str]:
        """A line of the table."""
        part = self.part
        head = [self.kind, str(self.devices)]
        if part is None:
            return [*head, "does not fit", *[""] * 10]
        inside = sum(one.intra_node_bytes for one in part.traffic)
        between = sum(one.inter_node_bytes for one in part.traffic)
        stages = [stage.seconds * 1e3 for stage in part.stages]
        memory = [stage.memory_bytes / 1e9 for stage in part.stages]
        return [
            *head,
            str(part.mesh),
            str(part.microbatches),
            f"{part.step_seconds:,.2f}",
            f"{self.tokens_per_second:,.0f}",
            f"{self.tokens_per_second / self.devices:,.0f}",
            f"{min(stages):,.0f} to {max(stages):,.0f}",
            f"{part.bubble:.1%}",
            f"{min(memory):.0f} to {max(memory):.0f}",
            f"{inside / 1e12:,.2f}",
            f"{between / 1e12:,.3f}",
            f"{self.seconds:.0f}",
        ]


HEAD = [
    *(
        "model",
        "devices",
        "mesh",
        "microbatches a replica",
        "step s",
        "tokens/s",
        "tokens/s a device",
        "stages ms",
    ),
    *("bubble", "memory GB a device", "NVLink TB a step", "network TB a step", "CPU s to find"),
]


def study(kind: str, layers: int, counts: Sequence[int]) -> tuple[float, list[Result]]:
    """Seconds to read the graph, and one result for each number of devices."""
    start = time.process_time()
    model, example = llama_70b(layers)
    if kind != KINDS[0]:
        model = sketch_skeleton(model, ratio=0.5, progress=False)
    graphs = read_graphs(model, example, (), Costs(H100))
    read = time.process_time() - start
    print(f"{kind}: read in {read:.0f} s of CPU time", flush=True)
    options = PlanOptions(
        hardware=H100,
        memory_bytes=H100.memory_bytes,
        global_batch=SEQUENCES,
        schedule="auto",
        recompute="auto",
    )
    found = []
    for devices in sorted(counts, reverse=True):
        start = time.process_time()
        try:
            part = search_meshes(graphs, options, devices)
        except PartitionError as error:
            print(error)
            part = None
        found.append(Result(kind, devices, part, time.process_time() - start))
        print(" ".join(found[-1].cells()), flush=True)
    return read, found[::-1]


def draw(results: Sequence[Result], path: Path) -> None:
    """Tokens per second over devices."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title="Llama-70B on H100, as predicted")
    for kind in KINDS:
        points = [(one.devices, one.tokens_per_second) for one in results if one.kind == kind and one.part]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=kind)
            (first, speed), last = points[0], points[-1][0]
            axes.plot([first, last], [speed, speed * last / first], ":", color="gray", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="tokens per second")
    axes.set_xticks(DEVICES, [str(count) for count in DEVICES])
    axes.legend()
    figure.savefig(path, dpi=90)


_TEXT = """\
# Llama-70B on 1 to 512 H100, as predicted

Made by `benchmarks/scaling.py`. **Every number is predicted, none was measured on a GPU**: the `h100` preset
(data sheets), bf16, Adam with float32 states, {layers} layers of the shape of Llama-70B, microbatches of one
sequence of {tokens:,} tokens, 1F1B, no recomputation, transfers that overlap with nothing. A step is of
{sequences:,} sequences ({step:.1f} million tokens) on any number of devices, {sequences:,} / dp microbatches
through each replica, and dp x pp x tp is chosen for the fastest step. Stages and memory are from the smallest
to the largest. NVLink and network: what all devices together send in a step, inside nodes of eight and
between them. Sketched is
`sketch_skeleton(model, ratio=.5)`, whose ranks are chosen without knowing any weights.

{table}

Dotted in the picture: the fewest devices that the model fits on, scaled perfectly.

![tokens per second](scaling.png)

Found with {versions} on one CPU core, in at most {peak:.1f} GiB. CPU seconds
are of the search, the most devices first: what the others need of it they use again. Making the model and
reading its graph, once, comes on top: {read}.
"""


def main() -> None:
    """Run the study and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    read: dict[str, float] = {}
    lines = [f"| {' | '.join(HEAD)} |", f"|---{'|--:' * (len(HEAD) - 1)}|"]
    for kind in KINDS:
        read[kind], found = study(kind, arguments.layers, arguments.devices)
        results += found
        lines += (f"| {' | '.join(result.cells())} |" for result in found)
    text = _TEXT.format(
        layers=arguments.layers,
        tokens=TOKENS,
        sequences=SEQUENCES,
        step=SEQUENCES * TOKENS / 1e6,
        table="\n".join(lines),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        read=", ".join(f"{seconds:.0f} s ({kind})" for kind, seconds in read.items()),
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    (arguments.output / "scaling.md").write_text(text, encoding="utf-8")
    draw(results, arguments.output / "scaling.png")


if __name__ == "__main__":
    main()
