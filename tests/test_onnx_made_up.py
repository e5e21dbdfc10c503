"""An ONNX model of images that is given no data is fitted to images that are made up."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPTIONS, make, node, random, run

import panther_compile as pc
from panther_compile.onnx import made_up
from panther_compile.onnx.data import ObservedModel
from panther_compile.onnx.files import read_model
from panther_compile.onnx.made_up import made_up_inputs


def network(path, size=("h", "w"), channels=3, hidden=512, width=768, perm=None):
    random = np.random.default_rng(0)

    def kernel(*shape):
        return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    weights = {
        "a": kernel(32, channels, 8, 8),
        "b": kernel(hidden, 32, 3, 3),
        "c": kernel(width, hidden, 1, 1),
    }
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["p"], strides=[8, 8]),
        helper.make_node("Relu", ["p"], ["q"]),
        helper.make_node("Conv", ["q", "b"], ["r"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["r"], ["s"]),
        helper.make_node("Conv", ["s", "c"], ["y"]),
    ]
    if perm is None:
        return make(path, nodes, weights, x=("n", channels, *size))
    nodes[0].input[0] = "planes"
    nodes.insert(0, helper.make_node("Transpose", ["x"], ["planes"], perm=perm))
    return make(path, nodes, weights, x=("n", *size, channels))


def smooth(count, seed):
    """Images whose neighbouring pixels are alike."""
    noise = np.random.default_rng(seed).standard_normal((count, 3, 40, 40))
    for axis in (2, 3):
        noise = noise.cumsum(axis)
    noise -= noise.mean((2, 3), keepdims=True)
    return (noise / noise.std()).astype(np.float32)[..., 4:36, 4:36]


def off(source, target, x):
    dense, small = (run(path, x)[0] for path in (source, target))
    return np.linalg.norm(small - dense) / np.linalg.norm(dense)


def test_images_are_closer_than_the_weights_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    source, x = network(tmp_path / "in.onnx", (32, 32), hidden=192, width=256), smooth(16, seed=1)
    fitted = pc.sketch_onnx(source, tmp_path / "fitted.onnx", 0.5, progress=False)
    alone = pc.sketch_onnx(source, tmp_path / "alone.onnx", 0.5, progress=False, synthetic=False)
    assert (fitted.made_up, fitted.has_data) == (True, False)
    assert (alone.made_up, alone.has_data) == (False, False)
    assert fitted.plan.achieved_ratio <= 0.5
    assert off(source, tmp_path / "fitted.onnx", x) < 0.6 * off(source, tmp_path / "alone.onnx", x)
    assert "on 2 batches of made-up images" in str(fitted)
    assert "on random inputs" in str(alone)


@pytest.mark.parametrize("perm", [(0, 3, 1, 2), (0, 3, 2, 1)])
def test_channels_may_come_last(tmp_path, monkeypatch, perm):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    source, x = network(tmp_path / "in.onnx", (32, 32), hidden=192, width=256, perm=perm), smooth(16, seed=1)
    x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    fitted = pc.sketch_onnx(source, tmp_path / "fitted.onnx", 0.5, progress=False)
    assert fitted.made_up is (perm == (0, 3, 1, 2))
    if fitted.made_up:
        pc.sketch_onnx(source, tmp_path / "alone.onnx", 0.5, progress=False, synthetic=False)
        assert off(source, tmp_path / "fitted.onnx", x) < 0.6 * off(source, tmp_path / "alone.onnx", x)


def test_channels_last_of_free_sizes(tmp_path):
    model = read_model(network(tmp_path / "in.onnx", channels=1, perm=(0, 3, 1, 2)))
    found = made_up_inputs(model, ObservedModel(model, (), tmp_path), seed=0, folder=tmp_path)
    assert {feed["x"].shape for feed in found.feeds} == {(8, 224, 224, 1)}


def test_small_models_are_sketched_from_their_weights(tmp_path):
    source = network(tmp_path / "in.onnx", (16, 16), width=64)
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.5, progress=False)
    assert not report.made_up


def test_int8_alone_is_compared_on_them(tmp_path):
    draw = np.random.default_rng(0).standard_normal
    weights = {"a": draw((64, 3, 3, 3)).astype(np.float32), "b": draw((64, 64)).astype(np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["p"]),
        helper.make_node("GlobalAveragePool", ["p"], ["q"]),
        helper.make_node("Flatten", ["q"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 3, 32, 32), y=("n", 64))
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 1.0, progress=False, then="int8")
    assert not report.made_up
    assert report.closeness.inputs == "2 batches of made-up images"


def made_for(path, tmp_path):
    model = read_model(path)
    return made_up_inputs(model, ObservedModel(model, (), tmp_path), seed=0, folder=tmp_path)


@pytest.mark.parametrize(
    ("size", "wanted"), [(("h", "w"), (64, 96)), ((16, "w"), (16, 96)), ((24, 40), (24, 40))]
)
def test_sizes_that_the_file_leaves_free_are_tried(tmp_path, monkeypatch, size, wanted):
    monkeypatch.setattr(made_up, "_SIZES", ((4, 4), (64, 96), (8, 8)))  # the kernel is larger than the first
    batches = made_for(network(tmp_path / "in.onnx", size), tmp_path).feeds
    assert {one["x"].shape for one in batches} == {(8, 3, *wanted)}
    together = np.concatenate([one["x"] for one in batches])
    assert together.dtype == np.float32
    assert abs(together.mean()) < 0.3
    assert 0.6 < together.std() < 1.4


def test_other_inputs_are_not_made_up(tmp_path):
    assert made_for(network(tmp_path / "a.onnx", channels=5), tmp_path) is None
    identity = helper.make_node("Identity", ["x"], ["y"])
    rows = make(tmp_path / "rows.onnx", [identity], {}, x=("n", 48))
    assert made_for(rows, tmp_path) is None
    ids = make(tmp_path / "ids.onnx", [identity], {}, x=("n", 3, 8, 8), dtype=TensorProto.INT64)
    assert made_for(ids, tmp_path) is None


def test_a_model_that_takes_none_of_the_sizes(tmp_path):
    shape = numpy_helper.from_array(np.array([1, 77]), "shape")
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"shape": numpy_helper.to_array(shape)}, x=("n", 3, "h", "w"))
    assert made_for(source, tmp_path) is None


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [(("n", 600), (8, 600)), (("n", 1, "t"), (8, 1, 1000)), ((3, 600, 1), (3, 600, 1))],
)
def test_sounds_of_a_convolution_along_time(tmp_path, monkeypatch, shape, wanted):
    monkeypatch.setattr(made_up, "_SAMPLES", (4, 1000))  # the kernel is larger than the first
    to_one = np.array([0, 1, -1])
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["one"]),
        helper.make_node("Conv", ["one", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((64, 1, 16)), "v": random.standard_normal((64, 64, 8))}
    weights = {name: value.astype(np.float32) for name, value in weights.items()} | {"shape": to_one}
    source = make(tmp_path / "in.onnx", nodes, weights, x=shape)
    found = made_for(source, tmp_path)
    assert found.what == "made-up sounds"
    assert {one["x"].shape for one in found.feeds} == {wanted}
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.5, min_params=0, progress=False)
    assert not report.made_up  # so few numbers are sketched by themselves
    assert report.closeness.inputs == "2 batches of made-up sounds"
    assert made_for(make(tmp_path / "two.onnx", nodes, weights, x=("n", 2, 600)), tmp_path) is None


def test_pictures_of_no_size_are_not_made_up(tmp_path):
    nodes = [node("Conv", ["x", "w"], ["c"], pads=[1] * 4), node("Relu", ["c"], ["r"])]
    nodes += [node("Conv", ["r", "v"], ["y"], pads=[1] * 4)]
    weights = {"w": random(16, 3, 3, 3), "v": random(16, 16, 3, 3)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=(0, 3, 16, 16))
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.5, include="v", **OPTIONS)
    assert [line.name for line in report.plan.sketched] == ["v"]
    assert not report.made_up
