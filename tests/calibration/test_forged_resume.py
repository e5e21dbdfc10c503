"""Whatever the JSON of a folder of `resume=` says: it is taken up, or refused by a ResumeError."""

import json
import shutil

import pytest
import torch
from forging import drop, put
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from thinned import thinned
from torch import nn

import panther_compile as pc
from panther_compile.errors import ResumeError

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False, "include": "*", "ratio": 0.4}
WRONG = [None, 3, 1.5, "text", [], [3], {"a": 3}]


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24)).eval()


def data():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(32, 24, generator=generator, dtype=torch.float32) for _ in range(5)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "work"
    pc.sketchify(model(), data=data(), resume=folder, **OPTIONS)
    return folder


def nested(depth):
    return "[" * depth + "]" * depth


STUDY = ("costs", "power", "reached", "shared", "links", "ridge")
LAYER = ("type", "spec", "fitted")
IN_STUDY = {
    **{f"{key} = {value}": put(key, value=value) for key in STUDY for value in WRONG},
    **{f"no {key}": drop(key) for key in STUDY},
    "a field more": put("surprise", value=1),
    "a coupling of nothing": put(
        "links",
        value=[
            [{"writers": ["0"], "reader": "9", "heads": 1, "shared": 1, "width": 3, "padded": False}, 1.0]
        ],
    ),
}
IN_LAYER = {
    **{f"{key} = {value}": put(key, value=value) for key in LAYER for value in WRONG},
    **{f"no {key}": drop(key) for key in LAYER},
    "a field more": put("surprise", value=1),
    "another type": put("type", value="SketchedConv2d"),
    "rank 0": put("spec", "rank", value=0),
    "rank 10**12": put("spec", "rank", value=10**12),
    "rank of text": put("spec", "rank", value="3"),
    "another rank": put("spec", "rank", value=1),
    "features 10**30": put("spec", "in_features", value=10**30),
    "an option more": put("spec", "surprise", value=3),
    "ranks of text": put("fitted", "ranks", value="3"),
}
# Of these the study is another one that could be; what it is not used for is not looked at.
FITTING = {
    "costs = {'a': 3}",
    "power = {'a': 3}",
    "reached = {'a': 3}",
    "shared = []",
    "links = []",
    "ridge = 3",
    "ridge = 1.5",
}


def forge(file, edit):
    with safe_open(file, framework="pt") as held:
        record = json.loads(next(iter(held.metadata().values())))
        name = next(iter(held.metadata()))
    edit(record)
    save_file(load_file(file), file, {name: json.dumps(record)})


def take_up(folder):
    return pc.sketchify(model(), data=data(), resume=folder, **OPTIONS)


@pytest.mark.parametrize("name", [name for name in IN_STUDY if name not in FITTING])
def test_forged_studies(kept, tmp_path, name):
    folder = shutil.copytree(kept, tmp_path / "work")
    forge(folder / "study.safetensors", IN_STUDY[name])
    with pytest.raises(ResumeError, match=r"study\.safetensors cannot be read, it was"):
        take_up(folder)


@pytest.mark.parametrize("name", thinned(IN_LAYER, 4))
def test_forged_layers(kept, tmp_path, name):
    folder = shutil.copytree(kept, tmp_path / "work")
    for file in folder.glob("layers-*/*.safetensors"):
        forge(file, IN_LAYER[name])
    with pytest.raises(ResumeError, match=r"safetensors cannot be read, it was"):
        take_up(folder)


@pytest.mark.parametrize("file", ["calibration.json", "tried-*.json"])
@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "null", '"text"', '{"distances": "text"}', '{"distances": []}', "{}", nested(100_000)],
)
def test_forged_json(kept, tmp_path, file, text):
    folder = shutil.copytree(kept, tmp_path / "work")
    for place in folder.glob(file):
        place.write_text(text)
    with pytest.raises(ResumeError):
        take_up(folder)


@pytest.mark.parametrize("given", [3, b"folder"])
def test_folders_that_are_none(given):
    with pytest.raises(pc.errors.ConfigTypeError, match="wanted a path"):
        take_up(given)


def test_a_folder_with_a_nul():
    with pytest.raises(pc.errors.ConfigError, match="holds a NUL"):
        take_up("a\0b")
