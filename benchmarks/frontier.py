"""Quality against time and bytes: dense, int8, sketched, sketched and int8, of encoders in ONNX Runtime.

    python benchmarks/frontier.py --cache out/frontier      an hour on two cores, minutes the second time
    python benchmarks/frontier.py --cache out/frontier --output docs/benchmarks/frontier.md
    python benchmarks/frontier.py --cache out/bert --model bert-width       time alone: its weights are random

MiniLM is fitted to 256 paragraphs and judged by 256 others, as in accuracy.py. All files are loaded at once
and take turns; the fastest turn of each counts, in processor seconds, which other work disturbs least. A
picture is drawn beside the table.
"""

import argparse
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

# Here a file is called onnx.py: this folder has to come last.
HERE = Path(__file__).parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE.resolve()]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import AutoTokenizer, BertConfig, BertModel  # noqa: E402

import panther_compile as pc  # noqa: E402

sys.path.append(str(HERE))
from accuracy_models.minilm import compare, embed, minilm, model_directory, tokenized  # noqa: E402
from accuracy_models.subject import Subject, kept_sketch  # noqa: E402
from accuracy_models.texts import english_paragraphs  # noqa: E402
from onnx_files import session, write_int8  # noqa: E402

# By the name of a row, the ratio and the objective of `sketchify`; None is the dense model.
SKETCHES: dict[str, tuple[float, str] | None] = {
    "dense": None,
    "0.75": (0.75, "size"),
    "0.5": (0.5, "size"),
    "0.85 of int8 time": (0.85, "int8"),
    "0.8 of int8 time": (0.8, "int8"),
    "0.7 of int8 time": (0.7, "int8"),
    "0.65 of int8 time": (0.65, "int8"),
    "0.5 of int8 time": (0.5, "int8"),
}
PLAIN = "dense, quantize_dynamic alone"
MINILM, BERT_WIDTH = "minilm", "bert-width"
TITLES = {MINILM: "all-MiniLM-L6-v2", BERT_WIDTH: "4 layers as wide as BERT-base, random weights"}
SHAPES = {"32 x 64": (32, 64), "1 x 64": (1, 64)}


class SentenceEncoder(nn.Module):
    """The mean of the last hidden states.

    Args:
        model: an encoder of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask (batch, length) to embeddings (batch, width)."""
        types = torch.zeros_like(input_ids)
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=types)
        kept = attention_mask[..., None].to(found.last_hidden_state.dtype)
        return (found.last_hidden_state * kept).sum(1) / kept.sum(1)


def main() -> None:
    """Sketch, export, judge, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder of sketches and files, made once")
    parser.add_argument("--model", choices=list(TITLES), default=MINILM)
    parser.add_argument("--rows", nargs="+", default=list(SKETCHES), choices=list(SKETCHES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the table there too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}, wanted 1 or more")
    subject = minilm(options.cache, quick=False) if options.model == MINILM else bert_width()
    files: dict[str, Path] = {}
    for name in dict.fromkeys(["dense", *options.rows]):
        files |= make_files(subject, name, options.cache)
    judged = files if options.model == MINILM else {}
    quality = {name: judge(path, subject) for name, path in judged.items()}
    seconds = {threads: measure(files, threads, options.rounds) for threads in options.threads}
    text = "\n".join([*heading(options.model), *rows(files, quality, seconds), ""])
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")
        if quality:
            draw(quality, seconds[options.threads[0]], options.output.with_suffix(".png"))


def bert_width() -> Subject:
    """A BERT of four layers with random weights, which is fitted to random tokens: for times alone."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False).eval()
    ids = torch.randint(1000, 20000, (64, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(8)]
    return Subject(
        title=TITLES[BERT_WIDTH],
        model=model,
        blocks=tuple(f"encoder.layer.{i}" for i in range(4)),
        calibration=lambda domain, seed: data,
        in_domain="random tokens",
        off_domain="none",
        healing=lambda domain, seed: data,
        healed_on="the same",
        heal_steps=0,
        evaluate=lambda small: {},
        metrics={},
        outputs="values",
        options={"include": "encoder.*", "allow_slower": True},
    )


def make_files(subject: Subject, name: str, cache: Path) -> dict[str, Path]:
    """The float32 and the int8 file of a row, of the dense model a plain one too; what is there is taken."""
    folder = cache / name.replace(" ", "_")
    files = {name: cache / f"{folder.name}.onnx", f"{name}, int8": cache / f"{folder.name}.int8.onnx"}
    if name == "dense":
        files[PLAIN] = cache / "plain.onnx"
    if all(path.exists() for path in files.values()):
        return files
    cache.mkdir(parents=True, exist_ok=True)
    model, data = subject.model, subject.calibration("in", 0)
    if (sketch := SKETCHES[name]) is not None:
        ratio, objective = sketch
        model = kept_sketch(subject, ratio, folder, objective=objective, **subject.options)
    ids = torch.randint(5, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
    free = {0: torch.export.Dim("batch", max=512), 1: torch.export.Dim("tokens", max=512)}
    encoder, example = SentenceEncoder(model).eval(), (ids, torch.ones_like(ids))
    batches = [{key: batch[key] for key in ("input_ids", "attention_mask")} for batch in data]
    pc.export_onnx(encoder, example, files[name], dynamic_shapes=(free, free))
    pc.export_onnx(
        encoder, example, files[f"{name}, int8"], dynamic_shapes=(free, free), then="int8", data=batches
    )
    if name == "dense":
        quantize_alone(encoder, example, (free, free), files[PLAIN])
    return files


def quantize_alone(encoder: nn.Module, example: tuple[Tensor, ...], free: object, path: Path) -> None:
    """Write the int8 file that torch and ONNX Runtime make without this library."""
    exported = path.with_suffix(".float.onnx")
    options = {"dynamic_shapes": free, "opset_version": 18, "dynamo": True, "external_data": False}
    torch.onnx.export(encoder, example, exported, **options)  # type: ignore[arg-type]
    write_int8(exported, path, ["MatMul", "Gemm"])
    exported.unlink()


def judge(path: Path, subject: Subject) -> dict[str, float]:
    """How close the embeddings of held-out texts are to the dense model's."""
    batches = tokenized(AutoTokenizer.from_pretrained(model_directory()), english_paragraphs()[:256])
    run = session(path, 1)
    found = [
        run.run(None, {key: batch[key].numpy() for key in ("input_ids", "attention_mask")})[0]
        for batch in batches
    ]
    embeddings = F.normalize(torch.from_numpy(np.concatenate(found)), dim=-1)
    return compare(embeddings, embed(subject.model, batches))


def measure(files: dict[str, Path], threads: int, rounds: int) -> dict[tuple[str, str], float]:
    """Processor seconds of a call, by file and shape."""
    sessions = {name: session(path, threads) for name, path in files.items()}
    best: dict[tuple[str, str], float] = {}
    random = np.random.default_rng(0)
    for _ in range(rounds):
        for shape, size in SHAPES.items():
            feed = {"input_ids": random.integers(1000, 20000, size), "attention_mask": np.ones(size, "int64")}
            for name, run in sessions.items():
                calls = max(1, 512 // size[0] // size[1])
                start = time.process_time()
                for _ in range(calls):
                    run.run(None, feed)
                taken = (time.process_time() - start) / calls
                best[name, shape] = min(taken, best.get((name, shape), taken))
    return best


def heading(model: str) -> list[str]:
    """What was measured, where and how."""
    judged = ", 256 held-out texts" if model == MINILM else ""
    return [
        f"{TITLES[model]}, ONNX Runtime {version('onnxruntime')}, {platform.machine()}{judged};",
        "times as fast as int8 alone, of processor time, by texts x tokens.",
        "",
    ]


def rows(
    files: dict[str, Path],
    quality: dict[str, dict[str, float]],
    seconds: dict[int, dict[tuple[str, str], float]],
) -> list[str]:
    """A line for each file."""
    columns = [(threads, shape) for threads in seconds for shape in SHAPES]
    names = [f"{shape}, {threads} thread{'s' * (threads > 1)}" for threads, shape in columns]
    metrics = [one for one in ("Spearman", "cosine") if quality]
    found = [
        "| | " + " | ".join([*metrics, "MB", *names]) + " |",
        "|---|" + "--:|" * (len(metrics) + 1 + len(names)),
    ]
    for name, path in files.items():
        speeds = [seconds[threads]["dense, int8", shape] / seconds[threads][name, shape]
                  for threads, shape in columns]  # fmt: skip
        cells = [f"{quality[name][one]:.3f}" for one in metrics] + [f"{path.stat().st_size / 1e6:.1f}"]
        found.append(f"| {name} | " + " | ".join([*cells, *(f"{speed:.2f}" for speed in speeds)]) + " |")
    return found


def draw(quality: dict[str, dict[str, float]], seconds: dict[tuple[str, str], float], path: Path) -> None:
    """Quality against speed, for the first shape."""
    shape = next(iter(SHAPES))
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, one in quality.items():
        speed, rounded = seconds["dense, int8", shape] / seconds[name, shape], "int8" in name.split(", ")[-1]
        color = "#c0392b" if name.startswith("dense") else "#2c6fbb"
        axes.plot(speed, one["Spearman"], "o" if rounded or name == PLAIN else "s", color=color)
        axes.annotate(name, (speed, one["Spearman"]), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="times as fast as int8 alone, one thread", ylabel="Spearman to the dense model")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
