"""smooth.py: inputs scaled where it is free, the function as it was, and int8 closer."""

import numpy as np
import onnx
import torch
from onnx_models import make, node, random, run
from torch import nn

import panther_compile as pc
from panther_compile.onnx.files import read_model, write_model
from panther_compile.onnx.smooth import smooth_inputs


def smoothed(source, x):
    """The number of inputs that are scaled, and the file."""
    model, target = read_model(source), source.with_name("out.onnx")
    count = smooth_inputs(model, [{"x": x}], source.parent)
    write_model(model, target)
    return count, target


def normed(path, nodes, outputs=("y",), **weights):
    """A graph whose norm has one feature a hundred times as large as the others."""
    scale = np.ones(16, "float32")
    scale[3] = 100
    weights = {"g": scale, "c": random(16), "w": random(16, 8)} | weights
    more = [onnx.helper.make_tensor_value_info(name, 1, ("n", None)) for name in outputs[1:]]
    nodes = [node("LayerNormalization", ["x", "g", "c"], ["h"]), *nodes]
    return make(path, nodes, weights, x=("n", 16), y=("n", None), opset=17, outputs=more)


def kinds(path):
    return [one.op_type for one in onnx.load(path).graph.node]


def assert_same(source, target, x):
    for one, other in zip(run(source, x), run(target, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(one).max())


def test_scales_go_into_the_norm(tmp_path):
    nodes = [
        node("MatMul", ["h", "w"], ["y"]),
        node("Gemm", ["h", "v"], ["z"], transB=1),
    ]
    source, x = normed(tmp_path / "in.onnx", nodes, ("y", "z"), v=random(8, 16)), random(32, 16)
    count, target = smoothed(source, x)
    assert count == 1
    assert kinds(target) == kinds(source)
    assert_same(source, target, x)
    tensors = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(target).graph.initializer}
    assert set(tensors) == {"g.scaled", "c.scaled", "w.scaled", "v.scaled"}
    assert tensors["g.scaled"].max() < 10


def test_one_product_where_others_read_the_norm_too(tmp_path):
    nodes = [
        node("MatMul", ["h", "w"], ["y"]),
        node("MatMul", ["h", "v"], ["m"]),
        node("Add", ["m", "h"], ["z"]),
    ]
    source, x = normed(tmp_path / "in.onnx", nodes, ("y", "z"), v=random(16, 16)), random(32, 16)
    count, target = smoothed(source, x)
    assert count == 1
    assert sorted(kinds(target)) == sorted([*kinds(source), "Mul"])
    assert_same(source, target, x)


def test_what_no_norm_makes_stays(tmp_path):
    nodes = [node("Relu", ["h"], ["r"]), node("MatMul", ["r", "w"], ["y"])]
    source, x = normed(tmp_path / "in.onnx", nodes), random(32, 16)
    count, target = smoothed(source, x)
    assert count == 0
    assert_same(source, target, x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        with torch.no_grad():
            self.norm.weight[5] = 60.0
            self.up.weight[:, 5] /= 60.0

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_int8_is_closer_with_data(tmp_path):
    torch.manual_seed(0)
    model, data = Block().eval(), torch.randn(128, 32).split(16)
    plain = pc.export_onnx(model, data[0], tmp_path / "plain.onnx", then="int8")
    scaled = pc.export_onnx(model, data[0], tmp_path / "scaled.onnx", then="int8", data=data)
    assert scaled.distance < 0.7 * plain.distance
    x = torch.randn(16, 32)
    wanted = model(x).detach().numpy()
    errors = [
        np.linalg.norm(run(tmp_path / name, x.numpy())[0] - wanted) for name in ("scaled.onnx", "plain.onnx")
    ]
    assert errors[0] < 0.7 * errors[1]


def test_rows_that_are_not_finite_and_batches_without_rows_show_nothing(tmp_path):
    source, x = normed(tmp_path / "in.onnx", [node("MatMul", ["h", "w"], ["y"])]), random(32, 16)
    spoiled, target = x.copy(), tmp_path / "out.onnx"
    spoiled[5] = np.nan
    model = read_model(source)
    smooth_inputs(model, [{"x": x[:0]}, {"x": spoiled}], tmp_path)
    write_model(model, target)
    assert_same(source, target, x)
    unseen = read_model(source)
    smooth_inputs(unseen, [{"x": x[:0]}], tmp_path)
    write_model(unseen, target)
    assert kinds(target) == kinds(source)
    assert_same(source, target, x)
