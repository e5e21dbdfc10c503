"""ONNX files beside their peers: the weights of linear layers and convolutions cut by SVD to equal shares.

Files keep dense weights of that rank, which serve to judge by: pairs of factors would give the same.
"""

import argparse
import hashlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from accuracy_report import Result, Store
from torch.nn import functional as F

import panther_compile as pc
from panther_compile.onnx.branches import handing_out

METHODS = ("ours-free", "ours", "svd", "svd-llm")
_WITH_DATA = ("ours", "svd-llm")
Feed = Mapping[str, np.ndarray]


def measure_methods(
    name: str,
    source: Path,
    options: argparse.Namespace,
    store: Store,
    draw: Callable[[int], Sequence[Feed]],
    judge: Callable[[Path], dict[str, float]],
) -> Iterator[tuple[str, float, Path, pc.OnnxReport]]:
    """Store all methods, ratios and seeds that are not stored yet; data is in domain or none.

    Args:
        name: of the model.
        source: its file.
        options: of `gauntlet.py`.
        store: where results are kept.
        draw: data of a seed.
        judge: metrics of a sketched file.

    Yields:
        The method, the ratio, the file and its report.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "small.onnx"
        for seed in range(options.seeds):
            data = draw(100 + seed)
            for ratio, method in product(options.ratios, (one for one in METHODS if one in options.methods)):
                domain = "in" if method in _WITH_DATA else "none"
                key = Result(name, mark_of(source), options.quick, method, domain, ratio, seed)
                if key in store:
                    continue
                begin, known = time.perf_counter(), data if domain == "in" else ()
                if method in ("ours", "ours-free"):
                    report = _sketch(source, target, ratio, known, seed)
                else:
                    report = cut_evenly(source, target, ratio, known)
                seconds = time.perf_counter() - begin
                metrics = judge(target)
                store.add(key, metrics, ratio, seconds)
                print(name, method, domain, ratio, metrics, f"{seconds:.1f} s", flush=True)
                yield method, ratio, target, report


def _sketch(source: Path, target: Path, ratio: float, data: Sequence[Feed], seed: int) -> pc.OnnxReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)  # the table tells
        return pc.sketch_onnx(source, target, ratio, data=data or None, seed=seed, progress=False)


def mark_of(source: Path) -> str:
    """What tells a file from others."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:12]


def described(report: pc.OnnxReport, title: str, metrics: Mapping[str, bool], inside: str) -> dict[str, Any]:
    """What `Store.describe` is to say of a file.

    Args:
        report: of one of its sketches.
        title: of the model.
        metrics: whether higher is better; the best is 1 then, else 0.
        inside: the data in domain, in words.
    """
    layers = report.plan.sketched
    return {
        "title": title,
        "dense": {metric: float(higher) for metric, higher in metrics.items()},
        "metrics": dict(metrics),
        "layers": len(layers),
        "replaced": sum(line.dense_numbers for line in layers),
        "numbers": sum(line.dense_numbers for line in report.plan.layers),
        "healing": "not measured",
        "in": inside,
        "off": "not measured",
        "remark": "",
    }


def cut_evenly(source: Path, target: Path, ratio: float, batches: Sequence[Feed]) -> pc.OnnxReport:
    """Write a file whose weights have the rank at which two factors store so many of the numbers.

    Args:
        source: a file.
        target: the file to write.
        ratio: of the numbers that each may store.
        batches: inputs, for SVD-LLM (W), in whose metric weights are cut; none for truncated SVD.

    Returns:
        What this library cuts without data, none left whole: the weights that are cut here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)
        report = pc.sketch_onnx(source, target, ratio, synthetic=False, verify=False, progress=False)
    names = [line.name for line in report.plan.sketched]
    model = ir.load(source)
    readers = _readers(model, names)
    grams = _grams(source, names, batches) if batches else {}
    for name, node in readers.items():
        value = node.inputs[1]
        weight = ir.convenience.get_const_tensor(value).numpy()
        is_kernel = node.op_type == "Conv"
        matrix = (weight.reshape(len(weight), -1) if is_kernel else weight.T).astype(np.float64)
        rank = max(1, int(ratio * matrix.size / sum(matrix.shape)))
        cut = _truncated(matrix, rank, grams.get(name))
        found = cut.reshape(weight.shape) if is_kernel else cut.T
        _overwrite(value, np.ascontiguousarray(found, np.float32))
    ir.save(model, target)
    return report


def _readers(model: ir.Model, names: Sequence[str]) -> dict[str, ir.Node]:
    wanted, found = set(names), {}
    for node in model.graph.all_nodes():
        if node.op_type in ("Conv", "MatMul") and node.inputs[1].name in wanted:
            found[node.inputs[1].name] = node
    if missing := wanted - set(found):
        raise SystemExit(f"no layer that can be cut reads {', '.join(sorted(missing))}")
    return found


def _overwrite(value: ir.Value, weight: np.ndarray) -> None:
    tensor = ir.tensor(weight, name=value.name)
    if value.producer() is None:
        value.const_value = tensor
    else:
        value.producer().attributes["value"] = ir.AttrTensor("value", tensor)


def _truncated(matrix: np.ndarray, rank: int, gram: np.ndarray | None) -> np.ndarray:
    if gram is None:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return (left[:, :rank] * values[:rank]) @ right[:rank]
    _, vectors = np.linalg.eigh(matrix @ gram @ matrix.T)  # as Swift-SVD finds SVD-LLM's optimum
    directions = vectors[:, ::-1][:, :rank]
    return directions @ (directions.T @ matrix)


def _grams(source: Path, names: Sequence[str], batches: Sequence[Feed]) -> dict[str, np.ndarray]:
    """X^T X of what each weight is multiplied with; none of those in branches that are not taken."""
    model = ir.load(source)
    readers = _readers(model, names)
    inputs = list(dict.fromkeys(node.inputs[0] for node in readers.values()))
    seeing, values = handing_out(model, inputs)
    shown = [value.name for value in values]
    seeing.graph.outputs.extend(values)
    runner = ort.InferenceSession(ir.to_proto(seeing).SerializeToString())
    grams: dict[str, np.ndarray] = {}
    for batch in batches:
        seen = dict(zip(shown, runner.run(shown, dict(batch)), strict=True))
        for name, node in readers.items():
            x = seen[node.inputs[0].name]
            if x.size:
                rows = _rows(node, torch.from_numpy(x))
                grams[name] = grams.get(name, 0.0) + (rows.T @ rows).double().numpy()
    return grams


def _rows(node: ir.Node, x: torch.Tensor) -> torch.Tensor:
    """(N, I): what the weight as a matrix is multiplied with."""
    if node.op_type == "MatMul":
        return x.flatten(0, -2)
    sizes = {
        name: list(one.as_ints())
        for name, one in node.attributes.items()
        if one.type == ir.AttributeType.INTS
    }
    kernel = sizes["kernel_shape"]
    if len(kernel) == 1:  # a map of one column
        x, kernel = x[..., None], [*kernel, 1]
        pads, strides = sizes.get("pads", [0, 0]), [*sizes.get("strides", [1]), 1]
        x = F.pad(x, (0, 0, *pads))
    else:
        top, left, bottom, right = sizes.get("pads", [0] * 4)
        x, strides = F.pad(x, (left, right, top, bottom)), sizes.get("strides", [1, 1])
    unfolded = F.unfold(x, kernel, stride=strides)
    return unfolded.transpose(1, 2).flatten(0, 1)
