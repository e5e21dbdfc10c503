"""ONNX files as others write them, and as nobody should: sketched, or refused by an error of our own."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPTIONS, assert_same_outputs, kernel, low_rank, make, mlp, node, random, reasons, run

import panther_compile as pc
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    NoTargetError,
    OnnxError,
    OnnxExternalDataError,
    OnnxInvalidError,
    PantherError,
    SketchQualityWarning,
)

# ----------------------------------------------------------------------------------------- Constant nodes


def constants(path, ir_version=8):
    """A convolution and a product whose weights are made by Constant nodes, as Paddle writes them."""

    def constant(name, array):
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))

    nodes = [
        constant("w", kernel(32, 16, 3)),
        constant("b", random(32)),
        node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["c"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        constant("m", low_rank(32, 48)),
        node("MatMul", ["f", "m"], ["y"]),
    ]
    return make(path, nodes, {}, x=("n", 16, 8, 8), ir_version=ir_version)


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize("with_data", [False, True])
def test_weights_in_constant_nodes(tmp_path, ir_version, with_data):
    source, target = constants(tmp_path / "in.onnx", ir_version), tmp_path / "out.onnx"
    data = [random(4, 16, 8, 8) for _ in range(3)] if with_data else None
    report = pc.sketch_onnx(source, target, 0.5, data=data, include="*", **OPTIONS)
    assert {line.name for line in (*report.plan.sketched, *report.plan.whole)} == {"w", "m"}
    assert_same_outputs(source, target, random(2, 16, 8, 8))
    assert target.stat().st_size < 0.7 * source.stat().st_size


# ----------------------------------------------------------------------------------------- several readers


@pytest.mark.parametrize("how", ["Transpose", "Gemm"])
def test_a_weight_that_is_transposed_in_one_of_its_nodes_says_so(tmp_path, how):
    nodes = [node("MatMul", ["x", "w"], ["h"])]
    if how == "Transpose":
        nodes += [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["h", "t"], ["k"])]
    else:
        nodes += [node("Gemm", ["h", "w"], ["k"], transB=1)]
    nodes += [node("MatMul", ["k", "v"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": low_rank(48, 64), "v": low_rank(48, 64)})
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", include="*", **OPTIONS)
    assert "used in several ways (transposed" in reasons(report)["w"]
    assert [line.name for line in report.plan.sketched] == ["v"]
    with pytest.raises(NoTargetError, match=r"w: its weight is used in several ways \(transposed"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", include="w", **OPTIONS)


@pytest.mark.parametrize("with_data", [False, True])
def test_a_kernel_of_a_convolution_and_of_a_transposed_one_stays(tmp_path, with_data):
    """As in autoencoders with tied weights."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], strides=[2, 2]),
        node("Relu", ["c"], ["r"]),
        node("ConvTranspose", ["r", "w"], ["t"], strides=[2, 2]),
        node("Conv", ["t", "v"], ["y"]),
    ]
    weights = {"w": kernel(32, 16, 2), "v": kernel(32, 16, 3)}
    source, target = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 8, 8)), tmp_path / "out.onnx"
    data = [random(2, 16, 8, 8) for _ in range(3)] if with_data else None
    report = pc.sketch_onnx(source, target, data=data, include="*", **OPTIONS)
    assert "used in several ways (transposed, on the other side, by another operator" in reasons(report)["w"]
    assert [line.name for line in report.plan.sketched] == ["v"]
    assert_same_outputs(source, target, random(2, 16, 8, 8))


# -------------------------------------------------------------------------------------------- external data


def function_with_external_data(folder):
    """A function whose If adds a tensor that is kept in another file."""
    (folder / "bias.bin").write_bytes(np.ones(64, np.float32).tobytes())
    outside = TensorProto(name="bias", data_type=TensorProto.FLOAT, dims=[64])
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="bias.bin")
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["a", "bias"], [f"o_{op}"])],
            name,
            [],
            [helper.make_tensor_value_info(f"o_{op}", TensorProto.FLOAT, None)],
            [outside],
        )
        for name, op in (("then_branch", "Add"), ("else_branch", "Sub"))
    }
    function = helper.make_function(
        "own",
        "shift",
        ["a", "flag"],
        ["out"],
        [helper.make_node("If", ["flag"], ["out"], **branches)],
        [helper.make_opsetid("", 13)],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("shift", ["h", "flag"], ["y"], domain="own"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 48))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 64))],
        [numpy_helper.from_array(low_rank(48, 64), "w"), numpy_helper.from_array(np.array(True), "flag")],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=[function])
    path = folder / "in.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_inside_a_function(tmp_path):
    source = function_with_external_data(tmp_path)
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "out.onnx"
    pc.sketch_onnx(source, target, include="*", **OPTIONS)
    x = random(3, 48)
    w = numpy_helper.to_array(onnx.load(source, load_external_data=False).graph.initializer[0])
    np.testing.assert_allclose(run(target, x)[0], x @ w + 1, atol=1e-4)


def beside(path):
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def set_entry(path, key, value):
    model = onnx.load(path, load_external_data=False)
    tensor = next(one for one in model.graph.initializer if one.external_data)
    for entry in list(tensor.external_data):
        if entry.key == key:
            tensor.external_data.remove(entry)
    if value is not None:
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


ODD = ["text", "", "-1", "1.5", "0x10", "1e3", str(10**15), str(10**30), "9" * 5000, "٣"]


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("offset", "length") for value in ODD]
    + [("length", "3"), ("location", ""), ("location", "a\0b"), ("location", "x" * 5000), ("location", None)],
)
def test_places_of_external_data_that_are_none(tmp_path, key, value):
    source = beside(mlp(tmp_path / "in.onnx"))
    set_entry(source, key, value)
    with pytest.raises(OnnxExternalDataError) as caught:
        pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "out.onnx").exists()


def test_external_data_without_a_length(tmp_path):
    source = beside(mlp(tmp_path / "in.onnx"))
    set_entry(source, "length", None)
    pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)
    assert_same_outputs(source, tmp_path / "out.onnx", random(3, 48))


def change_tensor(change):
    def edit(model):
        change(model.graph.initializer[0])

    return edit


def drop_last_bytes(tensor):
    tensor.raw_data = tensor.raw_data[:-5]


FORGED = {
    "raw data cut": change_tensor(drop_last_bytes),
    "raw data empty": change_tensor(lambda t: t.ClearField("raw_data")),
    "no type": change_tensor(lambda t: t.ClearField("data_type")),
    "an unknown type": change_tensor(lambda t: setattr(t, "data_type", 999)),
    "of strings": change_tensor(lambda t: setattr(t, "data_type", TensorProto.STRING)),
    "a negative size": change_tensor(lambda t: t.dims.__setitem__(0, -4)),
    "a giant size": change_tensor(lambda t: t.dims.__setitem__(0, 2**40)),
    "no name": change_tensor(lambda t: t.ClearField("name")),
    "no opset": lambda m: m.ClearField("opset_import"),
    "no ir version": lambda m: m.ClearField("ir_version"),
    "a node without inputs": lambda m: m.graph.node[0].ClearField("input"),
    "a node of no type": lambda m: m.graph.node[0].ClearField("op_type"),
    "outputs twice": lambda m: m.graph.node[1].output.__setitem__(0, m.graph.node[0].output[0]),
    "no outputs": lambda m: m.graph.ClearField("output"),
    "no inputs": lambda m: m.graph.ClearField("input"),
}


@pytest.mark.parametrize("name", list(FORGED))
@pytest.mark.parametrize("verify", [True, False])
def test_forged_files(tmp_path, name, verify):
    source = mlp(tmp_path / "in.onnx")
    model = onnx.load(source)
    FORGED[name](model)
    source.write_bytes(model.SerializeToString())
    with pytest.raises(OnnxError):
        pc.sketch_onnx(source, tmp_path / "out.onnx", verify=verify, **OPTIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["in.onnx"]


def test_bytes_changed_anywhere(tmp_path):
    """Sketched, or refused by an error of our own."""
    source, target = mlp(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    whole, places = source.read_bytes(), np.random.default_rng(0)
    for _ in range(40):
        spoiled = bytearray(whole)
        for place in places.integers(0, 400, 3):  # the nodes; what follows are numbers
            spoiled[place] = places.integers(0, 256)
        source.write_bytes(bytes(spoiled))
        try:
            pc.sketch_onnx(source, target, **OPTIONS)
        except PantherError:
            continue


@pytest.mark.parametrize("given", [None, 3, b"in.onnx"])
def test_paths_that_are_none(tmp_path, given):
    source = mlp(tmp_path / "in.onnx")
    for pair in ((given, tmp_path / "out.onnx"), (source, given)):
        with pytest.raises(ConfigTypeError, match=f"a {type(given).__name__}, wanted a path"):
            pc.sketch_onnx(*pair)
    with pytest.raises(ConfigTypeError, match=f"a {type(given).__name__}, wanted a path"):
        pc.export_onnx(None, (), given)
    with pytest.raises(ConfigError, match="holds a NUL"):
        pc.sketch_onnx("a\0b", tmp_path / "out.onnx")


# ------------------------------------------------------------------------------------------------ closeness


def test_maps_are_named(tmp_path):
    """As what scikit-learn's classifiers give, by default."""
    source = make(tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 4)})
    model = onnx.load(source)
    zipped = helper.make_node("ZipMap", ["y"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2, 3])
    model.graph.node.append(zipped)
    chance = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, []))
    model.graph.output.append(helper.make_value_info("z", helper.make_sequence_type_proto(chance)))
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    onnx.save(model, source)
    with pytest.raises(OnnxInvalidError, match=r"in.onnx: 'z' is a map, as ZipMap makes, wanted tensors"):
        pc.sketch_onnx(source, tmp_path / "out.onnx")


def test_sparse_constants_are_named(tmp_path):
    values = helper.make_tensor("values", TensorProto.FLOAT, [2], [1.0, 2.0])
    sparse = helper.make_sparse_tensor(values, helper.make_tensor("at", TensorProto.INT64, [2], [0, 5]), [64])
    nodes = [
        node("Constant", [], ["b"], sparse_value=sparse),
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "b"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 64)})
    with pytest.raises(OnnxInvalidError, match=r"in.onnx: Constant 'b' holds a sparse tensor, wanted dense"):
        pc.sketch_onnx(source, tmp_path / "out.onnx")


def test_a_wreck_is_warned_of(tmp_path):
    matrices = {name: random(96, 96) / 10 for name in ("a", "b", "c")}
    nodes = [
        node("MatMul", ["x", "a"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "b"], ["s"]),
        node("MatMul", ["s", "c"], ["y"]),
    ]
    source, target = make(tmp_path / "in.onnx", nodes, matrices, x=("n", 96)), tmp_path / "out.onnx"
    with pytest.warns(SketchQualityWarning, match=r"ratio 0.2 .*destroyed.*weights alone.*data=") as caught:
        report = pc.sketch_onnx(source, target, 0.2, include="*", **OPTIONS)
    assert caught[0].filename == __file__
    assert report.closeness.grade == "destroyed"
    assert str(report).startswith("outputs: destroyed: relative error ")
    assert "on random inputs" in str(report).splitlines()[0]


def test_what_stays_close_is_said_to(tmp_path, recwarn):
    source, target = mlp(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    report = pc.sketch_onnx(source, target, data=[random(16, 48) for _ in range(3)], **OPTIONS)
    assert str(report).startswith("outputs: good: ")
    assert "on 3 batches of the data it was fitted to" in str(report).splitlines()[0]
    assert not [one for one in recwarn if issubclass(one.category, SketchQualityWarning)]
    report = pc.sketch_onnx(source, target, verify=False, **OPTIONS)
    assert str(report).startswith("outputs: not compared with the dense model's: verify=False")


def test_chances_are_compared_by_their_divergence(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Softmax", ["h"], ["y"], axis=-1)]
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 64)}, y=("n", 64))
    with pytest.warns(SketchQualityWarning, match="KL .* nats a row"):
        report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.2, include="*", **OPTIONS)
    assert report.closeness.kind == "KL"
    assert report.closeness.agreement < 1
