"""Time the Triton kernels beside cuBLAS, torch.compile and the dense layer; JSON lines and a Markdown table.

    python benchmarks/kernels.py                             every shape of every model, forward and backward
    python benchmarks/kernels.py --quick                     one shape of each kind
    python benchmarks/kernels.py --models BERT-base --dtypes bf16 --rows 1 512
    python benchmarks/kernels.py --device cpu --quick        a smoke run of everything but Triton

Contenders: "triton" (the operator, PANTHER_COMPILE_KERNEL=triton), "two products" (plain torch: cuBLAS or
cuDNN), "compiled" (torch.compile of the latter, mode max-autotune) and "dense" (the layer replaced).
A time is the median of many runs with a cold L2 cache, and its 20th and 80th percentile. The roofline is
max(operations / rate, bytes / bandwidth), the rate of a large product and the bandwidth of a large copy
measured first on the same device; bytes are the inputs, factors and outputs, without the latent.
Factors are random: their values do not change the time. kernels/dispatch.py is to be filled from this.
"""

import argparse
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.kernels import reference
from panther_compile.ops import (
    Factors,
    favor_attention,
    sketched_conv2d,
    sketched_linear,
    sketched_multi_linear,
)

# model -> (in_features, out_features)
LINEAR = {
    "BERT-base": ((768, 768), (768, 3072), (3072, 768)),
    "ViT-L": ((1024, 1024), (1024, 4096), (4096, 1024)),
    "Llama-1B": ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)),
    "Llama-7B": ((4096, 4096), (4096, 11008), (11008, 4096)),
}
# (in_features, outputs of q, k and v)
PROJECTIONS = {
    "BERT-base": (768, (768, 768, 768)),
    "Llama-1B": (2048, (2048, 512, 512)),
    "Llama-7B": (4096, (4096, 4096, 4096)),
}
# (channels in, out, taps, stride, height and width) of ResNet-50
CONV2D = (
    (64, 64, 3, 1, 56),
    (128, 128, 3, 1, 28),
    (256, 256, 3, 1, 14),
    (512, 512, 3, 1, 7),
    (3, 64, 7, 2, 224),
)
# (heads, head_dim, features)
ATTENTION = {"BERT-base": (12, 64, 256), "Llama-7B": (32, 128, 256)}
ROWS = (1, 4, 16, 128, 512, 2048, 4096, 16384)
RATIOS = (0.75, 0.5, 0.25)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
IMAGES = (1, 32)
LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        labels: what it is, for the table.
        contenders: functions of the inputs, by name.
        inputs: of each contender, by its name.
        operations: of the sketched forward, two to a multiply-add.
        traffic: numbers that its forward reads and writes.
    """

    labels: dict[str, Any]
    contenders: dict[str, Callable[..., Any]]
    inputs: dict[str, tuple[Tensor, ...]]
    operations: float
    traffic: int


@dataclass(frozen=True)
class Bench:
    """What to time on."""

    device: torch.device
    dtype: torch.dtype
    quick: bool

    @property
    def has_triton(self) -> bool:
        """Whether kernels can run."""
        return self.device.type == "cuda"

    def draw(self, *shape: int) -> Tensor:
        """A random leaf."""
        scale = shape[-1] ** -0.5
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype).requires_grad_()

    def contenders(
        self, ours: Callable[..., Any], plain: Callable[..., Any], dense: Callable[..., Any] | None
    ) -> dict[str, Callable[..., Any]]:
        """The contenders there are on this device."""
        found = {"two products": plain}
        if dense is not None:
            found["dense"] = dense
        if self.has_triton:
            compiled = torch.compile(plain, mode="max-autotune", dynamic=False)
            return {"triton": ours, **found, "compiled": compiled}
        return {"operator": ours, **found}


def pair_rank(inputs: int, outputs: int, ratio: float) -> int:
    """The largest r with r (I + O) <= ratio I O."""
    return max(1, int(ratio * inputs * outputs / (inputs + outputs)))


def pivoted_rank(inputs: int, outputs: int, ratio: float) -> int:
    """The largest r with r (I + O - r) <= ratio I O."""
    total = inputs + outputs
    root = math.sqrt(total * total - 4 * ratio * inputs * outputs)
    return max(1, min(inputs - 1, int((total - root) / 2)))


def linear_case(
    bench: Bench, model: str, inputs: int, outputs: int, rows: int, ratio: float, form: str
) -> Case:
    """One layer, as a plain pair or pivoted."""
    pivoted = form == "pivoted"
    rank = (pivoted_rank if pivoted else pair_rank)(inputs, outputs, ratio)
    start = 0 if pivoted else None
    x, bias = bench.draw(rows, inputs), bench.draw(outputs)
    down, up = bench.draw(rank, inputs - rank * pivoted), bench.draw(outputs, rank)
    plain: Callable[..., Any] = reference.pair_linear
    if pivoted:
        plain = functools.partial(reference.pivoted_linear, start=0)
    contenders = bench.contenders(functools.partial(sketched_linear, start=start), plain, F.linear)
    given = dict.fromkeys(contenders, (x, down, up, bias))
    given["dense"] = (x, bench.draw(outputs, inputs), bias)
    labels = {"op": "linear", "model": model, "shape": f"{inputs}->{outputs}", "rows": rows, "form": form}
    return Case(
        {**labels, "ratio": ratio, "rank": rank},
        contenders,
        given,
        2.0 * rows * (down.numel() + up.numel()),
        sum(one.numel() for one in (x, down, up, bias)) + rows * outputs,
    )


def projections_case(
    bench: Bench, model: str, inputs: int, outputs: tuple[int, ...], rows: int, ratio: float
) -> Case:
    """The projections of attention, plain pairs."""
    x = bench.draw(rows, inputs)
    ranks = [pair_rank(inputs, out, ratio) for out in outputs]
    factors = [
        one
        for out, rank in zip(outputs, ranks, strict=True)
        for one in (bench.draw(rank, inputs), bench.draw(out, rank))
    ]

    def ours(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        layers = [Factors(down, up, None, None) for down, up in zip(factors[::2], factors[1::2], strict=True)]
        return tuple(sketched_multi_linear(x, layers))

    def plain(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return tuple(reference.pair_linear(x, down, up, None) for down, up in pairs)

    contenders = bench.contenders(ours, plain, F.linear)
    given = dict.fromkeys(contenders, (x, *factors))
    given["dense"] = (x, bench.draw(sum(outputs), inputs))
    stored = sum(one.numel() for one in factors)
    labels = {
        "op": "multi_linear",
        "model": model,
        "shape": f"{inputs}->{outputs}",
        "rows": rows,
        "form": "pair",
    }
    return Case(
        {**labels, "ratio": ratio, "rank": ranks},
        contenders,
        given,
        2.0 * rows * stored,
        x.numel() + stored + rows * sum(outputs),
    )


def conv2d_case(bench: Bench, shape: tuple[int, ...], images: int, ratio: float) -> Case:
    """A convolution of ResNet-50 as kh x kw -> 1 x 1, channels last."""
    inputs, outputs, taps, stride, size = shape
    rank = pair_rank(inputs * taps * taps, outputs, ratio)
    x = bench.draw(images, inputs, size, size).detach().to(memory_format=torch.channels_last).requires_grad_()
    down, up, bias = (
        bench.draw(rank, inputs, taps, taps),
        bench.draw(outputs, rank, 1, 1),
        bench.draw(outputs),
    )
    pad = taps // 2

    def plain(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, down, None, stride, pad), up, bias)

    ours = functools.partial(sketched_conv2d, stride=(stride, stride), padding=(pad, pad))
    dense = functools.partial(F.conv2d, stride=stride, padding=pad)
    contenders = bench.contenders(ours, plain, dense)
    given = dict.fromkeys(contenders, (x, down, up, bias))
    given["dense"] = (x, bench.draw(outputs, inputs, taps, taps), bias)
    positions = images * ((size + 2 * pad - taps) // stride + 1) ** 2
    labels = {
        "op": "conv2d",
        "model": "ResNet-50",
        "shape": f"{inputs}->{outputs} {taps}x{taps}/{stride} {size}",
    }
    return Case(
        {**labels, "rows": images, "form": "channel", "ratio": ratio, "rank": rank},
        contenders,
        given,
        2.0 * positions * (down.numel() + up.numel()),
        sum(one.numel() for one in (x, down, up, bias)) + positions * outputs,
    )


def attention_case(bench: Bench, model: str, length: int, causal: bool) -> Case:
    """Random-feature attention; "dense" is exact attention, "two products" the reference."""
    heads, head_dim, features = ATTENTION[model]
    q, k, v = (bench.draw(1, heads, length, head_dim) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    w = reference.favor_directions(features, head_dim, generator).to(bench.device, bench.dtype)
    plain = functools.partial(reference.favor_attention, directions_MD=w, causal=causal)
    ours = functools.partial(favor_attention, directions=w, causal=causal)
    exact = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    contenders = bench.contenders(ours, plain, exact)
    labels = {
        "op": "favor",
        "model": model,
        "shape": f"{heads}x{head_dim}, {features} features",
        "rows": length,
    }
    return Case(
        {**labels, "form": "causal" if causal else "both", "ratio": None, "rank": features},
        contenders,
        dict.fromkeys(contenders, (q, k, v)),
        2.0 * heads * length * features * 4 * head_dim,
        4 * q.numel(),
    )


def cases(bench: Bench, options: argparse.Namespace) -> Iterator[Case]:
    """The cases asked for."""
    rows = options.rows or ((1, 64) if bench.quick else ROWS)
    ratios = (0.5,) if bench.quick else RATIOS
    models = options.models or ([*LINEAR, "ResNet-50"] if not bench.quick else ["BERT-base", "ResNet-50"])
    for model in models:
        for inputs, outputs in LINEAR.get(model, ())[: 1 if bench.quick else None]:
            for row, ratio, form in ((a, b, c) for a in rows for b in ratios for c in ("pair", "pivoted")):
                yield linear_case(bench, model, inputs, outputs, row, ratio, form)
        if model in PROJECTIONS:
            for row, ratio in ((a, b) for a in rows for b in ratios):
                yield projections_case(bench, model, *PROJECTIONS[model], row, ratio)
        if model in ATTENTION:
            for length, causal in (
                (a, b) for a in LENGTHS[: 1 if bench.quick else None] for b in (False, True)
            ):
                yield attention_case(bench, model, length, causal)
        if model == "ResNet-50":
            for shape in CONV2D[3:4] if bench.quick else CONV2D:
                for images, ratio in ((a, b) for a in IMAGES[: 1 if bench.quick else None] for b in ratios):
                    yield conv2d_case(bench, shape, images, ratio)


def time_of(run: Callable[[], Any], bench: Bench) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile, in seconds."""
    if bench.has_triton:
        from triton.testing import do_bench

        low, middle, high = do_bench(run, quantiles=[0.2, 0.5, 0.8])
        return middle / 1e3, low / 1e3, high / 1e3
    run()
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    low, *_, high = statistics.quantiles(samples, n=5)
    return statistics.median(samples), low, high


def measure(case: Case, bench: Bench) -> Iterator[dict[str, Any]]:
    """One record for each contender, forward and backward."""
    for name, contender in case.contenders.items():
        os.environ["PANTHER_COMPILE_KERNEL"] = "triton" if name == "triton" else "auto"
        inputs = case.inputs[name]

        def forward(contender: Callable[..., Any] = contender, inputs: tuple[Tensor, ...] = inputs) -> Any:
            with torch.no_grad():
                return contender(*inputs)

        yield {"contender": name, "pass": "forward", "seconds": time_of(forward, bench)}
        outputs = contender(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.randn_like(one) for one in outputs]

        def backward(
            outputs: Any = outputs, inputs: tuple[Tensor, ...] = inputs, grads: list[Tensor] = grads
        ) -> Any:
            return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

        yield {"contender": name, "pass": "backward", "seconds": time_of(backward, bench)}
    del os.environ["PANTHER_COMPILE_KERNEL"]


def ceilings(bench: Bench) -> dict[str, float]:
    """Operations and bytes in a second: a large square product, and a large copy."""
    size = 512 if bench.quick else 8192
    a = torch.randn(size, size, device=bench.device, dtype=bench.dtype)
    rate = 2 * size**3 / time_of(lambda: a @ a, bench)[0]
    source = torch.empty(2**22 if bench.quick else 2**29, device=bench.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "operations_per_second": rate,
        "bytes_per_second": 2 * source.numel() / time_of(lambda: target.copy_(source), bench)[0],
    }


def records(bench: Bench, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One for each case, contender and pass, with its share of the roofline."""
    ceiling = ceilings(bench)
    cuda = bench.has_triton
    about = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "dtype": str(bench.dtype).removeprefix("torch."),
        **ceiling,
    }
    for case in cases(bench, options):
        floor = max(
            case.operations / ceiling["operations_per_second"],
            case.traffic * bench.dtype.itemsize / ceiling["bytes_per_second"],
        )
        for record in measure(case, bench):
            middle, low, high = record.pop("seconds")
            # A backward is two products for each one, and reads and writes about twice as much.
            bound = floor * (1 if record["pass"] == "forward" else 2)
            times = {"microseconds": middle * 1e6, "p20": low * 1e6, "p80": high * 1e6}
            yield {**about, **case.labels, **record, **times, "of_roofline": bound / middle}


def to_markdown(lines: list[dict[str, Any]]) -> str:
    """A row for each case and pass, a column for each contender: microseconds (share of the roofline)."""
    names = list(dict.fromkeys(line["contender"] for line in lines))
    keys = ("dtype", "op", "model", "shape", "rows", "form", "ratio", "rank", "pass")
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        place = rows.setdefault(tuple(str(line[key]) for key in keys), {})
        place[line["contender"]] = f"{line['microseconds']:.1f} ({line['of_roofline']:.0%})"
    table = [(*keys, *names), ("---",) * (len(keys) + len(names))]
    table += [(*key, *(row.get(name, "") for name in names)) for key, row in rows.items()]
    head = "Microseconds (share of the roofline), {device}, torch {torch}.\n\n".format(**lines[0])
    return head + "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=[*LINEAR, "ResNet-50"])
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES))
    parser.add_argument("--output", type=Path, help="folder of kernels.jsonl and kernels.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs a CUDA device; --device cpu --quick runs all but Triton")
    if options.device == "cpu" and not options.quick:
        sys.exit("on a CPU there is only the smoke run: add --quick")
    names = options.dtypes or (["fp32"] if options.device == "cpu" else list(DTYPES))
    lines = []
    for name in names:
        bench = Bench(torch.device(options.device), DTYPES[name], options.quick)
        for record in records(bench, options):
            print(json.dumps(record), flush=True)
            lines.append(record)
    table = to_markdown(lines)
    print(table)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (options.output / "kernels.jsonl").write_text(text, encoding="utf-8")
        (options.output / "kernels.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
