"""Texts of words for an ONNX encoder without data, whose tokenizer lies beside the file."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import node, run
from test_word_texts import CLS, SEP, VOCABULARY, tokenizer

import panther_compile as pc
from panther_compile.onnx.data import ObservedModel
from panther_compile.onnx.files import read_model
from panther_compile.onnx.made_up import made_up_inputs

RNG = np.random.default_rng(0)
OTHERS = ("attention_mask", "token_type_ids", "position_ids")


def encoder(path, others=OTHERS, *, ids="input_ids", dtype=TensorProto.INT64, longest=40, sizes=("n", "t")):
    """Tokens and places looked up, and two products; masks and types do not matter to it."""
    path.parent.mkdir(exist_ok=True)
    basis = RNG.standard_normal((8, 64)).astype(np.float32)
    weights = {
        "table": (RNG.standard_normal((len(VOCABULARY), 8)) @ basis).astype(np.float32),
        "places": 0.1 * RNG.standard_normal((longest, 64)).astype(np.float32),
        "a": RNG.standard_normal((64, 256)).astype(np.float32) / 8,
        "b": RNG.standard_normal((256, 64)).astype(np.float32) / 16,
    }
    placed = [node("Identity", ["words"], ["h"])]
    if "position_ids" in others:
        placed = [
            node("Gather", ["places", "position_ids"], ["where"]),
            node("Add", ["words", "where"], ["h"]),
        ]
    nodes = [
        node("Cast", [ids], ["long"], to=TensorProto.INT64),
        node("Gather", ["table", "long"], ["words"]),
        *placed,
        node("MatMul", ["h", "a"], ["i"]),
        node("Relu", ["i"], ["j"]),
        node("MatMul", ["j", "b"], ["k"]),
        node("Add", ["k", "h"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(one, dtype, sizes) for one in (ids, *others)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (*sizes, 64))],
        [numpy_helper.from_array(one, name) for name, one in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def made_for(path):
    model = read_model(path)
    return made_up_inputs(model, ObservedModel(model, (), path.parent), seed=0, folder=path.parent)


@pytest.mark.parametrize("others", [OTHERS, ("attention_mask",), ()])
@pytest.mark.parametrize("dtype", [TensorProto.INT64, TensorProto.INT32])
def test_texts_are_of_words(tmp_path, others, dtype):
    tokenizer().save_pretrained(tmp_path)
    found = made_for(encoder(tmp_path / "in.onnx", others, dtype=dtype))
    assert found.what == "made-up texts of words"
    ids = [feed["input_ids"] for feed in found.feeds]
    assert {one.dtype for one in ids} == {np.dtype("int64" if dtype == TensorProto.INT64 else "int32")}
    assert {int(token) for one in ids for token in one[:, 0]} == {CLS}
    assert {int(token) for one in ids for token in one[:, -1]} == {SEP}
    assert len({one.shape[1] for one in ids}) > 4  # texts of many lengths
    assert max(one.shape[1] for one in ids) <= (32 if "position_ids" in others else 128)  # of 40 places
    assert all(set(feed) == {"input_ids", *others} for feed in found.feeds)
    if others == OTHERS:
        feed = found.feeds[0]
        assert feed["attention_mask"].min() == 1
        assert feed["token_type_ids"].max() == 0
        assert feed["position_ids"][0].tolist() == list(range(ids[0].shape[1]))


def test_the_tokenizer_may_be_a_folder_above(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    assert made_for(encoder(tmp_path / "onnx" / "in.onnx")) is not None


def test_other_models_get_none(tmp_path):
    source = encoder(tmp_path / "in.onnx")
    assert made_for(source) is None  # no tokenizer
    tokenizer().save_pretrained(tmp_path)
    assert made_for(source) is not None
    assert made_for(encoder(source, (*OTHERS, "task_ids"))) is None
    assert made_for(encoder(source, ids="tokens")) is None
    assert made_for(encoder(source, longest=8)) is None  # no length that is tried


@pytest.mark.parametrize("text", ["no tokenizer", "{}", "[]", '{"model": {"type": "of tomorrow"}}'])
@pytest.mark.filterwarnings("ignore:the tokenizer at")
def test_a_tokenizer_that_cannot_be_read_is_none(tmp_path, text):
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    assert made_for(encoder(tmp_path / "in.onnx")) is None


@pytest.mark.parametrize(("sizes", "count"), [((1, 16), 448), (("n", 16), 14), ((4, "t"), 112)])
def test_texts_have_the_sizes_that_a_file_fixes(tmp_path, monkeypatch, sizes, count):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    tokenizer().save_pretrained(tmp_path)
    source = encoder(tmp_path / "in.onnx", ("attention_mask",), sizes=sizes)
    feeds = made_for(source).feeds
    assert len(feeds) == count
    for feed in feeds:
        assert all(
            wanted in ("n", "t", size) for wanted, size in zip(sizes, feed["input_ids"].shape, strict=True)
        )
    assert pc.sketch_onnx(source, tmp_path / "out.onnx", 0.5, progress=False).made_up


def test_texts_of_one_length_where_others_do_not_run(tmp_path):
    """A graph of blocks of 16 tokens."""
    tokenizer().save_pretrained(tmp_path)
    blocks = [
        node("Gather", ["table", "input_ids"], ["h"]),
        node("Reshape", ["h", "shape"], ["y"]),
    ]
    table, shape = np.ones((len(VOCABULARY), 8), np.float32), np.array([0, -1, 16, 8])
    graph = helper.make_graph(
        blocks,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ("n", "t"))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", "b", 16, 8))],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(shape, "shape")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "in.onnx").write_bytes(model.SerializeToString())
    assert {feed["input_ids"].shape for feed in made_for(tmp_path / "in.onnx").feeds} == {(32, 128)}


def test_a_sketch_is_closer_on_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    tokenizer().save_pretrained(tmp_path)
    source = encoder(tmp_path / "in.onnx", ("attention_mask",))
    fitted = pc.sketch_onnx(source, tmp_path / "fitted.onnx", 0.5, progress=False)
    alone = pc.sketch_onnx(source, tmp_path / "alone.onnx", 0.5, progress=False, synthetic=False)
    assert (fitted.made_up, alone.made_up) == (True, False)
    assert "on 2 batches of made-up texts of words" in str(fitted)
    ids = RNG.integers(9, len(VOCABULARY), (16, 20))
    files = source, tmp_path / "fitted.onnx", tmp_path / "alone.onnx"
    wanted, *found = (run(path, [ids, ids * 0 + 1])[0] for path in files)
    off = [np.linalg.norm(one - wanted) for one in found]
    assert off[0] < 0.5 * off[1]
