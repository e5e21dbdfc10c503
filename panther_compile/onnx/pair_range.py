"""Weights in int8 that no CPU overflows on.

ONNX Runtime multiplies int8 weights by unsigned 8-bit inputs. On x86 CPUs without VNNI instructions (AVX2,
and AVX-512 before Cascade Lake) `vpmaddubsw` adds two neighbouring products in 16 bits and saturates:
255 (p + q) fits only while |p + q| <= 128. Weights of the whole range [-127, 127] then give wrong outputs
there, without a word. ONNX Runtime's remedy, `reduce_range`, takes one bit from all weights. Here only pairs
that would overflow are moved, to the closest one that does not, and each output's scale is the one of least
squared error among a few: never worse than one bit less, and the outputs are the same on every CPU.
"""

import numpy as np
import onnx_ir as ir

from panther_compile.onnx.patterns import is_onnx

LARGEST_SUM = 128  # of two neighbours of one sign
LARGEST = 127
_WIDER = np.linspace(
    1, 2, 11
)  # scales that are tried, of that of the largest weight: at 2 no pair is too large


def scale_of(graph: ir.Graph, quantized: ir.Value) -> ir.Value | None:
    """The scales of numbers that `quantize_dynamic` made, by the name that it gives them; None without."""
    return graph.initializers.get(str(quantized.name).removesuffix("_quantized") + "_scale")


def fit_pair_range(model: ir.Model, plain: ir.Model) -> None:
    """Round the weights of a quantized model anew, so that no pair of neighbours overflows.

    Args:
        model: of `quantize_dynamic`, its weights int8 with zero points of 0; is changed.
        plain: the model that was quantized, with the weights as they were.
    """
    for node in model.graph.all_nodes():
        if not is_onnx(node, "MatMulInteger") or (quantized := node.inputs[1]) is None:
            continue
        floats = floats_of(plain, str(quantized.name))
        scale = scale_of(model.graph, quantized)
        if floats is None or scale is None or quantized.const_value is None or scale.const_value is None:
            continue
        rounded, scales = pair_rounded(floats, scale.const_value.numpy())
        quantized.const_value = ir.tensor(rounded, name=quantized.name)
        scale.const_value = ir.tensor(scales, name=scale.name)


def pair_rounded(weight: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a weight to int8 such that neighbours of one sign sum up to at most 128.

    Args:
        weight: (..., I, O); neighbours are the rows 2 i and 2 i + 1.
        scales: (O,) or (), positive: what the largest weight over 127 is, of each output or of all.

    Returns:
        the rounded weight (..., I, O) int8, and the scales, of their shape and dtype.
    """
    best, chosen, least = None, scales, None
    axes = tuple(range(weight.ndim - 1)) if scales.ndim else None
    for wider in _WIDER.astype(scales.dtype):
        rounded = _rounded(weight / (scales * wider))
        errors = np.square(rounded * (scales * wider) - weight, dtype=np.float64).sum(axes)
        if best is None or least is None:
            best, chosen, least = rounded, scales * wider, errors
            continue
        better = errors < least
        best, chosen, least = (
            np.where(better, new, old)
            for new, old in ((rounded, best), (scales * wider, chosen), (errors, least))
        )
    assert best is not None
    return best.astype(np.int8), np.asarray(chosen, scales.dtype)


def _rounded(weight: np.ndarray) -> np.ndarray:
    """The closest whole numbers (..., I, O) whose pairs fit; the last of odd rows has no pair."""
    rounded = np.clip(np.rint(weight), -LARGEST, LARGEST)
    even = weight.shape[-2] // 2 * 2
    first, second = rounded[..., 0:even:2, :], rounded[..., 1:even:2, :]
    over = (first * second > 0) & (np.abs(first + second) > LARGEST_SUM)
    # The closest point of |p| + |q| = 128: both lose half of what is too much.
    sizes = np.abs(weight[..., :even, :])
    size = np.clip(np.rint((sizes[..., 0::2, :] - sizes[..., 1::2, :] + LARGEST_SUM) / 2), 1, LARGEST)
    rounded[..., 0:even:2, :] = np.where(over, np.sign(first) * size, first)
    rounded[..., 1:even:2, :] = np.where(over, np.sign(second) * (LARGEST_SUM - size), second)
    return rounded


def floats_of(plain: ir.Model, name: str) -> np.ndarray | None:
    """What a quantized weight was made of, as (..., I, O); None where the plain model has no such weight."""
    name = name.removesuffix("_quantized")
    for source, is_flipped in ((name, False), (name.removesuffix("_Transposed"), True)):
        value = plain.graph.initializers.get(source)
        if value is not None and value.const_value is not None:
            array = value.const_value.numpy()
            return array.T if is_flipped else array
    return None
