"""panther-compile sketch-onnx --data file.npz: what of the file becomes batches, and what is refused."""

import json

import numpy as np
import pytest
from onnx_models import make, node, random, run

from panther_compile.cli import main

MIX = np.random.default_rng(1).standard_normal((5, 256))
SMALL = ["--min-params", "0", "--include", "*"]


@pytest.fixture
def source(tmp_path):
    """A product whose inputs have five dimensions."""
    weights = {"w": random(256, 256), "b": random(256)}
    return make(tmp_path / "in.onnx", [node("Gemm", ["x", "w", "b"], ["y"])], weights, x=("n", 256))


def rows(count):
    return (np.random.default_rng(count).standard_normal((count, 5)) @ MIX + 1).astype(np.float32)


def sketch_onnx(source, *options):
    target = source.with_name("out.onnx")
    return main(["sketch-onnx", str(source), str(target), *SMALL, *options]), target


def test_the_weights_are_fitted_to_the_file(source, tmp_path, capsys):
    np.savez(tmp_path / "data.npz", x=rows(100))
    status, target = sketch_onnx(
        source, "--data", str(tmp_path / "data.npz"), "--batch-size", "30", "--sequential", "--json"
    )
    assert status == 0
    document = json.loads(capsys.readouterr().out)
    assert document["output_errors"]["y"] < 0.02
    (wanted,), (found,) = run(source, rows(40)), run(target, rows(40))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


def test_without_a_run_of_the_result(source, tmp_path, capsys):
    np.savez(tmp_path / "data.npz", x=rows(16))
    for options in ([], ["--data", str(tmp_path / "data.npz")]):
        status, target = sketch_onnx(source, "--no-verify", *options)
        assert status == 0
        assert target.exists()
        assert "relative error" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"z": rows(8)}, [], r"DataError: batch 0 of data has arrays for ['z']"),
        ({"x": rows(8).astype(np.float64)}, [], "input 'x' is float64, wanted float32"),
        (
            {"x": rows(8), "labels": rows(7)},
            [],
            "wanted one number of samples, along the first axis; found x: 8",
        ),
        ({"x": rows(0)}, [], "found x: 0"),
        ({}, [], "found no array"),
        ({"x": rows(8)}, ["--batch-size", "0"], "ConfigError: batch size 0, wanted at least 1"),
        ({"x": np.array([{}])}, [], "cannot read"),
    ],
)
def test_what_does_not_fit_is_told(arrays, options, message, source, tmp_path, capsys):
    np.savez(tmp_path / "data.npz", **arrays)
    status, target = sketch_onnx(source, "--data", str(tmp_path / "data.npz"), *options)
    assert status == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 broken", b"words"])
def test_a_file_that_is_none(content, source, tmp_path, capsys):
    path = tmp_path / "data.npz"
    if content is not None:
        path.write_bytes(content)
    status, _ = sketch_onnx(source, "--data", str(path))
    assert status == 2
    assert f"DataError: cannot read {path}, wanted a .npz file" in capsys.readouterr().err


def test_a_single_array_has_no_name(source, tmp_path, capsys):
    np.save(tmp_path / "data.npy", rows(8))
    status, _ = sketch_onnx(source, "--data", str(tmp_path / "data.npy"))
    assert status == 2
    assert "wanted a .npz file of arrays by input name" in capsys.readouterr().err
