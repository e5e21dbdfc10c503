"""Every operator of ONNX Runtime's own that torch runs, against ONNX Runtime."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx_in_torch import RNG, compare, floats, write

from panther_compile.onnx.as_torch import OnnxModule, as_tensors
from panther_compile.onnx.torch_cells import UnknownOperatorError
from panther_compile.onnx.torch_runtime import RUNTIME_OPERATORS

RUNTIME = "com.microsoft"
X, NORM = floats(2, 5, 12), [np.abs(floats(12)), floats(12)]
WEIGHTS = [floats(12, 36) / 3, floats(36)]
MASK = (np.arange(5) < np.array([[5], [3]])).astype(np.int32)
LENGTHS = np.array([5, 3], dtype=np.int32)
QKV = [floats(2, 5, 12), floats(2, 7, 12), floats(2, 7, 12)]
WIDE = (np.arange(7) < np.array([[7], [3]])).astype(np.int32)
PAST = [floats(2, 4, 3, 3), floats(2, 4, 3, 3)]
IDS = RNG.integers(0, 9, (2, 5)).astype(np.int32)
TABLES = [floats(9, 12), floats(8, 12), floats(2, 12)]
ANGLES = [floats(16, 2), floats(16, 2)]
ROWS = np.array([4, 4], dtype=np.int32), np.array(5, dtype=np.int32)  # the last place of each, and how many
LATER = np.array([7], dtype=np.int32), np.array(8, dtype=np.int32)
GROUPED = {"num_heads": 4, "kv_num_heads": 2}
GROUPS = [floats(2, 5, 64), floats(2, 5, 32), floats(2, 5, 32)]
NEW = [one[:1] for one in GROUPS]
CACHE = [floats(1, 2, 3, 16), floats(1, 2, 3, 16)]
EMPTY = [floats(2, 2, 0, 16), floats(2, 2, 0, 16)]
TURNS = [floats(16, 8), floats(16, 8)]
HEADS = {"num_heads": 4}
# operator: (inputs, attributes, outputs), several of some; None leaves an input out.
CASES = {
    "Gelu": [([X], {}, 1)],
    "BiasGelu": [([X, floats(12)], {}, 1)],
    "FastGelu": [([X], {}, 1), ([X, floats(12)], {}, 1)],
    "QuickGelu": [([X], {}, 1), ([X], {"alpha": 1.3}, 1)],
    "FusedMatMul": [
        ([X, floats(2, 7, 12)], {"transB": 1, "alpha": 0.5}, 1),
        ([X, floats(2, 5, 7)], {"transA": 1}, 1),
    ],
    "SkipLayerNormalization": [
        ([X, floats(2, 5, 12), *NORM], {"epsilon": 1e-5}, 1),
        ([X, floats(1, 5, 12), *NORM, floats(12)], {}, (0, 3)),
        ([X, floats(2, 5, 12), NORM[0]], {"epsilon": 1e-3}, 1),
    ],
    "SkipSimplifiedLayerNormalization": [
        ([X, floats(2, 5, 12), NORM[0]], {"epsilon": 1e-6}, (0, 3)),
        ([X, floats(2, 5, 12), NORM[0], floats(12)], {"epsilon": 1e-3}, 1),
    ],
    "EmbedLayerNormalization": [
        ([IDS, IDS % 2, *TABLES, *NORM, MASK], {"epsilon": 1e-12}, 2),
        ([IDS, None, *TABLES[:2], None, *NORM, None, IDS % 8], {"epsilon": 1e-5}, (0, 1, 2)),
    ],
    "Attention": [
        ([X, *WEIGHTS], HEADS, 1),
        ([X, *WEIGHTS, MASK], HEADS, 1),
        ([X, *WEIGHTS, LENGTHS], HEADS | {"scale": 0.3}, 1),
        ([X, *WEIGHTS, np.repeat(MASK[:, None], 5, 1)], HEADS | {"mask_filter_value": -50.0}, 1),
        ([X, *WEIGHTS, None, None, floats(2, 4, 5, 5)], HEADS, 1),
        ([X, *WEIGHTS, None, floats(2, 2, 4, 3, 3)], HEADS | {"unidirectional": 1}, 2),
        ([X, floats(12, 28), floats(28), MASK], HEADS | {"qkv_hidden_sizes": [8, 8, 12]}, 1),
    ],
    "MultiHeadAttention": [
        (QKV, HEADS, 1),
        ([*QKV, floats(36), WIDE], HEADS, 1),
        ([*QKV, None, None, floats(1, 4, 5, 7)], HEADS | {"scale": 0.4}, 1),
        ([X, X, X, None, None, None, *PAST], HEADS | {"unidirectional": 1}, 3),
        ([X, floats(2, 4, 7, 3), floats(2, 4, 7, 3)], HEADS, 1),
        ([X, X, X, floats(36), LENGTHS], HEADS, 1),
    ],
    "GroupQueryAttention": [
        ([*GROUPS, *EMPTY, *ROWS], GROUPED, 3),
        ([*NEW, *CACHE, *LATER], GROUPED | {"scale": 0.4}, 3),
        ([*GROUPS, *EMPTY, *ROWS, *TURNS], GROUPED | {"do_rotary": 1}, 3),
        ([*NEW, *CACHE, *LATER, *TURNS], GROUPED | {"do_rotary": 1, "rotary_interleaved": 1}, 3),
        ([*GROUPS, *EMPTY, *ROWS], GROUPED | {"local_window_size": 2}, 3),
        ([*GROUPS, *EMPTY, *ROWS], GROUPED | {"softcap": 0.7}, 3),
        ([floats(2, 5, 128), None, None, *EMPTY, *ROWS], GROUPED, 3),
    ],
    "RotaryEmbedding": [
        ([X, IDS.astype(np.int64), *ANGLES], {}, 1),
        ([X, np.array([3], dtype=np.int64), *ANGLES], {"interleaved": 1}, 1),
        ([floats(2, 3, 5, 4), IDS.astype(np.int64), *ANGLES], {}, 1),
        ([floats(2, 5, 18), IDS.astype(np.int64), *ANGLES], {"num_heads": 3, "rotary_embedding_dim": 4}, 1),
    ],
}


@pytest.mark.parametrize(
    ("operator", "place"), [(name, place) for name, cases in CASES.items() for place in range(len(cases))]
)
def test_operator(tmp_path, operator, place):
    inputs, attributes, outputs = CASES[operator][place]
    path = tmp_path / "m.onnx"
    compare(path, write(path, operator, inputs, attributes, outputs, 17, RUNTIME))


def test_every_operator_is_tested():
    assert set(CASES) == set(RUNTIME_OPERATORS)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("FusedMatMul", [X, floats(2, 12, 7)], {"transBatchA": 1}),
        ("Attention", [X, *WEIGHTS, np.ones((2, 1, 5, 5), np.int32)], HEADS),
        ("Attention", [X, *WEIGHTS], HEADS | {"do_rotary": 1}),
        ("MultiHeadAttention", [floats(2, 5, 4, 3, 3)], HEADS),
        ("GroupQueryAttention", [*GROUPS, *EMPTY, np.array([4, 2], np.int32), ROWS[1]], GROUPED),
        ("RotaryEmbedding", [X, IDS.astype(np.int64), *ANGLES], {"scale": 2.0}),
    ],
)
def test_uses_that_torch_does_not_know(tmp_path, operator, inputs, attributes):
    feed = write(tmp_path / "m.onnx", operator, inputs, attributes, 1, 17, RUNTIME)
    with pytest.raises(UnknownOperatorError):
        OnnxModule(ir.load(tmp_path / "m.onnx"), [])(**as_tensors(feed))
