"""Convolutions of an ONNX file in int8, with ranges of activations that are fixed beforehand, by data.

ONNX Runtime's quantizer writes them as QuantizeLinear, DequantizeLinear and Conv, which it runs as one
QLinearConv. What it is told here:

ranges   of what a node reads and gives, by which values seen are rounded with the least squared error
weights  a scale for each output, and no pair that overflows (`pair_range.py`), depthwise ones excepted
biases   b - Σ (W' - W) E[x] for weights rounded to W': else each output is off by a constant, which a
         network does not average away (Nagel et al., ICCV 2019, section 4.2)

Activations, sums and pools between convolutions go with them, so that nothing is widened in between. Left in
float32 are what a graph gives, and runs of such nodes that take few multiplications for all the numbers that
they read and give: rounding those costs the time that int8 saves.
"""

# O channels made, I channels read in a group, N batch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType
from onnxruntime.quantization.calibrate import TensorsData

from panther_compile.errors import DataError
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.files import read_model, write_model
from panther_compile.onnx.lowering import GraphWriter
from panther_compile.onnx.pair_range import LARGEST, pair_rounded
from panther_compile.onnx.patterns import feeds_output, fixed_tensor, is_onnx

_ACTIVATIONS = ("Relu", "Clip")
_JOINS = ("Add", "Concat")
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "Resize")
_PAYS = 48  # multiply-adds for each number that a run reads or gives, from which int8 is faster
_LEVELS = 255  # steps of an unsigned byte
_SHARES = np.linspace(1.0, 0.2, 17)  # of a range, that are tried
_SAMPLED = 1 << 15  # values of a tensor that its range is judged by


class _Seen:
    """What some data show of a value.

    Args:
        sampled: how many of its entries a batch are kept.
    """

    def __init__(self, sampled: int) -> None:
        self._sampled, self._low, self._high = sampled, 0.0, 0.0
        self._kept: list[np.ndarray] = []
        self._sums: Any = 0.0
        self._count = 0
        self.size = 0  # entries of one sample

    def add(self, array: np.ndarray, draw: np.random.Generator) -> None:
        """Take an array (N, channels, ...) into account; one without entries shows nothing."""
        if not array.size:
            return
        self._low, self._high = min(self._low, float(array.min())), max(self._high, float(array.max()))
        self._kept.append(array.reshape(-1)[draw.integers(0, array.size, self._sampled)])
        self._sums = self._sums + array.sum(tuple(set(range(array.ndim)) - {1}), dtype=np.float64)
        self._count += array.size // array.shape[1]
        self.size = array.size // len(array)

    @property
    def means(self) -> np.ndarray:
        """The mean of each channel (channels,)."""
        return np.asarray(self._sums / self._count)

    def range(self) -> tuple[np.float32, np.float32]:
        """The ends, 0 between them, by which the kept values are rounded with the least squared error."""
        values = np.concatenate(self._kept)
        errors = [_rounding_error(values, share * self._low, share * self._high) for share in _SHARES]
        share = float(_SHARES[int(np.argmin(errors))])
        return np.float32(share * self._low), np.float32(share * self._high)


def round_convolutions(path: Path, feeds: Sequence[Feed], large: bool) -> Path:
    """The file of a model whose convolutions are in int8, beside the one given; that one if it has none.

    Args:
        path: of a model that ONNX Runtime has preprocessed, in float32.
        feeds: data, one batch at least.
        large: put weights into a file of their own.

    Raises:
        DataError: ONNX Runtime cannot run a batch, or NaN or Inf comes of it.
        OnnxFileError: a file cannot be written.
    """
    plain = read_model(path)
    NameFixPass()(plain)
    nodes = _candidates(plain)
    seen = _observed(plain, nodes, feeds, path.parent) if nodes else {}
    nodes = _that_pay(nodes, seen)
    if not nodes:
        return path
    _own_biases(plain, nodes)
    named, rounded, fitted = (path.with_name(f"conv_{part}.onnx") for part in ("plain", "int8", "fitted"))
    write_model(plain, named)
    names = {str(value.name) for node in nodes for value in (*_read(node), node.outputs[0])}
    ranges = {name: seen[name].range() for name in names}
    quantizer = QDQQuantizer(
        onnx.load(named),
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, ranges),
        nodes_to_quantize=[str(node.name) for node in nodes],
        nodes_to_exclude=[],
        op_types_to_quantize=["Conv", *_ACTIVATIONS, *_JOINS, *_POOLS],
        extra_options={},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(rounded), large)
    result = read_model(rounded)
    _fit_weights(result, {str(node.name): node for node in nodes}, seen)
    write_model(result, fitted)
    return fitted


def _candidates(model: ir.Model) -> list[ir.Node]:
    """The convolutions by constants, and the nodes that read nothing but what these give, in their order."""
    found: dict[ir.Node, None] = {}

    def is_found(value: ir.Value | None) -> bool:
        return value is not None and value.producer() in found

    for node in model.graph:
        if is_onnx(node, "Conv"):
            fits = all(map(_is_float_constant, node.inputs[1:]))
        elif is_onnx(node, *_ACTIVATIONS):
            fits = is_found(node.inputs[0]) and len(node.inputs[0].uses()) == 1  # type: ignore[union-attr]
            fits = fits and _holds_0(node)
        elif is_onnx(node, *_JOINS):
            fits = all(map(is_found, node.inputs))
        else:
            fits = is_onnx(node, *_POOLS) and is_found(node.inputs[0])
        if fits and not feeds_output(node.outputs[0]):
            found[node] = None
    return list(found)


def _holds_0(node: ir.Node) -> bool:
    """Whether 0 is among what an activation may give, as it is in ranges: they stand for it in the file."""
    for sign, bound in zip((1, -1), node.inputs[1:3] if is_onnx(node, "Clip") else (), strict=False):
        tensor = fixed_tensor(bound)
        if bound is not None and (tensor is None or sign * float(tensor.numpy().reshape(())) > 0):
            return False
    return True


def _that_pay(nodes: Sequence[ir.Node], seen: Mapping[str, _Seen]) -> list[ir.Node]:
    """The nodes of runs, one feeding the next, that multiply enough for what they read and give.

    Runs with a value that no data show are left out.
    """
    among, runs = set(nodes), nx.Graph()
    runs.add_nodes_from(nodes)
    runs.add_edges_from(
        (node, reader) for node in nodes for reader in node.outputs[0].consumers() if reader in among
    )
    kept: set[ir.Node] = set()
    for run in nx.connected_components(runs):
        read = {value for node in run for value in _read(node) if value.producer() not in run}
        given = {node.outputs[0] for node in run if not run.issuperset(node.outputs[0].consumers())}
        moved = sum(seen[str(value.name)].size for value in read | given)
        multiplied = 0
        for node in run:
            if is_onnx(node, "Conv"):
                weight = _array(node.inputs[1])
                moved += weight.size
                multiplied += weight[0].size * seen[str(node.outputs[0].name)].size
        shown = all(seen[str(value.name)].size for node in run for value in (*_read(node), *node.outputs[:1]))
        if shown and multiplied >= _PAYS * moved:
            kept |= run
    return [node for node in nodes if node in kept]


def _own_biases(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Give each convolution a bias of its own, in place.

    ONNX Runtime's quantizer copies one that several read, under a name that another value may have.
    """
    writer, taken = GraphWriter(model), set[ir.Value]()
    for node in nodes:
        if not is_onnx(node, "Conv") or len(node.inputs) < 3 or (bias := node.inputs[2]) is None:
            continue
        if bias in taken:
            own = writer.weight(model.graph, str(bias.name), torch.from_numpy(_array(bias).copy()))
            node.replace_input_with(2, own)
        taken.add(bias)


def _read(node: ir.Node) -> list[ir.Value]:
    """What a node reads, constants left out."""
    read = node.inputs if is_onnx(node, *_JOINS) else node.inputs[:1]
    return [value for value in read if value is not None]


def _is_float_constant(value: ir.Value | None) -> bool:
    tensor = fixed_tensor(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _observed(
    model: ir.Model, nodes: Sequence[ir.Node], feeds: Sequence[Feed], folder: Path
) -> dict[str, _Seen]:
    """What the data show of all that the nodes read and give, by name."""
    values: dict[ir.Value, None] = {}
    for node in nodes:
        values |= dict.fromkeys((*_read(node), node.outputs[0]))
    names = [str(value.name) for value in values]
    draw = np.random.default_rng(0)
    seen = {name: _Seen(max(1, _SAMPLED // len(feeds))) for name in names}
    for feed, arrays in zip(feeds, ObservedModel(model, list(values), folder).run(feeds, names), strict=True):
        for name in names:
            if not np.isfinite(arrays[name]).all():
                raise DataError(
                    f"batch {feed.place} of data: NaN or Inf reaches or leaves a convolution, {name}"
                )
            seen[name].add(arrays[name], draw)
    return seen


def _rounding_error(values: np.ndarray, low: float, high: float) -> float:
    """Mean squared error of values in steps of an unsigned byte from one end to the other."""
    step = max((high - low) / _LEVELS, 1e-30)
    zero = np.rint(-low / step)
    rounded = (np.clip(np.rint(values / step) + zero, 0, _LEVELS) - zero) * step
    return float(np.square(rounded - values, dtype=np.float64).mean())


def _fit_weights(model: ir.Model, plain: Mapping[str, ir.Node], seen: Mapping[str, _Seen]) -> None:
    """Round weights so that none overflow, and move biases by what that changes, in place.

    Args:
        model: as ONNX Runtime's quantizer wrote it.
        plain: the nodes of before, by name.
        seen: what the data show of what they read.
    """
    for node in model.graph:
        before = plain.get(str(node.name))
        if before is None or not is_onnx(node, "Conv"):
            continue
        weight = _array(before.inputs[1])
        groups = before.attributes.get_int("group", 1)
        rounded, scales = _rounded_kernel(weight, groups)
        stored, stored_scales = _stored(node.inputs[1])
        _store(stored, rounded)
        _store(stored_scales, scales)
        if len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        off = rounded * _along_first(scales, weight) - weight
        means = seen[str(before.inputs[0].name)].means.reshape(groups, 1, -1)  # type: ignore[union-attr]
        per_channel = off.reshape(groups, len(weight) // groups, weight.shape[1], -1).sum(-1)
        bias = _array(before.inputs[2]) - (per_channel * means).sum(-1).reshape(-1)
        step = _array(_stored(node.inputs[0])[1]) * scales
        stored, stored_scales = _stored(node.inputs[2])
        _store(stored, np.rint(bias / step).clip(-(2**31), 2**31 - 1).astype(np.int32))
        _store(stored_scales, step.astype(np.float32))


def _rounded_kernel(weight: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """A kernel (O, I, ...) in int8, and the scales (O,).

    ONNX Runtime multiplies the channels of one tap after those of another, and depthwise kernels in 32 bits.
    """
    flat = np.moveaxis(weight, 1, -1).reshape(len(weight), -1)  # (O, taps x I)
    scales = (np.abs(flat).max(1) / LARGEST).clip(np.finfo(np.float32).tiny).astype(np.float32)
    if weight.shape[1] == 1 and groups == len(weight):
        rounded = np.rint(flat / scales[:, None]).astype(np.int8)
    else:
        turned, scales = pair_rounded(flat.T, scales)
        rounded = turned.T
    shape = (len(weight), *weight.shape[2:], weight.shape[1])
    return np.ascontiguousarray(np.moveaxis(rounded.reshape(shape), -1, 1)), scales


def _along_first(scales: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return scales.reshape(-1, *(1 for _ in weight.shape[1:]))


def _stored(value: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """What DequantizeLinear makes a value of, and the scale."""
    assert value is not None
    maker = value.producer()
    assert maker is not None
    quantized, scale = maker.inputs[:2]
    assert quantized is not None
    assert scale is not None
    return quantized, scale


def _array(value: ir.Value | None) -> np.ndarray:
    assert value is not None
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return tensor.numpy()


def _store(value: ir.Value, array: np.ndarray) -> None:
    value.const_value = ir.tensor(array, name=value.name)
