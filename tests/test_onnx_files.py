"""ONNX files: what is written is whole, external data stays in its folder, bad files are refused."""

import json
import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import (
    OPTIONS,
    low_rank,
    make,
    mlp,
    node,
    random,
    run,
)

import panther_compile as pc
from panther_compile.cli import main
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    OnnxExternalDataError,
    OnnxFileError,
    OnnxInvalidError,
    SelectorError,
    WeightError,
)
from panther_compile.onnx import files as onnx_file


def beside(path, location="weights.bin"):
    """The model again, with its weights in another file."""
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    """In the cache of Hugging Face's hub it is a file called by its checksum."""
    source, kept, link = mlp(tmp_path / "in.onnx"), tmp_path / "kept", tmp_path / "out.onnx"
    kept.write_bytes(source.read_bytes())
    link.symlink_to(kept)
    pc.sketch_onnx(link, link, 0.5, **OPTIONS)
    assert not link.is_symlink()
    assert kept.read_bytes() == source.read_bytes()


def test_external_data_stays_external_and_in_the_folder(tmp_path):
    source = mlp(tmp_path / "in.onnx")
    (tmp_path / "there").mkdir()
    x = random(3, 48)
    wanted = run(source, x)[0]
    beside(source)
    target = tmp_path / "there" / "out.onnx"
    report = pc.sketch_onnx(source, target, **OPTIONS)
    files = sorted(file.name for file in target.parent.iterdir())
    assert len(files) == 2
    assert files[1].startswith("out.onnx-")
    assert report.sketched_bytes == sum((target.parent / name).stat().st_size for name in files)
    np.testing.assert_allclose(run(target, x)[0], wanted, atol=1e-5)


def test_weights_that_another_file_reads_stay(tmp_path):
    source, target, copy = beside(mlp(tmp_path / "in.onnx")), tmp_path / "m.onnx", tmp_path / "copy.onnx"
    pc.sketch_onnx(source, target, **OPTIONS)
    x = random(3, 48)
    wanted = run(target, x)[0]
    copy.write_bytes(target.read_bytes())  # reads the same weights
    pc.sketch_onnx(source, target, 0.4, **OPTIONS)
    np.testing.assert_array_equal(run(copy, x)[0], wanted)
    copy.unlink()
    pc.sketch_onnx(source, target, 0.3, **OPTIONS)
    assert len(list(tmp_path.glob("m.onnx-*.data"))) == 1


@pytest.mark.parametrize(
    ("name", "message"), [("", "Is a directory"), ("none/out.onnx", "No such file or directory")]
)
def test_what_cannot_be_written_is_told_before_any_work(tmp_path, name, message):
    source = mlp(tmp_path / "in.onnx")

    def data():
        raise AssertionError
        yield

    for write in (
        lambda: pc.sketch_onnx(source, tmp_path / name, data=data(), **OPTIONS),
        lambda: pc.export_onnx(None, (), tmp_path / name),
    ):
        with pytest.raises(OnnxFileError, match=message):
            write()


def test_the_weights_of_the_source_are_no_target(tmp_path):
    source, x = beside(mlp(tmp_path / "in.onnx")), random(3, 48)
    wanted = run(source, x)[0]
    with pytest.raises(ConfigError, match=r"weights.bin' holds weights of the source"):
        pc.sketch_onnx(source, tmp_path / "weights.bin", **OPTIONS)
    np.testing.assert_array_equal(run(source, x)[0], wanted)


def test_a_file_can_be_sketched_in_place(tmp_path):
    source, x = beside(mlp(tmp_path / "m.onnx")), random(3, 48)
    wanted = run(source, x)[0]
    pc.sketch_onnx(source, source, 0.5, **(OPTIONS | {"include": "coef0"}))
    pc.sketch_onnx(source, source, 0.5, **(OPTIONS | {"include": "coef1"}))
    np.testing.assert_allclose(run(source, x)[0], wanted, atol=1e-5)
    assert len(list(tmp_path.glob("m.onnx-*.data"))) == 1


def relocate(path, location):
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("how", ["parent", "absolute", "link", "missing", "short"])
def test_external_data_that_cannot_be_trusted_is_refused(how, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    source = beside(mlp(folder / "in.onnx"))
    data = folder / "weights.bin"
    wanted = "outside the model's folder"
    if how in ("parent", "absolute", "link"):
        outside = tmp_path / "weights.bin"
        data.rename(outside)
        if how == "link":
            data.symlink_to(outside)
        else:
            relocate(source, "../weights.bin" if how == "parent" else str(outside))
    elif how == "missing":
        data.unlink()
        wanted = "which is missing"
    else:
        os.truncate(data, 100)
        wanted = "cut short: 100 bytes"
    with pytest.raises(OnnxExternalDataError, match=wanted):
        pc.sketch_onnx(source, folder / "out.onnx", **OPTIONS)
    assert not (folder / "out.onnx").exists()


def broken(path, change):
    model = onnx.load(mlp(path))
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def swap(model):
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))


def close_circle(model):
    model.graph.node[0].input[0] = model.graph.node[-2].output[0]


def dangle(model):
    model.graph.node[3].input[1] = "nobody"


def set_opset(version):
    def change(model):
        model.opset_import[0].version = version

    return change


def forget_shape(model):
    model.graph.output[0].type.tensor_type.ClearField("shape")


def add_training(model):
    model.training_info.add()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: (dangle(model), swap(model)), "not a sound ONNX model: .*nobody"),
        (close_circle, "not a sound ONNX model"),
        (dangle, "not a sound ONNX model: .*nobody"),
        (set_opset(10), "opset 10, wanted 11 to"),
        (set_opset(1000), "opset 1000, wanted 11 to"),
        (lambda model: model.graph.ClearField("node"), "holds no graph"),
        (add_training, "training_info"),
        (forget_shape, r"in.onnx: 'y' has no shape in the file, wanted one.*infer_shapes"),
    ],
)
def test_unsound_models_are_refused(change, message, tmp_path):
    source = broken(tmp_path / "in.onnx", change)
    with pytest.raises(OnnxInvalidError, match=message):
        pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["in.onnx"]


@pytest.mark.parametrize("apart", [False, True])
def test_nodes_ahead_of_what_they_read(apart, tmp_path):
    """Converters to float16 put the casts of inputs last; ONNX Runtime reads it all the same."""
    source = mlp(tmp_path / "in.onnx")
    plain = pc.sketch_onnx(source, tmp_path / "plain.onnx", **OPTIONS)
    if apart:
        beside(source)
    model = onnx.load(source, load_external_data=False)
    swap(model)
    source.write_bytes(model.SerializeToString())
    report = pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)
    assert report.plan.stored_numbers == plain.plan.stored_numbers
    x = random(3, 48)
    np.testing.assert_array_equal(run(tmp_path / "out.onnx", x)[0], run(tmp_path / "plain.onnx", x)[0])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_files_are_refused(share, tmp_path):
    source = mlp(tmp_path / "in.onnx")
    source.write_bytes(source.read_bytes()[: int(share * source.stat().st_size)])
    with pytest.raises(OnnxInvalidError, match="truncated"):
        pc.sketch_onnx(source, tmp_path / "out.onnx", **OPTIONS)


def test_bad_requests_are_told(tmp_path):
    source, target = mlp(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    with pytest.raises(OnnxFileError, match="cannot read"):
        pc.sketch_onnx(tmp_path / "none.onnx", target)
    with pytest.raises(OnnxFileError, match="cannot write"):
        pc.sketch_onnx(source, tmp_path / "none" / "out.onnx", **OPTIONS)
    with pytest.raises(SelectorError, match=r"include: 'encoder\.\*' matches none of the 3 weights"):
        pc.sketch_onnx(source, target, include="encoder.*")
    with pytest.raises(ConfigTypeError, match=r"unknown option inplace \(of sketchify alone\)"):
        pc.sketch_onnx(source, target, inplace=True)
    weight = low_rank(48, 64)
    weight[3, 3] = np.nan
    make(source, [node("MatMul", ["x", "w"], ["y"])], {"w": weight})
    with pytest.raises(WeightError, match="w holds 1 NaN or Inf"):
        pc.sketch_onnx(source, target)
    assert [file.name for file in tmp_path.iterdir()] == ["in.onnx"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    source, target = mlp(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    target.write_text("old")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(onnx_file.os, "replace", fail)
    with pytest.raises(OnnxFileError, match="no space left"):
        pc.sketch_onnx(source, target, **OPTIONS)
    assert target.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_documents_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs/onnx.md").read_text(encoding="utf-8")
    text = text.replace("2048", "512").replace("512", "128")  # the lines are the same
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S)), {})
    assert "1 of 2 layers to be sketched" in capsys.readouterr().out


def test_command_line(tmp_path, capsys):
    source, target = mlp(tmp_path / "in.onnx", (64, 512, 512, 3)), tmp_path / "out.onnx"
    arguments = ["sketch-onnx", str(source), str(target), "--ratio", "0.4", "--min-params", "100"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["achieved_ratio"] <= 0.4
    assert document["sketched_bytes"] == target.stat().st_size
    assert main(arguments) == 0
    assert "saved to" in capsys.readouterr().out
    assert main(["sketch-onnx", str(tmp_path / "none.onnx"), str(target)]) == 2
    assert "OnnxFileError: cannot read" in capsys.readouterr().err
