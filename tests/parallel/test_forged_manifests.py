"""Whatever a signed manifest of a training says: it is read, or refused by an error of our own."""

import copy
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from forging import drop, put

from panther_compile import read_state_dict
from panther_compile.errors import CheckpointError
from panther_compile.parallel.checkpoint_folder import list_checkpoints
from panther_compile.storage import document_sha256

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "format-1" / "training.zip"
FIELDS = ("step", "extra", "mesh", "names", "files", "optimizer")
WRONG = [None, 3, 1.5, True, "text", [], [3], {"a": 3}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that an earlier version wrote, and its manifest."""
    place = tmp_path_factory.mktemp("training")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(place)
    folder = list_checkpoints(place / "training" / "dp2")[0]
    return folder, json.loads((folder / "manifest.json").read_text())


REFUSED = {
    **{f"no {key}": drop(key) for key in FIELDS},
    **{f"{key} = {value}": put(key, value=value) for key in FIELDS for value in WRONG},
    "a field more": put("surprise", value=1),
    "version of text": put("version", value="1"),
    "version True": put("version", value=True),
    "step -1": put("step", value=-1),
    "a file elsewhere": put("files", "../manifest.json", value={"bytes": 1, "sha256": "a"}),
    "a file with a NUL": put("files", "a\0b", value={"bytes": 1, "sha256": "a"}),
    "a file of giant size": put("files", ".metadata", "bytes", value=10**400),
    "a file of no size": put("files", ".metadata", value={"sha256": "a"}),
    "a checksum of 3": put("files", ".metadata", "sha256", value=3),
    "a name of nothing": put("names", "surprise", value="nothing"),
    "a name of 3": put("names", "surprise", value=3),
    "a group that is none": put("optimizer", "group_of", "surprise", value=10**9),
    "a group of -1": put("optimizer", "group_of", "surprise", value=-1),
    "groups of numbers": put("optimizer", "groups", value=[3]),
    "no type of optimizer": lambda document: document["optimizer"].pop("type"),
}
ACCEPTED = {"step = 3", "extra = {'a': 3}", "mesh = {'a': 3}"}


def forge(saved, folder, edit):
    place = shutil.copytree(saved[0], folder / saved[0].name)
    document = copy.deepcopy(saved[1])
    edit(document)
    document["sha256"] = document_sha256(document)
    (place / "manifest.json").write_text(json.dumps(document))
    return place


@pytest.mark.parametrize("name", list(REFUSED))
def test_forged(saved, tmp_path, name):
    place = forge(saved, tmp_path, REFUSED[name])
    if name in ACCEPTED:
        assert read_state_dict(place).keys() == read_state_dict(saved[0]).keys()
        return
    with pytest.raises(CheckpointError) as caught:
        read_state_dict(place)
    assert str(place) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("depth", [400, 100_000])
@pytest.mark.parametrize("key", ["extra", "other"])
def test_deep_nesting(saved, tmp_path, key, depth):
    place = forge(saved, tmp_path, put(key, value="HERE"))
    file = place / "manifest.json"
    file.write_text(file.read_text().replace('"HERE"', "[" * depth + "]" * depth))
    with pytest.raises(CheckpointError):
        read_state_dict(place)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '{"format": 3}', "\0", '{"format": "panther_compile.training"}']
)
def test_what_is_no_manifest(saved, tmp_path, text):
    place = forge(saved, tmp_path, lambda document: None)
    (place / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_state_dict(place)
