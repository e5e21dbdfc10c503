"""Files that ONNX Runtime's optimizer wrote are sketched as those that it was given."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPTIONS, RNG, assert_same_outputs, far, kernel, kinds, low_rank, random, reasons, run

import panther_compile as pc

WIDTH, HEADS = 48, 4
RUNTIME = "com.microsoft"
SIZES = ("n", "s", WIDTH)


def fused(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs, outputs, domain=RUNTIME, name=outputs[0], **attributes)


def write(path, nodes, weights, x=SIZES, y=SIZES, inputs=(), opset=17, **others):
    """A model of one input x, others, and one output y."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x), *inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
        **others,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(RUNTIME, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def half(path, tmp_path, data=None, **options):
    target = tmp_path / "half.onnx"
    return pc.sketch_onnx(path, target, 0.5, data=data, **(OPTIONS | options)), target


def encoder(path):
    """A layer of BERT as the optimizer writes it, of opset 12, which has no LayerNormalization."""
    weights = {
        "qkv": np.concatenate([low_rank(WIDTH, WIDTH) for _ in range(3)], 1),
        "qkv_bias": random(3 * WIDTH),
    }
    weights |= {"o": low_rank(WIDTH, WIDTH), "o_bias": random(WIDTH)}
    weights |= {"up": low_rank(WIDTH, 96), "up_bias": random(96)}
    weights |= {"down": low_rank(WIDTH, 96), "down_bias": random(WIDTH)}
    weights |= {"scale": np.abs(random(WIDTH)), "shift": random(WIDTH)}
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["n"]),
        fused("Attention", ["n", "qkv", "qkv_bias", "mask"], ["a"], num_heads=HEADS),
        helper.make_node("MatMul", ["a", "o"], ["p"]),
        fused("SkipLayerNormalization", ["p", "n", "scale", "shift", "o_bias"], ["s"], epsilon=1e-5),
        helper.make_node("MatMul", ["s", "up"], ["u"]),
        fused("BiasGelu", ["u", "up_bias"], ["g"]),
        fused("FusedMatMul", ["g", "down"], ["d"], alpha=0.5, transB=1),
        fused("SkipLayerNormalization", ["d", "s", "scale", "shift", "down_bias"], ["y"]),
    ]
    mask = helper.make_tensor_value_info("mask", TensorProto.INT32, ("n", "s"))
    return write(path, nodes, weights, inputs=[mask], opset=12)


def batches(count=6):
    mask = (np.arange(9) < RNG.integers(4, 10, (8, 1))).astype(np.int32)
    return [{"x": random(8, 9, WIDTH), "mask": mask} for _ in range(count)]


def test_an_encoder(tmp_path):
    """All six matrices are sketched, by torch where there are data, and biases make up for means."""
    source = encoder(tmp_path / "in.onnx")
    feeds = batches()
    given = list(feeds[0].values())
    report, target = half(source, tmp_path)
    assert_same_outputs(source, target, given)
    sketched = {line.name for line in report.plan.sketched}
    assert sketched == {"qkv.query", "qkv.key", "qkv.value", "o", "up", "down"}
    report, target = half(source, tmp_path, feeds)
    assert report.plan.route == "ONNX graph, run by torch"
    assert_same_outputs(source, target, given)
    names = {one.name for one in onnx.load(target).graph.initializer}
    assert {"qkv_bias.query.shifted", "o_bias.shifted", "up_bias.shifted"} <= names


def test_an_encoder_in_int8(tmp_path):
    """ONNX Runtime's quantizer would leave FusedMatMul, and take Attention for one product."""
    source = encoder(tmp_path / "in.onnx")
    target = tmp_path / "int8.onnx"
    pc.sketch_onnx(source, target, 1, then="int8", **OPTIONS)
    assert kinds(target)["MatMulInteger"] == 6
    given = list(batches(1)[0].values())
    assert far(run(target, given)[0], run(source, given)[0]) < 0.05


CONV = {"kernel_shape": [3, 3], "pads": [1] * 4}
ACTIVATED = [
    {"activation": "Relu"},
    {"activation": "LeakyRelu", "activation_params": [0.3]},
    {"activation": "Clip", "activation_params": [0.0, 0.7]},
    {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
    {},
]


@pytest.mark.parametrize("attributes", ACTIVATED, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_convolutions(tmp_path, attributes, added):
    weights = {"w": kernel(32, 32, 3), "b": random(32)}
    inputs = ["x", "w", "b", "x"] if added else ["x", "w", "b"]
    nodes = [fused("FusedConv", inputs, ["y"], **CONV, **attributes)]
    size = (2, 32, 8, 8)
    source = write(tmp_path / "in.onnx", nodes, weights, size, size)
    report, target = half(source, tmp_path)
    assert [line.name for line in report.plan.sketched] == ["w"]
    assert_same_outputs(source, target, random(*size))


@pytest.mark.parametrize(
    "attributes",
    [{"activation": "Relu"}, {"activation": "LeakyRelu", "activation_alpha": 0.3, "alpha": 2.0, "transB": 1}],
    ids=str,
)
def test_gemm(tmp_path, attributes):
    weights = {"w": low_rank(WIDTH, WIDTH), "b": random(WIDTH)}
    nodes = [fused("FusedGemm", ["x", "w", "b"], ["y"], **attributes)]
    source = write(tmp_path / "in.onnx", nodes, weights, ("n", WIDTH), ("n", WIDTH))
    report, target = half(source, tmp_path)
    assert [line.name for line in report.plan.sketched] == ["w"]
    assert_same_outputs(source, target, random(9, WIDTH))


@pytest.mark.parametrize(
    ("attributes", "weights"),
    [
        ({}, None),
        ({"unidirectional": 1, "scale": 0.4}, None),
        ({"qkv_hidden_sizes": [32, 32, WIDTH]}, low_rank(WIDTH, 64 + WIDTH)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [None, (2, 9), (2, 9, 9)], ids=str)
def test_attention(tmp_path, attributes, weights, mask):
    """Of any mask that says what each text may see."""
    weights = low_rank(WIDTH, 3 * WIDTH) if weights is None else weights
    names = ["x", "w", "b"] if mask is None else ["x", "w", "b", "mask"]
    given = [] if mask is None else [helper.make_tensor_value_info("mask", TensorProto.INT32, mask)]
    nodes = [fused("Attention", names, ["y"], num_heads=HEADS, **attributes)]
    held = {"w": weights, "b": random(weights.shape[1])}
    source = write(tmp_path / "in.onnx", nodes, held, (2, 9, WIDTH), (2, 9, WIDTH), given)
    report, target = half(source, tmp_path)
    assert len(report.plan.sketched) == 3
    places = [] if mask is None else [(np.arange(9) < np.full((*mask[:-1], 1), 6)).astype(np.int32)]
    assert_same_outputs(source, target, [random(2, 9, WIDTH), *places])


def test_weights_that_are_stored_in_halves(tmp_path):
    nodes = [
        *(helper.make_node("Cast", [one], [f"{one}32"], to=TensorProto.FLOAT) for one in "wb"),
        fused("Attention", ["x", "w32", "b32"], ["y"], num_heads=HEADS),
    ]
    weights = {"w": low_rank(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH)}
    halves = {name: one.astype(np.float16) for name, one in weights.items()}
    source = write(tmp_path / "in.onnx", nodes, halves)
    report, target = half(source, tmp_path)
    assert len(report.plan.sketched) == 3
    (one,), (other,) = (run(path, np.ones((2, 9, WIDTH), np.float32)) for path in (source, target))
    assert far(other, one) < 2e-3
    found = {one.name: one.data_type for one in onnx.load(target).graph.initializer}
    assert found["w.query.up"] == TensorProto.FLOAT16


def test_layers_that_share_their_attention(tmp_path):
    """As those of ALBERT: each part is a weight that both read."""
    nodes = [
        fused("Attention", ["x", "w", "b"], ["h"], num_heads=HEADS),
        fused("Attention", ["h", "w", "b"], ["y"], num_heads=HEADS),
    ]
    weights = {"w": low_rank(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH)}
    source = write(tmp_path / "in.onnx", nodes, weights)
    report, target = half(source, tmp_path)
    assert len(report.plan.sketched) == 3
    assert_same_outputs(source, target, random(2, 9, WIDTH))


def test_a_bias_of_heads(tmp_path):
    nodes = [
        *(helper.make_node("MatMul", ["x", one], [f"{one}x"]) for one in "qkv"),
        fused("MultiHeadAttention", ["qx", "kx", "vx", "b"], ["y"], num_heads=HEADS),
    ]
    weights = {one: low_rank(WIDTH, WIDTH) for one in "qkv"} | {"b": random(3 * WIDTH)}
    source = write(tmp_path / "in.onnx", nodes, weights)
    data = [random(4, 9, WIDTH) for _ in range(4)]
    report, target = half(source, tmp_path, data)
    assert report.plan.route == "ONNX graph, run by torch"
    assert_same_outputs(source, target, random(2, 9, WIDTH))
    assert "b.value.shifted" in {one.name for one in onnx.load(target).graph.initializer}


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("options", ["mask", "order", "sum"])
def test_an_embedding(tmp_path, options, opset):
    """Its tables are sketched where they are included; lengths, and the sum, are read on."""
    tables = {"words": low_rank(60, WIDTH), "places": low_rank(20, WIDTH), "kinds": random(2, WIDTH)}
    norm = {"scale": np.abs(random(WIDTH)), "shift": random(WIDTH)}
    given = ["ids", "segments", *tables, *norm, "mask"]
    names = {"mask": ["h", "lengths"], "order": ["h", "unread"], "sum": ["h", "", "total"]}[options]
    if options == "order":
        given = ["ids", "", "words", "places", "", *norm, "", "segments"]
    nodes = [fused("EmbedLayerNormalization", given, names, epsilon=1e-5)]
    if options == "mask":
        weights = {"w": low_rank(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH)}
        nodes.append(fused("Attention", ["h", "w", "b", "lengths"], ["g"], num_heads=HEADS))
    else:
        weights = {"v": low_rank(WIDTH, WIDTH)}
        nodes.append(helper.make_node("MatMul", ["total" if options == "sum" else "h", "v"], ["g"]))
    nodes.append(helper.make_node("Add", ["g", "x"], ["y"]))
    given = [
        helper.make_tensor_value_info(one, TensorProto.INT32, (2, 9)) for one in ("ids", "segments", "mask")
    ]
    size = (2, 9, WIDTH)
    source = write(tmp_path / "in.onnx", nodes, tables | norm | weights, size, size, given, opset)
    report, target = half(source, tmp_path, include=["words", "w*" if options == "mask" else "v"])
    assert "words" in {line.name for line in report.plan.sketched}
    assert {"EmbedLayerNormalization", "Attention"}.isdisjoint(kinds(target))
    ids, segments = RNG.integers(0, 60, (2, 9)), RNG.integers(0, 2, (2, 9))
    mask = np.arange(9) < np.array([[9], [5]])
    assert_same_outputs(
        source, target, [random(*size), *(one.astype(np.int32) for one in (ids, segments, mask))]
    )


def test_what_is_not_plain_stays(tmp_path):
    """An Attention with a cache stays as it is, named in the report, and torch runs it."""
    nodes = [
        fused("Attention", ["x", "w", "b", "", "past"], ["h", "present"], num_heads=HEADS),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
        helper.make_node("ReduceSum", ["present"], ["unread"]),
    ]
    weights = {"w": low_rank(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH), "v": low_rank(WIDTH, WIDTH)}
    past = helper.make_tensor_value_info("past", TensorProto.FLOAT, (2, "n", HEADS, 3, WIDTH // HEADS))
    source = write(tmp_path / "in.onnx", nodes, weights, inputs=[past])
    data = [(random(4, 9, WIDTH), random(2, 4, HEADS, 3, WIDTH // HEADS)) for _ in range(4)]
    report, target = half(source, tmp_path, data)
    assert report.plan.route == "ONNX graph, run by torch"
    (reason,) = reasons(report).values()
    assert "of an operator of com.microsoft" in reason
    assert_same_outputs(source, target, list(data[0]))


def test_onnx_runtime_fuses_it_again(tmp_path):
    """So that nothing is slower for it."""
    source = encoder(tmp_path / "in.onnx")
    _, target = half(source, tmp_path)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "read.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(target, options, providers=["CPUExecutionProvider"])
    found = kinds(tmp_path / "read.onnx")
    assert found["BiasGelu"] == 1
    assert found["FusedMatMul"] == 1
    assert found["Mul"] == 0


def test_kernels_in_blocks_are_named(tmp_path):
    """As ONNX Runtime writes them for its own CPU; their numbers are not in the order of a kernel's."""
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["h"], domain="com.microsoft.nchwc", name="blocked", **CONV),
        helper.make_node("Conv", ["x", "w"], ["g"], **CONV),
        helper.make_node("Add", ["h", "g"], ["y"]),
    ]
    weights = {"k": kernel(32, 32, 3), "w": kernel(32, 32, 3)}
    size = (2, 32, 8, 8)
    source = write(tmp_path / "in.onnx", nodes, weights, size, size)
    model = onnx.load(source)
    model.opset_import.append(helper.make_opsetid("com.microsoft.nchwc", 1))
    onnx.save(model, source)
    report, _ = half(source, tmp_path, verify=False, synthetic=False)
    assert [line.name for line in report.plan.sketched] == ["w"]
    assert reasons(report)["blocked"].endswith(
        "com.microsoft.nchwc, wanted those of ONNX: sketch the file it was made of"
    )
