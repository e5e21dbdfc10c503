"""ONNX's Attention in torch, with masks, caches and caps, against ONNX Runtime."""

import numpy as np
import pytest
from onnx_in_torch import RNG, compare, floats, write

QUERY, KEY, VALUE = floats(2, 4, 5, 6), floats(2, 2, 7, 6), floats(2, 2, 7, 3)
PAST = [floats(2, 2, 3, 6), floats(2, 2, 3, 3)]
SELF = [floats(2, 4, 5, 6), floats(2, 4, 5, 6), floats(2, 4, 5, 6)]
ALLOWED = RNG.random((2, 1, 5, 7)) < 0.7
ALLOWED[..., 0] = True
ADDED = floats(2, 4, 5, 7)
CASES = {
    "causal and allowed": ([QUERY, KEY, VALUE, ALLOWED], {"is_causal": 1}, 1, 23),
    "causal and added to": ([QUERY, KEY, VALUE, ADDED], {"is_causal": 1, "scale": 0.2}, 1, 23),
    "a cache": ([QUERY, KEY, VALUE, None, *PAST], {}, 3, 23),
    "a cache, causal": ([*SELF, None, *(floats(2, 4, 3, 6) for _ in "kv")], {"is_causal": 1}, 3, 23),
    "a cache and a mask": ([QUERY, KEY, VALUE, floats(5, 10), *PAST], {"is_causal": 1}, 3, 23),
    "a cache, flat": (
        [floats(2, 5, 24), floats(2, 7, 12), floats(2, 7, 6), floats(5, 10), *PAST],
        {"q_num_heads": 4, "kv_num_heads": 2},
        3,
        23,
    ),
    "keys and values": ([QUERY, KEY, VALUE], {}, 3, 23),
    "a cap": ([QUERY, KEY, VALUE], {"softcap": 0.7}, 1, 23),
    "a cap and a mask": ([QUERY, KEY, VALUE, ADDED], {"softcap": 0.7}, 1, 24),
    "a cap, causal": ([QUERY, KEY, VALUE, ALLOWED], {"softcap": 0.7, "is_causal": 1}, 1, 24),
    "a cap and a mask of opset 23": ([QUERY, KEY, VALUE, ADDED], {"softcap": 0.7}, 1, 23),
    "lengths, causal": (
        [QUERY, KEY, VALUE, None, None, None, np.array([7, 5], dtype=np.int64)],
        {"is_causal": 1},
        1,
        24,
    ),
    "lengths": (
        [QUERY, KEY, VALUE, None, None, None, np.array([7, 4], dtype=np.int64)],
        {},
        1,
        24,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_attention(tmp_path, case):
    inputs, attributes, outputs, opset = CASES[case]
    path = tmp_path / "m.onnx"
    compare(path, write(path, "Attention", inputs, attributes, outputs, opset))
