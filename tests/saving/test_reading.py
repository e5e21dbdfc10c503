"""A checkpoint that is not whole, or of another model, is refused."""

import ast
import copy
import inspect
import json

import pytest
import torch
from saving.model import assert_same, skeleton, sketched
from torch import nn

import panther_compile as pc
from panther_compile import checkpoint
from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVersionError,
)
from panther_compile.storage import document_sha256

# ------------------------------------------------------------------------------------------ reading


def refused(path, error, match=None):
    with pytest.raises(error, match=match) as caught:
        pc.load_sketched(skeleton(), path)
    return str(caught.value)


def test_nothing_there(tmp_path):
    refused(tmp_path, CheckpointError, "holds no readable checkpoint")
    refused(tmp_path / "none", CheckpointError, "holds no readable checkpoint")


@pytest.mark.parametrize("which", [1, 2], ids=["sketch.json", "weights"])
def test_truncated_anywhere(copied, which):
    path, file = copied[0], copied[which]
    whole = file.read_bytes()
    for share in (0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        file.write_bytes(whole[: int(share * len(whole))])
        assert file.name in refused(path, CheckpointCorruptError)
    file.write_bytes(whole[:-1])
    refused(path, CheckpointCorruptError)
    file.write_bytes(whole)
    pc.load_sketched(skeleton(), path)


def test_a_bit_flipped_in_the_weights(copied):
    path, _, weights = copied
    whole = weights.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << (place % 8)
        weights.write_bytes(bytes(spoiled))
        refused(path, CheckpointCorruptError, "truncated or changed")


def test_a_bit_flipped_in_the_plan(copied):
    """Always refused; where only the digits of the version change, as one that is newer."""
    path, plan, _ = copied
    whole = plan.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 100)):
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << (place % 8)
        plan.write_bytes(bytes(spoiled))
        try:
            same = json.loads(bytes(spoiled)) == json.loads(whole)  # white space is not content
        except ValueError:
            same = False
        if not same:
            refused(path, (CheckpointCorruptError, CheckpointVersionError))


def test_bytes_added(copied):
    path, plan, weights = copied
    weights.write_bytes(weights.read_bytes() + b"\0")
    refused(path, CheckpointCorruptError)
    plan.write_text(plan.read_text() + "}")
    refused(path, CheckpointCorruptError, "not JSON")


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '"text"', "3", '{"format": "other"}', "\xff"])
def test_a_plan_that_is_something_else(copied, text):
    path, plan, _ = copied
    plan.write_bytes(text.encode("latin-1"))
    refused(path, CheckpointCorruptError)


def test_weights_missing(copied):
    path, _, weights = copied
    weights.unlink()
    refused(path, CheckpointCorruptError, "is missing, sketch.json names it")


def test_weights_of_another_checkpoint(copied, tmp_path_factory):
    path, _, weights = copied
    other = tmp_path_factory.mktemp("other")
    pc.save_sketched(sketched(), other)
    (theirs,) = other.glob("weights-*")
    weights.write_bytes(theirs.read_bytes())
    refused(path, CheckpointCorruptError, "truncated or changed")


def edit(plan, change, *, sign=False):
    document = json.loads(plan.read_text())
    change(document)
    if sign:
        document["sha256"] = document_sha256(document)
    plan.write_text(json.dumps(document))


EDITS = {
    "rank": lambda d: d["layers"][0]["spec"].update(rank=1),
    "error": lambda d: d["record"]["fitted"]["fc1"].update(error=0.0),
    "frozen": lambda d: d["frozen"].clear(),
    "weights": lambda d: d["weights"].update(file="../elsewhere"),
    "added": lambda d: d.update(extra=1),
    "dropped": lambda d: d.pop("aliases"),
    "checksum": lambda d: d.update(sha256="0" * 64),
    "no checksum": lambda d: d.pop("sha256"),
}


@pytest.mark.parametrize("name", list(EDITS))
def test_an_edited_plan(copied, name):
    path, plan, _ = copied
    edit(plan, EDITS[name])
    refused(path, CheckpointCorruptError, "changed after it was written")


@pytest.mark.parametrize("version", [2, 1000, None, "2", 1.5])
def test_a_newer_version(copied, version):
    path, plan, _ = copied
    edit(plan, lambda d: d.update(version=version), sign=True)
    refused(path, CheckpointVersionError, "upgrade it")


def test_a_layer_type_of_a_newer_version(copied):
    path, plan, _ = copied
    edit(plan, lambda d: d["layers"][0].update(type="SketchedHologram"), sign=True)
    refused(path, CheckpointVersionError, "SketchedHologram.*does not know: upgrade it")


def test_a_name_that_points_out_of_the_directory(copied, tmp_path_factory):
    path, plan, weights = copied
    elsewhere = tmp_path_factory.mktemp("elsewhere") / weights.name
    weights.rename(elsewhere)
    edit(plan, lambda d: d["weights"].update(file=str(elsewhere)), sign=True)
    refused(path, CheckpointCorruptError, "names its weights .*elsewhere")


# --------------------------------------------------------------------------------------- mismatches


def mismatch(empty, path):
    with pytest.raises(CheckpointMismatchError, match="is a sketch of a Model") as caught:
        pc.load_sketched(empty, path)
    return str(caught.value)


def test_another_model(saved):
    assert "has no layer 'embed'" in mismatch(nn.Sequential(nn.Linear(4, 4)), saved[1])


def test_another_size(saved):
    assert "another size" in mismatch(skeleton(width=32), saved[1])
    assert "another size" in mismatch(skeleton(classes=21), saved[1])


def test_another_size_of_a_sketched_layer_alone(tmp_path):
    model = pc.sketchify(
        nn.Sequential(nn.Linear(40, 30)), 0.5, min_params=0, progress=False, allow_slower=True
    )
    pc.save_sketched(model, tmp_path)
    for other in (nn.Linear(40, 31), nn.Linear(30, 40), nn.Linear(40, 30, bias=False), nn.LayerNorm(40)):
        with pytest.raises(CheckpointMismatchError, match="of another size: '0' replaces a layer of 1,230"):
            pc.load_sketched(nn.Sequential(other), tmp_path)


def test_another_size_of_a_layer_that_stays(saved):
    empty = skeleton()
    empty.scale = torch.rand(17)
    assert "scale has shape (16,), the skeleton wants (17,)" in mismatch(empty, saved[1])


def test_more_or_less_than_was_saved(saved):
    more, less = skeleton(), skeleton()
    more.extra = nn.Linear(2, 2)
    assert "2 tensors missing (extra.bias, extra.weight), 0 unexpected" in mismatch(more, saved[1])
    del less.shift
    assert "0 tensors missing (), 1 unexpected (shift)" in mismatch(less, saved[1])


def test_a_skeleton_that_is_not_tied_is_tied_by_loading(saved):
    empty = skeleton()
    empty.head.weight = nn.Parameter(empty.head.weight.detach().clone())
    loaded = pc.load_sketched(empty, saved[1])
    assert loaded.head.up.weight is loaded.embed.codes.weight


def test_a_sketched_skeleton_is_filled_too(saved):
    assert_same(pc.load_sketched(copy.deepcopy(saved[0]), saved[1]), saved[0])


def test_nothing_is_ever_unpickled():
    tree = ast.parse(inspect.getsource(checkpoint))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {name for name in imported if "pickle" in name or "shelve" in name or "marshal" in name}
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert calls.isdisjoint({"torch.load", "torch.save", "eval", "exec", "load", "loads", "__import__"})
