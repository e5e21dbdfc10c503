"""Weights in int8 that no CPU overflows on: what is moved, what is not, and how far."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import make, node, random, run

from panther_compile.onnx.int8 import int8_model
from panther_compile.onnx.pair_range import LARGEST_SUM, pair_rounded

SHAPES = [(2, 1), (96, 64), (97, 8), (1, 4), (3, 48, 16)]
DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "of one sign": lambda rng, shape: rng.uniform(0.5, 1, shape),
    "as large as each other": lambda rng, shape: np.ones(shape),
}


def largest_sum(rounded):
    """The largest sum of two neighbours of one sign."""
    wide = rounded.astype(np.int64)
    even = wide.shape[-2] // 2 * 2
    first, second = wide[..., 0:even:2, :], wide[..., 1:even:2, :]
    return np.abs(np.where(first * second > 0, first + second, 0)).max(initial=0)


def scales_of(weight):
    sizes = np.abs(weight).max(tuple(range(weight.ndim - 1)))
    return np.where(sizes > 0, sizes / 127, 1).astype(np.float32)


def error(rounded, scales, weight):
    return np.square(rounded * scales.astype(np.float64) - weight).sum(tuple(range(weight.ndim - 1)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draw", DRAWS)
def test_no_pair_overflows_and_none_is_worse_than_with_seven_bits(draw, shape):
    weight = DRAWS[draw](np.random.default_rng(0), shape).astype(np.float32)
    scales = scales_of(weight)
    rounded, found = pair_rounded(weight, scales)
    assert rounded.dtype == np.int8
    assert found.dtype == np.float32
    assert found.shape == scales.shape
    assert rounded.shape == weight.shape
    assert np.abs(rounded.astype(int)).max() <= 127
    assert largest_sum(rounded) <= LARGEST_SUM
    seven_bits = np.rint(weight / (2 * scales))
    assert (error(rounded, found, weight) <= error(seven_bits, 2 * scales, weight) * (1 + 1e-5)).all()


def test_weights_whose_pairs_fit_keep_eight_bits():
    weight = random(64, 16)
    weight[1::2] *= -np.sign(weight[1::2]) * np.sign(weight[::2])  # neighbours of other signs
    scales = scales_of(weight)
    rounded, found = pair_rounded(weight, scales)
    plain = np.rint(weight / scales)
    assert (error(rounded, found, weight) <= error(plain, scales, weight)).all()


def test_a_pair_moves_to_the_closest_one_that_fits():
    weight = np.array([[127.0], [80.0], [5.0], [-127.0]], np.float32)
    rounded, found = pair_rounded(weight, np.ones(1, np.float32))
    p, q = np.meshgrid(np.arange(-127, 128), np.arange(-127, 128))
    fit = (p * q <= 0) | (abs(p + q) <= LARGEST_SUM)
    candidates = [
        sum(((p * s - a) ** 2 + (q * s - b) ** 2)[fit].min() for a, b in (weight[:2, 0], weight[2:, 0]))
        for s in np.linspace(1, 2, 11, dtype=np.float32)
    ]
    assert error(rounded, found, weight)[0] == pytest.approx(min(candidates), rel=1e-5)


def test_columns_of_zeros_and_one_scale_for_all():
    weight = random(6, 3)
    weight[:, 1] = 0
    rounded, found = pair_rounded(weight, scales_of(weight))
    assert not rounded[:, 1].any()
    assert np.isfinite(found).all()
    one, scale = pair_rounded(weight, np.float32(np.abs(weight).max() / 127))
    assert scale.shape == ()
    assert np.abs(one * scale - weight).max() < 0.7 * np.abs(weight).max()
    assert largest_sum(one) <= LARGEST_SUM


@pytest.mark.parametrize("op_type", ["Gemm", "MatMul"])
def test_files(tmp_path, op_type):
    weights = {
        "w": random(40, 97) if op_type == "Gemm" else random(97, 40),
        "v": random(40, 8),
        "u": random(2, 8, 8),
    }
    options = {"transB": 1} if op_type == "Gemm" else {}
    nodes = [node(op_type, ["x", "w"], ["h"], **options), node("MatMul", ["h", "v"], ["i"])]
    nodes.append(node("MatMul", ["i", "u"], ["y"]))  # a batch of matrices stays as it is
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 97), y=(2, "n", 8))
    with int8_model(ir.load(source), tmp_path) as model:
        ir.save(model, tmp_path / "out.onnx")
    found = {
        one.name: onnx.numpy_helper.to_array(one)
        for one in onnx.load(tmp_path / "out.onnx").graph.initializer
    }
    whole = [array for array in found.values() if array.dtype == np.int8 and array.ndim > 1]
    assert sorted(array.shape for array in whole) == [(40, 8), (97, 40)]
    assert max(map(largest_sum, whole)) <= LARGEST_SUM
    x = random(64, 97)
    wanted, outputs = run(source, x)[0], run(tmp_path / "out.onnx", x)[0]
    assert np.linalg.norm(outputs - wanted) < 0.025 * np.linalg.norm(wanted)


def test_products_as_a_cpu_without_vnni_adds_them():
    """The arithmetic of `vpmaddubsw` on what is written, beside the exact one."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(128, 64)).astype(np.float32)
    x = rng.integers(0, 256, (32, 128))

    def added(w):
        products = x[:, :, None] * w.astype(np.int64)
        return np.clip(products[:, ::2] + products[:, 1::2], -(2**15), 2**15 - 1).sum(1)

    plain = np.rint(weight / scales_of(weight))
    assert (added(plain) != x @ plain).mean() > 0.1
    rounded, _ = pair_rounded(weight, scales_of(weight))
    assert (added(rounded) == x @ rounded.astype(np.int64)).all()
