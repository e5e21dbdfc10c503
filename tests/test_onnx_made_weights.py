"""Weights that nodes of a file make of constants are folded, and sketched."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import panther_compile as pc
from panther_compile.onnx.made_weights import fold_made_weights, read_past_identities

HEAD = '<ir_version: 10, opset_import: ["" : 18]>'


def model_of(body, *, given="float[2,6] x", **constants):
    """A model of one output y, its constants at random."""
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(f"{HEAD} agraph ({given}) => (float[2,8] y) {{ {body} }}")
    for name, shape in constants.items():
        array = generator.uniform(0.5, 1.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def run(model, **feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds or {"x": np.ones((2, 6), np.float32)})[0]


def folded(model):
    found = ir.from_proto(model)
    count = fold_made_weights(found)
    return ir.to_proto(found), count


NORM = "norm = ReduceL2 <keepdims=1> (v, axes) unit = Div (v, norm) w = Mul (g, unit)"


def normed(body, **constants):
    model = model_of(f"axes = Constant <value_ints: ints = [0]> () {NORM} {body}", **constants)
    return model


SHAPE = "s = Constant <value_ints = [6, 8]> ()"
SPLIT = "p, q, r = Split <axis = 1, num_outputs = 3> (v)"
ENDS = " ".join(f"e{end} = Constant <value_ints = [{end}]> ()" for end in (0, 1, 8, 16))
SLICES = f"{ENDS} p = Slice (v, e0, e8, e1) q = Slice (v, e8, e16, e1)"


@pytest.mark.parametrize(
    ("model", "made", "left"),
    [
        (normed("y = MatMul (x, w)", v=(6, 8), g=(1, 8)), 1, ["MatMul"]),
        (normed("y = Gemm <transB=1> (x, w)", v=(8, 6), g=(1, 6)), 1, ["Gemm"]),
        (normed("t = Transpose (w) y = MatMul (x, t)", v=(8, 6), g=(1, 6)), 1, ["MatMul"]),
        (normed("a = MatMul (x, w) b = MatMul (x, w) y = Add (a, b)", v=(6, 8), g=(1, 8)), 1, None),
        (model_of("w = Mul (v, c) y = MatMul (x, w)", v=(6, 8), c=()), 1, ["MatMul"]),
        (  # of one weight another is made, which would be one more
            model_of(
                "u = Mul (v, c) w = Neg (u) a = MatMul (x, w) b = MatMul (x, u) y = Add (a, b)",
                v=(6, 8),
                c=(),
            ),
            1,
            None,
        ),
        (model_of(f"{SHAPE} w = Reshape (v, s) y = MatMul (x, w)", v=(48,)), 1, ["MatMul"]),
        (model_of(f"{SHAPE} t = Reshape (v, s) w = Identity (t) y = MatMul (x, w)", v=(48,)), 1, ["MatMul"]),
        (model_of("w = Concat <axis = 0> (v, u) y = MatMul (x, w)", v=(2, 8), u=(4, 8)), 1, ["MatMul"]),
        (
            model_of(
                f"{SPLIT} a = MatMul (x, p) b = MatMul (x, q) c = MatMul (x, r) y = Sum (a, b, c)", v=(6, 24)
            ),
            3,
            None,
        ),
        (
            model_of(f"{SLICES} a = MatMul (x, p) b = MatMul (x, q) y = Add (a, b)", v=(6, 16)),
            2,
            None,
        ),
    ],
)
def test_a_weight_that_is_made_becomes_a_constant(model, made, left):
    result, count = folded(model)
    assert count == made
    if left is not None:
        assert [node.op_type for node in result.graph.node] == left
        assert len(result.graph.initializer) == 1
    assert np.allclose(run(result), run(model), rtol=1e-5)
    onnx.checker.check_model(result, full_check=True)


@pytest.mark.parametrize(
    "model",
    [
        model_of("w = MatMul (a, b) y = MatMul (x, w)", a=(6, 2), b=(2, 8)),  # a factored weight
        model_of("w = Mul (a, b) y = MatMul (x, w)", a=(6, 1), b=(1, 8)),  # of fewer numbers
        model_of(  # a part of the Split is no weight
            f"{SPLIT} a = MatMul (x, p) b = MatMul (x, q) c = ReduceSum (r) y = Sum (a, b, c)", v=(6, 24)
        ),
        model_of(f"{SHAPE} w = Reshape (v, s) a = MatMul (x, w) b = ReduceSum (v) y = Add (a, b)", v=(48,)),
        model_of("w = Identity (v) y = MatMul (x, w)", v=(6, 8)),  # a tied one
        model_of("w = Transpose (v) y = MatMul (x, w)", v=(8, 6)),
        model_of("s = Mul (x, c) y = MatMul (s, v)", v=(6, 8), c=()),  # of the input
        model_of("w = Mul (v, c) y = MatMul (x, w)", given="float[2,6] x, float[6,8] v", c=()),
        model_of("q = Cast <to=10> (v) h = Cast <to=1> (q) w = Mul (h, c) y = MatMul (x, w)", v=(6, 8), c=()),
    ],
)
def test_what_is_smaller_as_it_is_or_no_constant_is_left(model):
    result, count = folded(model)
    assert count == 0
    assert result == ir.to_proto(ir.from_proto(model))


def test_half_types_are_added_up_in_float32():
    model = normed("h = Cast <to=1> (x) y = MatMul (h, wide)", v=(6, 8), g=(1, 8))
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor) * (200 if tensor.name == "v" else 1)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float16), tensor.name))
    model.graph.node[-2].op_type, model.graph.node[-2].input[0] = "Cast", "x"
    model.graph.node[-2].attribute[0].i = onnx.TensorProto.FLOAT16
    model.graph.node[-1].input[1] = "w"
    model.graph.node[-1].output[0] = "p"
    model.graph.node.append(onnx.helper.make_node("Cast", ["p"], ["y"], to=onnx.TensorProto.FLOAT))
    result, count = folded(model)
    assert count == 1
    v, g = (onnx.numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer)
    wanted = np.ones((2, 6)) @ (g * v / np.linalg.norm(v, axis=0, keepdims=True))
    assert np.allclose(run(result), wanted, rtol=5e-3)


def test_constants_that_stay_are_not_counted():
    shared = model_of("w = Mul (v, c) a = MatMul (x, w) b = MatMul (x, v) y = Add (a, b)", v=(6, 8), c=())
    assert folded(shared)[1] == 0


def test_a_norm_by_statistics_of_before_opset_14_is_left():
    body = "w = BatchNormalization (v, s, b, m, n) y = MatMul (x, w)"
    model = model_of(body, v=(6, 8), s=(8,), b=(8,), m=(8,), n=(8,))
    model.opset_import[0].version = 13
    assert folded(model)[1] == 0
    model.opset_import[0].version = 18
    result, count = folded(model)
    assert count == 1
    assert np.allclose(run(result), run(model), rtol=1e-5)


def test_a_weight_that_is_an_output_is_left():
    model = model_of("w = Mul (v, c) y = MatMul (x, w)", v=(6, 8), c=())
    model.graph.output.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [6, 8]))
    assert folded(model)[1] == 0


def test_in_the_branch_of_an_if():
    body = """
        y = If (cond) <
            then_branch = one () => (float[2,8] a) { w = Mul (v, c) a = MatMul (x, w) },
            else_branch = other () => (float[2,8] b) { b = MatMul (x, u) }
        >
    """
    model = model_of(body, given="float[2,6] x, bool cond", v=(6, 8), u=(6, 8), c=())
    result, count = folded(model)
    for cond in (True, False):
        feeds = {"x": np.ones((2, 6), np.float32), "cond": np.array(cond)}
        assert np.allclose(run(result, **feeds), run(model, **feeds), rtol=1e-5)
    assert count == 1


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("large", [True, False])  # large constants are in a file of their own
@pytest.mark.filterwarnings("ignore")
def test_weight_norm_as_torch_exports_it(tmp_path, dynamo, large):
    torch.manual_seed(0)
    channels = 256 if large else 32

    def layer():
        conv = nn.Conv1d(channels, channels, 3, padding=1)
        with torch.no_grad():
            matrix = torch.randn(channels, 6) @ torch.randn(6, 3 * channels)
            conv.weight.copy_(matrix.view_as(conv.weight) / channels)
        return parametrizations.weight_norm(conv)

    model = nn.Sequential(layer(), nn.Tanh(), layer()).eval()
    x = torch.randn(2, channels, 9)
    source, target = tmp_path / "dense.onnx", tmp_path / "small.onnx"
    torch.onnx.export(model, (x,), source, dynamo=dynamo, verbose=False)
    before = source.read_bytes()
    report = pc.sketch_onnx(
        source, target, 0.5, synthetic=False, min_params=0, allow_slower=True, progress=False
    )
    assert len(report.plan.sketched) == 2
    assert source.read_bytes() == before
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.allclose(found, model(x).detach().numpy(), atol=1e-4)
    assert report.sketched_bytes < 0.7 * report.dense_bytes


def test_parts_of_one_constant_are_sketched(tmp_path):
    generator = np.random.default_rng(0)
    packed = (generator.standard_normal((64, 4)) @ generator.standard_normal((4, 192))).astype(np.float32)
    body = f"{SPLIT} a = MatMul (x, p) b = MatMul (x, q) c = MatMul (x, r) d = Tanh (a) e = Mul (d, b)"
    text = f"{HEAD} agraph (float[n,64] x) => (float[n,64] y) {{ {body} y = Add (e, c) }}"
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(packed, "v"))
    source, target = tmp_path / "dense.onnx", tmp_path / "small.onnx"
    onnx.save(model, source)
    x = generator.standard_normal((32, 64)).astype(np.float32)
    for data in (None, [{"x": x}] * 4):
        options = {"include": "*", "min_params": 0, "allow_slower": True, "progress": False}
        report = pc.sketch_onnx(source, target, 0.5, data=data, **options)
        assert {line.name for line in report.plan.sketched} == {"p", "q", "r"}
        assert target.stat().st_size < 0.6 * source.stat().st_size
        wanted, found = run(model, x=x), run(onnx.load(target), x=x)
        assert np.linalg.norm(found - wanted) < 1e-3 * np.linalg.norm(wanted)


def test_a_weight_that_layers_share_through_identities_is_sketched(tmp_path):
    body = """same = Identity (w) added = Identity (b) m = MatMul (x, w) n = Add (m, b)
        o = Relu (n) p = MatMul (o, same) q = Add (p, added) y = MatMul (q, last)"""
    model = model_of(body, given="float[2,96] x", w=(96, 96), b=(96,), last=(96, 8))
    (weight,) = (one for one in model.graph.initializer if one.name == "w")
    factor = np.random.default_rng(2).standard_normal((96, 8)).astype(np.float32)
    weight.CopyFrom(onnx.numpy_helper.from_array(factor @ factor.T / 96, "w"))
    onnx.save(model, tmp_path / "in.onnx")
    report = pc.sketch_onnx(
        tmp_path / "in.onnx", tmp_path / "out.onnx", 0.5, exclude="last", allow_slower=True, progress=False
    )
    assert [line.name for line in report.plan.sketched] == ["w"]
    assert report.achieved_ratio <= 0.5
    x = np.random.default_rng(1).standard_normal((2, 96)).astype(np.float32)
    sketched, wanted = (run(onnx.load(one), x=x) for one in (tmp_path / "out.onnx", tmp_path / "in.onnx"))
    assert np.linalg.norm(sketched - wanted) < 1e-4 * np.linalg.norm(wanted)


def test_an_identity_that_is_an_output_stays():
    model = model_of("y = Identity (w)", w=(2, 8))
    found = ir.from_proto(model)
    read_past_identities(found)
    assert [node.op_type for node in found.graph] == ["Identity"]
