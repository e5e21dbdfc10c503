"""ONNX files that are healed: their factors trained in torch, towards the outputs of the source."""

import json

import numpy as np
import onnx
import pytest
import torch
from onnx_models import far, make, node, run

import panther_compile as pc
from panther_compile.cli import main
from panther_compile.errors import ConfigError, DataError, HealingError
from panther_compile.healing.report import HEALED_SINCE
from panther_compile.records import NEVER_REACHED

RNG = np.random.default_rng(0)
OPTIONS = {"min_params": 64, "allow_slower": True, "progress": False}
MIX = np.random.default_rng(1).standard_normal((24, 48)).astype(np.float32)


@pytest.fixture(autouse=True)
def rng(monkeypatch):
    """The same weights in whatever order tests are run."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def rows(count, seed=0):
    """(count, 16, 48)"""
    values = np.random.default_rng(seed).standard_normal((count, 16, 24)) * np.linspace(2, 0.2, 24)
    return values.astype(np.float32) @ MIX


def batches(count=24):
    return [rows(16, seed) for seed in range(count)]


@pytest.fixture
def deep(tmp_path):
    """Four products with biases, and the mean over positions."""
    weights, nodes, x = {}, [], "x"
    for place in range(4):
        weights |= {f"w{place}": normal(48, 48) / 7, f"b{place}": normal(48) / 4}
        nodes += [node("MatMul", [x, f"w{place}"], [f"m{place}"])]
        nodes += [node("Add", [f"m{place}", f"b{place}"], [f"a{place}"])]
        nodes += [node("Relu", [f"a{place}"], [x := f"t{place}"])]
    nodes += [node("ReduceMean", [x], ["y"], axes=[1], keepdims=0)]
    return make(tmp_path / "deep.onnx", nodes, weights, x=("n", 16, 48))


@pytest.fixture
def images(tmp_path):
    """Three convolutions with biases, and the mean over places."""
    weights = {"k0": normal(16, 3, 3, 3) / 5, "b0": normal(16)}
    weights |= {"k1": normal(24, 16, 3, 3) / 12, "b1": normal(24), "k2": normal(24, 24, 1, 1) / 5}
    nodes = [
        node("Conv", ["x", "k0", "b0"], ["c0"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", ["c0"], ["r0"]),
        node("Conv", ["r0", "k1", "b1"], ["c1"], kernel_shape=[3, 3], strides=[2, 2]),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "k2"], ["c2"], kernel_shape=[1, 1]),
        node("GlobalAveragePool", ["c2"], ["y"]),
    ]
    return make(tmp_path / "images.onnx", nodes, weights, x=("n", 3, 12, 12))


def pictures(count, seed):
    coarse = np.random.default_rng(seed).standard_normal((count, 3, 4, 4)).astype(np.float32)
    return coarse.repeat(3, 2).repeat(3, 3)


def sketched(source, data, ratio=0.4, name="out.onnx", **options):
    target = source.with_name(name)
    report = pc.sketch_onnx(source, target, ratio, data=data, **(OPTIONS | options))
    return report, target


def test_a_healed_file_is_closer_on_other_inputs(deep):
    x = rows(256, 99)
    (wanted,) = run(deep, x)
    before, closed = sketched(deep, batches(), name="closed.onnx")
    after, healed = sketched(deep, batches(), refine="kl", refine_steps=120)
    assert before.healed is None
    assert far(run(healed, x)[0], wanted) < 0.95 * far(run(closed, x)[0], wanted)
    assert after.achieved_ratio == before.achieved_ratio
    assert after.plan.choices == before.plan.choices


def test_convolutions_and_their_biases_are_healed(images):
    data, x = [pictures(32, seed) for seed in range(16)], pictures(64, 99)
    (wanted,) = run(images, x)
    _, closed = sketched(images, data, 0.35, name="closed.onnx")
    report, healed = sketched(images, data, 0.35, refine="kl", refine_steps=120)
    assert far(run(healed, x)[0], wanted) < 0.95 * far(run(closed, x)[0], wanted)
    assert not report.healed.reverted
    biases = [
        {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
        for path in (closed, healed)
    ]
    same = {name for name in biases[0] if biases[0][name].ndim == 1}
    assert any(not np.array_equal(biases[0][name], biases[1][name]) for name in same)


def test_what_weights_give_is_healed_alone(images):
    data = [pictures(32, seed) for seed in range(16)]
    report, _ = sketched(images, data, 0.35, refine="block", refine_steps=60)
    before, after = ({**one, "output": 0.0} for one in (report.healed.before, report.healed.after))
    assert sum(after.values()) < sum(before.values())


def test_the_report_tells_of_it(deep):
    report, _ = sketched(deep, batches(), refine="kl", refine_steps=20)
    assert report.healed.steps == 20
    assert report.healed.after["output"] < report.healed.before["output"]
    assert {one.note for one in report.fitted.values()} == {HEALED_SINCE}
    assert report.healed.line() in str(report)
    assert report.healed.line() in report._repr_html_()
    assert json.loads(json.dumps(report.to_dict()))["healed"]["steps"] == 20


def test_the_source_is_what_it_was(deep):
    before = deep.read_bytes()
    sketched(deep, batches(), refine="kl", refine_steps=5)
    assert deep.read_bytes() == before


def test_it_is_the_same_each_time(deep):
    files = [sketched(deep, batches(), refine="kl", refine_steps=5)[1].read_bytes() for _ in range(2)]
    assert files[0] == files[1]


def test_in_int_8_too(tmp_path):
    weights = {name: normal(192, 192) / 14 for name in "abc"}
    nodes = [
        node("MatMul", ["x", "a"], ["h"]),
        node("Relu", ["h"], ["i"]),
        node("MatMul", ["i", "b"], ["j"]),
        node("Relu", ["j"], ["k"]),
        node("MatMul", ["k", "c"], ["l"]),
        node("Relu", ["l"], ["m"]),
        node("ReduceMean", ["m"], ["y"], axes=[1], keepdims=0),
    ]
    source = make(tmp_path / "wide.onnx", nodes, weights, x=("n", 16, 192))
    *data, x = (np.tile(rows(32, seed), 4) for seed in range(13))
    (wanted,) = run(source, x)
    _, closed = sketched(source, data, 0.2, name="closed.onnx", then="int8")
    report, healed = sketched(source, data, 0.2, refine="kl", refine_steps=100, then="int8")
    assert not report.healed.reverted
    assert far(run(healed, x)[0], wanted) < 0.9 * far(run(closed, x)[0], wanted)


def test_what_padding_hides_does_not_count(tmp_path):
    mask = onnx.helper.make_tensor_value_info("attention_mask", onnx.TensorProto.INT64, ("n", 6))
    kept = onnx.helper.make_tensor_value_info("kept", onnx.TensorProto.INT64, ("n", 6))
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
        node("Identity", ["attention_mask"], ["kept"]),
    ]
    weights = {"w": normal(48, 48) / 7, "v": normal(48, 48) / 7}
    source = make(tmp_path / "m.onnx", nodes, weights, x=("n", 6, 48), inputs=[mask], outputs=[kept])
    hidden = np.tile(np.int64([1, 1, 1, 1, 0, 0]), (8, 1))

    def data(padding):
        for seed in range(6):
            x = rows(8, seed)[:, :6].copy()
            x[:, 4:] = padding
            yield x, hidden

    files = [
        sketched(source, list(data(padding)), refine="kl", refine_steps=5)[1].read_bytes()
        for padding in (0.0, 50.0)
    ]
    assert files[0] == files[1]


def test_what_cannot_be_healed_is_refused(deep, runtime_alone):
    with pytest.raises(ConfigError, match=r"refine='kl' trains the weights in torch, .*: not asked;"):
        sketched(deep, batches(), refine="kl")
    assert not deep.with_name("out.onnx").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": None}, ConfigError, "refine='kl' needs data="),
        ({"ratio": 1.0, "then": "int8"}, ConfigError, "of which a ratio of 1 makes none"),
        ({"data": batches(1)}, DataError, "data holds 1 batch, wanted at least 2"),
        ({"refine": "more"}, ConfigError, "refine='more'"),
        ({"refine_steps": 0}, ConfigError, "refine_steps=0"),
    ],
)
def test_options_that_have_no_meaning(deep, options, error, message):
    with pytest.raises(error, match=message):
        sketched(deep, **({"data": batches(2), "refine": "kl"} | options))
    assert not deep.with_name("out.onnx").exists()


def test_it_is_healed_from_the_command_line(deep, capsys):
    np.savez(deep.with_name("data.npz"), x=np.concatenate(batches(4)))
    options = ["--data", str(deep.with_name("data.npz")), "--refine", "kl", "--refine-steps", "3"]
    target = str(deep.with_name("out.onnx"))
    assert (
        main(["sketch-onnx", str(deep), target, *options, "--json", "--ratio", "0.2", "--min-params", "64"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["healed"]["steps"] == 3


def info(name, sizes=None, dtype=onnx.TensorProto.FLOAT):
    return onnx.helper.make_tensor_value_info(name, dtype, sizes)


def branch(name, nodes, **weights):
    held = [onnx.numpy_helper.from_array(one, key) for key, one in weights.items()]
    return onnx.helper.make_graph(nodes, name, [], [info(nodes[-1].output[0])], held)


def branched(path, *, has_outer=True, has_both=True):
    """An If by the sign of the mean, a product in one branch or both, products outside or none."""
    h = "h" if has_outer else "x"
    one = branch("one", [node("MatMul", [h, "v"], ["one_y"])], v=normal(48, 48) / 7)
    other = branch("other", [node("Relu", [h], ["other_y"])])
    if has_both:
        other = branch("other", [node("MatMul", [h, "u"], ["other_y"])], u=normal(48, 48) / 7)
    nodes = [
        node("ReduceMean", ["x"], ["mean"], keepdims=0),
        node("Greater", ["mean", "zero"], ["positive"]),
        node("If", ["positive"], ["z" if has_outer else "y"], then_branch=one, else_branch=other),
    ]
    weights = {"zero": np.float32(0)}
    if has_outer:
        nodes = [node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["h"]), *nodes]
        nodes += [node("MatMul", ["z", "t"], ["y"])]
        weights |= {"w": normal(48, 48) / 7, "t": normal(48, 48) / 7}
    return make(path, nodes, weights, x=("n", 16, 48))


@pytest.mark.parametrize("method", ["kl", "block"])
@pytest.mark.parametrize("means", [(3, -3), (3,) * 11 + (-3,), (3,)])
@pytest.mark.parametrize(("has_outer", "has_both"), [(True, True), (True, False), (False, False)])
def test_branches_that_some_batches_take(tmp_path, method, means, has_outer, has_both):
    source = branched(tmp_path / "in.onnx", has_outer=has_outer, has_both=has_both)
    data = [rows(8, seed) + means[seed % len(means)] for seed in range(24)]
    report, _ = sketched(source, data, refine=method, refine_steps=20)
    assert report.plan.route == "ONNX graph, run by torch"
    assert report.healed.after["output"] >= 0
    assert "held-out loss at" in str(report.healed)


def test_weights_that_no_batch_reaches_are_sketched_by_themselves(tmp_path):
    source = branched(tmp_path / "in.onnx", has_outer=False, has_both=False)
    report, _ = sketched(source, [rows(8, seed) - 3 for seed in range(12)], refine="kl", refine_steps=20)
    assert report.healed.reverted
    assert {one.note for one in report.fitted.values()} == {NEVER_REACHED}


def test_kernels_that_data_leave_alone_are_healed_too(tmp_path):
    weights = {"t": normal(16, 8, 3, 3) / 6, "k": normal(24, 16, 1, 1) / 4}
    nodes = [
        node("ConvTranspose", ["x", "t"], ["h"], kernel_shape=[3, 3], group=2),
        node("Relu", ["h"], ["r"]),
        node("Conv", ["r", "k"], ["c"], kernel_shape=[1, 1]),
        node("GlobalAveragePool", ["c"], ["y"]),
    ]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 6, 6))
    means = np.random.default_rng(5).standard_normal((13, 16, 16, 1, 1)).astype(np.float32)
    *data, x = means + 0.3 * normal(13, 16, 16, 6, 6)
    (wanted,) = run(source, x)
    _, closed = sketched(source, data, 0.5, name="closed.onnx", include="t")
    report, healed = sketched(source, data, 0.5, refine="kl", refine_steps=60, include="t")
    assert report.fitted["t"].note.startswith("data leaves it alone: a grouped kernel")
    assert report.healed.before["output"] > 0.6  # of both kernels; of the second alone .38
    assert far(run(healed, x)[0], wanted) < far(run(closed, x)[0], wanted)


def test_wherever_the_caller_stands(images):
    data = [pictures(16, seed) for seed in range(4)]
    before = torch.random.get_rng_state()
    _, plain = sketched(images, data, 0.35, name="plain.onnx", refine="kl", refine_steps=3)
    assert torch.equal(before, torch.random.get_rng_state())
    with torch.inference_mode():
        _, inside = sketched(images, data, 0.35, refine="kl", refine_steps=3)
    assert inside.read_bytes() == plain.read_bytes()


def test_an_error_names_the_batch_as_it_was_given(tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["y"]),
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "most"], ["is_large"]),
        node("Where", ["is_large", "infinite", "y"], ["z"]),
    ]
    weights = {"w": normal(48, 48) / 7, "most": np.float32(1e5), "infinite": np.float32(np.inf)}
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 48), outputs=[info("z")])
    data = batches(12)
    data[5] = data[5] + 100
    with pytest.raises(HealingError, match="holds NaN or Inf on batch 5 of the data"):
        sketched(source, data, refine="kl", refine_steps=40)


def test_outputs_that_are_truths(tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("MatMul", ["h", "v"], ["y"]),
        node("Greater", ["y", "zero"], ["z"]),
    ]
    weights = {"w": normal(48, 48) / 7, "v": normal(48, 48) / 7, "zero": np.float32(0)}
    outputs = [info("z", dtype=onnx.TensorProto.BOOL)]
    source = make(tmp_path / "in.onnx", nodes, weights, x=("n", 16, 48), outputs=outputs)
    report, _ = sketched(source, batches(6), refine="kl", refine_steps=5)
    assert report.plan.route == "ONNX graph, run by torch"
