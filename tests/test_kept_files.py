"""What earlier versions wrote is still read, and gives what it gave: `fixtures/make_fixtures.py`."""

import shutil
from pathlib import Path

import pytest
import torch
from fixtures.make_fixtures import outputs_of
from fixtures.saved_models import OPTIONS, SAVED
from safetensors.torch import load_file

import panther_compile as pc
from panther_compile.errors import ResumeError

FORMATS = sorted((Path(__file__).parent / "fixtures").glob("format-*"))
SKETCHES = [(place.name, name) for place in FORMATS for name in sorted(SAVED)]


def numbered(tensors, word):
    return [tensors[name] for name in sorted(tensors) if name.startswith(word)]


def folder_of(version):
    return next(place for place in FORMATS if place.name == version)


@pytest.mark.parametrize(("version", "name"), SKETCHES)
def test_sketches(version, name):
    folder = folder_of(version) / "sketches" / name
    kept = load_file(folder / "expected.safetensors")
    torch.manual_seed(7)  # another model than that which was sketched
    skeleton = SAVED[name].build().eval()
    small = pc.load_sketched(skeleton, folder)
    found, wanted = outputs_of(small, numbered(kept, "input")), numbered(kept, "output")
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert any(
        not torch.allclose(one, other, atol=1e-2)
        for one, other in zip(outputs_of(skeleton, numbered(kept, "input")), wanted, strict=True)
    )
    report = pc.sketch_report(small)
    assert 0 < report.stored_numbers < report.dense_numbers


def test_every_kind_of_sketch_is_kept():
    """A folder that is missed by its name would pass as no test at all."""
    for place in FORMATS:
        assert {one.name for one in (place / "sketches").iterdir()} == set(SAVED)
    assert FORMATS


@pytest.mark.parametrize("version", [place.name for place in FORMATS])
def test_work_that_was_kept_is_taken_up(version, tmp_path):
    """In the same format, with the torch that it was done with; another is refused by name."""
    folder = shutil.copytree(folder_of(version) / "resume", tmp_path / "resume")
    kept = load_file(folder_of(version) / "resume.safetensors")
    model = SAVED["linear"].build().eval()
    model.load_state_dict(
        {name.removeprefix("model."): one for name, one in kept.items() if name.startswith("model.")}
    )
    data, options = numbered(kept, "data"), {"ratio": 0.5, **OPTIONS, "resume": folder}
    if version == "format-1":  # layers were narrowed without a note of what each keeps
        with pytest.raises(ResumeError, match=r"format: panther_compile[.]calibration 3 there"):
            pc.sketchify(model, data=data, **options)
        return
    if torch.__version__ != "2.13.0+cpu":
        with pytest.raises(ResumeError, match=r"torch: 2.13.0\+cpu there"):
            pc.sketchify(model, data=data, **options)
        return
    before = {file: file.stat().st_ino for file in folder.rglob("*")}
    small = pc.sketchify(model, data=data, **options)
    assert {file: file.stat().st_ino for file in folder.rglob("*")} == before, "something was done again"
    (found,) = outputs_of(small, numbered(kept, "input"))
    torch.testing.assert_close(found, kept["output0"], rtol=1e-4, atol=1e-5)
