"""A checkpoint is written whole, or what was there stays."""

import json
import os

import pytest
import safetensors.torch
import torch
from saving.model import all_tensors, assert_same, names_in, skeleton, sketched
from torch import nn
from torch.nn.utils import parametrize, prune

import panther_compile as pc
from panther_compile import checkpoint
from panther_compile.errors import (
    CheckpointError,
)


def test_directory_holds_two_readable_files(saved):
    _, path = saved
    document = json.loads((path / "sketch.json").read_text())
    assert names_in(path) == ["sketch.json", document["weights"]["file"]]
    with safetensors.safe_open(path / document["weights"]["file"], "pt") as file:
        assert set(file.keys()) | set(document["aliases"]) == set(all_tensors(saved[0]))
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert len(modes) == 1  # whoever may read the one may read the other


def test_tied_weights_are_written_once(saved):
    document = json.loads((saved[1] / "sketch.json").read_text())
    assert document["aliases"] == {
        "head.down.weight": "embed.basis.weight",
        "head.up.weight": "embed.codes.weight",
    }


def test_saving_again_replaces(tmp_path):
    first, second = sketched(seed=1), sketched(seed=2)
    pc.save_sketched(first, tmp_path)
    (tmp_path / "weights-of-mine.safetensors").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    pc.save_sketched(second, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), second)
    kept = [name for name in names_in(tmp_path) if name not in ("notes.txt", "weights-of-mine.safetensors")]
    assert len(kept) == 2
    assert (tmp_path / "weights-of-mine.safetensors").read_text() == "mine"


def test_saving_the_same_model_again_changes_nothing(copied, saved):
    path = copied[0]
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    pc.save_sketched(saved[0], path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_makes_missing_directories(saved, tmp_path):
    pc.save_sketched(saved[0], tmp_path / "a" / "b")
    assert_same(pc.load_sketched(skeleton(), tmp_path / "a" / "b"), saved[0])
    pc.save_sketched(saved[0], str(tmp_path / "c"))
    assert_same(pc.load_sketched(skeleton(), str(tmp_path / "c")), saved[0])


def test_a_place_that_cannot_be_written(saved, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    for place in (file, file / "below"):
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            pc.save_sketched(saved[0], place)
    assert file.read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(saved, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="cannot write"):
            pc.save_sketched(saved[0], tmp_path)
    finally:
        tmp_path.chmod(0o700)


class Broken:
    """Does part of the work, then fails as a full disk or a Ctrl-C does."""

    def __init__(self, function, error, after=0):
        self.function, self.error, self.after = function, error, after

    def __call__(self, *args, **kwargs):
        self.after -= 1
        if self.after < 0:
            raise self.error
        return self.function(*args, **kwargs)


def half_written(tensors, path):
    """What a full disk leaves of safetensors' own file."""
    data = safetensors.torch.save(tensors)
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_checkpoint(monkeypatch, copied, saved):
    path, before = copied[0], names_in(copied[0])
    monkeypatch.setattr(checkpoint, "save_file", half_written)
    with pytest.raises(CheckpointError, match="No space left on device"):
        pc.save_sketched(sketched(), path)
    assert names_in(path) == before
    assert_same(pc.load_sketched(skeleton(), path), saved[0])


ERRORS = [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("where", "after"), [("save_file", 0), ("file_sha256", 0), ("flush", 0), ("replace", 0), ("replace", 1)]
)
def test_failing_anywhere_leaves_the_old_checkpoint(monkeypatch, copied, saved, where, after, error):
    path, before = copied[0], names_in(copied[0])
    owner = os if where == "replace" else checkpoint
    other = sketched()
    with monkeypatch.context() as patched:
        patched.setattr(owner, where, Broken(getattr(owner, where), error, after))
        with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
            pc.save_sketched(other, path)
    assert names_in(path) == before
    assert_same(pc.load_sketched(skeleton(), path), saved[0])
    pc.save_sketched(other, path)
    assert_same(pc.load_sketched(skeleton(), path), other)


def test_failing_on_the_same_weights_keeps_them(monkeypatch, copied, saved):
    """The new weights file is then the old one too."""
    path = copied[0]
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", Broken(os.replace, KeyboardInterrupt(), 1))
        with pytest.raises(KeyboardInterrupt):
            pc.save_sketched(saved[0], path)
    assert_same(pc.load_sketched(skeleton(), path), saved[0])


def test_failing_at_the_first_save_leaves_nothing(monkeypatch, saved, tmp_path):
    monkeypatch.setattr(os, "replace", Broken(os.replace, KeyboardInterrupt(), 1))
    with pytest.raises(KeyboardInterrupt):
        pc.save_sketched(saved[0], tmp_path)
    assert names_in(tmp_path) == []


class Half(nn.Module):
    def forward(self, weight):
        return 0.5 * weight


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), prune.remove),
        (
            lambda layer: parametrize.register_parametrization(layer, "weight", Half()),
            parametrize.remove_parametrizations,
        ),
    ],
    ids=["pruned", "parametrized"],
)
def test_factors_that_make_their_weight_are_not_saved(change, undo, tmp_path):
    """They were, and no skeleton fitted what was there."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    small = pc.sketchify(layers, 0.5, include="*", min_params=0, allow_slower=True, progress=False)
    change(small[0].down)
    with pytest.raises(CheckpointError, match=r"^0.down makes its weight of other tensors: call save"):
        pc.save_sketched(small, tmp_path / "small")
    assert not (tmp_path / "small").exists()
    undo(small[0].down, "weight")
    pc.save_sketched(small, tmp_path / "small")
    x = torch.randn(4, 32)
    assert torch.equal(pc.load_sketched(layers, tmp_path / "small")(x), small(x))
