"""Every operator that torch runs for ONNX, against ONNX Runtime, of a new opset and of an old one."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper
from onnx_in_torch import RNG, compare, floats, write

from panther_compile.onnx.as_torch import OnnxModule, as_tensors
from panther_compile.onnx.torch_cells import UnknownOperatorError
from panther_compile.onnx.torch_ops import OPERATORS


def ints(*values):
    return np.array(values, dtype=np.int64)


def positive(*shape):
    return np.abs(floats(*shape)) + np.float32(0.1)


def truth(*shape):
    return RNG.random(shape) < 0.5


X, MAP, LINE = floats(2, 3, 4), floats(2, 4, 7, 6), floats(2, 4, 11)
CELL = [floats(5, 2, 6), floats(2, 12, 6), floats(2, 12, 3), floats(2, 24)]
GATED = [floats(5, 2, 6), floats(2, 9, 6), floats(2, 9, 3), floats(2, 18)]
HEADS = [floats(2, 4, 5, 3), floats(2, 2, 7, 3), floats(2, 2, 7, 6)]
FLAT = floats(2, 5, 12)
LENGTHS = np.array([3, 5], dtype=np.int32)
SIMPLE = [floats(5, 2, 6), floats(2, 3, 6), floats(2, 3, 3), floats(2, 6)]


def one_way(cell):
    """The inputs of a node of one direction."""
    return cell[:1] + [one[:1] for one in cell[1:]]


ONE_INPUT = (
    *("Abs", "Neg", "Exp", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos", "Erf", "Tanh", "Sigmoid", "Relu"),
    *("Selu", "HardSwish", "Softplus", "Softsign", "Mish", "Identity", "Shape", "Size", "IsNaN"),
    *("Tan", "Atan", "Sinh", "Cosh", "Asinh", "IsInf", "ThresholdedRelu"),
)
# operator: (inputs, attributes, outputs), several of some; None leaves an input out.
CASES = {
    **{name: [([X], {}, 1)] for name in ONE_INPUT},
    **{name: [([positive(2, 3)], {}, 1)] for name in ("Sqrt", "Log", "Reciprocal")},
    **{name: [([X, floats(3, 1)], {}, 1)] for name in ("Add", "Sub", "Mul")},
    **{name: [([np.tanh(X)], {}, 1)] for name in ("Asin", "Acos", "Atanh")},
    "Acosh": [([1 + positive(2, 3)], {}, 1)],
    **{name: [([ints(12, 10), ints(7, 3)], {}, 1)] for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")},
    "BitwiseNot": [([ints(12, 10)], {}, 1)],
    "Swish": [([X], {"alpha": 1.5}, 1)],
    "Div": [([X, positive(4)], {}, 1), ([ints(7, -7, 8), ints(2, 2, -3)], {}, 1)],
    "Pow": [([positive(2, 3), np.float32(1.5)], {}, 1), ([X, ints(2)], {}, 1)],
    **{name: [([X, floats(3, 1), floats(1)], {}, 1)] for name in ("Sum", "Max", "Min", "Mean")},
    "Mod": [([ints(7, -7), ints(3, 3)], {}, 1), ([X, positive(4)], {"fmod": 1}, 1)],
    "Where": [([truth(3, 4), X, floats(1)], {}, 1)],
    **{
        name: [([ints(1, 2, 3), ints(3, 2, 1)], {}, 1)]
        for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    **{name: [([truth(4), truth(4)], {}, 1)] for name in ("And", "Or", "Xor")},
    "Not": [([truth(4)], {}, 1)],
    "Dropout": [([X], {}, 1)],
    "Cast": [([X], {"to": TensorProto.INT64}, 1), ([ints(0, 2)], {"to": TensorProto.BOOL}, 1)],
    "CastLike": [([ints(1, 2), floats(1)], {}, 1)],
    "Clip": [
        ([X, np.float32(-0.5), np.float32(0.5)], {}, 1),
        ([X, None, np.float32(0.1)], {}, 1),
        ([X], {}, 1),
    ],
    "LeakyRelu": [([X], {}, 1), ([X], {"alpha": 0.3}, 1)],
    "Elu": [([X], {}, 1)],
    "Celu": [([X], {"alpha": 2.0}, 1)],
    "HardSigmoid": [([X], {}, 1), ([X], {"alpha": 1 / 6, "beta": 0.4}, 1)],
    "PRelu": [([X, floats(3, 1)], {}, 1)],
    "Gelu": [([X], {}, 1), ([X], {"approximate": "tanh"}, 1)],
    **{name: [([X], {}, 1), ([X], {"axis": 1}, 1)] for name in ("Softmax", "LogSoftmax")},
    **{
        name: [([X, ints(1)], {"keepdims": 0}, 1), ([X], {}, 1), ([X], {"noop_with_empty_axes": 1}, 1)]
        for name in (
            "ReduceMean",
            "ReduceSum",
            "ReduceMax",
            "ReduceMin",
            "ReduceL1",
            "ReduceL2",
            "ReduceSumSquare",
            "ReduceProd",
            "ReduceLogSumExp",
        )
    },
    "ReduceLogSum": [([positive(2, 3, 4), ints(0, 2)], {}, 1)],
    "ArgMin": [([X], {"axis": 1}, 1)],
    "MeanVarianceNormalization": [([MAP], {}, 1), ([X], {"axes": [-1]}, 1)],
    "LRN": [([MAP], {"size": 3, "alpha": 0.3, "beta": 0.6, "bias": 2.0}, 1)],
    "LpNormalization": [([X], {}, 1), ([X], {"p": 1, "axis": 1}, 1)],
    "GridSample": [
        ([MAP, np.tanh(floats(2, 3, 5, 2))], {}, 1),
        ([MAP, floats(2, 3, 5, 2)], {"mode": "cubic", "padding_mode": "border", "align_corners": 1}, 1),
        ([MAP, floats(2, 3, 5, 2)], {"mode": "nearest", "padding_mode": "reflection"}, 1),
    ],
    "ScatterElements": [
        ([X, np.array([[[0, -1]]]), floats(1, 1, 2)], {"axis": 1}, 1),
        ([X, np.array([[[1, 1], [0, 1]]]), floats(1, 2, 2)], {"axis": 2, "reduction": "add"}, 1),
        ([X, np.array([[[1, 1], [0, 1]]]), floats(1, 2, 2)], {"axis": 2, "reduction": "max"}, 1),
    ],
    "ScatterND": [
        ([X, np.array([[0, 2], [1, 0]]), floats(2, 4)], {}, 1),
        ([X, np.array([[0, 2], [0, 2]]), floats(2, 4)], {"reduction": "add"}, 1),
    ],
    "OneHot": [
        ([np.array([[1, -1, 9]]), np.int64(4), floats(2)], {}, 1),
        ([ints(1, 3), np.int64(4), floats(2)], {"axis": 0}, 1),
    ],
    "NonZero": [([ints(0, 3, 0, 1)], {}, 1)],
    "ArgMax": [([X], {"axis": -1, "keepdims": 0}, 1)],
    "TopK": [([X, ints(2)], {"axis": 1}, 2), ([X, ints(2)], {"largest": 0}, 2)],
    "CumSum": [([X, np.int64(1)], {}, 1)],
    "Reshape": [([X, ints(0, -1)], {}, 1)],
    "Transpose": [([X], {}, 1), ([X], {"perm": [1, 0, 2]}, 1)],
    "Unsqueeze": [([X, ints(0, -1)], {}, 1)],
    "Squeeze": [([X[:, :1], ints(1)], {}, 1), ([X[:1, :1]], {}, 1)],
    "Flatten": [([MAP], {}, 1), ([MAP], {"axis": -1}, 1)],
    "Concat": [([X, floats(2, 1, 4)], {"axis": 1}, 1)],
    "Split": [([X, ints(1, 3)], {"axis": 2}, 2), ([floats(2, 5)], {"axis": 1, "num_outputs": 2}, 2)],
    "Slice": [
        ([X, ints(1), ints(9), ints(2), ints(2)], {}, 1),
        ([X, ints(-1), ints(-(2**63)), ints(1), ints(-1)], {}, 1),
        ([X, ints(3, -2), ints(0, 2**62), ints(2, 1), ints(-2, 1)], {}, 1),
    ],
    "Gather": [
        ([X, ints(2, -1)], {"axis": 1}, 1),
        ([X, np.int64(1)], {}, 1),
        ([X, ints(1)[None]], {"axis": 2}, 1),
    ],
    "GatherND": [([X, np.array([[0, 1], [1, 2]])], {}, 1)],
    "GatherElements": [([X, np.zeros((2, 3, 4), np.int64)], {"axis": 1}, 1)],
    "Expand": [([X[:1], ints(2, 1, 4)], {}, 1)],
    "Tile": [([X, ints(2, 1, 3)], {}, 1)],
    "Pad": [
        ([X, ints(0, 1, 0, 1, 0, 2), np.float32(0.5)], {}, 1),
        ([X, ints(0, 1, 2, 0, 1, 3)], {"mode": "reflect"}, 1),
        ([X, ints(2, 1), None, ints(1)], {"mode": "edge"}, 1),
        ([X, ints(2, 1), None, ints(1)], {"mode": "wrap"}, 1),
        ([X, ints(-1, 2), None, ints(-1)], {}, 1),
    ],
    "ConstantOfShape": [
        ([ints(2, 3)], {}, 1),
        ([ints(2)], {"value": numpy_helper.from_array(ints(7))}, 1),
    ],
    "EyeLike": [([floats(3, 3)], {}, 1), ([floats(3, 2)], {}, 1)],
    "Range": [([np.int64(1), np.int64(9), np.int64(3)], {}, 1)],
    "Trilu": [([X], {"upper": 0}, 1), ([X, np.int64(1)], {}, 1)],
    "DepthToSpace": [([MAP], {"blocksize": 2}, 1), ([MAP], {"blocksize": 2, "mode": "CRD"}, 1)],
    "SpaceToDepth": [([MAP[:, :, :6]], {"blocksize": 2}, 1)],
    "Einsum": [([X, floats(4, 5)], {"equation": "abc,cd->abd"}, 1)],
    "MatMul": [([X, floats(4, 5)], {}, 1), ([floats(5, 3), X], {}, 1)],
    "Gemm": [
        ([floats(3, 4), floats(4, 5), floats(5)], {"alpha": 0.5, "beta": 2.0}, 1),
        ([floats(4, 3), floats(5, 4)], {"transA": 1, "transB": 1}, 1),
    ],
    "Conv": [
        ([LINE, floats(6, 4, 3), floats(6)], {"pads": [2, 1], "strides": [2], "dilations": [2]}, 1),
        ([MAP, floats(6, 2, 3, 2)], {"group": 2, "auto_pad": "SAME_UPPER"}, 1),
        ([MAP, floats(6, 4, 3, 2)], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, 1),
        ([floats(1, 2, 4, 5, 6), floats(3, 2, 2, 3, 3)], {"auto_pad": "VALID"}, 1),
    ],
    "ConvTranspose": [
        ([MAP, floats(4, 3, 3, 2), floats(3)], {"strides": [2, 2], "pads": [1, 0, 1, 0]}, 1),
        ([MAP, floats(4, 3, 3, 3)], {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 0]}, 1),
        ([MAP, floats(4, 3, 2, 2), floats(3)], {"strides": [3, 3], "output_padding": [1, 2]}, 1),
        ([MAP, floats(4, 3, 3, 3)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, 1),
        ([MAP, floats(4, 3, 4, 3)], {"strides": [2, 3], "auto_pad": "SAME_LOWER"}, 1),
        ([MAP, floats(4, 3, 2, 2)], {"strides": [2, 2], "auto_pad": "VALID"}, 1),
        ([MAP, floats(4, 3, 4, 4)], {"strides": [2, 2], "output_shape": [13, 12]}, 1),
        ([LINE, floats(4, 2, 3)], {"group": 2, "strides": [2], "output_padding": [1]}, 1),
    ],
    "MaxPool": [
        ([MAP], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}, 1),
        ([MAP], {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}, 1),
        ([LINE], {"kernel_shape": [3], "strides": [2], "ceil_mode": 1, "dilations": [2]}, 1),
    ],
    "AveragePool": [
        ([MAP], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}, 1),
        ([MAP], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}, 1),
    ],
    **{name: [([MAP], {}, 1)] for name in ("GlobalAveragePool", "GlobalMaxPool")},
    "BatchNormalization": [([MAP, floats(4), floats(4), floats(4), positive(4)], {"epsilon": 0.01}, 1)],
    "LayerNormalization": [([X, floats(4), floats(4)], {}, 1), ([X, floats(3, 4)], {"axis": 1}, 1)],
    "SimplifiedLayerNormalization": [([X, floats(4)], {"epsilon": 1e-3, "axis": -1}, 1)],
    "RMSNormalization": [],
    "InstanceNormalization": [([MAP, floats(4), floats(4)], {}, 1)],
    "GroupNormalization": [([MAP, floats(4), floats(4)], {"num_groups": 2}, 1)],
    "Resize": [
        (
            [MAP, None, np.array([1, 1, 2, 2], np.float32)],
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
            1,
        ),
        ([MAP, None, None, ints(2, 4, 9, 9)], {"mode": "linear"}, 1),
        (
            [MAP, None, None, ints(2, 4, 9, 9)],
            {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            1,
        ),
    ],
    "LSTM": [
        (
            [*CELL, LENGTHS, floats(2, 2, 3), floats(2, 2, 3)],
            {"hidden_size": 3, "direction": "bidirectional"},
            3,
        ),
        ([*one_way(CELL), LENGTHS], {"hidden_size": 3, "direction": "reverse"}, 3),
        (CELL, {"hidden_size": 3, "direction": "bidirectional"}, 3),
        (
            [CELL[0], CELL[1][:1], CELL[2][:1], None, None, floats(1, 2, 3), floats(1, 2, 3)],
            {"hidden_size": 3},
            3,
        ),
        (one_way(CELL), {"hidden_size": 3, "direction": "reverse"}, 3),
    ],
    "GRU": [
        (
            [*GATED, LENGTHS],
            {"hidden_size": 3, "direction": "bidirectional", "linear_before_reset": 1},
            2,
        ),
        (GATED, {"hidden_size": 3, "direction": "bidirectional", "linear_before_reset": 1}, 2),
        (GATED, {"hidden_size": 3, "direction": "bidirectional"}, 2),
        ([*one_way(GATED), None, floats(1, 2, 3)], {"hidden_size": 3, "direction": "reverse"}, 2),
        (one_way(GATED)[:3], {"hidden_size": 3, "activations": ["Sigmoid", "Tanh"]}, 2),
    ],
    "Attention": [
        (HEADS, {"is_causal": 1, "qk_matmul_output_mode": 0}, 1),
        ([*HEADS, floats(5, 7)], {"scale": 0.3}, 1),
        ([*HEADS, floats(2, 1, 5, 7) > 0], {}, 1),
        ([FLAT, FLAT[:, :, :6], FLAT[:, :, 6:]], {"q_num_heads": 4, "kv_num_heads": 2}, 1),
    ],
    "RotaryEmbedding": [
        ([floats(2, 4, 5, 6), floats(2, 5, 3), floats(2, 5, 3)], {}, 1),
        ([FLAT, floats(9, 2), floats(9, 2), ints(*range(10)).reshape(2, 5) % 9], {"num_heads": 3}, 1),
        ([FLAT, floats(2, 5, 3), floats(2, 5, 3)], {"num_heads": 2, "interleaved": 1}, 1),
        (
            [floats(2, 4, 5, 8), floats(9, 2), floats(9, 2), ints(*range(10)).reshape(2, 5) % 9],
            {"rotary_embedding_dim": 4},
            1,
        ),
    ],
    "RNN": [
        (SIMPLE, {"hidden_size": 3, "direction": "bidirectional", "activations": ["Tanh", "Tanh"]}, 2),
        ([*one_way(SIMPLE), None, floats(1, 2, 3)], {"hidden_size": 3}, 2),
        ([*one_way(SIMPLE), LENGTHS], {"hidden_size": 3, "direction": "reverse"}, 2),
    ],
}
OLD = {
    "Softmax": ([X], {"axis": 1}),
    "ReduceMean": ([X], {"axes": [1]}),
    "Unsqueeze": ([X], {"axes": [0, 2]}),
    "Squeeze": ([X[:1]], {"axes": [0]}),
    "Split": ([X], {"axis": 2, "split": [1, 3]}),
}


@pytest.mark.parametrize(
    ("operator", "place"), [(name, place) for name, cases in CASES.items() for place in range(len(cases))]
)
def test_operator(tmp_path, operator, place):
    inputs, attributes, outputs = CASES[operator][place]
    opset = {"GroupNormalization": 18, "Attention": 23, "RotaryEmbedding": 23, "Swish": 24}.get(operator, 20)
    if operator == "GroupNormalization":
        inputs = [inputs[0], inputs[1][:2], inputs[2][:2]]
    compare(tmp_path / "m.onnx", write(tmp_path / "m.onnx", operator, inputs, attributes, outputs, opset))


@pytest.mark.parametrize("operator", OLD)
def test_operator_of_an_old_opset(tmp_path, operator):
    inputs, attributes = OLD[operator]
    outputs = 2 if operator == "Split" else 1
    compare(tmp_path / "m.onnx", write(tmp_path / "m.onnx", operator, inputs, attributes, outputs, 11))


def test_every_operator_is_tested():
    assert set(CASES) == set(OPERATORS)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("GRU", [*one_way(GATED), LENGTHS], {"hidden_size": 3}),
        ("GRU", one_way(GATED), {"hidden_size": 3, "clip": 0.5}),
        ("LSTM", one_way(CELL), {"hidden_size": 3, "clip": 0.5}),
        ("Attention", HEADS, {"left_window_size": 2}),
        ("RNN", one_way(SIMPLE), {"hidden_size": 3, "activations": ["Relu"]}),
        ("ScatterND", [X, np.array([[0]]), floats(1, 3, 4)], {"reduction": "max"}),
        ("EyeLike", [floats(3, 3)], {"k": 1}),
        ("GatherND", [X, np.array([[0], [1]])], {"batch_dims": 1}),
    ],
)
def test_uses_that_torch_does_not_know(tmp_path, operator, inputs, attributes):
    outputs = {"GRU": 2, "LSTM": 3, "RNN": 2}.get(operator, 1)
    feed = write(tmp_path / "m.onnx", operator, inputs, attributes, outputs, 20)
    with pytest.raises(UnknownOperatorError):
        OnnxModule(ir.load(tmp_path / "m.onnx"), [])(**as_tensors(feed))


def test_an_operator_that_is_not_there_is_named(tmp_path):
    write(tmp_path / "m.onnx", "Det", [floats(2, 3, 3)], {}, 1, 20)
    with pytest.raises(UnknownOperatorError, match="ONNX Det is not known here"):
        OnnxModule(ir.load(tmp_path / "m.onnx"), [])
