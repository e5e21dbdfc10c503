"""PP-OCRv4's files from the package rapidocr-onnxruntime, sketched by `sketch_onnx`, on pictures of words.

Both are judged by the dense file's own answers: recognition by the character error rate (CER) of the text,
detection by the intersection over union of where it sees text. `gauntlet.py` calls `measure_ocr`.
"""

import argparse
import hashlib
import tempfile
import time
import warnings
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
from accuracy_report import Result, Store
from onnx import numpy_helper
from onnx_files import processor_seconds

import panther_compile as pc

BATCH, CALIBRATION, SEEN_TEXT, TURNS = 16, 192, 0.3, 7
METHODS = ("ours-free", "ours", "svd", "svd-llm")


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
    """All methods, ratios and seeds that are not stored yet; data is in domain or none."""
    reader = READERS[name]
    source = folder_of("rapidocr_onnxruntime") / "models" / reader.file
    mark = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    held_out = reader.pictures(reader.held_out, 1, held_out=True)
    wanted, speeds = answers(source, held_out), dict[float, float]()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "small.onnx"
        for seed in range(options.seeds):
            data = _batches(reader.pictures(CALIBRATION, 100 + seed, held_out=False))
            for ratio in options.ratios:
                report = None
                for method in (one for one in METHODS if one in options.methods):
                    domain = "in" if method in ("ours", "svd-llm") else "none"
                    key = Result(name, mark, options.quick, method, domain, ratio, seed)
                    if key in store:
                        continue
                    begin = time.perf_counter()
                    if method in ("ours", "ours-free"):
                        report = _sketch(source, target, ratio, data if domain == "in" else None, seed)
                    else:
                        report = report or _sketch(source, target, ratio, None, seed)
                        cut_evenly(source, target, report, ratio, data if domain == "in" else [])
                    seconds = time.perf_counter() - begin
                    metrics = reader.judge(answers(target, held_out), wanted, source)
                    store.add(key, metrics, ratio, seconds)
                    print(name, method, domain, ratio, metrics, f"{seconds:.1f} s", flush=True)
                    if method == "ours":
                        speeds[ratio] = times_as_fast(source, target, held_out[:8])
                    _describe(store, name, mark, reader, report, speeds, quick=options.quick)


def _sketch(
    source: Path, target: Path, ratio: float, data: list[np.ndarray] | None, seed: int
) -> pc.OnnxReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)  # the table tells
        return pc.sketch_onnx(source, target, ratio, data=data, seed=seed, progress=False)


def _describe(
    store: Store,
    name: str,
    mark: str,
    reader: Reader,
    report: pc.OnnxReport,
    speeds: Mapping[float, float],
    *,
    quick: bool,
) -> None:
    known = store.descriptions.get((name, quick), {}).get("speeds", {})
    layers = report.plan.sketched
    store.describe(
        name,
        mark,
        {
            "title": reader.title,
            "dense": {metric: float(higher) for metric, higher in reader.metrics.items()},
            "metrics": dict(reader.metrics),
            "layers": len(layers),
            "replaced": sum(line.dense_numbers for line in layers),
            "numbers": sum(line.dense_numbers for line in report.plan.layers),
            "healing": "none, a file has no gradients",
            "in": f"{CALIBRATION} pictures of other words in other fonts",
            "off": "not measured",
            "remark": "",
            "speeds": known | {str(ratio): round(found, 3) for ratio, found in speeds.items()},
        },
        quick=quick,
    )


def times_as_fast(source: Path, target: Path, pictures: np.ndarray) -> float:
    """Processor time of the source over that of the target, side by side, the least of some turns each."""
    runners = {path: session(path) for path in (source, target)}
    calls = {
        path: partial(run.run, None, {run.get_inputs()[0].name: pictures}) for path, run in runners.items()
    }
    best = processor_seconds(calls, TURNS)
    return best[source] / best[target]


def cut_evenly(
    source: Path, target: Path, report: pc.OnnxReport, ratio: float, data: list[np.ndarray]
) -> None:
    """The same weights cut by SVD to equal shares, in the metric of the data if there is any: SVD-LLM (W).

    The file keeps dense weights of that rank, which serve to judge by: pairs of factors would give the same.
    """
    model = onnx.load(source)
    names = {line.name for line in report.plan.sketched}
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    readers = {one: node for node in model.graph.node for one in node.input if one in names}
    grams = _grams(source, readers, data) if data else {}
    for name in names:
        weight = numpy_helper.to_array(constants[name].attribute[0].t)
        is_kernel = weight.ndim == 4
        matrix = (weight.reshape(len(weight), -1) if is_kernel else weight.T).astype(np.float64)
        rank = max(1, int(ratio * matrix.size / sum(matrix.shape)))
        cut = _truncated(matrix, rank, grams.get(name))
        found = cut.reshape(weight.shape) if is_kernel else cut.T
        tensor = numpy_helper.from_array(found.astype(np.float32), constants[name].attribute[0].t.name)
        constants[name].attribute[0].t.CopyFrom(tensor)
    onnx.save(model, target)


def _truncated(matrix: np.ndarray, rank: int, gram: np.ndarray | None) -> np.ndarray:
    if gram is None:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return (left[:, :rank] * values[:rank]) @ right[:rank]
    _, vectors = np.linalg.eigh(matrix @ gram @ matrix.T)  # as Swift-SVD finds SVD-LLM's optimum
    directions = vectors[:, ::-1][:, :rank]
    return directions @ (directions.T @ matrix)


def _grams(
    source: Path, readers: Mapping[str, onnx.NodeProto], data: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """X^T X of what each weight is multiplied with, but of larger kernels, which are cut by themselves."""
    model = onnx.load(source)
    wanted = {name: node.input[0] for name, node in readers.items() if _is_matrix(node)}
    shown = sorted(set(wanted.values()))
    for value in shown:
        model.graph.output.append(onnx.ValueInfoProto(name=value))
    runner, grams = ort.InferenceSession(model.SerializeToString()), dict[str, np.ndarray]()
    for batch in data:
        found = dict(zip(shown, runner.run(shown, {"x": batch}), strict=True))
        for name, value in wanted.items():
            x = found[value]
            rows = x.transpose(0, 2, 3, 1) if readers[name].op_type == "Conv" else x
            rows = rows.reshape(-1, rows.shape[-1])
            grams[name] = grams.get(name, 0.0) + (rows.T @ rows).astype(np.float64)
    return grams


def _is_matrix(node: onnx.NodeProto) -> bool:
    kernels = [list(one.ints) for one in node.attribute if one.name == "kernel_shape"]
    return node.op_type == "MatMul" or kernels == [[1, 1]]
