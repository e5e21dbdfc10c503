"""Tables of embeddings, a large part of a small model: cut by their weights, and fitted to data.

    python benchmarks/tables.py minilm e5 smollm2 [--domains in off]

Each row is a call as README has it, one draw, one thread: `sketchify(model, ratio, data=data, include=...)`,
judged on texts of the benchmarks' own that no fit has seen. Prints the rows of `docs/benchmarks/tables.md`.
"""

import argparse
import time
import warnings

import torch
from accuracy_models import load_subject
from torch import nn

import panther_compile as pc

# The table, with the output head that has its weight, and the layers.
ENCODER = (["*word_embeddings"], ["encoder.*"])
PARTS = {"minilm": ENCODER, "e5": ENCODER, "smollm2": (["model.embed_tokens", "lm_head"], ["model.layers.*"])}
CALLS = (
    ("table", 0.75),
    ("table", 0.5),
    ("table", 0.25),
    ("table and layers", 0.5),
    ("table and layers", 0.75),
    ("layers", 0.5),
)


def main() -> None:
    """Sketch, judge, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=PARTS)
    parser.add_argument("--domains", nargs="+", choices=("in", "off"), default=["in", "off"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", pc.SketchQualityWarning)
    for name in options.models:
        subject = load_subject(name)
        model = subject.model.eval()
        metrics = [*subject.metrics][:2]
        print(f"\n{subject.title}, {numbers(model) / 1e6:.1f} M numbers\n")
        print(f"| sketched | ratio | fitted to | M numbers | of all | {' | '.join(metrics)} | s |")
        print("|---|--:|---|--:|--:|" + "--:|" * len(metrics) + "--:|", flush=True)
        table, layers = PARTS[name]
        selections = {"table": table, "table and layers": [*table, *layers], "layers": None}
        for what, ratio in CALLS:
            selected = {} if selections[what] is None else {"include": selections[what]}
            data = {domain: subject.calibration(domain, 0) for domain in options.domains}
            fitted = {
                subject.in_domain if key == "in" else subject.off_domain: one for key, one in data.items()
            }
            if what == "table":
                fitted = {"its weights alone": None, **fitted}
            for label, batches in fitted.items():
                start = time.process_time()
                small = pc.sketchify(
                    model, ratio, data=batches, synthetic=batches is not None, progress=False, **selected
                )
                seconds, found = time.process_time() - start, subject.evaluate(small)
                cells = [f"{found[metric]:.3f}" for metric in metrics]
                share = numbers(small) / numbers(model)
                print(
                    f"| {what} | {ratio} | {label} | {numbers(small) / 1e6:.1f} | {share:.2f} | "
                    f"{' | '.join(cells)} | {seconds:.0f} |",
                    flush=True,
                )


def numbers(model: nn.Module) -> int:
    """Of all parameters, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
