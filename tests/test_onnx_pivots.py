"""Pivoted convolutions in ONNX files that read their input whole, where it is faster, and store no more."""

import numpy as np
import onnx
import pytest
import torch
from onnx_models import OPTIONS, kernel, make, node, random, run
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError
from panther_compile.onnx.files import read_model, write_model
from panther_compile.onnx.pivots import read_whole

WIDTHS = {"few channels": (64, True), "many channels": (256, False)}  # at .75 a rank of half the channels


def chain(path, channels, *, stride=1):
    """Two convolutions of 1 x 1 with a Relu between, and one of 3 x 3."""
    weights = {name: random(channels, channels, 1, 1) / channels**0.5 for name in "ab"}
    weights["c"] = kernel(8, channels, 3)
    nodes = [
        node("Conv", ["x", "a"], ["h"]),
        node("Relu", ["h"], ["i"]),
        node("Conv", ["i", "b"], ["j"], strides=[stride, stride]),
        node("Relu", ["j"], ["k"]),
        node("Conv", ["k", "c"], ["y"], pads=[1, 1, 1, 1]),
    ]
    return make(path, nodes, weights, x=("n", channels, 6, 6))


def kinds(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def numbers(path):
    return sum(int(np.prod(tensor.dims)) for tensor in onnx.load(path).graph.initializer)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_where_the_rank_is_low(tmp_path, width, stride, monkeypatch):
    channels, is_read_whole = WIDTHS[width]
    source, target, split = (tmp_path / f"{name}.onnx" for name in ("in", "out", "split"))
    chain(source, channels, stride=stride)
    report = pc.sketch_onnx(source, target, 0.75, include=["a", "b"], **OPTIONS)
    assert [line.choice.scheme for line in report.plan.sketched] == ["pivoted", "pivoted"]
    assert ("EyeLike" in kinds(target)) == is_read_whole
    assert ("Split" in kinds(target)) != is_read_whole
    monkeypatch.setattr("panther_compile.onnx.sketch.read_whole", lambda model: 0)
    pc.sketch_onnx(source, split, 0.75, include=["a", "b"], **OPTIONS)
    assert kinds(split).count("Split") == 2
    assert numbers(target) <= numbers(split) + 16  # sizes, no identity
    x = random(2, channels, 6, 6)
    np.testing.assert_allclose(run(target, x)[0], run(split, x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_pivots_at_either_end(tmp_path, first):
    weights = {"down": random(8, 24, 1, 1), "up": random(32, 8, 1, 1), "sizes": np.int64([8, 24])}
    if not first:
        weights["sizes"] = np.int64([24, 8])
    parts = ["p", "o"] if first else ["o", "p"]
    nodes = [
        node("Split", ["x", "sizes"], parts, axis=1),
        node("Conv", ["o", "down"], ["h"]),
        node("Add", ["p", "h"] if first else ["h", "p"], ["latent"]),
        node("Conv", ["latent", "up"], ["y"]),
    ]
    source, x = make(tmp_path / "in.onnx", nodes, weights, x=("n", 32, 5, 5)), random(2, 32, 5, 5)
    model = read_model(source)
    assert read_whole(model) == 1
    write_model(model, tmp_path / "out.onnx")
    assert "Split" not in kinds(tmp_path / "out.onnx")
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x)[0], run(source, x)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(NoTargetError, match="factored"):
        pc.sketch_onnx(tmp_path / "out.onnx", tmp_path / "again.onnx", 0.5, **OPTIONS)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": [node("Add", ["p", "p"], ["latent"])]},
        {"nodes": [node("Add", ["other", "h"], ["latent"])]},
        {"down": random(8, 24, 3, 3)},
        {"sizes": np.int64([8, 24, 0])},
    ],
)
def test_what_is_no_pivoted_convolution_stays(tmp_path, change):
    weights = {"down": random(8, 24, 1, 1), "up": random(32, 8, 1, 1), "sizes": np.int64([8, 24])}
    weights |= {"other": random(8, 1, 1)} | {name: one for name, one in change.items() if name != "nodes"}
    nodes = [
        node("Split", ["x", "sizes"], ["p", "o"] + ["e"] * (len(weights["sizes"]) - 2), axis=1),
        node("Conv", ["o", "down"], ["h"], pads=[(weights["down"].shape[-1] - 1) // 2] * 4),
        *change.get("nodes", [node("Add", ["p", "h"], ["latent"])]),
        node("Conv", ["latent", "up"], ["y"]),
    ]
    model = read_model(make(tmp_path / "in.onnx", nodes, weights, x=("n", 32, 5, 5)))
    assert read_whole(model) == 0


def test_exports_of_sketches(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 1) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).eval()
    small = pc.sketchify(model, 0.5, synthetic=False, progress=False, min_params=64)
    x, target = torch.randn(2, 64, 6, 6), tmp_path / "out.onnx"
    pc.export_onnx(small, (x,), target, dynamic_shapes=({0: "n"},))
    assert kinds(target).count("EyeLike") == sum(
        line.choice.scheme == "pivoted" for line in pc.sketch_report(small).plan.sketched
    )
    assert "Slice" not in kinds(target)
    x = torch.randn(3, 64, 6, 6)
    np.testing.assert_allclose(run(target, x.numpy())[0], small(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_sketched_file_is_fitted_by_torch(tmp_path):
    """What reads it whole is run by torch as the rest is."""
    source, first = chain(tmp_path / "in.onnx", 64), tmp_path / "first.onnx"
    pc.sketch_onnx(source, first, 0.75, include=["a", "b"], **OPTIONS)
    data = [random(8, 64, 6, 6) for _ in range(4)]
    report = pc.sketch_onnx(first, tmp_path / "second.onnx", 0.5, include=["c"], data=data, **OPTIONS)
    assert report.plan.route == "ONNX graph, run by torch"
    assert [line.name for line in report.plan.sketched] == ["c"]
