"""Means out of int8 products: latents in the middle of their range, biases without the mean error."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_models import far, kinds, make, node, random, run

from panther_compile.onnx import centre
from panther_compile.onnx.centre import centre_latents
from panther_compile.onnx.data import Feed
from panther_compile.onnx.int8 import int8_model

WIDTH, RANK = 96, 24


@pytest.fixture
def feeds():
    """Batches whose features have means that add up in latents."""
    drawn = np.random.default_rng(0)
    rows = [(2 + drawn.standard_normal((32, WIDTH))).astype(np.float32) for _ in range(8)]
    return [Feed({"x": one}, place) for place, one in enumerate(rows)]


def pair(path, product="Gemm", bias=True, shown=None, **attributes):
    """(x D) U + b; the latent or another reader of it may be an output too."""
    weights = {"down": random(WIDTH, RANK), "up": random(RANK, WIDTH)} | (
        {"b": random(WIDTH)} if bias else {}
    )
    nodes = [node("MatMul", ["x", "down"], ["latent"])]
    if product == "Gemm":
        nodes.append(node("Gemm", ["latent", "up", *["b"] * bias], ["y"], **attributes))
    else:
        nodes.append(node("MatMul", ["latent", "up"], ["product" if bias else "y"]))
        nodes += [node("Add", ["b", "product"], ["y"])] * bias
    if shown == "other":
        nodes.append(node("Relu", ["latent"], ["other"]))
    others = [helper.make_tensor_value_info(shown, TensorProto.FLOAT, None)] if shown else []
    return make(path, nodes, weights, x=("n", WIDTH), outputs=others)


def outputs(path, feeds):
    return np.concatenate([run(path, feed["x"])[0] for feed in feeds])


@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.5, "beta": 2.0}, {"transB": 0}])
@pytest.mark.parametrize("product", ["Gemm", "MatMul"])
def test_the_function_stays_and_latents_are_centred(tmp_path, feeds, product, attributes):
    path = pair(tmp_path / "in.onnx", product, **(attributes if product == "Gemm" else {}))
    model = ir.load(path)
    assert centre_latents(model, feeds, tmp_path) == 1
    ir.save(model, tmp_path / "out.onnx")
    assert far(outputs(tmp_path / "out.onnx", feeds), outputs(path, feeds)) < 1e-5
    (add,) = [one for one in model.graph if one.op_type == "Add" and one.inputs[0].name == "latent"]
    model.graph.outputs[:] = add.outputs
    ir.save(model, tmp_path / "latent.onnx")
    latent = outputs(tmp_path / "latent.onnx", feeds)
    assert np.abs(latent.max(0) + latent.min(0)).max() < 1e-3 * np.abs(latent).max()


@pytest.mark.parametrize(
    "options",
    [{"bias": False}, {"product": "MatMul", "bias": False}, {"shown": "latent"}, {"shown": "other"}],
)
def test_what_cannot_be_centred_for_nothing_is_left_alone(tmp_path, feeds, options):
    model = ir.load(pair(tmp_path / "in.onnx", **options))
    nodes = [one.op_type for one in model.graph]
    assert centre_latents(model, feeds, tmp_path) == 0
    assert [one.op_type for one in model.graph] == nodes


def test_pairs_behind_large_means_survive_int8(tmp_path, feeds):
    path = pair(tmp_path / "in.onnx")
    wanted = outputs(path, feeds)
    lost = {}
    for name, data in (("without data", []), ("with data", feeds)):
        with int8_model(ir.load(path), tmp_path, data) as rounded:
            ir.save(rounded, tmp_path / "int8.onnx")
        assert kinds(tmp_path / "int8.onnx")["MatMulInteger"] == 2
        found = outputs(tmp_path / "int8.onnx", feeds)
        lost[name] = np.linalg.norm(found - wanted) / np.linalg.norm(wanted - wanted.mean(0))
    assert lost["with data"] < 0.5 * lost["without data"]


@pytest.mark.parametrize("product", ["Gemm", "MatMul"])
def test_biases_make_up_for_what_rounding_does_to_means(tmp_path, feeds, product):
    weights = {"w": random(WIDTH, 64), "b": random(64)}
    if product == "Gemm":
        nodes = [node("Gemm", ["x", "w", "b"], ["y"])]
    else:
        nodes = [node("MatMul", ["x", "w"], ["p"]), node("Add", ["p", "b"], ["y"])]
    path = make(tmp_path / "in.onnx", nodes, weights, x=("n", WIDTH))
    wanted = outputs(path, feeds[-2:])  # which the means are not taken from
    off = {}
    for name, data in (("without data", []), ("with data", feeds)):
        with int8_model(ir.load(path), tmp_path, data) as rounded:
            ir.save(rounded, tmp_path / "int8.onnx")
        off[name] = np.abs((outputs(tmp_path / "int8.onnx", feeds[-2:]) - wanted).mean(0)).mean()
    assert off["with data"] < 0.3 * off["without data"]


def test_values_are_looked_at_in_parts(tmp_path, feeds, monkeypatch):
    nodes, weights = [], {}
    for place in range(3):
        given = f"y{place - 1}" if place else "x"
        nodes += [
            node("MatMul", [given, f"d{place}"], [f"h{place}"]),
            node("Gemm", [f"h{place}", f"u{place}", f"b{place}"], ["y" if place == 2 else f"y{place}"]),
        ]
        weights |= {f"d{place}": random(WIDTH, RANK), f"u{place}": random(RANK, WIDTH) / WIDTH}
        weights |= {f"b{place}": random(WIDTH)}
    path = make(tmp_path / "in.onnx", nodes, weights, x=("n", WIDTH))
    for name, at_once in (("whole.onnx", 64), ("parts.onnx", 2)):
        monkeypatch.setattr(centre, "_AT_ONCE", at_once)
        model = ir.load(path)
        assert centre_latents(model, feeds, tmp_path) == 3
        ir.save(model, tmp_path / name)
    whole, parts = (outputs(tmp_path / name, feeds) for name in ("whole.onnx", "parts.onnx"))
    assert np.array_equal(whole, parts)
    assert far(whole, outputs(path, feeds)) < 1e-5
