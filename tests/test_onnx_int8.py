"""Files in int8: the right nodes, the right outputs, the right words."""

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.version_converter import ConvertError
from onnx_models import far, kinds, low_rank, make, mlp, node, random, run
from torch import nn

import panther_compile as pc
from panther_compile.cli import main
from panther_compile.errors import NoTargetError
from panther_compile.onnx import int8
from panther_compile.onnx.int8 import as_pairs, warn_if_destroyed_by_int8
from panther_compile.records import Choice, Closeness, LayerPlan, SketchPlan

WIDTHS = (96, 512, 96, 10)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, 96)).eval()


def test_sketch_and_int8(tmp_path):
    source, target = mlp(tmp_path / "in.onnx", WIDTHS), tmp_path / "out.onnx"
    data = [random(16, 96) for _ in range(4)]
    report = pc.sketch_onnx(source, target, 0.5, data=data, then="int8", min_params=0, allow_slower=True)
    plain = tmp_path / "plain.onnx"
    pc.sketch_onnx(source, plain, 0.5, data=data, min_params=0, allow_slower=True)
    assert {line.choice.scheme for line in report.plan.sketched} == {"pair"}
    assert report.achieved_ratio <= 0.5
    # Each product, those of the head that stays dense too.
    assert kinds(target)["MatMulInteger"] == len(report.plan.sketched) * 2 + 1
    assert kinds(target)["MatMul"] == 0
    # A pair of one rank stores more numbers than the pivoted form of the plain file, a byte each, and the
    # middles of its latents.
    assert report.sketched_bytes == target.stat().st_size < 0.48 * plain.stat().st_size
    # What is reported is what the int8 file computes.
    found, wanted = run(target, data[-1])[0], run(source, data[-1])[0]
    assert report.output_errors["y"] == pytest.approx(far(found, wanted), rel=1e-4)
    assert far(found, wanted) < 0.1
    assert found.shape == wanted.shape


def test_without_data_and_with_gemm(tmp_path):
    weights = {"w": random(1024, 96), "b": random(1024), "v": random(1024, 96)}
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        node("MatMul", ["h", "v"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 96), y=("n", 96))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)
        report = pc.sketch_onnx(
            source, tmp_path / "out.onnx", 0.5, then="int8", include="*", min_params=0, allow_slower=True
        )
    assert len(report.plan.sketched) == 2
    assert kinds(tmp_path / "out.onnx")["MatMulInteger"] == 4


def test_a_gemm_whose_bias_is_an_empty_name(tmp_path):
    source = make(
        tmp_path / "in.onnx", [node("Gemm", ["x", "w", ""], ["y"])], {"w": random(96, 64)}, ("n", 96)
    )
    pc.sketch_onnx(source, tmp_path / "out.onnx", 1.0, then="int8")
    assert kinds(tmp_path / "out.onnx")["MatMulInteger"] == 1
    x = random(5, 96)
    assert far(run(tmp_path / "out.onnx", x)[0], run(source, x)[0]) < 0.03


def plan(*shapes, rank):
    lines = [
        LayerPlan(
            str(place), "Linear", shape, shape[0] * shape[1],
            Choice("pivoted", rank, (rank,), rank * (sum(shape) - rank), 0.1), "",
        )
        for place, shape in enumerate(shapes)
    ]  # fmt: skip
    return SketchPlan(tuple(lines), "0.5", "ONNX graph")


def test_pairs_of_as_many_numbers_or_dense():
    wide, square = as_pairs(plan((1536, 384), (384, 384), rank=180), None).layers
    assert wide.choice.scheme == "pair"
    assert wide.choice.ranks == (wide.choice.rank,) == (160,)
    assert wide.choice.stored_numbers == 160 * (1536 + 384) <= 180 * (1536 + 384 - 180)
    assert square.choice is not None
    (slow,) = as_pairs(plan((384, 384), rank=250), None).layers
    assert slow.choice is None
    assert "int8" in slow.reason


def test_pairs_keep_the_rank_that_is_wanted_where_the_budget_has_room():
    wanted = plan((64, 48), (64, 64), rank=6)
    assert [line.choice.rank for line in as_pairs(wanted, None).layers] == [5, 5]
    assert [line.choice.rank for line in as_pairs(wanted, None, ratio=0.6).layers] == [6, 6]
    for room, ranks in ((0, [5, 5]), (40, [6, 5]), (80, [6, 6])):
        ratio = (wanted.stored_numbers + room + 0.5) / wanted.dense_numbers
        found = as_pairs(wanted, None, ratio=ratio)
        assert [line.choice.rank for line in found.layers] == ranks
        assert found.stored_numbers <= ratio * found.dense_numbers
    assert [line.choice.rank for line in as_pairs(wanted, 2, ratio=0.6).layers] == [6, 6]
    (steps,) = as_pairs(plan((384, 384), rank=24), None, ratio=0.6).layers
    assert steps.choice.rank == 24


def test_weights_of_a_low_rank_keep_it(tmp_path):
    source = make(
        tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": low_rank(48, 64)}, ("n", 48)
    )
    options = {"min_params": 0, "allow_slower": True, "synthetic": False, "include": "*"}
    x = random(9, 48)
    for ratio in (0.6, {"w": 0.6}):
        pc.sketch_onnx(source, tmp_path / "out.onnx", ratio, then="int8", **options)
        assert far(run(tmp_path / "out.onnx", x)[0], run(source, x)[0]) < 0.03


def test_each_budget_has_its_own_room(tmp_path):
    weights = {"u": low_rank(48, 64), "v": low_rank(64, 64), "w": random(64, 96)}
    nodes = [node("MatMul", [x, w], [y]) for x, w, y in (("x", "u", "a"), ("a", "v", "b"), ("b", "w", "y"))]
    source = make(tmp_path / "in.onnx", nodes, weights, ("n", 48))
    options = {"min_params": 0, "allow_slower": True, "synthetic": False, "include": "*", "then": "int8"}
    ratio = {"u": 0.6, "v": 0.3, "w": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)
        plan = pc.sketch_onnx(source, tmp_path / "out.onnx", ratio, **options).plan
    assert all(line.stored_numbers <= ratio[line.name] * line.dense_numbers for line in plan.sketched)
    alone = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.6, **options | {"include": "u"}).plan
    assert plan.choices["u"] == alone.choices["u"]


def test_other_schemes_stay():
    conv = LayerPlan("0", "Conv2d", (8, 8, 3, 3), 576, Choice("channel", 2, (2,), 160, None), "")
    assert as_pairs(SketchPlan((conv,), "0.5", "ONNX graph"), None).layers == (conv,)


def test_export(tmp_path, model):
    data = torch.randn(64, 96).split(16)
    small = pc.sketchify(model, 0.5, data=data, include="*", min_params=0, allow_slower=True, narrow=False)
    path, plain = tmp_path / "int8.onnx", tmp_path / "plain.onnx"
    closeness = pc.export_onnx(small, data[0], path, then="int8", data=data)
    assert pc.export_onnx(small, data[0], plain) is None
    assert closeness.grade == "good"
    assert closeness.inputs == "4 batches of the data"
    assert kinds(path)["MatMulInteger"] == 4
    assert path.stat().st_size < 0.45 * plain.stat().st_size
    wanted = small(data[0]).detach().numpy()
    assert far(run(path, data[0].numpy())[0], wanted) < 0.05
    assert sorted(one.name for one in tmp_path.iterdir()) == ["int8.onnx", "plain.onnx"]


def test_a_dense_model_in_int8(tmp_path, model):
    x = torch.randn(8, 96)
    pc.export_onnx(model, x, tmp_path / "int8.onnx", then="int8", verify=False)
    assert kinds(tmp_path / "int8.onnx")["MatMulInteger"] == 2
    assert far(run(tmp_path / "int8.onnx", x.numpy())[0], model(x).detach().numpy()) < 0.05


def test_destroyed_outputs_are_warned_of(tmp_path):
    # One feature so large that all others round to nothing, and it does not count.
    layer = nn.Linear(64, 64)
    layer.weight.data[:, 0] = 0
    x = torch.randn(8, 64)
    x[:, 0] = 1e5
    with pytest.warns(pc.SketchQualityWarning, match=r"int8 destroys.*Try then='none'$"):
        pc.export_onnx(layer.eval(), x, tmp_path / "out.onnx", then="int8", data=[x])
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.SketchQualityWarning)  # an example is too little to tell
        found = pc.export_onnx(layer, x, tmp_path / "out.onnx", then="int8", data=[x[:3]])
    assert found.inputs == "the example"
    assert found.grade == "destroyed"


def test_a_larger_ratio_is_a_remedy_where_there_is_one():
    wreck = Closeness("destroyed", "relative error", 1.0, 1.0, None, "the data")
    for sketched, remedy in ((True, "a larger ratio, or then='none'"), (False, "then='none'")):
        with pytest.warns(pc.SketchQualityWarning, match=rf"on the data\. Try {remedy}$"):
            warn_if_destroyed_by_int8(wreck, sketched=sketched, stacklevel=1)


def test_errors(tmp_path, model, monkeypatch):
    source = mlp(tmp_path / "in.onnx")
    with pytest.raises(pc.errors.ConfigError, match="then='int7', wanted one of 'none', 'int8'"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", then="int7")
    with pytest.raises(pc.errors.ConfigError, match="then='int7'"):
        pc.export_onnx(model, torch.randn(2, 96), tmp_path / "out.onnx", then="int7")
    with pytest.raises(pc.errors.ConfigError, match="data= is for then='int8'"):
        pc.export_onnx(model, torch.randn(2, 96), tmp_path / "out.onnx", data=[torch.randn(2, 96)])
    old = mlp(tmp_path / "old.onnx", opset=12)

    def fails(model, opset):
        raise ConvertError(f"no adapter to {opset}")

    monkeypatch.setattr(int8, "convert_version", fails)
    wanted = "opset 13 or newer, the source has 12, and ONNX cannot convert it: no adapter to 13"
    with pytest.raises(pc.errors.ConfigError, match=wanted):
        pc.sketch_onnx(old, tmp_path / "out.onnx", then="int8")
    assert not (tmp_path / "out.onnx").exists()


def test_on_the_command_line(tmp_path):
    source = mlp(tmp_path / "in.onnx", WIDTHS)
    target = tmp_path / "out.onnx"
    main(["sketch-onnx", str(source), str(target), "--then", "int8", "--min-params", "300"])
    assert kinds(target)["MatMul"] == 0


def test_kernels_of_one_pixel_are_pairs_where_they_will_be_in_int8():
    choice = Choice("pivoted", 100, (100,), 100 * (480 + 480 - 100), 0.1)
    line = LayerPlan("0", "Conv", (480, 480, 1, 1), 480 * 480, choice, "")
    wanted = SketchPlan((line,), "0.5", "ONNX graph")
    assert as_pairs(wanted, None).layers == (line,)
    (found,) = as_pairs(wanted, None, kernels=True).layers
    assert (found.choice.scheme, found.choice.ranks) == ("channel", (88,))
    assert found.choice.stored_numbers <= choice.stored_numbers


def test_branches_that_read_what_is_made_around_them(tmp_path):
    """ONNX Runtime's quantizer puts nodes in an order in which such a branch comes too early."""

    def branch(name):
        nodes = [node("MatMul", ["h", "v"], [f"{name}_y"])]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)]
        )

    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Less", ["sum", "zero"], ["negative"]),
        node("MatMul", ["x", "w"], ["h"]),
        node("If", ["negative"], ["z"], then_branch=branch("then"), else_branch=branch("else")),
        node("MatMul", ["z", "w"], ["y"]),
    ]
    weights = {"w": random(48, 48), "v": random(48, 48), "zero": np.array(0, np.float32)}
    source, target = make(tmp_path / "in.onnx", nodes, weights), tmp_path / "out.onnx"
    pc.sketch_onnx(source, target, 1.0, then="int8", progress=False)
    x = random(16, 48)
    assert far(run(target, x)[0], run(source, x)[0]) < 0.03


class Pooled(nn.Module):
    """Attention pooling: a product by a vector beside others."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 16)
        self.scores = nn.Parameter(torch.randn(64))

    def forward(self, x):
        x = self.first(x).relu()
        return self.last((x * (x @ self.scores).softmax(-1)[..., None]).sum(1))


def test_a_product_by_a_vector_stays_in_float(tmp_path):
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(4, 6, 32)
    path = tmp_path / "int8.onnx"
    pc.export_onnx(model, x, path, then="int8")
    assert sum(node.op_type == "MatMulInteger" for node in ir.load(path).graph) == 2
    assert far(run(path, x.numpy())[0], model(x).detach().numpy()) < 0.05


def test_products_in_half_types_stay_beside_others_in_int8(tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Cast", ["h"], ["half"], to=TensorProto.FLOAT16),
        node("MatMul", ["half", "v"], ["made"]),
        node("Cast", ["made"], ["y"], to=TensorProto.FLOAT),
    ]
    weights = {"w": low_rank(48, 40), "v": random(40, 40).astype(np.float16)}
    source, target = make(tmp_path / "in.onnx", nodes, weights), tmp_path / "out.onnx"
    pc.sketch_onnx(source, target, 0.5, exclude="v", then="int8", min_params=0, allow_slower=True)
    assert (kinds(target)["MatMulInteger"], kinds(target)["MatMul"]) == (2, 1)
    x = random(5, 48)
    assert far(run(target, x)[0], run(source, x)[0]) < 0.05


def test_products_of_what_other_domains_make(tmp_path):
    nodes = [
        node("Gelu", ["x"], ["g"], domain="com.microsoft"),
        node("Gemm", ["g", "w", "b"], ["h"]),
        node("MatMul", ["h", "v"], ["y"]),
    ]
    weights = {"w": random(48, 40), "b": random(40), "v": random(40, 32)}
    microsoft = helper.make_opsetid("com.microsoft", 1)
    source = make(tmp_path / "in.onnx", nodes, weights, y=("n", 32), domains=[microsoft])
    target = tmp_path / "out.onnx"
    pc.sketch_onnx(source, target, 1.0, then="int8")
    assert kinds(target)["MatMulInteger"] == 2
    x = random(5, 48)
    assert far(run(target, x)[0], run(source, x)[0]) < 0.05


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm"])
@pytest.mark.parametrize("ir_version", [3, 8])
def test_weights_that_may_be_given_stay_inputs(tmp_path, op_type, ir_version):
    """They were rounded, and their inputs taken away; Constant nodes are in int8 in old files too."""
    matrix = numpy_helper.from_array(random(48, 40), "v")
    nodes = [
        node("Constant", [], ["v"], value=matrix),
        node("MatMul", ["x", "v"], ["h"]),
        node(op_type, ["h", "w"], ["y"], **({"transB": 1} if op_type == "Gemm" else {})),
    ]
    given = [helper.make_tensor_value_info("w", TensorProto.FLOAT, (40, 40))]
    options = {"ir_version": ir_version, "inputs": given, "opset": 11, "y": ("n", 40)}
    source = make(tmp_path / "in.onnx", nodes, {"w": random(40, 40)}, **options)
    target = tmp_path / "out.onnx"
    pc.sketch_onnx(source, target, 1.0, then="int8")
    assert [one.name for one in ir.load(target).graph.inputs] == ["x", "w"]
    assert kinds(target)["MatMulInteger"] == 1
    session = [ort.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (source, target)]
    feed = {"x": random(5, 48)} | ({"w": random(40, 40)} if ir_version > 3 else {})
    wanted, found = (one.run(None, feed)[0] for one in session)
    assert far(found, wanted) < 0.05
    alone = [node(op_type, ["x", "w"], ["y"])]
    source = make(tmp_path / "in.onnx", alone, {"w": random(40, 40)}, **options, x=("n", 40))
    with pytest.raises(NoTargetError, match="there is none, and no data"):
        pc.sketch_onnx(source, target, 1.0, then="int8")


def test_an_old_file_with_its_weights_beside_it(tmp_path):
    source, target = mlp(tmp_path / "in.onnx", WIDTHS, opset=11), tmp_path / "out.onnx"
    onnx.save(onnx.load(source), source, save_as_external_data=True, location="weights", size_threshold=0)
    report = pc.sketch_onnx(source, target, 1.0, then="int8")
    assert kinds(target)["MatMulInteger"] == 3
    assert report.sketched_bytes < 0.4 * report.dense_bytes
    x = random(5, 96)
    assert far(run(target, x)[0], run(source, x)[0]) < 0.05


def test_an_old_file_with_functions(tmp_path):
    opsets = [helper.make_opsetid("", 11)]
    call = [node("MatMul", ["a", "m"], ["p"]), node("Relu", ["p"], ["o"])]
    function = helper.make_function("own", "layer", ["a", "m"], ["o"], call, opsets)
    nodes = [node("layer", ["x", "w"], ["h"], domain="own"), node("MatMul", ["h", "v"], ["y"])]
    options = {"functions": [function], "domains": [helper.make_opsetid("own", 1)], "opset": 11}
    weights = {"w": random(48, 40), "v": random(40, 32)}
    source, target = make(tmp_path / "in.onnx", nodes, weights, y=("n", 32), **options), tmp_path / "out.onnx"
    pc.sketch_onnx(source, target, 1.0, then="int8")
    assert kinds(target)["MatMulInteger"] == 2
    x = random(5, 48)
    assert far(run(target, x)[0], run(source, x)[0]) < 0.05


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_gemm_without_an_entry_stays(tmp_path, transposed):
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Gemm", ["h", "empty"], ["e"], transB=transposed),
        node("Concat", ["e", "h"], ["y"], axis=1),
    ]
    empty = np.zeros((0, 40) if transposed else (40, 0), np.float32)
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 40), "empty": empty})
    target = tmp_path / "out.onnx"
    pc.sketch_onnx(source, target, 1.0, then="int8")
    assert kinds(target)["MatMulInteger"] == 1
    x = random(5, 48)
    assert far(run(target, x)[0], run(source, x)[0]) < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_cannot_be_in_int8(tmp_path, dtype):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval().to(dtype)
    x = torch.randn(4, 32, dtype=dtype)
    source, target = tmp_path / "plain.onnx", tmp_path / "int8.onnx"
    with pytest.raises(NoTargetError, match=r"in float32 .* weights here are (B?FLOAT16|DOUBLE)"):
        pc.export_onnx(model, x, target, then="int8")
    pc.export_onnx(model, x, source, verify=dtype != torch.bfloat16)
    with pytest.raises(NoTargetError, match=r"give the model in float32"):
        pc.sketch_onnx(source, target, 1.0, then="int8")
    assert not target.exists()


def test_convolutions_without_data_cannot_be_in_int8(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(NoTargetError, match="and no data"):
        pc.export_onnx(model, x, tmp_path / "int8.onnx", then="int8")


class Constant(nn.Module):
    """Answers the same whatever it is given, as a table of prompts behind its projection does."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.project = nn.Parameter(torch.randn(rows, 64)), nn.Linear(64, 64)

    def forward(self, *given):
        return self.project(self.table)


@pytest.mark.parametrize("given", [(), (torch.zeros(2, 3),)], ids=["no input", "one that is not read"])
def test_products_of_constants_alone(tmp_path, given):
    model, path = Constant(256).eval(), tmp_path / "int8.onnx"
    pc.export_onnx(model, given, path, then="int8")
    assert "MatMulInteger" in {node.op_type for node in onnx.load(path).graph.node}
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {one.name: given[0].numpy() for one in session.get_inputs()}
    assert far(session.run(None, feeds)[0], model().detach().numpy()) < 0.05


def test_a_model_that_the_exporter_makes_one_constant_of(tmp_path):
    with pytest.raises(NoTargetError, match="there is none"):
        pc.export_onnx(Constant(2).eval(), (), tmp_path / "int8.onnx", then="int8")
