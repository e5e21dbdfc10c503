"""Time every sketched layer beside the dense one it replaces, and print a Markdown table.

    python benchmarks/layers.py                      BERT-base, ViT-L, Llama-1B, ResNet-50; some minutes
    python benchmarks/layers.py --quick              a few shapes; half a minute
    python benchmarks/layers.py --threads 1          processor time of one core: right on a busy machine too
    python benchmarks/layers.py --output docs/benchmarks/layers.md

Dense and sketched layers take turns within one run and the fastest turn of each counts. With several threads
other work on the machine still shows: one thread that waits for its core holds up the rest. Factors are
random: their values do not change the time.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from panther_compile.factorization import cost
from panther_compile.factorization.candidates import Candidate, LinearCandidate
from panther_compile.factorization.conv2d import conv_candidates
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.linear import SketchedLinear

RATIOS = (0.75, 0.5, 0.25)
BATCHES = (1, 32, 512)
# (model, inputs, outputs)
LINEAR = (
    ("BERT-base", 768, 768),
    ("BERT-base", 768, 3072),
    ("BERT-base", 3072, 768),
    ("ViT-L", 1024, 1024),
    ("ViT-L", 1024, 4096),
    ("ViT-L", 4096, 1024),
    ("Llama-1B", 2048, 2048),
    ("Llama-1B", 2048, 512),
    ("Llama-1B", 2048, 8192),
    ("Llama-1B", 8192, 2048),
)
# (inputs, outputs, kernel, stride, height and width), all of ResNet-50
CONV2D = (
    (64, 64, 1, 1, 56),
    (64, 256, 1, 1, 56),
    (256, 64, 1, 1, 56),
    (256, 128, 1, 1, 28),
    (128, 512, 1, 1, 28),
    (512, 128, 1, 1, 28),
    (512, 256, 1, 1, 14),
    (1024, 256, 1, 1, 14),
    (256, 1024, 1, 1, 14),
    (1024, 512, 1, 1, 7),
    (512, 2048, 1, 1, 7),
    (2048, 512, 1, 1, 7),
    (64, 64, 3, 1, 56),
    (128, 128, 3, 1, 28),
    (256, 256, 3, 1, 14),
    (512, 512, 3, 1, 7),
    (128, 128, 3, 2, 56),
    (3, 64, 7, 2, 224),
)
QUICK = 3  # every third shape


@dataclass(frozen=True)
class Case:
    """One dense layer, and the candidates for its weight."""

    label: str
    dense: nn.Linear | nn.Conv2d
    candidates: tuple[Candidate, ...]
    input_shape: tuple[int, ...]  # without the batch

    def sketched(self, candidate: Candidate, rank: int) -> nn.Module:
        """A layer of this rank with random factors."""
        dense, (device, dtype) = self.dense, _kind(self.dense)
        if isinstance(dense, nn.Linear):
            return SketchedLinear(
                dense.in_features,
                dense.out_features,
                rank,
                form=candidate.scheme,
                device=device,
                dtype=dtype,
            )
        return SketchedConv2d(
            dense.in_channels,
            dense.out_channels,
            dense.kernel_size,
            rank,
            scheme=candidate.scheme,
            stride=dense.stride,
            padding=dense.padding,
            device=device,
            dtype=dtype,
        )

    def rank(self, candidate: Candidate, ratio: float) -> int:
        """The largest rank within the ratio, rounded down as the planner rounds it."""
        rank = candidate.largest_rank(int(ratio * self.dense.weight.numel()))
        step = cost.rank_step(candidate)
        return max(rank // step * step, min(rank, step))

    def planned(self, candidate: Candidate, rank: int) -> str:
        """What the planner does, which knows neither batch nor image size."""
        dense = self.dense
        predicted = cost.speedup(
            candidate,
            rank,
            tuple(dense.weight.shape),
            stride=dense.stride if isinstance(dense, nn.Conv2d) else (1, 1),
            device=cost.device_class(dense.weight.device),
        )
        return "sketches" if predicted >= cost.WORTHWHILE else "leaves it dense"


def cases(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Case]:
    """The layers to time."""
    step = QUICK if quick else 1
    for model, inputs, outputs in LINEAR[::step]:
        linear = nn.Linear(inputs, outputs, device=device, dtype=dtype)
        candidates = (LinearCandidate(outputs, inputs, "pivoted"),)
        yield Case(f"Linear {inputs} -> {outputs}, {model}", linear, candidates, (inputs,))
    for inputs, outputs, kernel, stride, size in CONV2D[::step]:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, device=device, dtype=dtype)
        candidates = conv_candidates(conv.weight, 1, compute_energies=False)
        strided = f" / {stride}" if stride > 1 else ""
        label = f"Conv2d {kernel} x {kernel}{strided}, {inputs} -> {outputs} at {size} x {size}"
        yield Case(label, conv, candidates, (inputs, size, size))


def best_seconds(layers: list[nn.Module], x: Tensor, budget: float) -> list[float]:
    """The fastest of many turns of each layer, in which they follow one another."""
    on_cpu = _core_seconds if torch.get_num_threads() == 1 else _wall_seconds
    clock = _cuda_seconds if x.is_cuda else on_cpu
    for layer in layers:
        layer(x)
    best = [float("inf")] * len(layers)
    deadline, turns = time.perf_counter() + budget * len(layers), 0
    while turns < 4 or (time.perf_counter() < deadline and turns < 400):
        best = [min(b, clock(layer, x)) for b, layer in zip(best, layers, strict=True)]
        turns += 1
    return best


def _core_seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    begin = time.thread_time()
    layer(x)
    return time.thread_time() - begin


def _wall_seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    begin = time.perf_counter()
    layer(x)
    return time.perf_counter() - begin


def _cuda_seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    layer(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def time_case(case: Case, batch: int, budget: float, channels_last: bool) -> Iterator[str]:
    """The table rows of one layer at one batch size."""
    device, dtype = _kind(case.dense)
    x = torch.randn(batch, *case.input_shape, device=device, dtype=dtype)
    chosen = [
        (ratio, candidate, case.rank(candidate, ratio)) for ratio in RATIOS for candidate in case.candidates
    ]
    chosen = [(ratio, candidate, rank) for ratio, candidate, rank in chosen if rank > 0]
    layers = [case.dense, *(case.sketched(candidate, rank) for _, candidate, rank in chosen)]
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
        layers = [layer.to(memory_format=torch.channels_last) for layer in layers]
    dense, *times = best_seconds([layer.eval() for layer in layers], x, budget)
    for (ratio, candidate, rank), seconds in zip(chosen, times, strict=True):
        ranks = " x ".join(str(r) for r in candidate.ranks(rank))
        speed = f"{dense / seconds:.2f}" if seconds <= dense else f"**{dense / seconds:.2f}** slower"
        yield (
            f"| {case.label} | {batch} | {ratio} | {candidate.scheme} {ranks} | {dense * 1e3:.3f} "
            f"| {seconds * 1e3:.3f} | {speed} | {case.planned(candidate, rank)} |"
        )


def report(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the report."""
    device = torch.device(options.device)
    dtype: torch.dtype = getattr(torch, options.dtype)
    threads = torch.get_num_threads()
    clock = "processor time of one core" if threads == 1 else f"{threads} threads"
    on_cpu = f"{platform.machine()} CPU, {clock}"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    layout = "channels_last" if options.channels_last else "contiguous"
    yield "# Speed of single layers"
    yield ""
    yield (
        f"{hardware}, {options.dtype}, {layout}, PyTorch {torch.__version__}, eager, no gradients. The "
        f"fastest of many turns taken side by side. The ratio is an upper bound: ranks are rounded down as "
        "the planner rounds them. Made by `benchmarks/layers.py`."
    )
    yield ""
    yield "| layer | batch | ratio | scheme, rank | dense ms | sketched ms | speed-up | planner |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases(device, dtype, options.quick):
        for batch in BATCHES:
            if batch > 32 and not (options.full or isinstance(case.dense, nn.Linear)):
                continue
            yield from time_case(case, batch, 0.02 if options.quick else 0.1, options.channels_last)


def _kind(layer: nn.Linear | nn.Conv2d) -> tuple[torch.device, torch.dtype]:
    return layer.weight.device, layer.weight.dtype


def main() -> None:
    """Parse the command line, time, print, and write the file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="every third shape, fewer turns")
    parser.add_argument("--full", action="store_true", help="convolutions at batch 512 too")
    parser.add_argument("--channels-last", action="store_true", help="memory format of images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    parser.add_argument("--output", type=Path, help="also write the report here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = []
    with torch.inference_mode():
        for line in report(options):
            print(line, flush=True)
            lines.append(line)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
