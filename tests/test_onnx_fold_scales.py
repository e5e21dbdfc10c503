"""fold_scales.py and hard swishes of forms.py: the same function of fewer nodes, and what has to stay."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import far, kinds, low_rank, make, node, random, run, sketch

import panther_compile as pc
from panther_compile.onnx.files import read_model, write_model
from panther_compile.onnx.fold_scales import fold_scales
from panther_compile.onnx.forms import fuse_hard_swish

X, Y = ("n", 6, 9, 9), (None,) * 4
ONE, CHANNELS = np.float32([1.7]), np.linspace(0.5, 2, 8, dtype=np.float32).reshape(8, 1, 1)


def folded(source, passes=(fold_scales,)):
    """Run the passes, and hold what comes of them against the source."""
    model = read_model(source)
    count = sum(one(model) for one in passes)
    target = source.with_name("folded.onnx")
    write_model(model, target)
    x = random(2, 6, 9, 9)
    assert far(run(target, x)[0], run(source, x)[0]) < 1e-6
    onnx.checker.check_model(onnx.load(target))
    return count, kinds(target)


def conv(path, nodes, *, bias=True, dtype=np.float32, groups=1, **weights):
    """A convolution to `y0`, and what follows; V, of 3 x 3, is for a second one."""
    weights |= {"W": random(8, 6 // groups, 3, 3).astype(dtype), "V": random(4, 8, 3, 3).astype(dtype)}
    weights |= {"U": random(8, 1, 3, 3).astype(dtype)} | ({"b": random(8).astype(dtype)} if bias else {})
    first = node("Conv", ["x", "W", *["b"] * bias], ["y0"], group=groups)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    used = {name for one in nodes for name in one.input} | {"W", "b"}
    weights = {name: array for name, array in weights.items() if name in used}
    make(path, [first, *nodes], weights, x=X, y=Y, dtype=kind)
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)
    return path


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("constant", [ONE, CHANNELS, CHANNELS[None], np.float32(0.3)])
def test_scales_and_shifts_go_into_the_convolution_before(tmp_path, constant, groups, bias):
    nodes = [
        node("Mul", ["s", "y0"], ["y1"]),
        node("Sub", ["y1", "t"], ["y2"]),
        node("Div", ["y2", "s"], ["y3"]),
        node("Relu", ["y3"], ["y"]),
    ]
    source = conv(tmp_path / "in.onnx", nodes, bias=bias, groups=groups, s=constant, t=0.5 * constant)
    assert folded(source) == (3, {"Conv": 1, "Relu": 1})


def norm(given, result, **attributes):
    return node("BatchNormalization", [given, "g", "beta", "m", "v"], [result], **attributes)


STATISTICS = {name: 0.5 + np.abs(random(8)) for name in ("g", "beta", "m", "v")}


@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_norm_goes_into_the_convolution_before(tmp_path, bias):
    nodes = [norm("y0", "y1", epsilon=0.3), node("Relu", ["y1"], ["y"])]
    source = conv(tmp_path / "in.onnx", nodes, bias=bias, **STATISTICS)
    assert folded(source) == (1, {"Conv": 1, "Relu": 1})


def test_a_batch_norm_goes_into_the_convolution_behind(tmp_path):
    nodes = [node("Relu", ["y0"], ["a"]), norm("a", "p"), node("Conv", ["p", "V"], ["y"])]
    assert folded(conv(tmp_path / "in.onnx", nodes, **STATISTICS)) == (1, {"Conv": 2, "Relu": 1})


def test_a_batch_norm_that_is_given_its_statistics_stays(tmp_path):
    nodes = [node("Abs", ["v0"], ["v"]), norm("y0", "y1"), node("Relu", ["y1"], ["y"])]
    statistics = {name: one for name, one in STATISTICS.items() if name != "v"}
    source = conv(tmp_path / "in.onnx", nodes, **statistics, v0=STATISTICS["v"])
    assert folded(source) == (0, {"Abs": 1, "BatchNormalization": 1, "Conv": 1, "Relu": 1})


@pytest.mark.parametrize("constant", [ONE, CHANNELS])
@pytest.mark.parametrize(
    ("pads", "left"), [([0, 0, 0, 0], {}), ([1, 1, 1, 1], {"Add": 1})], ids=["unpadded", "padded"]
)
@pytest.mark.parametrize("order", [("Mul", "Add"), ("Add", "Mul")])
@pytest.mark.parametrize("groups", [1, 8])
def test_they_go_into_those_behind(tmp_path, groups, order, pads, left, constant):
    nodes = [
        node("Relu", ["y0"], ["a"]),
        node(order[0], ["a", "s"], ["p"]),
        node(order[1], ["p", "t"], ["v"]),
        node("Conv", ["v", "V" if groups == 1 else "U"], ["y"], pads=pads, group=groups),
    ]
    source = conv(tmp_path / "in.onnx", nodes, s=constant, t=0.3 * constant)
    assert folded(source) == (2 - len(left), {"Conv": 2, "Relu": 1} | left)


def test_one_goes_into_all_that_read_it(tmp_path):
    nodes = [
        node("Relu", ["y0"], ["a"]),
        node("Mul", ["a", "s"], ["v"]),
        node("Conv", ["v", "V"], ["c"], pads=[1, 1, 1, 1]),
        node("Conv", ["v", "U"], ["d"], pads=[1, 1, 1, 1], group=8),
        node("Concat", ["c", "d"], ["y"], axis=1),
    ]
    assert folded(conv(tmp_path / "in.onnx", nodes, s=CHANNELS)) == (
        1,
        {"Conv": 2 + 1, "Relu": 1, "Concat": 1},
    )


def test_weights_that_nodes_hold(tmp_path):
    source = conv(tmp_path / "in.onnx", [node("Mul", ["y0", "s"], ["m"]), node("Relu", ["m"], ["y"])], s=ONE)
    model = onnx.load(source)
    held = [helper.make_node("Constant", [], [one.name], value=one) for one in model.graph.initializer]
    del model.graph.initializer[:]
    for one in reversed(held):
        model.graph.node.insert(0, one)
    onnx.save(model, source)
    count, found = folded(source)
    assert (count, found["Mul"]) == (1, 0)


STAYS = {
    "a padded shift alone": [
        node("Relu", ["y0"], ["a"]),
        node("Add", ["a", "s"], ["v"]),
        node("Conv", ["v", "V"], ["y"], pads=[1, 1, 1, 1]),
    ],
    "padding by its name": [
        node("Relu", ["y0"], ["a"]),
        node("Add", ["a", "s"], ["v"]),
        node("Conv", ["v", "V"], ["y"], auto_pad="SAME_UPPER"),
    ],
    "a constant for each place": [node("Mul", ["y0", "place"], ["y1"]), node("Relu", ["y1"], ["y"])],
    "one more axis": [node("Mul", ["y0", "more"], ["y1"]), node("Squeeze", ["y1", "axis"], ["y"])],
    "what is read twice": [node("Mul", ["y0", "s"], ["y1"]), node("Add", ["y1", "y0"], ["y"])],
    "an output": [node("Mul", ["y0", "s"], ["y"])],
    "a constant over it": [node("Div", ["s", "y0"], ["y1"]), node("Relu", ["y1"], ["y"])],
    "division by nothing": [node("Div", ["y0", "zero"], ["y1"]), node("Clip", ["y1", "low", "high"], ["y"])],
    "what overflows": [node("Mul", ["y0", "huge"], ["y1"]), node("Clip", ["y1", "low", "high"], ["y"])],
    "a weight that another node reads": [
        node("Mul", ["y0", "s"], ["y1"]),
        node("Conv", ["x", "W"], ["z"]),
        node("Add", ["y1", "z"], ["y"]),
    ],
    "one reader of another kind": [
        node("Relu", ["y0"], ["a"]),
        node("Mul", ["a", "s"], ["v"]),
        node("Conv", ["v", "U"], ["c"], group=8, pads=[1, 1, 1, 1]),
        node("Add", ["c", "v"], ["y"]),
    ],
    "channels made of one": [
        node("ReduceMax", ["y0"], ["a"], axes=[1]),
        node("Mul", ["a", "each"], ["v"]),
        node("Conv", ["v", "U"], ["y"], group=8),
    ],
}
CONSTANTS = {
    "s": ONE,
    "place": np.float32(np.ones((7, 7))) * 2,
    "more": np.full((1, 1, 1, 1, 1), 2, np.float32),
    "axis": np.int64([0]),
    "zero": np.float32([0]),
    "huge": np.float32([3e38]),
    "low": np.float32(-9),
    "high": np.float32(9),
    "each": CHANNELS,
}


def test_a_weight_that_is_an_output_stays(tmp_path):
    scaled = [node("Mul", ["y0", "s"], ["y1"]), node("Relu", ["y1"], ["y"])]
    source = conv(tmp_path / "in.onnx", scaled, s=ONE)
    model = onnx.load(source)
    held = next(one for one in model.graph.initializer if one.name == "W")
    model.graph.output.append(helper.make_tensor_value_info("W", held.data_type, held.dims))
    onnx.save(model, source)
    before = kinds(source)
    assert folded(source) == (0, before)


@pytest.mark.parametrize("what", STAYS)
def test_what_stays(tmp_path, what):
    source = conv(tmp_path / "in.onnx", STAYS[what], **CONSTANTS)
    before = kinds(source)
    assert folded(source) == (0, before)


def test_half_types_stay(tmp_path):
    half = {"s": ONE.astype(np.float16)}
    nodes = [node("Mul", ["y0", "s"], ["y1"]), node("Relu", ["y1"], ["y"])]
    source = conv(tmp_path / "in.onnx", nodes, dtype=np.float16, **half)
    model = read_model(source)
    assert fold_scales(model) == 0


def swish(last, *, swap=False):
    """x clip(x + 3, 0, 6) / 6, or times a sixth."""
    divisor = "6" if last == "Div" else "1/6"
    return [
        node("Add", ["three", "y0"] if swap else ["y0", "three"], ["z"]),
        node("Clip", ["z", "0", "6"], ["c"]),
        node("Mul", ["c", "y0"] if swap else ["y0", "c"], ["m"]),
        node(last, [divisor, "m"] if swap and last == "Mul" else ["m", divisor], ["h"]),
        node("Neg", ["h"], ["y"]),
    ]


NUMBERS = {"three": np.float32([3]), "0": np.float32(0), "6": np.float32(6), "1/6": np.float32([1 / 6])}


@pytest.mark.parametrize("last", ["Div", "Mul"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_hard_swish(tmp_path, swap, last):
    source = conv(tmp_path / "in.onnx", swish(last, swap=swap), **NUMBERS)
    found = {"Conv": 1, "HardSigmoid": 1, "Mul": 1, "Neg": 1}
    assert folded(source, [fuse_hard_swish]) == (1, found)


def test_a_hard_sigmoid(tmp_path):
    nodes = [
        node("Add", ["y0", "three"], ["z"]),
        node("Clip", ["z", "0", "6"], ["c"]),
        node("Div", ["c", "6"], ["g"]),
        node("Neg", ["g"], ["y"]),
    ]
    source = conv(tmp_path / "in.onnx", nodes, **NUMBERS)
    assert folded(source, [fuse_hard_swish]) == (1, {"Conv": 1, "HardSigmoid": 1, "Neg": 1})


@pytest.mark.parametrize(
    "other",
    [
        {"three": np.float32([2])},
        {"6": np.float32(5)},
        {"0": np.float32(1)},
        {"three": np.full((1, 1, 1, 1, 1), 3, np.float32)},
    ],
)
def test_what_is_no_hard_swish(tmp_path, other):
    source = conv(tmp_path / "in.onnx", swish("Div"), **(NUMBERS | other))
    assert folded(source, [fuse_hard_swish])[0] == 0


def test_a_hard_swish_of_something_else(tmp_path):
    nodes = swish("Div")
    nodes[2] = node("Mul", ["z", "c"], ["m"])
    assert folded(conv(tmp_path / "in.onnx", nodes, **NUMBERS), [fuse_hard_swish])[0] == 0


def test_double_precision_keeps_its_hard_swish(tmp_path):
    doubles = {name: one.astype(np.float64) for name, one in NUMBERS.items()}
    source = conv(tmp_path / "in.onnx", swish("Div"), dtype=np.float64, **doubles)
    assert fuse_hard_swish(read_model(source)) == 0


def affine_blocks(path):
    """A convolution of low rank between affine blocks, as Paddle writes them."""
    weights = {"W": random(64, 6, 1, 1), "V": low_rank(64, 64, 6).reshape(64, 64, 1, 1), "s": ONE, **NUMBERS}
    nodes = [
        node("Conv", ["x", "W"], ["c0"]),
        node("Mul", ["s", "c0"], ["c1"]),
        node("Add", ["c1", "s"], ["y0"]),
        *swish("Div")[:-1],
        node("Mul", ["h", "s"], ["h1"]),
        node("Conv", ["h1", "V"], ["d"]),
        node("Add", ["d", "s"], ["e"]),
        node("Relu", ["e"], ["y"]),
    ]
    return make(path, nodes, weights, x=X, y=Y, dtype=TensorProto.FLOAT)


def test_a_sketched_file_has_them_folded(tmp_path):
    source, x = affine_blocks(tmp_path / "in.onnx"), random(2, 6, 9, 9)
    report, target = sketch(source, include="V")
    assert [line.name for line in report.plan.sketched] == ["V"]
    assert report.folded == 5
    assert "folded: 5 nodes" in str(report)
    assert kinds(target)["HardSigmoid"] == 1
    assert far(run(target, x)[0], run(source, x)[0]) < 1e-5


def test_a_ratio_of_1_folds_alone(tmp_path):
    source, x = affine_blocks(tmp_path / "in.onnx"), random(2, 6, 9, 9)
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 1, progress=False)
    assert not report.plan.sketched
    assert report.folded == 5
    assert kinds(tmp_path / "out.onnx") == {"Conv": 2, "HardSigmoid": 1, "Mul": 1, "Relu": 1}
    assert far(run(tmp_path / "out.onnx", x)[0], run(source, x)[0]) < 1e-6
    with pytest.raises(pc.errors.NoTargetError, match="ratio is 1"):
        pc.sketch_onnx(tmp_path / "out.onnx", tmp_path / "again.onnx", 1, progress=False)
