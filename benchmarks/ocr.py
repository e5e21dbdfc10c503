"""PP-OCRv4's files from the package rapidocr-onnxruntime, sketched by `sketch_onnx`, on pictures of words.

Both are judged by the dense file's own answers: recognition by the character error rate (CER) of the text,
detection by the intersection over union of where it sees text. `gauntlet.py` calls `measure_ocr`.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from accuracy_models.edits import edits
from accuracy_models.efficientnet import folder_of
from accuracy_models.written import lines, pages
from accuracy_report import Store
from onnx_files import processor_seconds
from onnx_peers import described, mark_of, measure_methods

BATCH, CALIBRATION, SEEN_TEXT, TURNS = 16, 192, 0.3, 7


@dataclass(frozen=True)
class Reader:
    """A file and how it is judged.

    Attributes:
        file: of the package.
        title: for the report.
        pictures: (count, seed, held_out) to an array.
        held_out: how many to judge by.
        metrics: and whether higher is better.
        judge: (what a sketch gives, what the dense file gives, the file) to the metrics.
    """

    file: str
    title: str
    pictures: Callable[..., np.ndarray]
    held_out: int
    metrics: Mapping[str, bool]
    judge: Callable[[np.ndarray, np.ndarray, Path], dict[str, float]]


def session(path: Path) -> ort.InferenceSession:
    """On one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answers(path: Path, pictures: np.ndarray) -> np.ndarray:
    """What a file gives."""
    runner = session(path)
    (name,) = (one.name for one in runner.get_inputs())
    return np.concatenate([runner.run(None, {name: batch})[0] for batch in _batches(pictures)])


def _batches(pictures: np.ndarray) -> list[np.ndarray]:
    return np.split(pictures, range(BATCH, len(pictures), BATCH))


def texts(chances: np.ndarray, path: Path) -> list[str]:
    """The likeliest characters, repeated ones once, without blanks, which have the number 0."""
    known = {one.key: one.value for one in onnx.load(path).metadata_props}["character"].splitlines()
    letters = ["", *known, " "]
    return [
        "".join(letters[one] for place, one in enumerate(row) if place == 0 or row[place - 1] != one)
        for row in chances.argmax(-1)
    ]


def judge_text(given: np.ndarray, wanted: np.ndarray, path: Path) -> dict[str, float]:
    """CER to the dense file's text, and the share of pictures with the very same."""
    pairs = list(zip(texts(given, path), texts(wanted, path), strict=True))
    wrong, total = sum(edits(*pair) for pair in pairs), sum(len(text) for _, text in pairs)
    return {"CER": wrong / total, "same text": sum(a == b for a, b in pairs) / len(pairs)}


def judge_places(given: np.ndarray, wanted: np.ndarray, path: Path) -> dict[str, float]:
    """Intersection over union of the pixels above the package's threshold, and the relative error."""
    del path
    here, there = given > SEEN_TEXT, wanted > SEEN_TEXT
    error = np.linalg.norm(given - wanted) / np.linalg.norm(wanted)
    return {"IoU": float((here & there).sum() / (here | there).sum()), "relative error": float(error)}


READERS = {
    "ocr-rec": Reader(
        "ch_PP-OCRv4_rec_infer.onnx",
        "PP-OCRv4 recognition (ONNX), text of a line against the dense file's",
        lines,
        192,
        {"CER": False, "same text": True},
        judge_text,
    ),
    "ocr-det": Reader(
        "ch_PP-OCRv4_det_infer.onnx",
        "PP-OCRv4 detection (ONNX), where text is seen against the dense file",
        pages,
        64,
        {"IoU": True, "relative error": False},
        judge_places,
    ),
}


def measure_ocr(name: str, options: argparse.Namespace, store: Store) -> None:
    """All methods, ratios and seeds that are not stored yet."""
    reader = READERS[name]
    source = folder_of("rapidocr_onnxruntime") / "models" / reader.file
    held_out = reader.pictures(reader.held_out, 1, held_out=True)
    wanted, speeds = answers(source, held_out), dict[str, float]()

    def draw(seed: int) -> list[dict[str, np.ndarray]]:
        return [{"x": batch} for batch in _batches(reader.pictures(CALIBRATION, seed, held_out=False))]

    def judge(path: Path) -> dict[str, float]:
        return reader.judge(answers(path, held_out), wanted, source)

    for method, ratio, target, report in measure_methods(name, source, options, store, draw, judge):
        if method == "ours":
            speeds[str(ratio)] = round(times_as_fast(source, target, held_out[:8]), 3)
        inside = f"{CALIBRATION} pictures of other words in other fonts"
        description = described(report, reader.title, reader.metrics, inside)
        known = store.descriptions.get((name, options.quick), {}).get("speeds", {})
        description["speeds"] = known | speeds
        store.describe(name, mark_of(source), description, quick=options.quick)


def times_as_fast(source: Path, target: Path, pictures: np.ndarray) -> float:
    """Processor time of the source over that of the target, side by side, the least of some turns each."""
    runners = {path: session(path) for path in (source, target)}
    calls = {
        path: partial(run.run, None, {run.get_inputs()[0].name: pictures}) for path, run in runners.items()
    }
    best = processor_seconds(calls, TURNS)
    return best[source] / best[target]
