"""Work that was cut short is taken up where it ended, and comes to the very same result."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate, choose, few_data, resume, unseen
from panther_compile.calibration.held_out import HeldOut
from panther_compile.calibration.layer_fit import LayerFit
from panther_compile.errors import CheckpointError, ConfigError, ConfigTypeError, DataError, ResumeError

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False, "include": "*", "narrow": False}
NARROW = {**OPTIONS, "narrow": True}


def mlp():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 24, bias=False), nn.ReLU(), nn.Linear(24, 40)
    )
    model[0].requires_grad_(False)
    model[2].eval()
    return model


def convolutions():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, groups=2),
    )
    return model.to(memory_format=torch.channels_last)


def encoder():
    torch.manual_seed(1)
    return (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).bfloat16().float()
    )


def batches(*shape, count=6):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


CASES = {
    "mlp": (mlp, batches(32, 40)),
    "convolutions": (convolutions, batches(4, 8, 7, 7)),
    "encoder": (encoder, batches(4, 12, 32)),
    "half": (lambda: mlp().bfloat16(), [x.bfloat16() for x in batches(32, 40)]),
}


class CutError(Exception):
    """Stands for whatever ends a run."""


def count_fits(monkeypatch):
    """The names of the layers that are fitted from now on."""
    fit, done = LayerFit._fit, []

    def counted(self, name, arrivals):
        done.append(name)
        return fit(self, name, arrivals)

    monkeypatch.setattr(LayerFit, "_fit", counted)
    return done


def many_data(monkeypatch):
    """Data counts as many, so that layers are fitted once."""
    for module in (few_data, unseen):
        monkeypatch.setattr(module, "has_few", lambda *args: False)


def assert_equal(one, other):
    found, wanted = one.state_dict(), other.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert found[name].stride() == value.stride(), name
    assert pc.sketch_report(one) == pc.sketch_report(other)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.requires_grad == b.requires_grad
    for a, b in zip(one.modules(), other.modules(), strict=True):
        assert a.training == b.training


@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("convolutions", "half", "encoder"))],
)
def test_every_cut_comes_to_the_same_result(name, tmp_path, monkeypatch):
    many_data(monkeypatch)  # no fit is made to be judged and left
    build, data = CASES[name]
    model = build()
    whole = pc.sketchify(model, 0.4, data=data, **NARROW)
    layers = len(pc.sketch_report(whole).sketched)
    for fits in (0, 1, layers - 1):
        folder = tmp_path / str(fits)
        with monkeypatch.context() as patch:
            saved = resume.CalibrationFolder.keep_layer
            kept = []

            def keep_or_raise(self, plan, unit, *rest, kept=kept, fits=fits, saved=saved):
                if len(kept) == fits:
                    raise CutError
                kept.append(unit)
                saved(self, plan, unit, *rest)

            patch.setattr(resume.CalibrationFolder, "keep_layer", keep_or_raise)
            with pytest.raises(CutError):
                pc.sketchify(model, 0.4, data=data, resume=folder, **NARROW)
        with monkeypatch.context() as patch:
            patch.setattr(calibrate, "study_layers", None)  # must not be called again
            done = count_fits(patch)
            again = pc.sketchify(build(), 0.4, data=copy.deepcopy(data), resume=folder, **NARROW)
        assert len(done) == layers - fits
        assert not set(done) & set(kept)
        assert_equal(again, whole)
    with monkeypatch.context() as patch:
        done = count_fits(patch)
        assert_equal(pc.sketchify(model, 0.4, data=data, resume=folder, **NARROW), whole)
    assert done == []


@pytest.mark.parametrize("name", ["mlp", pytest.param("encoder", marks=pytest.mark.slow)])
def test_a_cut_right_after_the_study(name, tmp_path, monkeypatch):
    build, data = CASES[name]

    def cut(*args):
        raise CutError

    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "choose_plan", cut)
        with pytest.raises(CutError):
            pc.sketchify(build(), 0.4, data=data, resume=tmp_path, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "study_layers", None)
        again = pc.sketchify(build(), 0.4, data=data, resume=tmp_path, **OPTIONS)
    whole = pc.sketchify(build(), 0.4, data=data, **OPTIONS)
    assert pc.sketch_report(whole).tried
    assert_equal(again, whole)


def test_an_evaluate_that_raises_half_way(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "NEAR", 1.0)  # no layer is fitted for a trial
    many_data(monkeypatch)
    model, data = mlp(), CASES["mlp"][1]
    x = torch.cat(data)
    wanted = model(x).detach()
    scores = []

    def evaluate(one):
        scores.append(-float((one(x) - wanted).norm() / wanted.norm()))
        if len(scores) == 3:
            raise CutError
        return scores[-1]

    given = {"data": data, "max_drop": 0.2, "evaluate": evaluate, **OPTIONS}
    with pytest.raises(pc.PantherError, match=r"raised on the model of ratio 0\.\d+ \(CutError"):
        pc.sketchify(model, resume=tmp_path, **given)
    with monkeypatch.context() as patch:
        done = count_fits(patch)
        small = pc.sketchify(model, resume=tmp_path, **given)
    points = pc.sketch_report(small).curve.points
    assert len(points) > 2
    assert len(done) == 3 * (len(points) - 2)  # the first two ratios were fitted before
    assert_equal(small, pc.sketchify(model, **given))


def test_ratios_share_the_study(tmp_path, monkeypatch):
    model, data = mlp(), CASES["mlp"][1]
    pc.sketchify(model, 0.4, data=data, resume=tmp_path, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "study_layers", None)
        small = pc.sketchify(model, 0.6, data=data, resume=tmp_path, **OPTIONS)
    assert_equal(small, pc.sketchify(model, 0.6, data=data, **OPTIONS))


def test_a_loader_that_raises_half_way_gives_what_it_read(tmp_path):
    model, data = mlp(), CASES["mlp"][1]

    def broken():
        yield from data[:4]
        raise CutError("the disk is gone")

    with pytest.raises(DataError, match=r"failed after 4 batches .*the disk is gone") as raised:
        pc.sketchify(model, 0.4, data=broken(), resume=tmp_path / "new", **OPTIONS)
    assert not (tmp_path / "new").exists()
    small = pc.sketchify(model, 0.4, data=raised.value.calls, resume=tmp_path, **OPTIONS)
    assert_equal(small, pc.sketchify(model, 0.4, data=data[:4], resume=tmp_path, **OPTIONS))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of a run that is done; each test has a copy, `done`."""
    folder = tmp_path_factory.mktemp("work")
    pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=folder, **OPTIONS)
    return folder


@pytest.fixture
def done(work, tmp_path):
    return shutil.copytree(work, tmp_path, dirs_exist_ok=True)


def other_weights():
    model = mlp()
    with torch.no_grad():
        model[2].weight[5, 7] += 1e-6
    return model


def narrower():
    model = mlp()
    model[0] = nn.Linear(40, 24, bias=False)
    return model


@pytest.mark.parametrize(
    ("model", "data", "options", "what"),
    [
        (other_weights, None, {}, "model: Sequential, 5 tensors, .* there, Sequential, 5 tensors"),
        (narrower, None, {}, "model: Sequential, 5 tensors, .* there, Sequential, 4 tensors"),
        (mlp, batches(32, 40, count=5), {}, "data: 6 batches of 32x40 float32, .* there, 5 batches"),
        (mlp, batches(31, 40), {}, "data: .* there, 6 batches of 31x40 float32"),
        (mlp, [x + 1e-6 for x in batches(32, 40)], {}, "data: 6 batches"),
        (mlp, batches(32, 40)[::-1], {}, "data: 6 batches"),
        (mlp, None, {"seed": 1}, "option seed: 0 there, 1 here"),
        (mlp, None, {"output": "logits"}, "option output: auto there, logits here"),
        (mlp, None, {"exclude": "4"}, "layers: 3, .* there, 2, "),
    ],
)
def test_the_folder_of_another_run_is_refused(done, model, data, options, what):
    before = {file: file.read_bytes() for file in done.rglob("*") if file.is_file()}
    data = CASES["mlp"][1] if data is None else data
    with pytest.raises(ResumeError, match=f"holds the work of another run\n  {what}") as raised:
        pc.sketchify(model(), 0.4, data=data, resume=done, **(OPTIONS | options))
    assert str(raised.value).count("\n") == 1
    assert {file: file.read_bytes() for file in done.rglob("*") if file.is_file()} == before


def test_values_of_no_tensor_count_too():
    config = pc.SketchConfig()

    def identity(**kwargs):
        return resume.identity_of(mlp(), ["0"], config, [resume.Call((torch.ones(2),), kwargs)])["data"]

    assert identity(length=3) == identity(length=3) != identity(length=4)
    assert identity(length=3) != identity(size=3)
    assert identity(nested={"a": [torch.zeros(2)]}) != identity(nested={"a": [torch.ones(2)]})
    assert identity(cache=object()) == identity(cache=object())


@pytest.mark.slow
def test_identity_is_that_of_another_process():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import json, test_resume as t\n"
        "call = t.resume.Call((t.batches(3, 4)[0],), {})\n"
        "print(json.dumps(t.resume.identity_of(t.encoder(), ['a'], t.pc.SketchConfig(), [call])))"
    )
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(here), str(here.parent)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    call = resume.Call((batches(3, 4)[0],), {})
    assert json.loads(done.stdout) == resume.identity_of(encoder(), ["a"], pc.SketchConfig(), [call])


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ResumeError, match=r"holds files but no calibration\.json"):
        pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path, **OPTIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_path_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResumeError, match="is no folder that can be written"):
        pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path / "file", **OPTIONS)


@pytest.mark.parametrize("which", ["study.safetensors", "layers-*/*.safetensors", "calibration.json"])
@pytest.mark.parametrize("how", ["cut short", "changed"])
def test_files_that_were_damaged_are_refused(done, which, how):
    file = next(done.glob(which))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if how == "cut short" else b"\xff" * len(whole))
    with pytest.raises(ResumeError, match=rf"{file.name} cannot be read, it was (cut short or )?changed"):
        pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=done, **OPTIONS)


def test_a_write_that_fails_leaves_no_half_file(tmp_path, monkeypatch):
    replace = os.replace

    def full(source, target):
        if str(target).endswith(".safetensors"):
            raise OSError("no space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(ResumeError, match=r"cannot write .*study\.safetensors: no space left"):
            pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path, **OPTIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.json"]
    pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path, **OPTIONS)


# The latter is of an earlier version.
@pytest.mark.parametrize("name", [".saving-abc", pytest.param(".writing-abc", marks=pytest.mark.slow)])
def test_remains_of_a_killed_write_are_no_obstacle(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_bytes(b"half")
    pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path, **OPTIONS)


def test_what_the_folder_holds(tmp_path):
    small = pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path, **NARROW)
    assert (tmp_path / "calibration.json").exists()
    assert {key.split("/")[0] for key in load_file(tmp_path / "study.safetensors")} == {
        "values",
        "weights",
        "factors",
        "links",
    }
    stored = sum(t.numel() for file in tmp_path.glob("layers-*/*") for t in load_file(file).values())
    assert stored == pc.sketch_report(small).replaced_stored_numbers
    assert not list(tmp_path.rglob(".saving*"))


def test_resume_that_is_no_path():
    with pytest.raises(ConfigTypeError, match="resume=3 is a int, wanted a path"):
        pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=3, **OPTIONS)


def test_resume_without_data():
    with pytest.raises(ConfigError, match="resume= needs data="):
        pc.sketchify(mlp(), 0.4, resume="anywhere", **OPTIONS)


def test_the_error_is_one_of_checkpoints():
    assert issubclass(ResumeError, CheckpointError)


def test_what_was_fitted_to_be_compared_with_the_weights_alone_is_kept(tmp_path, monkeypatch):
    made, usual = [], HeldOut.fitted_to_all

    def fit(self, plan):
        made.append(plan.allocation)
        return usual(self, plan)

    monkeypatch.setattr(unseen, "has_few", lambda studied: False)  # no fit is made to be judged and left
    monkeypatch.setattr(HeldOut, "fitted_to_all", fit)
    first, again = (pc.sketchify(mlp(), 0.4, data=CASES["mlp"][1], resume=tmp_path, **OPTIONS) for _ in "12")
    assert len(made) == 1
    assert_equal(again, first)
