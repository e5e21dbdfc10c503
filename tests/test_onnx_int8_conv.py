"""Convolutions in int8: which they are, how close they come, and on every CPU."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from onnx_models import far, kinds, make, node, random, run
from torch import nn

import panther_compile as pc
from panther_compile.errors import DataError
from panther_compile.onnx import int8_conv
from panther_compile.onnx.int8_conv import _rounded_kernel, _Seen

SIDE = 24


def cnn():
    """Pointwise, depthwise and 3 x 3 convolutions, activations and a sum: all a run of its own."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 64, 3, padding=1)
            self.deep = nn.Conv2d(64, 64, 3, padding=1, groups=64)
            self.point = nn.Conv2d(64, 64, 1)
            self.wide = nn.Conv2d(64, 96, 3, padding=1, stride=2)
            self.head = nn.Linear(96, 10)

        def forward(self, x):
            x = self.stem(x).relu()
            x = x + self.point(self.deep(x).clamp(0, 6))
            return self.head(self.wide(x).relu().mean((2, 3)))

    torch.manual_seed(0)
    return Residual().eval()


def stored(path):
    """The kernels as they are stored, by the name of the convolution."""
    model = ir.load(path)
    found = {}
    for one in model.graph:
        if one.op_type == "Conv":
            maker = one.inputs[1].producer()
            found[one.name] = (
                (one.inputs[1] if maker is None else maker.inputs[0]).const_value.numpy(),
                maker is not None,
            )
    return found


def test_a_network_in_int8(tmp_path):
    model, data = cnn(), torch.randn(24, 3, SIDE, SIDE).split(8)
    x = torch.randn(16, 3, SIDE, SIDE)
    shapes = ({0: torch.export.Dim("n")},)
    found = pc.export_onnx(
        model, x, tmp_path / "int8.onnx", dynamic_shapes=shapes, then="int8", data=list(data)
    )
    pc.export_onnx(model, x, tmp_path / "without.onnx", dynamic_shapes=shapes, then="int8")
    assert found.grade == "good"
    assert found.inputs == "3 batches of the data"
    assert all(is_rounded for _, is_rounded in stored(tmp_path / "int8.onnx").values())
    assert kinds(tmp_path / "int8.onnx")["MatMulInteger"] == 1  # the head
    assert not any(is_rounded for _, is_rounded in stored(tmp_path / "without.onnx").values())
    wanted = model(x).detach().numpy()
    assert far(run(tmp_path / "int8.onnx", x.numpy())[0], wanted) < 0.03
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * (tmp_path / "without.onnx").stat().st_size


def test_batches_are_divided_to_fit(tmp_path):
    model, data = cnn(), [torch.randn(8, 3, SIDE, SIDE)]
    found = pc.export_onnx(model, data[0][:2], tmp_path / "int8.onnx", then="int8", data=data)
    assert found.inputs == "4 batches of the data"
    unchecked = tmp_path / "unchecked.onnx"
    assert pc.export_onnx(model, data[0][:2], unchecked, then="int8", data=data, verify=False) is None
    assert unchecked.read_bytes() == (tmp_path / "int8.onnx").read_bytes()
    assert all(is_rounded for _, is_rounded in stored(tmp_path / "int8.onnx").values())


class Stereo(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = cnn()

    def forward(self, left, right, scale=None, *, views=()):
        both = self.net(left) - self.net(0.01 * right)
        return sum(map(self.net, views), both) * (1.0 if scale is None else scale)


def pictures(amplitude=1.0):
    return amplitude * torch.randn(4, 3, SIDE, SIDE)


# The example, by position and by name, and a batch of data for it.
STEREO = {
    "a number": (
        lambda: ((pictures(), pictures(100.0), torch.tensor(2.0)), {}),
        lambda: (pictures(), pictures(100.0), torch.tensor(2.0)),
    ),
    "a list": (
        lambda: ((pictures(), pictures(100.0)), {"views": [pictures(), pictures()]}),
        lambda: {"views": [pictures(), pictures()], "right": pictures(100.0), "left": pictures()},
    ),
    "others by name": (
        lambda: ((), {"right": pictures(100.0), "left": pictures()}),
        lambda: (pictures(), pictures(100.0)),
    ),
}


@pytest.mark.parametrize("what", STEREO)
def test_data_reach_inputs_however_they_are_given(what, tmp_path):
    torch.manual_seed(0)
    example, batch = STEREO[what]
    (args, kwargs), batches = example(), [batch() for _ in range(3)]
    model = Stereo().eval()
    found = pc.export_onnx(model, args, tmp_path / "m.onnx", kwargs=kwargs, then="int8", data=batches)
    assert found.inputs == "3 batches of the data"
    assert all(is_rounded for _, is_rounded in stored(tmp_path / "m.onnx").values())
    names = [one.name for one in onnx.load(tmp_path / "m.onnx").graph.input]
    given = [*args, *kwargs.get("views", ())] or [kwargs[name] for name in names]
    with torch.no_grad():
        wanted = model(*args, **kwargs).numpy()
    found = run(tmp_path / "m.onnx", [one.numpy() for one in given])[0]
    assert far(found, wanted) < 0.08


def test_what_does_not_pay_stays(tmp_path):
    # A stem of few multiplications between float32 sigmoids, then one of many, then the output itself.
    weights = {
        "a": random(8, 3, 3, 3),
        "b": random(128, 8, 1, 1) / 3,
        "c": random(128, 128, 3, 3) / 30,
        "d": random(4, 128, 1, 1) / 10,
    }
    nodes = [
        node("Conv", ["x", "a"], ["h0"], name="stem", pads=[1, 1, 1, 1]),
        node("Sigmoid", ["h0"], ["h1"]),
        node("Conv", ["h1", "b"], ["h2"], name="thin"),
        node("Sigmoid", ["h2"], ["h3"]),
        node("Conv", ["h3", "c"], ["h4"], name="thick", pads=[1, 1, 1, 1]),
        node("Sigmoid", ["h4"], ["h5"]),
        node("Conv", ["h5", "d"], ["y"], name="last"),
    ]
    source = make(
        tmp_path / "in.onnx", nodes, weights, x=("n", 3, SIDE, SIDE), y=("n", 4, SIDE, SIDE), opset=12
    )
    data = [random(4, 3, SIDE, SIDE) for _ in range(4)]
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 1.0, data=data, then="int8")
    assert not report.plan.sketched
    assert report.closeness.grade == "good"
    # The opset is one that has scales for each output.
    assert [one.version for one in onnx.load(tmp_path / "out.onnx").opset_import if not one.domain] == [13]
    rounded = {name: is_rounded for name, (_, is_rounded) in stored(tmp_path / "out.onnx").items()}
    assert rounded == {"stem": False, "thin": False, "thick": True, "last": False}


def test_sketch_and_int8(tmp_path):
    # Kernels of low rank, whose factors are convolutions too.
    left, right = random(64, 8), random(8, 64 * 9) / 24
    weights = {"a": (left @ right / 3).reshape(64, 64, 3, 3), "b": random(10, 64)}
    nodes = [
        node("Conv", ["x", "a"], ["h"], pads=[1, 1, 1, 1]),
        node("Relu", ["h"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "b"], ["y"], transB=1),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 64, SIDE, SIDE), y=("n", 10))
    data = [np.maximum(random(4, 64, SIDE, SIDE), 0) for _ in range(4)]
    report = pc.sketch_onnx(
        source, tmp_path / "out.onnx", 0.5, data=data, then="int8", min_params=2000, allow_slower=True
    )
    assert len(report.plan.sketched) == 1
    kernels = stored(tmp_path / "out.onnx")
    assert len(kernels) == 2
    assert all(is_rounded for _, is_rounded in kernels.values())
    assert far(run(tmp_path / "out.onnx", data[0])[0], run(source, data[0])[0]) < 0.05


def test_biases_take_up_what_rounding_weights_moves(tmp_path, monkeypatch):
    # Inputs far from 0, and weights that round up by as much as they can, all but the largest.
    kernel = np.full((8, 64, 1, 1), 10.4, np.float32)
    kernel[:, 0] = 127
    weights = {"a": kernel, "b": np.zeros(8, np.float32), "c": np.eye(8, dtype=np.float32)}
    nodes = [
        node("Conv", ["x", "a", "b"], ["h"]),
        node("GlobalAveragePool", ["h"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("MatMul", ["f", "c"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 64, 8, 8), y=("n", 8))
    data = [random(4, 64, 8, 8) * 0.1 + 5 for _ in range(4)]
    monkeypatch.setattr(int8_conv, "_PAYS", 0)
    # All outputs are alike, so that any error is as large as what there is to tell.
    with pytest.warns(pc.SketchQualityWarning, match=r"^int8 destroys what the model computes"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", 1.0, data=data, then="int8")
    (bias,) = (
        numpy_helper.to_array(one)
        for one in onnx.load(tmp_path / "out.onnx").graph.initializer
        if one.data_type == onnx.TensorProto.INT32 and one.dims == [8] and "zero_point" not in one.name
    )
    assert np.abs(bias).min() > 0
    # Off by .4 of 63 weights times 5 without it: 2 % of the output.
    found, wanted = run(tmp_path / "out.onnx", data[0])[0], run(source, data[0])[0]
    assert far(found, wanted) < 0.01


@pytest.mark.slow
def test_a_convolution_that_runs_twice(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(64, 64, 3, padding=1)
            self.head = nn.Linear(64 * 16, 10)

        def forward(self, x):
            small, large = self.conv(x).sigmoid(), self.conv(20 * x).sigmoid()
            return self.head((small + large)[..., ::6, ::6].flatten(1))

    torch.manual_seed(0)
    model, data = Twice().eval(), [torch.randn(8, 64, SIDE, SIDE)]
    model.conv.bias.data.uniform_(-2, 2)
    path = tmp_path / "int8.onnx"
    found = pc.export_onnx(model, data[0], path, then="int8", data=data)
    assert found.grade == "good"
    assert len(stored(path)) == 2
    assert all(is_rounded for _, is_rounded in stored(path).values())
    assert far(run(path, data[0].numpy())[0], model(data[0]).detach().numpy()) < 0.02


def test_a_bias_that_two_convolutions_read(tmp_path, monkeypatch):
    """Its copy would be called "b0", as ONNX Runtime's quantizer has it, which another value is."""
    monkeypatch.setattr(int8_conv, "_PAYS", 0)
    weights = {name: random(16, 16, 5, 5) / 20 for name in ("u", "v", "w")} | {"b": random(16)}
    nodes = [
        node("Conv", ["x", "u", "b"], ["a"]),
        node("Conv", ["a", "v", "b"], ["b0"]),
        node("Conv", ["b0", "w"], ["y"]),
    ]
    data = [random(4, 16, SIDE, SIDE) for _ in range(3)]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, SIDE, SIDE))
    pc.sketch_onnx(source, tmp_path / "out.onnx", 1.0, data=data, then="int8", progress=False)
    assert [is_rounded for _, is_rounded in stored(tmp_path / "out.onnx").values()] == [True, True, False]
    assert far(run(tmp_path / "out.onnx", data[0])[0], run(source, data[0])[0]) < 0.02


def test_no_pair_overflows_but_in_depthwise_kernels():
    weight = random(16, 7, 3, 3)
    rounded, scales = _rounded_kernel(weight, 1)
    flat = np.moveaxis(rounded, 1, -1).reshape(16, -1).astype(int)
    pairs = flat[:, : flat.shape[1] // 2 * 2].reshape(16, -1, 2)
    assert np.abs(pairs.sum(-1)).max() <= 128
    assert far(rounded * scales[:, None, None, None], weight) < 0.02
    depthwise = np.full((4, 1, 3, 3), 0.5, np.float32)
    rounded, scales = _rounded_kernel(depthwise, 4)
    assert (rounded == 127).all()
    np.testing.assert_allclose(rounded * scales[:, None, None, None], depthwise, rtol=1e-6)


def test_ranges_leave_out_what_costs_less_than_it_takes():
    draw = np.random.default_rng(0)
    values = draw.standard_normal((4, 8, 1000)).astype(np.float32)
    plain, outlier = _Seen(4096), _Seen(4096)
    plain.add(values, draw)
    values[0, 0, 0] = 100
    outlier.add(values, draw)
    low, high = plain.range()
    assert low < -2.5
    assert 2.5 < high <= values.max()
    assert outlier.range()[1] < 75
    np.testing.assert_allclose(plain.means, 0, atol=0.1)
    assert plain.size == 8000


class Clamped(nn.Module):
    """Three convolutions in a row, which are faster in int8 together."""

    def __init__(self, low, high):
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = low, high
        self.layers = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.layers[1](self.layers[0](x).clamp(self.low, self.high)).relu()
        return self.head(self.layers[2](x).relu().mean((2, 3)))


@pytest.mark.parametrize(("low", "high", "stays"), [(0.0, 6.0, False), (0.5, 6.0, True), (None, -0.5, True)])
def test_a_clip_that_leaves_out_0_stays(tmp_path, low, high, stays):
    """ONNX Runtime lets ranges stand for activations; 0 is in all of them."""
    model, data = Clamped(low, high).eval(), torch.randn(12, 32, SIDE, SIDE).split(4)
    path = tmp_path / "int8.onnx"
    pc.export_onnx(model, data[0], path, then="int8", data=list(data))
    assert all(is_rounded for _, is_rounded in stored(path).values())
    assert any(one.op_type == "Clip" for one in ir.load(path).graph) == stays
    assert far(run(path, data[0].numpy())[0], model(data[0]).detach().numpy()) < 0.02


@pytest.mark.parametrize("every", [2, 1])
def test_batches_that_no_convolution_sees(tmp_path, every):
    """As of pictures beside texts: in some batches, or in all, there is none."""
    nodes = [
        node("Conv", ["p", "k"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "l"], ["d"], pads=[1] * 4),
        node("GlobalAveragePool", ["d"], ["z"]),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    weights = {"k": random(32, 32, 3, 3), "l": random(32, 32, 3, 3), "w": random(48, 64)}
    ends = [onnx.helper.make_tensor_value_info(name, 1, ("m", 32, *sides)) for name, *sides in ENDS]
    source = make(tmp_path / "in.onnx", nodes, weights, inputs=ends[:1], outputs=ends[1:])
    data = [{"x": random(4, 48), "p": random(2 * (i % every), 32, SIDE, SIDE)} for i in range(6)]
    pc.sketch_onnx(source, tmp_path / "out.onnx", 1.0, data=data, then="int8")
    assert all(is_rounded == (every > 1) for _, is_rounded in stored(tmp_path / "out.onnx").values())
    feed = [random(4, 48), random(2, 32, SIDE, SIDE)]
    for found, wanted in zip(run(tmp_path / "out.onnx", feed), run(source, feed), strict=True):
        assert far(found, wanted) < 0.05


ENDS = (("p", SIDE, SIDE), ("z", 1, 1))


def test_bounds_of_a_clip_with_an_axis(tmp_path):
    model, data = Clamped(0.0, 6.0).eval(), list(torch.randn(12, 32, SIDE, SIDE).split(4))
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    pc.export_onnx(model, data[0], source)
    graph = onnx.load(source)
    (clip,) = (one for one in graph.graph.node if one.op_type == "Clip")
    for bound, number in zip(("low", "high"), (0, 6), strict=True):
        graph.graph.initializer.append(numpy_helper.from_array(np.full(1, number, np.float32), bound))
    clip.input[1:] = ["low", "high"]
    onnx.save(graph, source)
    pc.sketch_onnx(source, target, 1.0, data=data, then="int8")
    assert not any(one.op_type == "Clip" for one in ir.load(target).graph)
    assert far(run(target, data[0].numpy())[0], run(source, data[0].numpy())[0]) < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_that_are_not_finite(tmp_path, value):
    model, data = Clamped(0.0, 6.0).eval(), list(torch.randn(16, 32, SIDE, SIDE).split(4))
    data[1] = data[1].clone()
    data[1][0, 0, 0, 0] = value
    with pytest.raises(DataError, match=r"batch 1 of .*data"):
        pc.export_onnx(model, data[0], tmp_path / "int8.onnx", then="int8", data=data)
    assert not any(tmp_path.iterdir())
