"""Time the exact factorization against the randomized one, with every sketch.

    python benchmarks/factorize.py [--max-size 1024] [--spectrum noise] [--output table.md]

All rows of a shape are timed in turn in one process, and the best of the repeats is kept. The error is
the full Frobenius residual in float64, as a ratio to that of the truncated SVD. Rows where the sketch
is the slower one are marked ``slower``.
"""

import argparse
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from panther_compile.factorization.factorize import LowRankPair, choose_method, factorize
from panther_compile.factorization.sketches import SKETCH_KINDS

SHAPES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 1024), (4096, 4096)]
RANK_FRACTIONS = [0.05, 0.25]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def make_weight(spectrum: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return a float32 matrix of Gaussian noise, or with singular values i**-0.3 or 1/i."""
    if spectrum == "noise":
        return torch.randn(rows, columns, generator=generator)
    count = min(rows, columns)
    power = {"flat": -0.3, "decaying": -1.0}[spectrum]
    values = torch.arange(1, count + 1) ** power
    left = torch.linalg.qr(torch.randn(rows, count, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, count, generator=generator)).Q
    return (left * values) @ right.mT


def time_in_turn(weight: Tensor, rank: int, repeats: int, seed: int) -> dict[str, tuple[float, LowRankPair]]:
    """Return the best time in seconds and the pair of "svd" and of each sketch."""
    results: dict[str, tuple[float, LowRankPair]] = {}
    for _ in range(repeats):
        for name in ("svd", *SKETCH_KINDS):
            options = {"method": "svd"} if name == "svd" else {"method": "randomized", "sketch": name}
            generator = torch.Generator().manual_seed(seed)
            start = time.perf_counter()
            pair = factorize(weight, rank, generator=generator, **options)
            seconds = time.perf_counter() - start
            results[name] = (min(seconds, results.get(name, (math.inf,))[0]), pair)
    return results


def residual(weight: Tensor, pair: LowRankPair) -> float:
    """Return ||W - left right||_F in float64."""
    return float(torch.linalg.vector_norm(weight.double() - pair.left.double() @ pair.right.double()))


def table(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table as they are measured."""
    yield (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, {arguments.dtype}, spectrum {arguments.spectrum}, best of "
        f"{arguments.repeats}"
    )
    yield ""
    yield "| shape | rank | method | seconds | speed-up | error / best | error field | auto takes | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for rows, columns in SHAPES:
        if max(rows, columns) > arguments.max_size:
            continue
        generator = torch.Generator().manual_seed(arguments.seed)
        weight = make_weight(arguments.spectrum, rows, columns, generator).to(DTYPES[arguments.dtype])
        for fraction in RANK_FRACTIONS:
            rank = int(fraction * min(rows, columns))
            results = time_in_turn(weight, rank, arguments.repeats, arguments.seed)
            exact_seconds, exact_pair = results["svd"]
            best = residual(weight, exact_pair)
            for name, (seconds, pair) in results.items():
                yield (
                    f"| {rows} x {columns} | {rank} | {name} | {seconds:.3f} "
                    f"| {exact_seconds / seconds:.2f} | {residual(weight, pair) / best:.4f} "
                    f"| {pair.error:.4f} | {choose_method(rows, columns, rank)} "
                    f"| {'slower' if seconds > exact_seconds else ''} |"
                )


def main() -> None:
    """Parse the command line, print the table and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-size", type=int, default=4096, help="leave out longer sides")
    parser.add_argument("--spectrum", choices=["noise", "flat", "decaying"], default="noise")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    lines = []
    for line in table(arguments):
        print(line, flush=True)
        lines.append(line)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
