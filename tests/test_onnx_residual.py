"""Low-rank branches beside the quantized products of an ONNX file."""

import logging

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx_models import make, run
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.quant_utils import QuantFormat

import panther_compile as pc
from panther_compile.errors import ConfigTypeError, DataError, NoTargetError, OnnxFileError, RankError
from panther_compile.models.batches import judged_of, spread_out

RNG = np.random.default_rng(1)


def dense_file(path):
    """Two layers with a sum around them; the second has no bias."""
    node = helper.make_node
    weights = {
        "first": RNG.standard_normal((48, 64)).astype(np.float32) / 7,
        "bias": RNG.standard_normal(64).astype(np.float32),
        "second": RNG.standard_normal((64, 48)).astype(np.float32) / 8,
    }
    nodes = [
        node("MatMul", ["x", "first"], ["a"], name="one"),
        node("Add", ["a", "bias"], ["b"], name="plus"),
        node("Relu", ["b"], ["c"], name="relu"),
        node("MatMul", ["c", "second"], ["d"], name="two"),
        node("Add", ["d", "x"], ["y"], name="sum"),
    ]
    return make(path, nodes, weights, x=("n", 48), y=("n", 48), opset=21, ir_version=10)


def int4(source, path, form=QuantFormat.QOperator):
    quantizer = MatMulNBitsQuantizer(
        str(source), bits=4, block_size=16, is_symmetric=form is QuantFormat.QDQ, quant_format=form
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    return path


def int4_qdq(source, path):
    return int4(source, path, QuantFormat.QDQ)


def int8(source, path):
    """One coarse scale for each weight."""
    quantize_dynamic(source, path, per_channel=False, weight_type=QuantType.QInt8)
    return path


FORMS = {"MatMulNBits": int4, "QDQ": int4_qdq, "MatMulInteger": int8}


def drawn(count=10, rows=64, seed=1):
    """Batches whose features are of very different size."""
    generator = np.random.default_rng(seed)
    mix = np.random.default_rng(5).standard_normal((48, 48))
    sizes = np.logspace(0, -2, 48)
    return [
        (generator.standard_normal((rows, 48)) * sizes @ mix).astype(np.float32) / 4 for _ in range(count)
    ]


def error(path, dense, x):
    found, wanted = run(path, x)[0], run(dense, x)[0]
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def files(tmp_path):
    logging.getLogger().setLevel(logging.ERROR)
    dense = dense_file(tmp_path / "dense.onnx")
    return dense, {name: make_low(dense, tmp_path / f"{name}.onnx") for name, make_low in FORMS.items()}


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("form", ["MatMulNBits", "QDQ"])
def test_closer_on_held_out_data(files, tmp_path, form, sequential):
    dense, lows = files
    before, target = lows[form].read_bytes(), tmp_path / "out.onnx"
    report = pc.add_residual_onnx(lows[form], dense, target, 8, data=drawn(), sequential=sequential)
    x = np.concatenate(drawn(4, seed=9))
    assert error(target, dense, x) < 0.6 * error(lows[form], dense, x)
    assert lows[form].read_bytes() == before
    assert report.kept
    assert report.after.share < report.before.share
    assert [row.rank for row in report.rows] == [8, 8]
    assert report.branch_bytes == 2 * 4 * 8 * (48 + 64)
    assert report.stored_bytes == target.stat().st_size > report.quantized_bytes == len(before)
    assert str(report).startswith("outputs: ")
    assert [one.name for one in onnx.load(target).graph.output] == ["y"]


class Reader(CalibrationDataReader):
    """Feeds of a model with one input, x."""

    def __init__(self, arrays):
        self._feeds = iter([{"x": array} for array in arrays])

    def get_next(self):
        return next(self._feeds, None)


@pytest.mark.parametrize("sequential", [False, True])
def test_activations_that_a_range_stands_for(files, tmp_path, sequential):
    """ONNX Runtime drops a Relu ahead of QuantizeLinear, whose range begins at 0."""
    dense, _ = files
    low, target = tmp_path / "low.onnx", tmp_path / "out.onnx"
    quantize_static(dense, low, Reader(drawn()), weight_type=QuantType.QInt8, per_channel=False)
    assert "Relu" not in {one.op_type for one in onnx.load(low).graph.node}
    model = onnx.load(low)
    for tensor in model.graph.initializer:  # weights of four bits
        if tensor.name in ("first_quantized", "second_quantized"):
            coarse = np.rint(numpy_helper.to_array(tensor) / 16).clip(-7, 7).astype(np.int8) * 16
            tensor.CopyFrom(numpy_helper.from_array(coarse.astype(np.int8), tensor.name))
    onnx.save(model, low)
    report = pc.add_residual_onnx(low, dense, target, 32, data=drawn(), sequential=sequential)
    x = np.concatenate(drawn(4, seed=9))
    assert report.kept
    assert error(target, dense, x) < 0.5 * error(low, dense, x)


def test_a_gemm_that_scales_its_product(tmp_path):
    logging.getLogger().setLevel(logging.ERROR)
    weights = {"w": RNG.standard_normal((64, 48)).astype(np.float32) / 7}
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.75, transB=1)]
    dense = make(tmp_path / "dense.onnx", nodes, weights, x=("n", 48), y=("n", 64))
    low, target, x = tmp_path / "low.onnx", tmp_path / "out.onnx", drawn(1)[0]
    quantize_static(dense, low, Reader([x]), weight_type=QuantType.QInt8, activation_type=QuantType.QInt16)
    pc.add_residual_onnx(low, dense, target, 48)
    assert error(target, dense, x) < 0.5 * error(low, dense, x)


@pytest.mark.parametrize("form", FORMS)
def test_exact_at_full_rank(files, tmp_path, form):
    """A branch of full rank puts back what the weights lack; activations may be rounded."""
    dense, lows = files
    x, target = drawn(1, seed=9)[0], tmp_path / "out.onnx"
    pc.add_residual_onnx(lows[form], dense, target, 48)
    most = 0.9 * error(lows[form], dense, x) if form == "MatMulInteger" else 1e-4
    assert error(target, dense, x) < most


def test_products_of_rounded_activations(files, tmp_path):
    dense, lows = files
    target = tmp_path / "out.onnx"
    report = pc.add_residual_onnx(lows["MatMulInteger"], dense, target, 16, data=drawn())
    assert len(report.rows) == 2
    x = np.concatenate(drawn(4, seed=9))
    assert error(target, dense, x) < error(lows["MatMulInteger"], dense, x)


def test_data_is_closer_than_weights_alone(files, tmp_path):
    dense, lows = files
    x, found = np.concatenate(drawn(4, seed=9)), []
    for data in (drawn(), None):
        pc.add_residual_onnx(lows["MatMulNBits"], dense, tmp_path / "out.onnx", 8, data=data)
        found.append(error(tmp_path / "out.onnx", dense, x))
    assert found[0] < 0.9 * found[1]


def test_a_product_that_is_an_output(tmp_path):
    weights = {"w": RNG.standard_normal((48, 32)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="one")]
    dense = make(tmp_path / "dense.onnx", nodes, weights, y=("n", 32), opset=21, ir_version=10)
    low, target = int4(dense, tmp_path / "low.onnx"), tmp_path / "out.onnx"
    pc.add_residual_onnx(low, dense, target, 32)
    assert error(target, dense, drawn(1)[0]) < 1e-5
    assert [one.name for one in onnx.load(target).graph.output] == ["y"]


def test_branches_that_bring_nothing_are_left_out(files, tmp_path):
    """The bias makes up for the mean of what it is fitted to, and is judged by the opposite."""
    weights = {
        "w": RNG.standard_normal((48, 64)).astype(np.float32),
        "b": np.zeros(64, np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="one"),
        helper.make_node("Add", ["a", "b"], ["y"], name="plus"),
    ]
    dense = make(tmp_path / "d.onnx", nodes, weights, y=("n", 64), opset=21, ir_version=10)
    low, target = int4(dense, tmp_path / "low.onnx"), tmp_path / "out.onnx"
    mean, noise = 10 * RNG.standard_normal(48), RNG.standard_normal((5, 64, 48))
    (judge,) = judged_of(spread_out(range(5)))
    data = [((-mean if place == judge else mean) + one).astype(np.float32) for place, one in enumerate(noise)]
    with pytest.warns(pc.SketchQualityWarning, match="no closer"):
        report = pc.add_residual_onnx(low, dense, target, 1, data=data)
    assert not report.kept
    assert report.branch_bytes == 0
    assert np.array_equal(run(target, data[0])[0], run(low, data[0])[0])


def test_bad_input(files, tmp_path):
    dense, lows = files
    low, target = lows["MatMulNBits"], tmp_path / "out.onnx"
    with pytest.raises(NoTargetError, match="holds 0 quantized products"):
        pc.add_residual_onnx(dense, dense, target, 8)
    with pytest.raises(RankError, match=r"rank=49, wanted an integer in 1\.\.48"):
        pc.add_residual_onnx(low, dense, target, 49)
    with pytest.raises(NoTargetError, match="holds 2 quantized products"):
        pc.add_residual_onnx(low, dense_file(tmp_path / "other.onnx"), target, 8)
    with pytest.raises(OnnxFileError):
        pc.add_residual_onnx(tmp_path / "none.onnx", dense, target, 8)
    with pytest.raises(DataError, match="no batch"):
        pc.add_residual_onnx(low, dense, target, 8, data=[])
    with pytest.raises(ConfigTypeError):
        pc.add_residual_onnx(low, dense, target, 8, data=torch.zeros(2, 48))
    fixed = onnx.load(low)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 32
    onnx.save(fixed, tmp_path / "fixed.onnx")
    with pytest.raises(
        DataError, match=r"the quantized one does not: batch \d+ .* \(64, 48\), wanted \(32, 48\)"
    ):
        pc.add_residual_onnx(tmp_path / "fixed.onnx", dense, target, 8, data=drawn())
    assert not target.exists()


@pytest.mark.parametrize("form", ["MatMulNBits", "QDQ"])
@pytest.mark.parametrize("with_data", [False, True])
def test_files_in_half_that_do_not_say_what_types_values_have(tmp_path, form, with_data):
    generator = np.random.default_rng(2)
    weights = {
        "first": (generator.standard_normal((48, 64)) / 7).astype(np.float16),
        "bias": generator.standard_normal(64).astype(np.float16),
        "second": (generator.standard_normal((64, 48)) / 8).astype(np.float16),
    }
    half = onnx.TensorProto.FLOAT16
    nodes = onnx.load(dense_file(tmp_path / "dense.onnx")).graph.node
    options = {"opset": 21, "ir_version": 10, "dtype": half}
    dense = make(tmp_path / "dense.onnx", nodes, weights, x=("n", 48), y=("n", 48), **options)
    low, target = FORMS[form](dense, tmp_path / "low.onnx"), tmp_path / "out.onnx"
    data = [batch.astype(np.float16) for batch in drawn()]
    report = pc.add_residual_onnx(low, dense, target, 4, data=data if with_data else None)
    assert report.kept
    assert [row.branch_bytes for row in report.rows] == [2 * 4 * (48 + 64)] * 2
    factors = [one for one in onnx.load(target).graph.initializer if one.name.endswith(("down", "up"))]
    assert {one.data_type for one in factors} == {half}
    found, before, wanted = (run(path, data[0])[0].astype(np.float32) for path in (target, low, dense))
    assert np.linalg.norm(found - wanted) < np.linalg.norm(before - wanted)
