"""With data, the budget of a file goes where cutting a weight does most to the outputs."""

import numpy as np
import onnx
import pytest
from onnx_models import OPTIONS, make, node, random, run

import panther_compile as pc
from panther_compile.onnx import damage

pytestmark = pytest.mark.usefixtures("runtime_alone")


def uneven(path):
    """Two products of equal weights: of the one all results are outputs, of the other a thousandth."""
    weights = {"a": random(48, 48), "b": random(48, 48), "small": np.full((1,), 1e-3, np.float32)}
    nodes = [
        node("MatMul", ["x", "a"], ["p"]),
        node("MatMul", ["x", "b"], ["q"]),
        node("Mul", ["q", "small"], ["r"]),
        node("Add", ["p", "r"], ["y"]),
    ]
    return make(path, nodes, weights)


def error(source, target, x):
    wanted, found = run(source, x)[0], run(target, x)[0]
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_what_matters_keeps_more(tmp_path):
    source, target = uneven(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    data = [random(64, 48) for _ in range(10)]
    report = pc.sketch_onnx(source, target, 0.6, data=data, include="*", **OPTIONS)
    stored = {line.name: line.stored_numbers for line in report.plan.layers}
    assert report.plan.allocation == "sensitivity"
    assert report.plan.tried["sensitivity"] < 0.9 * report.plan.tried["energy"]
    assert stored["a"] > 2 * stored["b"]
    assert sum(stored.values()) <= 0.6 * 2 * 48 * 48
    assert "ranks divided by sensitivity" in str(report)
    assert error(source, target, random(64, 48)) < 0.1
    onnx.checker.check_model(target)


def test_where_it_would_take_too_long_ranks_are_by_energy(tmp_path, monkeypatch):
    monkeypatch.setattr(damage, "MAX_BYTES", 10)
    source = uneven(tmp_path / "in.onnx")
    data = [random(64, 48) for _ in range(10)]
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", 0.6, data=data, include="*", **OPTIONS)
    stored = {line.name: line.stored_numbers for line in report.plan.layers}
    assert not report.plan.tried
    assert stored["a"] == pytest.approx(stored["b"], rel=0.2)


def test_outputs_of_another_shape_are_as_far_as_can_be():
    wanted = {"y": random(2, 8), "z": random(2, 8)}
    assert damage._distance({}, wanted, wanted) == 0.0
    assert damage._distance({}, wanted, wanted | {"z": random(2, 6)}) == 1.0
