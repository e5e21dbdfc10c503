"""ONNX Runtime runs a sketched file beside its source before it is put in its place."""

import numpy as np
import onnx_ir
import pytest
from onnx import TensorProto, helper
from onnx_models import OPTIONS, low_rank, make, mlp, node, random, run, sketch

import panther_compile as pc
from panther_compile.errors import (
    OnnxMismatchError,
)
from panther_compile.onnx import verify as onnx_verify
from panther_compile.onnx.verify import compare_files, kept_in


def square(path, *parts, x=("n", 48), **options):
    """One product that a sketch at half the numbers holds exactly."""
    return make(path, [node("MatMul", ["x", "w"], ["y"]), *parts], {"w": low_rank(48, 48)}, x=x, **options)


def test_exact_sketches_have_no_error_and_others_have(tmp_path):
    source = mlp(tmp_path / "in.onnx")
    report, _ = sketch(source)
    assert list(report.output_errors) == ["y"]
    assert report.output_errors["y"] < 1e-5
    assert "output y: relative error" in str(report)
    make(source, [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 48)})
    report, target = sketch(source)
    x = random(4, 48)
    (wanted,), (found,) = run(source, x), run(target, x)
    # Of another x, but for the size of the error that makes little difference.
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error / 1.5 < report.output_errors["y"] < 1.5 * error


def test_nothing_is_run_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("panther_compile.onnx.sketch.compare_files", None)
    report, _ = sketch(square(tmp_path / "in.onnx"), include="*", verify=False)
    assert report.output_errors == {}
    assert "relative error" not in str(report)


def test_every_output_has_its_error(tmp_path):
    parts = [node("ArgMax", ["y"], ["best"], axis=1), node("Not", ["flag"], ["other"])]
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, (2,))
    outputs = [
        helper.make_tensor_value_info("best", TensorProto.INT64, None),
        helper.make_tensor_value_info("other", TensorProto.BOOL, (2,)),
    ]
    source = square(tmp_path / "in.onnx", *parts, inputs=[flag], outputs=outputs)
    report, _ = sketch(source, include="*")
    assert set(report.output_errors) == {"y", "best", "other"}
    assert report.output_errors["other"] == report.output_errors["best"] == 0.0


def test_a_size_is_found_that_the_source_takes(tmp_path):
    # Only a multiple of 16 can be taken apart like that.
    parts = [node("Reshape", ["x", "shape"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    weights = {"w": low_rank(48, 48), "shape": np.array([16, -1, 48])}
    source = make(tmp_path / "in.onnx", parts, weights, x=("n", 48))
    assert compare_files(source, source).errors == {"y": 0.0}


def test_nan_of_the_source_is_no_error(tmp_path):
    source = make(
        tmp_path / "in.onnx",
        [node("MatMul", ["x", "w"], ["h"]), node("Sqrt", ["h"], ["y"])],
        {"w": low_rank(48, 48)},
    )
    report, _ = sketch(source, include="*")
    assert np.isnan(run(source, random(4, 48))[0]).any()
    assert report.output_errors["y"] < 1e-3


def change_weights(change):
    """A rewrite that goes wrong: what it leaves behind is sound and computes something else."""
    from panther_compile.onnx import sketch as onnx_sketch

    rewrite = onnx_sketch.rewrite

    def wrong(model, *rest):
        fitted = rewrite(model, *rest)
        change(model)
        return fitted

    return wrong


def spoil(model):
    name, value = next(iter(model.graph.initializers.items()))
    array = np.full(value.const_value.shape, np.nan, np.float32)
    value.const_value = onnx_ir.tensor(array, name=name)


def test_a_result_that_is_not_finite_is_not_written(tmp_path, monkeypatch):
    source, target = square(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    monkeypatch.setattr("panther_compile.onnx.sketch.rewrite", change_weights(spoil))
    with pytest.raises(OnnxMismatchError, match=r"output 'y' for inputs \(4, 48\) holds NaN or Inf"):
        pc.sketch_onnx(source, target, include="*", **OPTIONS)
    assert not target.exists()
    pc.sketch_onnx(source, target, include="*", verify=False, **OPTIONS)
    assert target.exists()


def test_outputs_of_other_shapes_and_types_are_named(tmp_path):
    source, other = square(tmp_path / "in.onnx"), tmp_path / "other.onnx"
    make(other, [node("MatMul", ["x", "w"], ["y"])], {"w": low_rank(48, 32)})
    with pytest.raises(OnnxMismatchError, match=r"'y' .* float32 \(4, 32\) .*, float32 \(4, 48\) in"):
        compare_files(source, other)
    make(other, [node("MatMul", ["x", "w"], ["y"])], {"w": low_rank(32, 48)}, x=("n", 32))
    with pytest.raises(OnnxMismatchError, match=r"cannot run the sketched model on inputs \(4, 48\)"):
        compare_files(source, other)


def test_nan_in_place_of_infinity_is_told(tmp_path):
    weights = {"w": low_rank(48, 48), "b": np.float32([-np.inf, *[0] * 47])}
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["y"])]
    source, other = (make(tmp_path / name, nodes, weights) for name in ("in.onnx", "other.onnx"))
    compare_files(source, other)
    make(other, nodes, weights | {"b": np.float32([np.nan, *[0] * 47])})
    with pytest.raises(OnnxMismatchError, match="holds NaN in the sketched model, where the source's is inf"):
        compare_files(source, other)


def test_unsigned_bytes_are_pixels_unless_the_source_takes_fewer(tmp_path):
    """Of pixels that are 0 or 1 outputs hardly differ, and any rounding would destroy them."""
    pixels = [
        node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        node("Sub", ["f", "mean"], ["c"]),
        node("Mul", ["c", "scale"], ["h"]),
        node("MatMul", ["h", "w"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "v"], ["z"]),
        node("Cast", ["z"], ["y"], to=TensorProto.UINT8),
    ]
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, ("n", 48))
    weights = {
        "mean": np.float32([110]),
        "scale": np.float32([0.02]),
        "w": random(48, 64),
        "v": random(64, 48),
    }
    options = {"dtype": TensorProto.UINT8, "y": ("n", 48), "outputs": [value]}
    source, target = make(tmp_path / "in.onnx", pixels, weights, **options), tmp_path / "out.onnx"
    assert pc.sketch_onnx(source, target, 1.0, then="int8").closeness.grade == "good"
    ids = [
        node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        node("Gather", ["t", "i"], ["e"]),
        node("MatMul", ["e", "w"], ["z"]),
        pixels[-1],
    ]
    weights = {"t": random(8, 48), "w": low_rank(48, 48)}
    source = make(tmp_path / "in.onnx", ids, weights, x=("n",), **options)
    assert pc.sketch_onnx(source, target, 0.5, include="w", **OPTIONS).closeness.inputs == "random inputs"


def test_what_cannot_be_run_is_told(tmp_path):
    weights, parts = {"w": low_rank(48, 48)}, [node("MatMul", ["x", "w"], ["y"])]
    source, target = make(tmp_path / "in.onnx", parts, weights), tmp_path / "out.onnx"
    words = helper.make_tensor_value_info("words", TensorProto.STRING, (2,))
    make(source, [*parts, node("Identity", ["words"], ["z"])], weights, inputs=[words])
    with pytest.raises(OnnxMismatchError, match=r"'words' is a tensor\(string\), and nothing random"):
        pc.sketch_onnx(source, target, include="*", **OPTIONS)
    split = [node("Reshape", ["x", "shape"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    make(source, split, weights | {"shape": np.array([17, -1, 48])}, x=("n", 48))
    with pytest.raises(OnnxMismatchError, match=r"cannot run .*in.onnx on random inputs.*verify=False"):
        pc.sketch_onnx(source, target, include="*", **OPTIONS)
    assert not target.exists()
    assert pc.sketch_onnx(source, target, include="*", verify=False, **OPTIONS).output_errors == {}


@pytest.mark.parametrize("mask", [[1, 1, 0], [True, True, False], [1.0, 1.0, 0.0], [0.0, 0.0, -1e9]])
def test_masks_of_every_form_keep_the_same(mask):
    assert kept_in({"attention_mask": np.array([mask])}).tolist() == [[True, True, False]]


def test_the_mask_of_an_encoder_does_not_hide_what_a_decoder_of_as_many_positions_is_given():
    feed = {"attention_mask": np.array([[0, 1, 0]]), "decoder_input_ids": np.ones((1, 3), np.int64)}
    assert kept_in(feed) is None
    assert kept_in(feed | {"decoder_attention_mask": np.array([[1, 0, 0]])}).tolist() == [[True, True, False]]
    assert kept_in(feed | {"decoder_input_ids": np.ones((1, 4), np.int64)}).tolist() == [[False, True, False]]


def test_lengths_leave_nothing_out(tmp_path):
    """Of 0 or 1, as other integers are, they would hide all that a sketch has destroyed."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Unsqueeze", ["lengths", "one"], ["until"]),
        node("Less", ["places", "until"], ["seen"]),
        node("Where", ["seen", "h", "zero"], ["y"]),
    ]
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, ("n",))
    weights = {"w": random(48, 48), "one": np.int64([1]), "zero": np.float32(0)}
    weights["places"] = np.int64([[*range(2, 50)]])
    source = make(tmp_path / "in.onnx", nodes, weights, inputs=[lengths], y=("n", 48))
    report, _ = sketch(source, include="*")
    assert report.output_errors["y"] > 0.3


def test_files_of_sounds_are_run_on_whole_windows(tmp_path):
    """On less a Conv cannot run, and ONNX Runtime ends the process at a DFT."""
    weights = {"w": random(32, 1, 400), "one": np.int64([1])}
    nodes = [node("Unsqueeze", ["x", "one"], ["h"]), node("Conv", ["h", "w"], ["y"], strides=[160])]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", "t"), y=("n", 32, "f"))
    report, _ = sketch(source, synthetic=False)
    assert report.output_errors["y"] > 0


def test_a_file_with_a_transform_is_never_given_less(tmp_path, monkeypatch):
    nodes = [
        node("Unsqueeze", ["x", "last"], ["u"]),
        node("DFT", ["u"], ["f"], axis=1),
        node("ReduceSumSquare", ["f"], ["p"], axes=[2], keepdims=0),
        node("Slice", ["p", "zero", "width", "second"], ["cut"]),
        node("MatMul", ["cut", "w"], ["y"]),
    ]
    weights = {"last": np.int64([2]), "zero": np.int64([0]), "width": np.int64([48]), "w": random(48, 40)}
    weights["second"] = np.int64([1])
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", "t"), y=("n", 40), opset=17)
    sizes, random_inputs = [], onnx_verify._random_inputs

    def seen(session, size, what, most):
        sizes.append(size)
        return random_inputs(session, size, what, most)

    monkeypatch.setattr(onnx_verify, "_random_inputs", seen)
    sketch(source, include="*", synthetic=False)
    assert sizes == [512]
