"""sketch_onnx(data=...): what reaches the weights decides what is kept of them."""

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPTIONS, make, node, random, run, sketch
from thinned import thinned
from zoo import ZOO

import panther_compile as pc
from panther_compile.errors import ConfigError, ConfigTypeError, DataError, OnnxMismatchError
from panther_compile.kinds import row_space
from panther_compile.onnx import files as onnx_files
from panther_compile.onnx import fit as onnx_fit
from panther_compile.onnx.data import ObservedModel

RNG = np.random.default_rng(1)
MIX = np.random.default_rng(2).standard_normal((5, 48))
ALL = {"include": "*", "min_params": 0}


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order(monkeypatch):
    monkeypatch.setattr(f"{__name__}.RNG", np.random.default_rng(1))


def rows(*shape, mean=0.0, mix=MIX):
    """Inputs (..., I) of a low dimension, about a mean."""
    x = RNG.standard_normal((*shape, len(mix))) @ mix
    return (x + mean * np.arange(mix.shape[1]) / mix.shape[1]).astype(np.float32)


def images(count, channels=16, size=9):
    """Images whose channels are mixtures of three."""
    mix = np.random.default_rng(3).standard_normal((channels, 3))
    return (np.einsum("ck,nkhw->nchw", mix, RNG.standard_normal((count, 3, size, size))) + 0.5).astype("f")


def batches(make_one, number=8):
    return [{"x": make_one()} for _ in range(number)]


def error(source, target, x):
    """Relative, over all outputs."""
    pairs = list(zip(run(source, x), run(target, x), strict=True))
    lost = sum(float(np.square(one - other).sum()) for one, other in pairs)
    return (lost / sum(float(np.square(one).sum()) for one, _ in pairs)) ** 0.5


def both_errors(source, data, x, **options):
    """Without data and with it, on other inputs."""
    _, target = sketch(source, **(ALL | options))
    without = error(source, target, x)
    report, target = sketch(source, data=data, **(ALL | options))
    assert {fitted.method for fitted in report.fitted.values()} == {"calibrated"}
    return without, error(source, target, x)


BIAS = {"b": random(32)}
W = random(48, 32)
MATRICES = {
    "MatMul": ([node("MatMul", ["x", "w"], ["y"])], {"w": W}, 0.0),
    "MatMul, Add": (
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["y"])],
        {"w": W} | BIAS,
        3.0,
    ),
    "Add first": ([node("MatMul", ["x", "w"], ["m"]), node("Add", ["b", "m"], ["y"])], {"w": W} | BIAS, 3.0),
    "Gemm": ([node("Gemm", ["x", "w", "b"], ["y"], alpha=0.7, beta=0.4)], {"w": W} | BIAS, 3.0),
    "Gemm, transB": ([node("Gemm", ["x", "w", "b"], ["y"], transB=1)], {"w": W.T.copy()} | BIAS, 3.0),
    "Gemm, transA": (
        [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("Gemm", ["t", "w", "b"], ["y"], transA=1)],
        {"w": W} | BIAS,
        3.0,
    ),
    "Gemm without C": ([node("Gemm", ["x", "w"], ["y"])], {"w": W}, 0.0),
    "left": ([node("MatMul", ["w", "x"], ["y"])], {"w": W.T.copy()}, 0.0),
    "left Gemm, transB": ([node("Gemm", ["w", "x"], ["y"], transB=1)], {"w": W.T.copy()}, 0.0),
    "behind a Transpose": (
        [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])],
        {"w": W.T.copy()},
        0.0,
    ),
}


@pytest.mark.parametrize("case", MATRICES)
def test_a_matrix_keeps_what_the_data_shows(case, tmp_path):
    """Data of five dimensions, about a mean where there is a bias: the rank is enough for all of it."""
    nodes, weights, mean = MATRICES[case]
    columns = case == "left"
    source = make(tmp_path / "in.onnx", nodes, weights, x=(48, "n") if columns else ("n", 48))

    def inputs(count):
        return rows(count, mean=mean).T if columns else rows(count, mean=mean)

    without, found = both_errors(source, batches(lambda: inputs(16)), inputs(64))
    assert without > 0.3
    assert found < 0.02


@pytest.mark.parametrize("case", ["MatMul, Add", "Gemm, transA", "left", "behind a Transpose"])
def test_a_matrix_of_more_inputs_than_memory_has_moments_of(case, tmp_path, monkeypatch):
    """It is fitted in its row space, of 32 dimensions."""
    monkeypatch.setattr(row_space, "memory_of", lambda _: 112 * 40**2)
    test_a_matrix_keeps_what_the_data_shows(case, tmp_path)


def test_a_matrix_that_memory_has_no_moments_of_is_cut_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(row_space, "memory_of", lambda _: 112 * 30**2)
    nodes, weights, _ = MATRICES["Gemm"]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 48))
    report, _ = sketch(source, data=batches(lambda: rows(16)), **ALL)
    assert [fitted.method for fitted in report.fitted.values()] == ["svd"]


CONVS = {
    "3 x 3": ((24, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "uneven": ((24, 16, 3, 3), {"pads": [0, 1, 2, 0], "strides": [2, 1], "dilations": [1, 2]}),
    "same, upper": ((24, 16, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same, lower": ((24, 16, 2, 3), {"auto_pad": "SAME_LOWER"}),
    "valid": ((24, 16, 3, 3), {"auto_pad": "VALID"}),
    "1 x 1, stride": ((24, 16, 1, 1), {"strides": [2, 2]}),
    "groups": ((24, 8, 3, 3), {"group": 2}),
}


@pytest.mark.parametrize("bias", thinned([True, False], 2))
@pytest.mark.parametrize("case", CONVS)
def test_a_kernel_keeps_what_the_data_shows(case, bias, tmp_path):
    shape, attributes = CONVS[case]
    weights = {"w": random(*shape)} | ({"b": random(shape[0])} if bias else {})
    nodes = [node("Conv", ["x", *weights], ["y"], **attributes)]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 9, 9))
    without, found = both_errors(source, batches(lambda: images(6)), images(12))
    assert found < (0.95 if case == "groups" else 0.5) * without


@pytest.mark.parametrize("kind", ["Gemm", "Conv"])
def test_the_bias_makes_up_for_the_mean(kind, tmp_path):
    """A rank that is too small leaves an error, but none on average."""
    if kind == "Gemm":
        nodes, weights, _ = MATRICES["Gemm"]
        source, mix = make(tmp_path / "in.onnx", nodes, weights), RNG.standard_normal((48, 48))
        data, axes = batches(lambda: rows(64, mean=40.0, mix=mix)), (0,)
    else:
        weights = {"w": random(24, 16, 3, 3), "b": random(24)}
        source = make(
            tmp_path / "in.onnx", [node("Conv", ["x", "w", "b"], ["y"])], weights, x=("n", 16, 9, 9)
        )
        data, axes = batches(lambda: (RNG.standard_normal((16, 16, 9, 9)) + 3).astype("f")), (0, 2, 3)
    _, target = sketch(source, data=data, ratio=0.3, **ALL)
    x = np.concatenate([batch["x"] for batch in data])
    (wanted,), (found,) = run(source, x), run(target, x)
    lost = found - wanted
    assert np.sqrt(np.square(lost).mean()) > 0.5
    assert np.abs(lost.mean(axes)).max() < 0.03


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("kind", ["Gemm", "MatMul", "Conv", "no bias", "not the last"])
def test_the_last_bias_makes_up_for_what_activations_shift(kind, sequential, tmp_path):
    """A head that stays dense: behind a ReLU the means are others where less of the spread is left."""
    tail = {
        "Gemm": [node("Gemm", ["r", "head", "c"], ["y"], beta=0.5)],
        "MatMul": [node("MatMul", ["r", "head"], ["m"]), node("Add", ["c", "m"], ["y"])],
        "Conv": [node("Conv", ["r", "head", "c"], ["y"])],
        "no bias": [node("MatMul", ["r", "head"], ["y"])],
        "not the last": [node("Gemm", ["r", "head", "c"], ["m"]), node("Tanh", ["m"], ["y"])],
    }[kind]
    weights = {"w": random(48, 32), "b": random(32), "head": random(32, 7), "c": random(7)}
    x, y, first = ("n", 48), ("n", 7), node("Gemm", ["x", "w", "b"], ["a"])
    axes = (0,)
    if kind == "Conv":
        x, y, first = (2, 48, 5, 5), (2, 7, 5, 5), node("Conv", ["x", "w", "b"], ["a"])
        weights |= {"w": random(32, 48, 1, 1), "head": random(7, 32, 1, 1)}
        axes = (0, 2, 3)
    source = make(tmp_path / "in.onnx", [first, node("Relu", ["a"], ["r"]), *tail], weights, x=x, y=y)
    shape = (2, 48, 5, 5) if kind == "Conv" else (20, 48)
    data = [{"x": random(*shape)} for _ in range(8)]
    report, target = sketch(source, data=data, sequential=sequential, **(ALL | {"include": "w"}))
    assert [line.name for line in report.plan.sketched] == ["w"]
    pairs = [(run(source, batch["x"])[0], run(target, batch["x"])[0]) for batch in data]
    missing = np.mean([one - other for one, other in pairs], axis=(0, *(axis + 1 for axis in axes)))
    if kind in ("no bias", "not the last"):
        assert np.abs(missing).max() > 1e-2
    else:
        assert np.abs(missing).max() < 1e-4


def test_outputs_that_a_bias_hides_stay_hidden(tmp_path):
    """As a text's first tokens are, by a bias of minus infinity."""
    bias = np.where(np.arange(32) < 3, -np.inf, random(32)).astype(np.float32)
    source = make(tmp_path / "in.onnx", [node("Gemm", ["x", "w", "b"], ["y"])], {"w": W, "b": bias})
    _, target = sketch(source, data=[random(16, 48) for _ in range(4)], **ALL)
    found = run(target, random(5, 48))[0]
    assert np.isneginf(found[:, :3]).all()
    assert np.isfinite(found[:, 3:]).all()


def test_weights_and_biases_that_several_nodes_read(tmp_path):
    nodes = [
        node("Gemm", ["x", "w", "b"], ["p"]),
        node("Gemm", ["x2", "w", "b2"], ["q"]),
        node("MatMul", ["x", "v"], ["m"]),
        node("Add", ["m", "b"], ["y"]),
        node("Add", ["p", "q"], ["z"]),
    ]
    weights = {"w": random(48, 32), "v": random(48, 32), "b": random(32), "b2": random(32)}
    other = helper.make_tensor_value_info("x2", TensorProto.FLOAT, ("n", 48))
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ("n", 32))
    source = make(tmp_path / "in.onnx", nodes, weights, inputs=[other], outputs=[z])
    mix = RNG.standard_normal((5, 48))
    both = lambda: (rows(16, mean=2.0), rows(16, mean=-1.0, mix=mix))  # noqa: E731
    data = [both() for _ in range(8)]
    report, target = sketch(source, data=data, ratio=0.45, **ALL)  # too little for one to stay whole
    assert error(source, target, list(both())) < 0.05
    left = {tensor.name for tensor in onnx.load(target).graph.initializer}
    assert not {"w", "v", "b", "b2"} & left
    assert "on the last batch of the data" in str(report)


@pytest.mark.parametrize("kind", [object, str])
def test_columns_of_text(tmp_path, kind):
    """As converters of scikit-learn write them; strings are given as ONNX Runtime takes them."""
    names = [f"c{place}" for place in range(24)]
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        node("OneHotEncoder", ["text"], ["chosen"], cats_strings=names, **ml),
        node("Reshape", ["chosen", "flat"], ["row"]),
        node("Concat", ["row", "x"], ["h"], axis=1),
        node("MatMul", ["h", "w"], ["m"]),
        node("Relu", ["m"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]
    weights = {"flat": np.array([-1, 24]), "w": random(48, 64), "v": random(64, 48)}
    text = helper.make_tensor_value_info("text", TensorProto.STRING, ("n", 1))
    options = {"inputs": [text], "y": ("n", 48), "domains": [helper.make_opsetid("ai.onnx.ml", 2)]}
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 24), **options)
    data = [{"x": random(8, 24), "text": RNG.choice(names, (8, 1)).astype(kind)} for _ in range(5)]
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.75, data=data, **(OPTIONS | ALL))
    assert report.closeness.inputs == "5 batches of the data it was fitted to"
    assert len(report.fitted) == 2
    for given in (np.zeros((8, 1)), np.full((8, 1), None)):
        with pytest.raises(DataError, match=r"batch 0 of data: input 'text' is \w+, wanted strings"):
            pc.sketch_onnx(source, tmp_path / "out.onnx", data=[data[0] | {"text": given}], **OPTIONS)
    with pytest.raises(OnnxMismatchError, match="nothing random can be made of it; give data="):
        pc.sketch_onnx(source, tmp_path / "out.onnx", **(OPTIONS | ALL))


@pytest.mark.parametrize("then", ["none", "int8"])
def test_the_errors_are_those_of_the_last_batch(tmp_path, then):
    """Batches are mixed to be fitted to."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["r"]), node("MatMul", ["r", "v"], ["y"])]
    weights = {"w": random(48, 64), "v": random(64, 48)}
    source, target = make(tmp_path / "in.onnx", nodes, weights), tmp_path / "out.onnx"
    for count in (5, 12):
        data = [random(8, 48) for _ in range(count)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pc.SketchQualityWarning)
            report = pc.sketch_onnx(source, target, data=data, then=then, **(OPTIONS | ALL))
        assert report.output_errors["y"] == pytest.approx(error(source, target, data[-1]), rel=1e-4)


def branched(path, *, inner=False):
    """A model whose If has a weight in each branch; if inner, in those of an If within each."""

    def graph(nodes, name, weights=()):
        output = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [output], list(weights))

    def branch(name):
        r, w, y = (f"{name}_{one}" for one in "rwy")
        nodes = [node("Relu", ["h"], [r]), node("MatMul", [r, w], [y])]
        found = graph(nodes, name, [numpy_helper.from_array(random(32, 32), w)])
        if not inner:
            return found
        other = graph([node("Identity", ["h"], [f"{name}_o"])], f"{name}_other")
        one = node("If", ["true"], [f"{name}_z"], then_branch=found, else_branch=other)
        return graph([one], f"{name}_outer")

    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Less", ["sum", "zero"], ["negative"]),
        node("If", ["negative"], ["y"], then_branch=branch("then"), else_branch=branch("else")),
    ]
    weights = {"w": W, "zero": np.array(0, np.float32), "true": np.array(inner)}
    return make(path, nodes, weights)


@pytest.mark.parametrize("inner", [False, True])
def test_weights_in_branches_are_fitted_to_what_reaches_them(tmp_path, inner):
    source = branched(tmp_path / "in.onnx", inner=inner)
    x, signs = rows(64, mean=9.0), iter([1, -1] * 6)
    data = batches(lambda: np.float32(next(signs)) * rows(16, mean=9.0), 12)
    for sign in (-1, 1):
        without, found = both_errors(source, data, sign * x)
        assert found < 0.5 * without


def test_a_branch_that_is_never_taken_is_sketched_without(tmp_path):
    report, _ = sketch(branched(tmp_path / "in.onnx"), data=batches(lambda: rows(16, mean=9.0)), **ALL)
    notes = {name: fitted.note for name, fitted in report.fitted.items()}
    assert notes == {"w": "", "else_w": "", "then_w": "data never reached it"}
    # The weight that is never reached takes no numbers from the others.
    stored = {line.name: line.stored_numbers for line in report.plan.layers}
    assert stored["then_w"] <= 0.5 * 32 * 32
    assert stored["w"] + stored["else_w"] > 0.95 * 0.5 * (48 + 32) * 32
    assert report.plan.route == "ONNX graph, run by torch"


def test_padded_positions_do_not_count(tmp_path):
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("n", 6))
    kept = helper.make_tensor_value_info("kept", TensorProto.INT64, ("n", 6))
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Identity", ["attention_mask"], ["kept"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": W}, x=("n", 6, 48), inputs=[mask], outputs=[kept])
    hides = np.array([[1] * 6, [1, 1, 1, 0, 0, 0]], np.int64)
    data = [(rows(2, 6), hides) for _ in range(12)]
    noise = [(np.where(hides[..., None] == 1, x, 9 * random(2, 6, 48)), hides) for x, _ in data]
    hidden = (9 * random(2, 6, 48), np.zeros_like(hides))
    empty = (np.zeros_like(hidden[0]), hidden[1])
    both = ([empty, *data], [hidden, *noise])
    found = [sketch(source, data=one, **ALL)[1].read_bytes() for one in both]
    assert found[0] == found[1]
    report, _ = sketch(source, data=[hidden], **ALL)
    assert report.fitted["w"].note == "data never reached it"


def test_a_value_that_is_an_input_or_an_output_already(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["r"]), node("MatMul", ["r", "v"], ["y"])]
    r = helper.make_tensor_value_info("r", TensorProto.FLOAT, ("n", 32))
    source = make(tmp_path / "in.onnx", nodes, {"w": W, "v": random(32, 48)}, outputs=[r])
    without, found = both_errors(source, batches(lambda: rows(32)), rows(64))
    assert found < 0.6 * without


def test_sums_and_inputs_are_held_in_groups(tmp_path, monkeypatch):
    nodes = [
        node("Conv", ["x", "k"], ["h"], pads=[1, 1, 1, 1]),
        node("Conv", ["h", "l"], ["g"], pads=[1, 1, 1, 1]),
        node("Conv", ["g", "m"], ["f"]),
        node("Conv", ["f", "n"], ["y"]),
    ]
    weights = {"k": random(16, 16, 3, 3), "l": random(16, 16, 3, 3)}
    weights |= {"m": random(16, 16, 1, 1), "n": random(16, 16, 1, 1)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 9, 9))
    data = batches(lambda: images(3), 3)
    whole = sketch(source, data=data, **ALL)[1].read_bytes()
    monkeypatch.setattr(onnx_fit, "MAX_BYTES", 1)
    assert sketch(source, data=data, **ALL)[1].read_bytes() == whole


def chain(path, layers=6):
    """A deep model, whose errors add up."""
    weights = {f"w{i}": random(48, 48) / 5 for i in range(layers)} | {
        f"b{i}": random(48) for i in range(layers)
    }
    nodes = []
    for i in range(layers):
        before, after = f"h{i - 1}" if i else "x", "y" if i == layers - 1 else f"h{i}"
        nodes += [node("Gemm", [before, f"w{i}", f"b{i}"], [f"g{i}"]), node("Relu", [f"g{i}"], [after])]
    return make(path, nodes, weights)


@pytest.mark.usefixtures("runtime_alone")
def test_one_by_one_is_closer_in_a_deep_model(tmp_path):
    source, x = chain(tmp_path / "in.onnx"), rows(256)
    data = batches(lambda: rows(1024))
    found = []
    for sequential in (False, True):
        report, target = sketch(source, data=data, sequential=sequential, **ALL)
        assert {fitted.method for fitted in report.fitted.values()} == {"calibrated"}
        found.append(error(source, target, x))
    assert found[1] < 0.9 * found[0]


@pytest.mark.usefixtures("runtime_alone")
def test_weights_that_do_not_hang_on_one_another_are_one_step(tmp_path, monkeypatch):
    nodes = [node("MatMul", ["x", name], [f"x{name}"]) for name in "qkv"]
    nodes += [node("Sum", ["xq", "xk", "xv"], ["s"]), node("Conv", ["x4", "c"], ["z"])]
    nodes += [
        node("MatMul", ["s", "o"], ["y"]),
        node("Relu", ["y"], ["r"]),
        node("MatMul", ["r", "e"], ["end"]),
    ]
    extra = helper.make_tensor_value_info("x4", TensorProto.FLOAT, ("n", 16, 9, 9))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("z", "end")]
    fading = np.float32(0.8) ** np.arange(48, dtype=np.float32)  # so that none is best left whole
    weights = {name: random(48, 48) * fading for name in "qkvoe"} | {"c": random(24, 16, 3, 3)}
    source = make(tmp_path / "in.onnx", nodes, weights, inputs=[extra], outputs=outputs)
    shown = []

    class Observed(ObservedModel):
        def __init__(self, model, values, folder):
            shown.append([value.name for value in values])
            super().__init__(model, values, folder)

    monkeypatch.setattr("panther_compile.onnx.fit_to_data.ObservedModel", Observed)
    sketch(source, data=[(rows(16), images(4)) for _ in range(4)], sequential=True, **ALL)
    assert shown == [[], ["x", "x", "x", "x4", "s", "r"], ["s"], ["r"]]


def test_external_weights_and_no_file_left_behind(tmp_path):
    source = make(tmp_path / "in.onnx", *MATRICES["MatMul, Add"][:2])
    onnx.save(onnx.load(source), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = source.read_bytes(), (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "out.onnx"
    pc.sketch_onnx(source, target, 0.5, data=batches(lambda: rows(16)), **(OPTIONS | ALL))
    assert error(source, target, rows(32)) < 0.02
    assert (source.read_bytes(), (tmp_path / "weights.bin").read_bytes()) == before
    assert {path.name.split("-")[0] for path in target.parent.iterdir()} == {"out.onnx"}
    assert {path.name for path in tmp_path.iterdir()} == {"in.onnx", "weights.bin", "there"}


def test_half_precision(tmp_path):
    kind = TensorProto.FLOAT16
    nodes, weights, _ = MATRICES["Gemm"]
    weights = {name: array.astype(np.float16) for name, array in weights.items()}
    source = make(tmp_path / "in.onnx", nodes, weights, dtype=kind)
    data = [rows(16).astype(np.float16) for _ in range(8)]
    _, target = sketch(source, data=data, **ALL)
    assert error(source, target, rows(32).astype(np.float16)) < 0.05
    assert {
        tensor.data_type for tensor in onnx.load(target).graph.initializer if np.prod(tensor.dims) > 2
    } == {kind}


# ------------------------------------------------------------------------------------------ bad data


def test_one_by_one_needs_data(tmp_path):
    with pytest.raises(ConfigError, match="sequential=True needs data="):
        pc.sketch_onnx(chain(tmp_path / "in.onnx"), tmp_path / "out.onnx", sequential=True)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ([], DataError, "data holds no batch"),
        ({"x": random(4, 48)}, ConfigTypeError, "data is a dict, wanted a list of batches"),
        (random(4, 48), ConfigTypeError, "data is a ndarray"),
        (3, ConfigTypeError, "data is a int"),
        ([3], ConfigTypeError, "batch 0 of data is a int"),
        ([{"z": random(4, 48)}], DataError, r"arrays for \['z'\], the model's inputs are \['x'\]"),
        ([{"x": random(4, 48), "labels": random(4)}], DataError, r"arrays for \['labels', 'x'\]"),
        ([(random(4, 48), random(4))], DataError, "has 2 arrays, the model 1 inputs"),
        (
            [random(4, 48), random(4, 47)],
            DataError,
            r"batch 1 of data: input 'x' has shape \(4, 47\), wanted",
        ),
        ([random(4, 3, 48)], DataError, r"shape \(4, 3, 48\)"),
        ([np.zeros((4, 48))], DataError, "is float64, wanted float32"),
        ([{"x": [[0.0] * 48]}], ConfigTypeError, "input 'x' is a list, wanted an array"),
        ([np.full((4, 48), np.nan, np.float32)], DataError, "input 'x' holds NaN"),
        ([np.full((4, 48), 3e38, np.float32)], DataError, "batch 0 of the data: a number of size 3e"),
        ([random(4, 48), random(0, 48)], DataError, r"batch 1 of data is empty, x \(0, 48\)"),
        ([np.ma.masked_less(random(4, 48), 0)], DataError, "input 'x' is a masked array"),
        ([torch.zeros(4, 48, dtype=torch.bfloat16)], DataError, "is bfloat16, wanted float32"),
        ([torch.zeros(4, 48).to_sparse()], DataError, "is a sparse tensor, wanted a dense one"),
        ([torch.zeros(4, 48, device="meta")], DataError, "is a tensor on the meta device"),
        ([torch.nested.nested_tensor([torch.zeros(2, 48)])], DataError, "is a nested tensor"),
    ],
)
def test_bad_data_is_told(data, kind, message, tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 64), "v": random(64, 48)})
    with pytest.raises(kind, match=message):
        pc.sketch_onnx(source, tmp_path / "out.onnx", data=data, **(OPTIONS | ALL))
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


@pytest.mark.parametrize("place", [1, 4])
def test_the_batch_is_named_by_its_place_in_the_data(place, tmp_path):
    """Batches are run in another order."""
    source = make(
        tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 64)}, y=("n", 64)
    )
    data = [random(4, 48) for _ in range(6)]
    data[place][0, 0] = np.inf
    with pytest.raises(DataError, match=f"batch {place} of the data: NaN or Inf reaches w"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", data=data, **(OPTIONS | ALL))


def test_batches_that_are_written_over_are_copied(tmp_path):
    source = make(tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 64)})
    buffer = torch.zeros(4, 48)

    def read():
        for size in range(4):
            yield buffer.fill_(size)

    feeds = ObservedModel(onnx_files.read_model(source), (), tmp_path).feeds(read())
    assert sorted(float(feed["x"].max()) for feed in feeds) == [0, 1, 2, 3]


def test_what_was_read_before_data_failed_is_not_lost(tmp_path):
    source = make(tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 64)})

    def read():
        yield random(4, 48)
        raise OSError("the disk is gone")

    with pytest.raises(DataError, match=r"after 1 batch \(OSError: the disk is gone\)") as caught:
        pc.sketch_onnx(source, tmp_path / "out.onnx", data=read(), **(OPTIONS | ALL))
    pc.sketch_onnx(source, tmp_path / "out.onnx", data=caught.value.calls, **(OPTIONS | ALL))


@pytest.mark.usefixtures("runtime_alone")
def test_arrays_that_run_backwards(tmp_path):
    """As pictures whose colours are turned round."""
    source = make(
        tmp_path / "in.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": random(48, 64)}, y=("n", 64)
    )
    sketch(source, data=[rows(9)[..., ::-1], np.broadcast_to(rows(1), (4, 48))], **ALL)


@pytest.mark.usefixtures("runtime_alone")
@pytest.mark.parametrize(("number", "what"), [(3e38, r"a number of size 3e\+38"), (np.inf, "NaN or Inf")])
def test_bad_numbers_where_torch_does_not_run(number, what, tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": random(48, 64), "v": random(64, 48)})
    data = [random(4, 48), np.full((4, 48), number, np.float32)]
    with pytest.raises(DataError, match=f"batch 1 of the data: {what} reaches w"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", data=data, **(OPTIONS | ALL))


def test_what_onnx_runtime_cannot_run(tmp_path):
    nodes = [node("Reshape", ["x", "shape"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    source = make(tmp_path / "in.onnx", nodes, {"w": W, "shape": np.array([16, -1, 48])})
    with pytest.raises(DataError, match="batch 0 of data: ONNX Runtime cannot run it"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", data=[rows(7)], **(OPTIONS | ALL))
    unknown = [node("MatMul", ["x", "w"], ["h"]), node("Own", ["h"], ["y"], domain="own")]
    make(source, unknown, {"w": W}, y=("n", 32), domains=[helper.make_opsetid("own", 1)])
    with pytest.raises(OnnxMismatchError, match="ONNX Runtime cannot load the model"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", data=[rows(7)], **(OPTIONS | ALL))


# ------------------------------------------------------------------------------------------- the zoo


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "convnext"])
def test_zoo_models_stay_closer(name, tmp_path):
    entry = ZOO[name]
    inputs = entry.inputs()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    source = tmp_path / "in.onnx"
    pc.export_onnx(entry.build(), args, source, kwargs=kwargs, verify=False)
    given = [*args, *kwargs.values()]

    def batch():
        generator = torch.Generator().manual_seed(int(RNG.integers(2**31)))
        return [
            torch.randint(int(value.max()) + 1, value.shape, generator=generator)
            if value.max() > 1 and not value.is_floating_point()
            else value * (1 + torch.rand(1, generator=generator))
            if value.is_floating_point()
            else value
            for value in given
        ]

    data = [batch() for _ in range(24)]
    others = [[value.numpy() for value in batch()] for _ in range(4)]
    errors = []
    for some in (None, data):
        _, target = sketch(source, data=some)
        errors.append(sum(error(source, target, x) for x in others))
    assert errors[1] < 0.8 * errors[0]
