"""Time ONNX files sketched by `sketch_onnx` beside the dense one, and print a Markdown table.

    python benchmarks/onnx.py                      BERT-base, 8 x 128 tokens; some minutes
    python benchmarks/onnx.py --layers 2 --rounds 3
    python benchmarks/onnx.py --output docs/benchmarks/onnx.md

A BERT with random weights is exported once and sketched at each ratio. All files are loaded at once and take
turns within one run; the fastest turn of each counts, in processor time of one thread, which other work on
the machine disturbs least. Random weights do not change the time; they say nothing about accuracy.
"""

import argparse
import platform
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

# This file is called onnx.py too: its folder has to come last.
HERE = Path(__file__).parent.resolve()
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != HERE), str(HERE)]

import torch  # noqa: E402
from onnx import load as load_onnx  # noqa: E402
from onnx_files import processor_seconds, session  # noqa: E402
from transformers import BertConfig, BertModel  # noqa: E402

from panther_compile.onnx.export import export_onnx  # noqa: E402
from panther_compile.onnx.sketch import OnnxReport, sketch_onnx  # noqa: E402

RATIOS = (0.75, 0.5, 0.25)


def main() -> None:
    """Export, sketch, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the table there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = example(options.batch, options.length)
    with tempfile.TemporaryDirectory() as folder:
        files, reports = make_files(Path(folder), options.layers, inputs)
        times = measure(files, inputs, options.rounds)
        rows = [line(ratio, files, times, reports) for ratio in (1.0, *RATIOS)]
    text = "\n".join([*heading(options), *rows, ""])
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")


def example(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids and a full mask."""
    ids = torch.randint(1000, 30000, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_files(
    folder: Path, layers: int, inputs: dict[str, torch.Tensor]
) -> tuple[dict[float, Path], dict[float, OnnxReport]]:
    """The dense file under 1.0, a sketched one under each ratio, and the reports of those."""
    torch.manual_seed(0)
    files = {ratio: folder / f"bert-{ratio}.onnx" for ratio in (1.0, *RATIOS)}
    model = BertModel(BertConfig(num_hidden_layers=layers))
    export_onnx(model, (), files[1.0], kwargs=inputs, verify=False)
    reports = {ratio: sketch_onnx(files[1.0], files[ratio], ratio, progress=False) for ratio in RATIOS}
    return files, reports


def measure(files: dict[float, Path], inputs: dict[str, torch.Tensor], rounds: int) -> dict[float, float]:
    """Processor seconds of the fastest turn of each file."""
    feed = {name: tensor.numpy() for name, tensor in inputs.items()}
    calls = {ratio: partial(session(file, 1).run, None, feed) for ratio, file in files.items()}
    return processor_seconds(calls, rounds)


def line(
    ratio: float, files: dict[float, Path], times: dict[float, float], reports: dict[float, OnnxReport]
) -> str:
    """One row: times, then sizes, the numbers of all tensors and of the replaced ones."""
    dense, file = files[1.0], files[ratio]
    of_replaced = f"{reports[ratio].achieved_ratio:.4f}" if ratio in reports else ""
    share = numbers(file) / numbers(dense)
    size = file.stat().st_size / dense.stat().st_size
    return (
        f"| {'dense' if ratio == 1.0 else ratio} "
        f"| {times[ratio] * 1e3:.0f} | {times[1.0] / times[ratio]:.2f} | "
        f"{file.stat().st_size / 1e6:.1f} | {size:.4f} | {share:.4f} | {of_replaced} |"
    )


def numbers(file: Path) -> int:
    """Numbers in all initializers."""
    return sum(torch.Size(tensor.dims).numel() for tensor in load_onnx(file).graph.initializer)


def heading(options: argparse.Namespace) -> list[str]:
    """What was measured, where and with what."""
    names = ("onnx", "onnxruntime", "torch", "transformers")
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    return [
        "# ONNX Runtime, dense and sketched",
        "",
        f"BERT-base shape: {options.layers} layers, float32, {options.batch} x {options.length} tokens,",
        "exported by `export_onnx`, then sketched by `sketch_onnx`. Made by `benchmarks/onnx.py`.",
        "",
        f"Machine: {cpu_name()}, one thread, CPUExecutionProvider. {packages},",
        f"Python {platform.python_version()}.",
        f"Milliseconds are processor time, the least of {options.rounds} turns.",
        "",
        "| ratio | ms | speed-up | file MB | of the dense file | of all numbers | of the replaced numbers |",
        "|---|---|---|---|---|---|---|",
    ]


def cpu_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
