"""An ONNX file whose products are in int8, by ONNX Runtime's own quantizer."""

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx.inliner import inline_local_functions
from onnx.version_converter import ConvertError, convert_version
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

from panther_compile.calibration.closeness import DESTROYED
from panther_compile.errors import ConfigError, NoTargetError, SketchQualityWarning, first_line
from panther_compile.factorization.balance import pays_in_int8
from panther_compile.onnx.centre import centre_latents, correct_biases
from panther_compile.onnx.data import Feed
from panther_compile.onnx.files import WEIGHTS_APART, is_large, read_model, saved_copy, write_model
from panther_compile.onnx.forms import keep_sums_apart
from panther_compile.onnx.int8_conv import round_convolutions
from panther_compile.onnx.int8_tables import round_tables
from panther_compile.onnx.lowering import GraphWriter
from panther_compile.onnx.pair_range import fit_pair_range
from panther_compile.onnx.patterns import fixed_tensor, holds_graph, is_onnx
from panther_compile.onnx.smooth import smooth_inputs
from panther_compile.onnx.verify import compare_files
from panther_compile.records import Closeness, LayerPlan, SketchPlan

ROUNDINGS = ("none", "int8")
_PRODUCTS = ["MatMul", "Gemm"]
_IN_INT8 = ("MatMulInteger", "QuantizeLinear")
_TAKEN = (
    "then='int8' takes MatMul and Gemm in float32 by constant matrices, and with data Conv, where that pays, "
    "none in branches and loops"
)
_HELD_OUT = 4  # one batch in so many judges
_OLDEST_OPSET = 13
_AS_FAST = "in int8 it is as fast dense"


def for_int8(model: ir.Model, folder: Path) -> ir.Model:
    """The model in opset 13, before which there is no scale for each output; itself if its own is no older.

    One of an IR version below 4, in which scales would have to be inputs, becomes one of 4. ONNX's converter
    drops functions, which are put in the place of their calls.

    Args:
        model: is changed.
        folder: where its weights are, if they are in other files.

    Raises:
        ConfigError: ONNX's converter cannot convert it.
    """
    model.ir_version = max(model.ir_version, WEIGHTS_APART)
    opset = model.opset_imports.get("") or 0
    if opset >= _OLDEST_OPSET:
        return model
    proto = ir.to_proto(model)
    if proto.functions:
        proto = inline_local_functions(proto)
    try:
        converted = ir.from_proto(convert_version(proto, _OLDEST_OPSET))
    except ConvertError as error:
        raise ConfigError(
            f"then='int8' needs opset {_OLDEST_OPSET} or newer, the source has {opset}, and ONNX cannot "
            f"convert it: {first_line(error)}"
        ) from error
    ir.external_data.set_base_dir(converted.graph, str(folder.absolute()))
    return converted


def check_can_round(model: ir.Model) -> None:
    """Check that a model has weights in float32, before anything is fitted to it.

    Raises:
        NoTargetError: all its weights are of other types.
    """
    weights = [value.const_value for value in model.graph.initializers.values()]
    kinds = {one.dtype for one in weights if one is not None and len(one.shape) > 1}
    if kinds and ir.DataType.FLOAT not in kinds:
        raise NoTargetError(
            f"{_TAKEN}; weights here are {', '.join(sorted(kind.name for kind in kinds))}: give the model in "
            "float32"
        )


def warn_if_destroyed_by_int8(closeness: Closeness, *, sketched: bool, stacklevel: int) -> None:
    """Warn of outputs that rounding alone has destroyed.

    Args:
        closeness: of the outputs to those of before.
        sketched: whether a larger ratio would help.
        stacklevel: of the warning, as `warnings.warn` in the function that calls this one would have it.
    """
    if closeness.grade == DESTROYED:
        remedy = "a larger ratio, or then='none'" if sketched else "then='none'"
        warnings.warn(
            f"int8 destroys what the model computes; {closeness}. Try {remedy}",
            SketchQualityWarning,
            stacklevel=stacklevel + 1,
        )


def as_pairs(
    plan: SketchPlan, step: int | None, *, kernels: bool = False, ratio: float | None = None
) -> SketchPlan:
    """The plan with plain pairs of as many numbers in place of the pivoted form, which int8 costs dearly.

    What the plan has left of its budget, as where weights are of a low rank, goes to pairs of the rank that
    the plan wants. A weight whose pair would be no faster in int8 than itself stays dense, and so do kernels
    of a basis.

    Args:
        plan: of matrices among others.
        step: ranks are multiples of it; None for 8, or less where that would be 0.
        kernels: whether 1 x 1 kernels will be in int8 too.
        ratio: of the budget; None to give no pair more numbers than its layer has.
    """
    left = 0 if ratio is None else max(0, math.floor(ratio * plan.dense_numbers) - plan.stored_numbers)
    lines = []
    for line in plan.layers:
        lines.append(_as_pair(line, step, kernels, left))
        if lines[-1].choice is not None:
            left -= max(0, lines[-1].stored_numbers - line.stored_numbers)
    return replace(plan, layers=tuple(lines))


def _as_pair(line: LayerPlan, step: int | None, kernels: bool, left: int) -> LayerPlan:
    choice, is_kernel = line.choice, len(line.shape) > 2
    if choice is not None and choice.scheme == "basis":
        return replace(line, choice=None, reason=_AS_FAST)
    if choice is None or choice.scheme != "pivoted" or (is_kernel and not kernels):
        return line
    outputs, inputs = line.shape[:2]
    rank = choice.stored_numbers // (outputs + inputs)
    every = step or (8 if rank >= 8 else 1)
    rank -= rank % every
    most = (choice.stored_numbers + left) // (outputs + inputs)
    while rank < choice.rank and rank + every <= most and pays_in_int8(outputs, inputs, rank + every):
        rank += every
    if rank == 0 or not pays_in_int8(outputs, inputs, rank):
        return replace(line, choice=None, reason=_AS_FAST)
    numbers, scheme = rank * (outputs + inputs), "channel" if is_kernel else "pair"
    choice = replace(choice, scheme=scheme, rank=rank, ranks=(rank,), stored_numbers=numbers, error=None)
    return replace(line, choice=choice)


@contextmanager
def int8_model(model: ir.Model, folder: Path, feeds: Sequence[Feed] = ()) -> Iterator[ir.Model]:
    """A model whose MatMul and Gemm nodes with constant weights are in int8, and its tables.

    For as long as this lasts.

    Weights get a scale for each output, activations a range that is measured at each call. With data so do
    Conv nodes, whose ranges are fixed by it (`int8_conv.py`).

    Args:
        model: is left as it is.
        folder: in which files are written for a moment.
        feeds: data; latents are centred and biases corrected by what the first of them show (`centre.py`),
            and inputs scaled (`smooth.py`) if the outputs for the last ones are closer so.

    Raises:
        NoTargetError: nothing of the model can be in int8.
        OnnxFileError: they cannot be written.
    """
    with saved_copy(model, folder) as path, _quiet():
        learnt = feeds[: -max(1, len(feeds) // _HELD_OUT)]
        if feeds:
            centred = read_model(path)
            if centre_latents(centred, learnt or feeds, folder):
                write_model(centred, path)
        rounded = _quantized(path, is_large(model), learnt or feeds)
        smooth = read_model(path) if learnt else None
        if smooth is not None and smooth_inputs(smooth, learnt, folder):
            with saved_copy(smooth, path.parent) as other:
                scaled = _quantized(other, is_large(smooth), learnt)
                held_out = feeds[len(learnt) :]
                shares = [compare_files(path, one, held_out).closeness.share for one in (scaled, rounded)]
                yield _finished(scaled if shares[0] < shares[1] else rounded, feeds)
        else:
            yield _finished(rounded, feeds)


def _quantized(path: Path, large: bool, feeds: Sequence[Feed]) -> Path:
    """The file of the model of another, beside it, in int8.

    Args:
        path: of the other.
        large: put weights into a file of their own.
        feeds: data for the ranges of convolutions, which stay in float32 without, and to correct biases by.
    """
    folded = _rounded(path, large, feeds, fold=True)
    if large or folded.stat().st_size <= path.stat().st_size:
        return folded
    # What is folded has copies of weights that several nodes read, as those of an LSTM in branches.
    return min(folded, _rounded(path, large, feeds, fold=False), key=lambda one: one.stat().st_size)


def _rounded(path: Path, large: bool, feeds: Sequence[Feed], *, fold: bool) -> Path:
    """See `_quantized`; whether ONNX Runtime folds what is made of constants alone."""
    parts = ("plain", "int8", "fitted")
    plain, rounded, fitted = (path.with_name(f"{part}_{int(fold)}.onnx") for part in parts)
    quant_pre_process(
        path, plain, skip_symbolic_shape=True, skip_optimization=not fold, save_as_external_data=large
    )
    if not len(ir.load(plain).graph):  # all is made of constants alone
        if not fold:
            raise _nothing(feeds)
        return _rounded(path, large, feeds, fold=False)
    source = read_model(plain)
    if _drop_empty_ends(source) + _hide_others(source):
        write_model(source, plain)
    quantize_dynamic(
        round_convolutions(plain, feeds, large) if feeds else plain,
        rounded,
        op_types_to_quantize=_PRODUCTS,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=large,
        extra_options={"DefaultTensorType": ir.DataType.FLOAT},  # of what operators of other domains give
    )
    _sort(rounded)
    model = read_model(rounded)
    fit_pair_range(model, source)
    if feeds:
        correct_biases(model, source, feeds, path.parent)
    write_model(model, fitted)
    return fitted


def _sort(path: Path) -> None:
    """Put the nodes of a file in order: ONNX Runtime's quantizer does not see what branches read."""
    model = ir.load(path)
    if any(map(holds_graph, model.graph)):
        model.graph.sort()
        ir.save(model, path)


def _drop_empty_ends(model: ir.Model) -> int:
    """Leave out the last inputs of nodes that are there by an empty name, in place; counts the nodes.

    ONNX Runtime's quantizer takes one of a Gemm for a bias.
    """
    nodes = [node for node in model.graph.all_nodes() if node.inputs and node.inputs[-1] is None]
    for node in nodes:
        given = [place for place, value in enumerate(node.inputs) if value is not None]
        node.resize_inputs(max(given, default=-1) + 1)
    return len(nodes)


def _hide_others(model: ir.Model) -> int:
    """Put an Identity ahead of what is no constant matrix in float32, in place; counts the products by it.

    ONNX Runtime's quantizer takes such a product too, and knows the Gemm that it leaves out by its name no
    more once it has made a MatMul of it. The right operand is a vector, a batch of matrices, one without an
    entry, or of another type, or an input that may be given another value.
    """
    writer, count = GraphWriter(model), 0
    for node in list(model.graph):
        value = node.inputs[1] if is_onnx(node, *_PRODUCTS) else None
        weight = None if value is None else ir.convenience.get_const_tensor(value)
        if weight is None:
            continue
        is_matrix = len(weight.shape) == 2 and weight.size > 0 and weight.dtype == ir.DataType.FLOAT
        if not is_matrix or fixed_tensor(value) is None:
            node.replace_input_with(1, writer.node(node, "Identity", (value,))[0])
            count += 1
    return count


def _nothing(feeds: Sequence[Feed]) -> NoTargetError:
    return NoTargetError(f"{_TAKEN}; there is none" + ("" if feeds else ", and no data"))


def _finished(path: Path, feeds: Sequence[Feed]) -> ir.Model:
    """The model of a file, in forms that are fast; raises NoTargetError if nothing in it is in int8."""
    model = read_model(path)
    if not any(is_onnx(node, *_IN_INT8) for node in model.graph.all_nodes()):
        raise _nothing(feeds)
    keep_sums_apart(model)
    round_tables(model)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing below an error from the root logger, which the quantizer writes its advice to."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
