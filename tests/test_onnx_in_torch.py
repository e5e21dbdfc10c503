"""ONNX files that torch runs, to fit them as models in torch are; others are fitted by ONNX Runtime alone."""

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPTIONS, kernel, make, node, random, run

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.layers.base import SketchedLayer
from panther_compile.onnx.as_torch import OnnxModule, as_tensors
from panther_compile.onnx.data import ObservedModel
from panther_compile.onnx.files import read_model
from panther_compile.onnx.fit_in_torch import fit_in_torch, module_of, that_count
from panther_compile.onnx.sites import find_onnx_sites
from panther_compile.onnx.torch_ops import OPERATORS

RNG = np.random.default_rng(0)
MIX = RNG.standard_normal((20, 48)).astype(np.float32)


def rows(count):
    return (RNG.standard_normal((count, 20)) * np.linspace(3, 0.2, 20)).astype(np.float32) @ MIX


def opened(path, data):
    """The module, its sites and its batches."""
    model = read_model(path)
    sites = find_onnx_sites(model, SketchConfig(min_params=64))
    dense = ObservedModel(model, (), path.parent)
    feeds = dense.feeds(data)
    return module_of(model, sites, dense, feeds), sites, feeds


def deep(path, *, last=(), **more):
    """Three products; of what the last one gives, two columns of 48 are a hundred times as large."""
    scale = np.where(np.arange(48) < 2, 1.0, 0.01).astype(np.float32)
    weights = {name: random(48, 48) for name in "abc"} | {"p": random(48), "scale": scale}
    weights |= more
    nodes = [
        node("MatMul", ["x", "a"], ["h"]),
        node("Add", ["h", "p"], ["i"]),
        node("Relu", ["i"], ["j"]),
        node("MatMul", ["j", "b"], ["k"]),
        node("Tanh", ["k"], ["l"]),
        node("MatMul", ["l", "c"], ["m"]),
        node("Mul", ["m", "scale"], ["n" if last else "y"]),
        *last,
    ]
    return make(path, nodes, weights)


def far(source, target, x):
    (wanted, *_), (found, *_) = run(source, x), run(target, x)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def sketched(source, data, name, **options):
    target = source.with_name(name)
    return pc.sketch_onnx(source, target, 0.5, data=data, **(OPTIONS | options)), target


def test_gradients_bring_outputs_closer(tmp_path, monkeypatch):
    source, data, x = deep(tmp_path / "in.onnx"), [rows(64) for _ in range(10)], rows(256)
    report, by_torch = sketched(source, data, "torch.onnx")
    assert report.plan.route == "ONNX graph, run by torch"
    monkeypatch.setitem(OPERATORS, "Tanh", lambda inputs, given, opset: inputs[0])
    report, alone = sketched(source, data, "alone.onnx")
    assert report.plan.route.endswith("alone: torch does not run its graph as ONNX Runtime does")
    assert far(source, by_torch, x) < 0.8 * far(source, alone, x)


@pytest.mark.parametrize("chances", [False, True])
def test_files_in_half_types_are_run_in_float32(tmp_path, chances):
    """Gradients vanish in float16, and ONNX Runtime's results are rounded to it."""
    last = [node("Softmax", ["n"], ["y"])] if chances else [node("Mul", ["n", "one"], ["y"])]
    plain = onnx.load(deep(tmp_path / "in.onnx", last=last, one=np.float32([1])))
    graph = plain.graph
    for tensor in graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    source = tmp_path / "half.onnx"
    onnx.save(plain, source)
    report, target = sketched(source, [rows(64).astype(np.float16) for _ in range(10)], "out.onnx")
    assert report.plan.route == "ONNX graph, run by torch"
    whole, small = tmp_path / "in.onnx", tmp_path / "small.onnx"
    pc.sketch_onnx(whole, small, 0.5, data=[rows(64) for _ in range(10)], **OPTIONS)
    x = rows(256)
    assert far(source, target, x.astype(np.float16)) < 1.3 * far(whole, small, x)
    kinds = {tensor.data_type for tensor in onnx.load(target).graph.initializer if len(tensor.dims) > 1}
    assert kinds == {TensorProto.FLOAT16}


def test_what_torch_does_not_know_is_said(tmp_path):
    source = deep(tmp_path / "in.onnx", last=[node("Shrink", ["n"], ["y"], lambd=0.0)])
    report, target = sketched(source, [rows(64) for _ in range(6)], "out.onnx")
    assert report.plan.route.endswith("alone: ONNX Shrink is not known here")
    _, plain = sketched(source, None, "plain.onnx")
    x = rows(64)
    assert far(source, target, x) < far(source, plain, x)


def test_a_use_that_torch_does_not_know_is_said(tmp_path):
    last = [
        node("Unsqueeze", ["n", "first"], ["steps"]),
        node("GRU", ["steps", "W", "R"], ["", "end"], hidden_size=48, clip=9.0),
        node("Squeeze", ["end", "first"], ["y"]),
    ]
    weights = {"first": np.int64([0]), "W": random(1, 144, 48), "R": random(1, 144, 48)}
    source = deep(tmp_path / "in.onnx", last=last, **weights)
    report, _ = sketched(source, [rows(64)], "out.onnx")
    assert report.plan.route.endswith("alone: GRU with options of its own is not known here")


def test_an_operator_that_raises_is_no_harm(tmp_path, monkeypatch):
    def fail(inputs, given, opset):
        raise ValueError("no")

    monkeypatch.setitem(OPERATORS, "Tanh", fail)
    report, _ = sketched(deep(tmp_path / "in.onnx"), [rows(64)], "out.onnx")
    assert report.plan.route.endswith("torch does not run its graph as ONNX Runtime does")


LAYERS = {
    "Gemm": [node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, beta=2.0, transB=1)],
    "Gemm, all transposed": [
        node("Transpose", ["x"], ["t"]),
        node("Gemm", ["t", "w", "b"], ["y"], transA=1, transB=1),
    ],
    "MatMul": [
        node("Transpose", ["w"], ["t"]),
        node("MatMul", ["x", "t"], ["m"]),
        node("Add", ["b", "m"], ["y"]),
    ],
    "Gemm, weight left": [node("Gemm", ["w", "x"], ["y"], transB=1)],
    "twice": [
        node("Gemm", ["x", "w", "b"], ["p"], transB=1),
        node("Neg", ["x"], ["q"]),
        node("Gemm", ["q", "w", "b"], ["r"], transB=1),
        node("Mul", ["p", "r"], ["y"]),
    ],
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_layers(tmp_path, name):
    source = make(tmp_path / "in.onnx", LAYERS[name], {"w": random(32, 48), "b": random(32)})
    module, _, _ = opened(source, [rows(7)])
    assert isinstance(module, OnnxModule)
    assert [tuple(layer.weight.shape) for layer in module.layers] == [(32, 48)]
    assert (module.layers[0].bias is None) == ("left" in name)


@pytest.mark.parametrize("pads", [{"pads": [1, 0, 2, 1]}, {"auto_pad": "SAME_UPPER"}])
def test_kernels_are_layers(tmp_path, pads):
    nodes = [
        node("Conv", ["x", "c", "b"], ["h"], strides=[2, 1], **pads),
        node("ConvTranspose", ["h", "t", "d"], ["y"], strides=[2, 2], pads=[0, 1, 1, 0]),
    ]
    weights = {"c": kernel(24, 16, 3), "b": random(24), "t": kernel(24, 16, 2), "d": random(16)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 9, 9))
    module, _, _ = opened(source, [random(2, 16, 9, 9)])
    assert [type(layer).__name__ for layer in module.layers] == ["Conv2d", "ConvTranspose2d"]


def test_chances_are_given_as_logarithms(tmp_path):
    source = deep(tmp_path / "in.onnx", last=[node("Softmax", ["n"], ["y"])])
    data = [rows(16) for _ in range(6)]
    module, _, feeds = opened(source, data)
    found = module(**as_tensors(feeds[0]))["y"]
    np.testing.assert_allclose(found.exp().numpy(), run(source, feeds[0]["x"])[0], atol=1e-5)
    report, _ = sketched(source, data, "out.onnx")
    assert "KL" in str(report.closeness)


def test_what_a_choice_was_made_by_is_given_too(tmp_path):
    source = tmp_path / "in.onnx"
    graph = helper.make_graph(
        [
            node("Gemm", ["x", "w", "b"], ["h"]),
            node("ArgMax", ["h"], ["n"], axis=1),
            node("Reshape", ["n", "shape"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 48))],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ("n",))],
        [
            numpy_helper.from_array(one, name)
            for name, one in (("w", random(48, 32)), ("b", random(32)), ("shape", np.array([-1])))
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), source)
    module, _, feeds = opened(source, [rows(5)])
    found = module(**as_tensors(feeds[0]))
    assert set(found) == {"y", "y/by"}
    assert torch.equal(found["y/by"].argmax(1), found["y"])
    report, _ = sketched(source, [rows(64) for _ in range(6)], "out.onnx", include="w")
    assert report.plan.route == "ONNX graph, run by torch"


def test_results_without_floating_numbers(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Shape", ["h"], ["s"]), node("Cast", ["s"], ["y"], to=7)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 48))],
        [helper.make_tensor_value_info("y", TensorProto.INT64, (2,))],
        [numpy_helper.from_array(random(48, 32), "w")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8),
        tmp_path / "in.onnx",
    )
    found, _, _ = opened(tmp_path / "in.onnx", [rows(5)])
    assert found == "no output holds floating numbers"


def test_a_copy_runs_the_same_graph(tmp_path):
    module, _, feeds = opened(deep(tmp_path / "in.onnx"), [rows(4)])
    other = copy.deepcopy(module)
    inputs = as_tensors(feeds[0])
    assert torch.equal(other(**inputs)["y"], module(**inputs)["y"])
    assert other.layers[0].weight.data_ptr() != module.layers[0].weight.data_ptr()


def test_gradients_reach_every_layer(tmp_path):
    module, _, feeds = opened(deep(tmp_path / "in.onnx"), [rows(4)])
    weights = [layer.weight.requires_grad_() for layer in module.layers]
    module(**as_tensors(feeds[0]))["y"].sum().backward()
    assert all(float(weight.grad.abs().sum()) > 0 for weight in weights)


def test_biases_make_up_for_means(tmp_path):
    """The mean of what ranks lose at a product with a bias goes into that bias, once."""
    nodes = [node("Gemm", ["x", "w", "b"], ["h"], alpha=0.5, beta=2.0), node("Neg", ["h"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 32), "b": random(32)})
    data = [rows(64) + 5 for _ in range(8)]
    _, target = sketched(source, data, "out.onnx", exclude=None)
    wanted, found = run(source, np.concatenate(data))[0], run(target, np.concatenate(data))[0]
    assert np.abs((found - wanted).mean(0)).max() < 1e-3 * np.abs(wanted).mean()


def test_fitted_layers_have_no_bias_of_their_own(tmp_path):
    source = deep(tmp_path / "in.onnx")
    module, sites, feeds = opened(source, [rows(64) for _ in range(6)])
    config = SketchConfig(min_params=64, allow_slower=True, progress=False)
    found = fit_in_torch(module, sites, config, feeds, lambda plan: plan, "", beside=True).weights
    assert set(found.shifts) <= {"a"}  # the only product that a bias is added to
    for layer, _ in found.ready.values():
        assert isinstance(layer, SketchedLayer)
        assert layer.bias is None


def test_batches_that_are_all_padding_do_not_count(tmp_path):
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("n", 6))
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Identity", ["attention_mask"], ["kept"])]
    kept = helper.make_tensor_value_info("kept", TensorProto.INT64, ("n", 6))
    source = make(
        tmp_path / "in.onnx", nodes, {"w": random(48, 32)}, x=("n", 6, 48), inputs=[mask], outputs=[kept]
    )
    feeds = ObservedModel(read_model(source), (), tmp_path).feeds(
        [(random(2, 6, 48), np.full((2, 6), one, np.int64)) for one in (0, 1)]
    )
    assert [feed["attention_mask"].max() for feed in that_count(feeds)] == [1]


def test_constants_that_torch_does_not_have(tmp_path):
    names = helper.make_tensor("names", TensorProto.STRING, (32,), [f"{one}".encode() for one in range(32)])
    graph = helper.make_graph(
        [
            node("Gemm", ["x", "w", "b"], ["y"]),
            node("ArgMax", ["y"], ["n"], axis=1, keepdims=0),
            node("Gather", ["names", "n"], ["label"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 48))],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 32)),
            helper.make_tensor_value_info("label", TensorProto.STRING, ("n",)),
        ],
        [numpy_helper.from_array(random(48, 32), "w"), numpy_helper.from_array(random(32), "b"), names],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "in.onnx")
    report, _ = sketched(tmp_path / "in.onnx", [rows(64)], "out.onnx", include="w")
    assert report.plan.route.endswith("alone: names is of dtype STRING, which torch lacks")


def test_no_other_input_than_attention_mask_says_what_counts(tmp_path):
    other = helper.make_tensor_value_info("padding_mask", TensorProto.INT64, ("n", 6))
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Cast", ["padding_mask"], ["c"], to=TensorProto.FLOAT),
        node("ReduceMean", ["c"], ["m"]),
        node("Mul", ["h", "m"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 32)}, x=("n", 6, 48), inputs=[other])
    data = [(rows(12).reshape(2, 6, 48), np.ones((2, 6), np.int64)) for _ in range(6)]
    report, _ = sketched(source, data, "out.onnx")
    assert report.plan.route == "ONNX graph, run by torch"
    assert report.fitted["w"].note == ""


def test_spliced_texts_are_of_lengths_that_run(tmp_path, monkeypatch):
    """Of blocks of eight tokens; texts spliced of such of 8, 16, 24, ... tokens may have others."""
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    graph = helper.make_graph(
        [
            node("Gather", ["table", "ids"], ["h"]),
            node("Reshape", ["h", "shape"], ["i"]),
            node("MatMul", ["i", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, (1, "t"))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, "b", 8, 32))],
        [
            numpy_helper.from_array(one, name)
            for name, one in (
                ("table", random(64, 48)),
                ("shape", np.array([0, -1, 8, 48])),
                ("w", random(48, 32)),
            )
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "in.onnx")
    data = [RNG.integers(0, 64, (1, 8 * (1 + place % 5))) for place in range(20)]
    report, _ = sketched(tmp_path / "in.onnx", data, "out.onnx")
    assert report.plan.route == "ONNX graph, run by torch"


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_arrays_that_are_not_to_be_written(tmp_path):
    data = [rows(64) for _ in range(4)]
    for one in data:
        one.flags.writeable = False
    report, _ = sketched(deep(tmp_path / "in.onnx"), data, "out.onnx")
    assert report.plan.route == "ONNX graph, run by torch"


@pytest.mark.parametrize("alpha", [1.0, 8.0, -3.0])
@pytest.mark.parametrize("by_torch", [True, False])
def test_the_last_bias_makes_up_for_means_whatever_its_product_is_scaled_by(
    tmp_path, monkeypatch, alpha, by_torch
):
    if not by_torch:
        monkeypatch.setattr("panther_compile.onnx.fit_to_data.module_of", lambda *_: "not asked")
    weights = {"a": random(48, 96), "p": random(96), "w": random(96, 32), "b": random(32)}
    nodes = [
        node("Gemm", ["x", "a", "p"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("Gemm", ["r", "w", "b"], ["y"], alpha=alpha, beta=2.0),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights)
    data = [rows(64) for _ in range(8)]
    _, target = sketched(source, data, "out.onnx", exclude="w")  # the last product stays dense
    wanted, found = (run(path, np.concatenate(data))[0] for path in (source, target))
    assert np.abs((found - wanted).mean(0)).max() < 1e-4 * np.abs(wanted).mean()


def branched(path):
    """Two products a branch, one of them of what is made outside, where something else reads it too."""

    def info(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 48))

    def branch(name, *, inner):
        last = node("Add", [f"{name}_p", "h"], [f"{name}_y"])
        if inner:
            arms = [
                helper.make_graph([node(op, [f"{name}_p"], [f"{op}_z"])], op, [], [info(f"{op}_z")])
                for op in ("Tanh", "Neg")
            ]
            last = node("If", ["positive"], [f"{name}_y"], then_branch=arms[0], else_branch=arms[1])
        weight = numpy_helper.from_array(random(48, 48) / 7, f"{name}_w")
        return helper.make_graph(
            [node("MatMul", ["h", f"{name}_w"], [f"{name}_p"]), last], name, [], [info(f"{name}_y")], [weight]
        )

    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("ReduceMean", ["x"], ["mean"], keepdims=0),
        node("Greater", ["mean", "zero"], ["positive"]),
        node(
            "If",
            ["positive"],
            ["z"],
            then_branch=branch("then", inner=True),
            else_branch=branch("else", inner=False),
        ),
        node("Add", ["z", "h"], ["y"]),
    ]
    return make(path, nodes, {"w": random(48, 48) / 7, "zero": np.float32(0)})


def test_the_branch_that_is_taken_is_run(tmp_path):
    source = branched(tmp_path / "in.onnx")
    module, sites, _ = opened(source, [rows(8) + 9, rows(8) - 9])
    assert isinstance(module, OnnxModule)
    names = [site.name for site, _ in sites.found.sites]
    weights = [layer.weight.requires_grad_() for layer in module.layers]
    for mean, taken in ((9, "then_w"), (-9, "else_w")):
        x = rows(16) + mean
        found = module(**{"input x": torch.from_numpy(x)})["y"]
        np.testing.assert_allclose(found.detach(), run(source, x)[0], rtol=1e-4, atol=1e-4)
        reached = [one is not None for one in torch.autograd.grad(found.sum(), weights, allow_unused=True)]
        assert [name for name, one in zip(names, reached, strict=True) if one] == ["w", taken]


def test_weights_in_branches_are_fitted_by_torch(tmp_path):
    source = branched(tmp_path / "in.onnx")
    data = [rows(64) + mean for mean in (2, -2) for _ in range(4)]
    report, target = sketched(source, data, "out.onnx")
    assert report.plan.route == "ONNX graph, run by torch"
    assert {line.name for line in report.plan.sketched} == {"w", "then_w", "else_w"}
    _, plain = sketched(source, None, "plain.onnx")
    for mean in (2, -2):
        x = rows(64) + mean
        assert far(source, target, x) < 0.7 * far(source, plain, x)


def test_chances_that_are_all_small_are_run_by_torch(tmp_path):
    """As a detector's that hears nothing: ONNX Runtime's Sigmoid is off by what 1 is rounded by."""
    nodes = [
        node("Gemm", ["x", "w"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("Gemm", ["r", "v", "b"], ["z"]),
        node("Sigmoid", ["z"], ["y"]),
    ]
    weights = {"w": random(64, 96), "v": random(96, 1) / 100, "b": np.full(1, -11.0, np.float32)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 64))
    data = [random(1, 64) for _ in range(40)]
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.75, data=data, min_params=0, allow_slower=True)
    assert run(source, data[0])[0].max() < 1e-3
    assert "run by torch" in report.plan.route
