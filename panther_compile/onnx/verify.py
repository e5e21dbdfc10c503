"""Whether a file computes what a model, or another file, computes."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import sympy
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from torch import Tensor, nn
from torch.export import ExportedProgram

from panther_compile.calibration.closeness import MOST_CALLS, OutputSums, Pair, paired
from panther_compile.errors import OnnxMismatchError, first_line
from panther_compile.models.batches import Call, kept_by, kept_by_either
from panther_compile.models.outputs import LOGITS, tensors_in
from panther_compile.onnx.output_parts import in_parts, parts_of
from panther_compile.onnx.patterns import is_onnx
from panther_compile.records import Closeness
from panther_compile.reporting.tables import counted

MASK = "attention_mask"  # name of the input (batch, length) that is 0 where a position is padding
_DECODED = ("decoder_input_ids", "decoder_attention_mask")
# Largest difference of an output, over its largest magnitude.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
RUNTIME_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
_DRAWING = (
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial"),
)
# What a model raises for sizes that it cannot take.
_REFUSALS = (RuntimeError, ValueError, IndexError)


def verify_export(
    model: nn.Module,
    example: Call,
    exported: ExportedProgram,
    path: Path,
    declared: Collection[int] = (),
) -> None:
    """Compare the file with the model on the example inputs, and on random ones of other sizes.

    Sizes that are equal in the example stay equal. A size that the model itself refuses is passed over.

    Args:
        model: that was exported.
        example: the inputs that it was exported with.
        exported: what torch made of it.
        path: of the file.
        declared: bounds that the caller of `export_onnx` gives to free sizes.

    Raises:
        OnnxMismatchError: an output differs, or ONNX Runtime cannot run the file.
    """
    session = load_session(path, "the model")
    for case in _cases(example, exported, declared):
        try:
            output = case.run(model)
        except _REFUSALS:
            if case is example:
                raise
            continue
        _compare(session, case.tensors, tensors_in(output), path)


@dataclass(frozen=True, slots=True)
class Compared:
    """Two files on the same inputs.

    Attributes:
        errors: of each output of the last run, or each part of it (`output_parts.py`), the Frobenius norm of
            the difference over that of the source's, where the source's is finite; of one that holds no
            floating numbers, the share of the entries that differ. Outputs that are no tensors have none.
        closeness: of the outputs of all runs together.
    """

    errors: dict[str, float]
    closeness: Closeness


def compare_files(
    source: Path, target: Path, feeds: Sequence[Mapping[str, Any]] = (), what: str = "the data"
) -> Compared:
    """Run two files of one interface on the same inputs, random ones unless some are given.

    Random numbers are standard normal, integers and booleans 0 or 1: ids and masks are allowed to be that;
    lengths leave nothing out; unsigned bytes, which pixels are, anything, if the source takes that.
    Sizes that the file leaves free are all alike, the first of `_SIZES` that the source takes.

    Args:
        source: the dense file.
        target: the sketched one.
        feeds: batches, an array for each input; the last ones of them are run.
        what: they are, in words.

    Raises:
        OnnxMismatchError: ONNX Runtime cannot load or run one of the files, or an output has another shape or
            type, or is not finite where the source's is.
    """
    dense, sketched = load_session(source, str(source)), load_session(target, "the sketched model")
    model, names = ir.load(source), [one.name for one in dense.get_outputs()]
    parts, sizes = parts_of(model), _sizes_of(model, dense)
    results, errors = OutputSums(), dict[str, float]()
    for feed, outputs in _runs(dense, feeds, str(source), sizes):
        shapes = ", ".join(f"{array.shape}" for array in feed.values())
        try:
            others = sketched.run(names, feed)
        except RUNTIME_ERRORS as error:
            raise OnnxMismatchError(
                f"ONNX Runtime cannot run the sketched model on inputs {shapes}: {first_line(error)}"
            ) from error
        wanted, found = (dict(zip(names, one, strict=True)) for one in (outputs, others))
        _check_alike(wanted, found, shapes)  # others have no such parts
        wanted, found = in_parts(wanted, parts), in_parts(found, parts)
        errors = _relative_errors(wanted, found, shapes)
        results.see(output_pairs(wanted, found), kept_in(feed))
    inputs = f"{counted(min(len(feeds), MOST_CALLS), 'batch')} of {what}" if feeds else "random inputs"
    return Compared(errors, results.closeness(inputs.replace("1 batches", "1 batch")))


def _runs(
    dense: ort.InferenceSession, feeds: Sequence[Mapping[str, Any]], what: str, sizes: Sequence[int]
) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    """Inputs, and what the dense file makes of them."""
    if feeds:
        yield from ((feed, dense.run(None, feed)) for feed in feeds[-MOST_CALLS:])
    else:
        yield _first_that_runs(dense, what, sizes)


def _sizes_of(model: ir.Model, session: ort.InferenceSession) -> tuple[int, ...]:
    """Sizes that a file may take where they are free, in the order in which they are tried."""
    if any(is_onnx(node, "DFT", "STFT") for node in model.graph.all_nodes()):
        return _OF_SOUND
    is_flat = all(len(one.shape) <= 2 for one in session.get_inputs())
    return (*_SIZES, *_OF_SOUND) if is_flat else _SIZES


def output_pairs(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Pair]:
    """The floating outputs, by name, of two runs on the same inputs, paired to be compared."""
    return [
        _pair(name, one, other)
        for name, one, other in _tensor_pairs(wanted, found)
        if np.issubdtype(one.dtype, np.floating)
    ]


def _pair(name: str, wanted: Any, found: Any) -> Pair:
    """Two outputs to be compared: logits, chances as their logarithms, or other numbers."""
    target, guess = (torch.from_numpy(one.astype(np.float32)) for one in (wanted, found))
    rows = target.flatten(0, -2) if target.dim() > 1 else target[None]
    chances = rows.shape[-1] > 1 and rows.numel() > 0 and bool((rows >= 0).all())
    if chances and bool(((rows.sum(-1) - 1).abs() < 1e-2).all()):
        least = torch.finfo(torch.float32).tiny
        return paired(name, target.clamp_min(least).log(), guess.clamp_min(least).log(), is_logits=True)
    return paired(name, target, guess, is_logits=name in LOGITS)


def kept_in(feed: Mapping[str, Any]) -> Tensor | None:
    """The positions (batch, length) of a batch that are no padding; None without a mask."""
    known = {name: torch.from_numpy(feed[name]) for name in (MASK, *_DECODED) if name in feed}
    if MASK not in known or known[MASK].dim() != 2:
        return None
    return kept_by_either(kept_by(known[MASK]), known)


_SIZES = (4, 1, 2, 8, 16, 32, 64, 128, 224)
_OF_SOUND = (512, 1024, 4096)  # less than a window ends the process: ONNX Runtime divides by 0 frames


def _first_that_runs(
    session: ort.InferenceSession, what: str, sizes: Sequence[int]
) -> tuple[dict[str, Any], list[Any]]:
    """Random inputs that a file takes, of the first of some sizes, and what it makes of them."""
    sizes = sizes if any(not _is_fixed(one) for one in session.get_inputs()) else sizes[:1]
    has_pixels = any(numpy_dtype(one) == np.uint8 for one in session.get_inputs())
    for size, most in itertools.product(sizes, (255, 1) if has_pixels else (1,)):
        feed = _random_inputs(session, size, what, most)
        try:
            return feed, session.run(None, feed)
        except RUNTIME_ERRORS as error:
            last = error
    raise OnnxMismatchError(
        f"ONNX Runtime cannot run {what} on random inputs: {first_line(last)}; "
        "verify=False writes the sketched model unchecked"
    ) from last


def _is_fixed(value: ort.NodeArg) -> bool:
    return all(isinstance(size, int) for size in value.shape)


def _random_inputs(session: ort.InferenceSession, size: int, what: str, most: int) -> dict[str, Any]:
    """An array for each input; `most` is the largest of unsigned bytes. Lengths leave nothing out."""
    generator = np.random.default_rng(0)
    feed = {}
    shapes = {
        one.name: [axis if isinstance(axis, int) else size for axis in one.shape]
        for one in session.get_inputs()
    }
    longest = max((axis for shape in shapes.values() for axis in shape[1:]), default=size)
    for one in session.get_inputs():
        shape = shapes[one.name]
        dtype = numpy_dtype(one)
        if dtype is None:
            raise OnnxMismatchError(
                f"{what}: input {one.name!r} is a {one.type}, and nothing random can be made of it; "
                "give data=, or verify=False, which writes the sketched model unchecked"
            )
        floating, highest = np.issubdtype(dtype, np.floating), most if dtype == np.uint8 else 1
        values = generator.standard_normal(shape) if floating else generator.integers(0, highest + 1, shape)
        if not floating and len(shape) == 1 and "len" in one.name.lower():
            values = np.full(shape, longest)
        feed[one.name] = np.asarray(values).astype(dtype)
    return feed


def has_sizes(array: Any, wanted: Sequence[Any]) -> bool:
    """Whether an array has the sizes that are wanted, those that are whole numbers."""
    return len(wanted) == array.ndim and all(
        not isinstance(size, int) or size == n for size, n in zip(wanted, array.shape, strict=True)
    )


def numpy_dtype(value: ort.NodeArg) -> Any:
    """The dtype of an input; None where NumPy has none for it."""
    kind = re.fullmatch(r"tensor\((\w+)\)", value.type)
    return _DTYPES.get(kind[1]) if kind else None


# By ONNX Runtime's names.
_DTYPES: dict[str, Any] = {
    "float": np.float32,
    "double": np.float64,
    "bool": np.bool_,
    **{name: np.dtype(name) for name in ("float16", "int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
}


def _check_alike(wanted: Mapping[str, Any], found: Mapping[str, Any], shapes: str) -> None:
    """Raise OnnxMismatchError if an output, on inputs of such shapes, is of another shape or type."""
    for name, one, other in _tensor_pairs(wanted, found):
        if other.shape != one.shape or other.dtype != one.dtype:
            raise OnnxMismatchError(
                f"output {name!r} for inputs {shapes} is {other.dtype} {other.shape} in the sketched model, "
                f"{one.dtype} {one.shape} in the source"
            )


def _relative_errors(wanted: Mapping[str, Any], found: Mapping[str, Any], shapes: str) -> dict[str, float]:
    """Relative errors of each output that is a tensor in both files, on inputs of such shapes."""
    return {
        name: _relative_error(f"output {name!r} for inputs {shapes}", other, one)
        for name, one, other in _tensor_pairs(wanted, found)
    }


def _tensor_pairs(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The outputs that are tensors in both files, by name."""
    for name, one in wanted.items():
        if isinstance(one, np.ndarray) and isinstance(found[name], np.ndarray):
            yield name, one, found[name]


def _relative_error(what: str, found: Any, wanted: Any) -> float:
    if not np.issubdtype(wanted.dtype, np.floating):
        return float(np.mean(found != wanted)) if wanted.size else 0.0
    finite = np.isfinite(wanted)
    if np.isnan(found[np.isinf(wanted)]).any():
        raise OnnxMismatchError(f"{what} holds NaN in the sketched model, where the source's is infinite")
    found, wanted = found[finite].astype(np.float64), wanted[finite].astype(np.float64)
    if not np.isfinite(found).all():
        raise OnnxMismatchError(
            f"{what} holds NaN or Inf in the sketched model, where the source's is finite"
        )
    distance, length = np.linalg.norm(found - wanted), np.linalg.norm(wanted)
    return float(distance / length) if distance else 0.0


def load_session(path: Path, what: str) -> ort.InferenceSession:
    """A session on the CPU.

    Raises:
        OnnxMismatchError: ONNX Runtime cannot load the file, which the message calls `what`.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except RUNTIME_ERRORS as error:
        advice = ""
        if _holds_bfloat16(path):
            advice = (
                "; it is in bfloat16, of which ONNX Runtime computes little on a CPU: give it in float32, "
                "or in float16"
            )
        raise OnnxMismatchError(
            f"ONNX Runtime cannot load {what}: {first_line(error)}{advice}; verify=False writes the file all "
            "the same"
        ) from error


def _holds_bfloat16(path: Path) -> bool:
    """Whether an input, or a weight, of a file is in bfloat16."""
    graphs = list(ir.load(path).graphs())
    values = [one for graph in graphs for one in (*graph.inputs, *graph.initializers.values())]
    return any(one.dtype == ir.DataType.BFLOAT16 for one in values)


def _cases(example: Call, exported: ExportedProgram, declared: Collection[int]) -> Iterator[Call]:
    """The example, then random inputs: of its sizes, smaller and larger, and of those that torch left out.

    Torch reads what a model does with the example, and leaves out sizes for which it would do something else;
    those next to bounds that the caller declared are not asked for.
    """
    yield example
    generator = torch.Generator().manual_seed(0)
    dynamic = _dynamic_sizes(exported, example.tensors)
    cases = [
        {symbol: min(max(change(n), low), high) for symbol, (n, low, high) in dynamic.items()}
        for change in (_CHANGES if dynamic else _CHANGES[:1])
    ]
    usual = {symbol: n for symbol, (n, _, _) in dynamic.items()}
    for symbol, (n, low, high) in dynamic.items():
        outside = [one for one, bound in ((low - 1, low), (high + 1, high)) if bound not in declared]
        if low < high:  # it is fixed otherwise
            cases += [usual | {symbol: one} for one in outside if 1 <= one <= _MOST_TIMES * n]
    for sizes in cases:
        shapes = iter(_shapes(exported, sizes))
        yield example.with_leaves(
            _redrawn(x, next(shapes), generator) if isinstance(x, Tensor) else x for x in example.leaves
        )


_MOST_TIMES = 16  # a size of the example: larger ones take too long to run
_CHANGES: tuple[Callable[[int], int], ...] = (
    lambda size: size,
    lambda size: size - 1,
    lambda size: size + 1,
    lambda size: 2 * size + 1,
)


def _dynamic_sizes(exported: ExportedProgram, tensors: list[Tensor]) -> dict[Any, tuple[int, int, int]]:
    """The value in the example of each symbol in the inputs' shapes, and its range."""
    found: dict[Any, tuple[int, int, int]] = {}
    for expected, given in zip(_input_values(exported), tensors, strict=True):
        for size, known in zip(expected.shape, given.shape, strict=True):
            symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
            if len(symbols) == 1:
                (symbol,) = symbols
                bounds = exported.range_constraints[symbol]
                high = int(bounds.upper) if bounds.upper.is_Integer else 2**31
                value = int(sympy.solve(size.node.expr - known, symbol)[0])
                found[symbol] = (value, max(1, int(bounds.lower)), high)
    return found


def _shapes(exported: ExportedProgram, sizes: Mapping[Any, int]) -> Iterator[tuple[int, ...]]:
    for value in _input_values(exported):
        yield tuple(
            int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else size
            for size in value.shape
        )


def _input_values(exported: ExportedProgram) -> Iterator[Tensor]:
    """The tensors that stand for the inputs in the exported graph."""
    names = set(exported.graph_signature.user_inputs)
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), Tensor):
            yield node.meta["val"]


def _redrawn(example: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random tensor of a shape, of values that the example has: ids stay ids, masks stay masks.

    The first entry along an axis stays the first, so that no row of a mask is empty.
    """
    result = example
    for axis, size in enumerate(shape):
        if size != example.shape[axis]:
            places = torch.randint(example.shape[axis], (size,), generator=generator)
            places[0] = 0
            result = result.index_select(axis, places.to(example.device))
    if not result.is_floating_point():
        return result
    factors = torch.rand(result.shape, generator=generator).to(result)
    return result * (0.5 + factors / 2)


def _compare(session: ort.InferenceSession, inputs: list[Tensor], wanted: list[Tensor], path: Path) -> None:
    names = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]
    shapes = ", ".join(f"{tuple(tensor.shape)}" for tensor in inputs)
    if len(names) != len(inputs) or len(outputs) != len(wanted):
        raise OnnxMismatchError(
            f"the file has {len(names)} inputs and {len(outputs)} outputs, "
            f"the model {len(inputs)} and {len(wanted)}"
        )
    feed = {name: _array(tensor) for name, tensor in zip(names, inputs, strict=True)}
    try:
        found = [torch.from_numpy(array) for array in session.run(outputs, feed)]
    except RUNTIME_ERRORS as error:
        raise OnnxMismatchError(f"ONNX Runtime cannot run inputs {shapes}: {first_line(error)}") from error
    for name, one, other in zip(outputs, found, wanted, strict=True):
        if one.shape != other.shape:
            raise OnnxMismatchError(
                f"output {name!r} has shape {tuple(one.shape)} for inputs {shapes}, "
                f"the model's has {tuple(other.shape)}"
            )
        allowed, distance = TOLERANCE.get(other.dtype, 0.0), _distance(one, other)
        if not distance <= allowed:
            raise OnnxMismatchError(
                f"output {name!r} differs by {distance:.1e} of its largest magnitude for inputs {shapes}, "
                f"{allowed:.1e} is allowed{_of_draws(path)}; verify=False writes the file all the same"
            )


def _of_draws(path: Path) -> str:
    """Nodes of a file that draw numbers, in words; empty if none does."""
    nodes = ir.load(path).graph.all_nodes()
    drawing = sorted({node.op_type for node in nodes if is_onnx(node, *_DRAWING)})
    return f", and the model draws numbers, others in each run ({', '.join(drawing)})" if drawing else ""


def _array(tensor: Tensor) -> Any:
    """A tensor as ONNX Runtime takes it."""
    if tensor.dtype == torch.bfloat16:
        raise OnnxMismatchError(
            "ONNX Runtime takes no bfloat16 inputs: verify=False writes the file unchecked"
        )
    return tensor.numpy(force=True)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest magnitude; NaN equals NaN, infinity the same infinity."""
    found, wanted = found.double(), wanted.detach().cpu().double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if bool(same.all()):
        return 0.0
    finite = wanted[wanted.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return float((found - wanted)[~same].abs().max()) / (size or 1.0)
