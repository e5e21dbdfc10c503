"""What int8 makes of means taken out of products: latents of pairs are centred, errors of weights corrected.

    (x D) U + b  =  (x D - m) U + (b + m U)            m: the middle of the range of each latent
    x W + b      ≈  x W' + (b + E[x] (W - W'))         W' the rounded weight

A range that is measured at each call is one for all latents, and where inputs have large means, as embeddings
have, most of it goes to what never changes; and rounding errors of a weight times such a mean are the same at
each call. ONNX Runtime takes both sums into the products. The second is the bias correction of Nagel et al.,
"Data-Free Quantization" (ICCV 2019), with means that data show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.lowering import Bias, GraphWriter, added_bias, bias_of, shift_constant
from panther_compile.onnx.pair_range import floats_of, scale_of
from panther_compile.onnx.patterns import is_onnx, is_read_once
from panther_compile.onnx.sites import Use, matrix_of, multiplies_by_matrix

_AT_ONCE = 64  # values whose arrays of a batch are held together


def centre_latents(model: ir.Model, feeds: Sequence[Feed], folder: Path) -> int:
    """Centre what a product hands to one that has a bias, and to nothing else; gives how many that are.

    Args:
        model: is changed; what it computes is not.
        feeds: the data.
        folder: where a copy of the model is written for a moment.

    Raises:
        DataError: ONNX Runtime cannot run a batch.
    """
    pairs = {node.outputs[0]: pair for node in model.graph if (pair := _pair(node)) is not None}
    seen, writer = _seen(model, list(pairs), feeds, folder), GraphWriter(model)
    for latent, (last, matrix, bias) in pairs.items():
        if latent not in seen:
            continue
        middle = seen[latent].middle
        shift = writer.weight_beside(latent, f"{latent.name}.middle", -middle.to(matrix.dtype))
        (centred,) = writer.node(last, "Add", (latent, shift))
        last.replace_input_with(0, centred)
        shift_constant(bias, middle @ matrix.double(), writer)
    return len(pairs)


def correct_biases(model: ir.Model, plain: ir.Model, feeds: Sequence[Feed], folder: Path) -> None:
    """Add to biases what rounding the weights takes from products on average.

    Args:
        model: of `quantize_dynamic`; is changed.
        plain: the model that was quantized.
        feeds: the data.
        folder: where a copy of the model is written for a moment.

    Raises:
        DataError: ONNX Runtime cannot run a batch.
    """
    values = {value.name: value for node in plain.graph for value in node.outputs}
    values |= {value.name: value for value in plain.graph.inputs}
    found: list[tuple[ir.Value, np.ndarray, Bias]] = []
    for node in model.graph:
        error = _error_of(node, model, plain)
        x = _rounded_input(node)
        if error is None or x is None or x.name not in values:
            continue
        bias = added_bias(_product(node), error.shape[-1])
        if bias is not None:
            found.append((values[x.name], error, bias))
    seen, writer = _seen(plain, [x for x, _, _ in found], feeds, folder), GraphWriter(model)
    for x, error, bias in found:
        if x in seen:
            shift_constant(bias, seen[x].mean @ torch.from_numpy(error), writer)


@dataclass(slots=True)
class _Features:
    """Adds up what each feature of a value is like.

    Attributes:
        least: (I,), as `most` and `total`.
        rows: how many.
    """

    least: np.ndarray
    most: np.ndarray
    total: np.ndarray
    rows: int

    @property
    def middle(self) -> Tensor:
        """Middles of the ranges (I,), float64."""
        return torch.from_numpy((self.least.astype(np.float64) + self.most) / 2)

    @property
    def mean(self) -> Tensor:
        """Means (I,), float64."""
        return torch.from_numpy(self.total / self.rows)


def _seen(
    model: ir.Model, values: Sequence[ir.Value], feeds: Sequence[Feed], folder: Path
) -> Mapping[ir.Value, _Features]:
    """What the features of some values are like; values without a finite row have no entry."""
    by_name = {str(value.name): value for value in values}
    found: dict[ir.Value, _Features] = {}
    names = list(by_name)
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]
        observed = ObservedModel(model, [by_name[name] for name in some], folder)
        for arrays in observed.run(feeds, some):
            for name, array in arrays.items():
                _add(found, by_name[name], array.reshape(-1, array.shape[-1]))
    return found


def _add(found: dict[ir.Value, _Features], value: ir.Value, rows: np.ndarray) -> None:
    """Add rows (n, I) of a value to what was seen."""
    rows = rows[np.isfinite(rows).all(1)]  # attention to nothing is NaN
    if not len(rows):
        return
    new = _Features(rows.min(0), rows.max(0), rows.sum(0, dtype=np.float64), len(rows))
    old = found.setdefault(value, new)
    if old is not new:
        old.least, old.most = np.minimum(old.least, new.least), np.maximum(old.most, new.most)
        old.total, old.rows = old.total + new.total, old.rows + new.rows


def _pair(node: ir.Node) -> tuple[ir.Node, Tensor, Bias] | None:
    """The product that alone reads what a product makes, its matrix (R, O) and its bias, if all are there."""
    if not is_onnx(node, "MatMul") or not multiplies_by_matrix(node) or not is_read_once(node.outputs[0]):
        return None
    (last,) = node.outputs[0].consumers()
    if not is_onnx(last, "MatMul", "Gemm") or last.inputs[0] is not node.outputs[0]:
        return None
    if not multiplies_by_matrix(last):
        return None
    matrix = matrix_of(last)
    bias = bias_of(Use(last, 1, False), matrix.shape[1])
    return None if bias is None else (last, matrix, bias)


def _error_of(node: ir.Node, model: ir.Model, plain: ir.Model) -> np.ndarray | None:
    """What rounding took from the matrix of an int8 product (I, O), float64."""
    quantized = node.inputs[1] if is_onnx(node, "MatMulInteger") else None
    if quantized is None or quantized.const_value is None:
        return None
    floats, scale = floats_of(plain, str(quantized.name)), scale_of(model.graph, quantized)
    if floats is None or floats.ndim != 2 or scale is None or scale.const_value is None:
        return None
    rounded, scales = quantized.const_value.numpy(), scale.const_value.numpy()
    return floats.astype(np.float64) - rounded * scales.astype(np.float64)


def _rounded_input(node: ir.Node) -> ir.Value | None:
    """What an int8 product reads, before it is rounded."""
    maker = node.inputs[0].producer() if is_onnx(node, "MatMulInteger") and node.inputs[0] else None
    return maker.inputs[0] if maker is not None and is_onnx(maker, "DynamicQuantizeLinear") else None


def _product(node: ir.Node) -> ir.Value:
    """What an int8 product gives in float32, behind its Cast and its Mul by the scales."""
    value = node.outputs[0]
    for op_type in ("Cast", "Mul"):
        if is_read_once(value) and is_onnx(reader := value.consumers()[0], op_type):
            value = reader.outputs[0]
    return value
