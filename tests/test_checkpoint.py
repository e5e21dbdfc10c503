"""A checkpoint is whole or refused, and what is loaded is what was saved."""

import ast
import copy
import inspect
import json
import os

import pytest
import safetensors.torch
import torch
from torch import nn

import panther_compile as pc
from panther_compile import checkpoint
from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVersionError,
    NoTargetError,
)
from panther_compile.layers.linear import SketchedLinear
from panther_compile.records import RECORD_ATTRIBUTE
from panther_compile.storage import document_sha256

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True, "include": ["fc*", "embed", "head"]}


class Model(nn.Module):
    """A tied table, buffers of both kinds, an integer buffer and a frozen layer."""

    def __init__(self, width=16, classes=20):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.fc1 = nn.Linear(width, 24)
        self.norm = nn.BatchNorm1d(24)
        self.fc2 = nn.Linear(24, width)
        self.head = nn.Linear(width, classes)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("shift", torch.rand(width), persistent=False)
        self.fc1.requires_grad_(False)

    def forward(self, ids):
        x = self.fc2(torch.tanh(self.norm(self.fc1(self.embed(ids)))))
        return self.head(x * self.scale + self.shift)


IDS = torch.tensor([1, 5, 7, 19])


def sketched(dtype=torch.float32, seed=1, **sizes):
    torch.manual_seed(seed)
    return pc.sketchify(Model(**sizes).eval().to(dtype), 0.5, **OPTIONS)


def skeleton(**sizes):
    torch.manual_seed(99)
    return Model(**sizes).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(model, directory) that no test writes into."""
    model = sketched(seed=0)
    path = tmp_path_factory.mktemp("saved")
    pc.save_sketched(model, path)
    return model, path


@pytest.fixture
def copied(saved, tmp_path):
    """A directory of its own to spoil: (path, plan file, weights file)."""
    for file in saved[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (weights,) = tmp_path.glob("weights-*")
    return tmp_path, tmp_path / "sketch.json", weights


def all_tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def assert_same(found, wanted):
    a, b = all_tensors(found), all_tensors(wanted)
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
        assert a[name].dtype == b[name].dtype
        assert a[name].requires_grad == b[name].requires_grad, name
        assert isinstance(a[name], nn.Parameter) == isinstance(b[name], nn.Parameter)


def names_in(path):
    return sorted(file.name for file in path.iterdir())


# --------------------------------------------------------------------------------------- round trip


def test_round_trip(saved):
    model, path = saved
    loaded = pc.load_sketched(skeleton(), path)
    assert type(loaded) is Model
    assert_same(loaded, model)
    assert torch.equal(loaded(IDS), model(IDS))
    assert loaded.head.up.weight is loaded.embed.codes.weight
    assert loaded.head.down.weight is loaded.embed.basis.weight
    assert getattr(loaded, RECORD_ATTRIBUTE) == getattr(model, RECORD_ATTRIBUTE)
    assert str(pc.sketch_report(loaded)) == str(pc.sketch_report(model))


def test_non_persistent_buffers_stay_non_persistent(saved):
    loaded = pc.load_sketched(skeleton(), saved[1])
    assert torch.equal(loaded.shift, saved[0].shift)
    assert "shift" not in loaded.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(tmp_path, dtype):
    model = sketched(dtype)
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), model)


def test_meta_skeleton(saved):
    with torch.device("meta"):
        empty = Model().eval()
    loaded = pc.load_sketched(empty, saved[1])
    assert_same(loaded, saved[0])
    assert torch.equal(loaded(IDS), saved[0](IDS))
    assert all(p.is_meta for p in empty.parameters())


def test_skeleton_is_untouched(saved):
    empty = skeleton()
    before = {name: t.clone() for name, t in all_tensors(empty).items()}
    kinds = [type(module) for module in empty.modules()]
    pc.load_sketched(empty, saved[1])
    assert [type(module) for module in empty.modules()] == kinds
    assert all(torch.equal(t, before[name]) for name, t in all_tensors(empty).items())


def test_loaded_model_does_not_hang_on_the_file(copied, saved):
    path, plan, weights = copied
    loaded = pc.load_sketched(skeleton(), path)
    weights.write_bytes(b"\0" * weights.stat().st_size)
    plan.unlink()
    assert_same(loaded, saved[0])


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_that_of_the_skeleton(saved, training):
    loaded = pc.load_sketched(skeleton().train(training), saved[1])
    assert all(module.training is training for module in loaded.modules())


def test_loaded_model_trains_saves_and_loads(saved, tmp_path):
    loaded = pc.load_sketched(skeleton().train(), saved[1])
    optimizer = torch.optim.SGD([p for p in loaded.parameters() if p.requires_grad], lr=0.1)
    loaded(IDS).square().mean().backward()
    optimizer.step()
    pc.save_sketched(loaded, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), loaded)


@pytest.mark.parametrize("lift", [torch.fx.symbolic_trace, lambda m: torch.export.export(m, (IDS,)).module()])
def test_graph_modules(tmp_path, lift):
    dense = lift(Model().eval())
    model = pc.sketchify(dense, 0.5, **(OPTIONS | {"include": "fc*"}))
    pc.save_sketched(model, tmp_path)
    empty = lift(skeleton())
    text = str(empty.graph)
    loaded = pc.load_sketched(empty, tmp_path)
    assert str(loaded.graph) == str(model.graph)
    assert torch.equal(loaded(IDS), model(IDS))
    assert str(empty.graph) == text


def test_functional_calls_of_a_graph(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(24, 16))

        def forward(self, x):
            return nn.functional.linear(x, self.w)

    model = pc.sketchify(torch.fx.symbolic_trace(Functional()), 0.5, **(OPTIONS | {"include": "*"}))
    pc.save_sketched(model, tmp_path)
    loaded = pc.load_sketched(torch.fx.symbolic_trace(Functional()), tmp_path)
    x = torch.randn(3, 16)
    assert torch.equal(loaded(x), model(x))


def test_sketched_root(tmp_path):
    model = pc.sketchify(nn.Linear(40, 40), 0.5, min_params=0, progress=False, allow_slower=True)
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(nn.Linear(40, 40), tmp_path), model)


def test_trailing_and_pair_forms(tmp_path):
    dense = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    with torch.no_grad():
        dense[0].weight[:, :9] = dense[0].weight[:, :1].clone()
    model = pc.sketchify(dense, 0.5, min_params=0, include="*", progress=False, allow_slower=True)
    model[1] = SketchedLinear.from_dense(dense[1], rank=7, form="pair")
    assert [layer.form for layer in model] == ["pivoted", "pair"]
    assert model[0].start == 40 - model[0].rank
    pc.save_sketched(model, tmp_path)
    loaded = pc.load_sketched(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), tmp_path)
    assert_same(loaded, model)


def test_two_frozen_names_of_one_parameter(tmp_path):
    model = sketched()
    model.embed.requires_grad_(False)
    pc.save_sketched(model, tmp_path)
    loaded = pc.load_sketched(skeleton(), tmp_path)
    assert_same(loaded, model)
    assert not loaded.head.up.weight.requires_grad


def test_views_of_one_storage_are_saved_apart(tmp_path):
    model = sketched()
    both = torch.rand(2, 16)
    model.scale, model.shift = both[0], both[1]
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), model)


def test_tensors_that_are_not_contiguous(tmp_path):
    model = sketched()
    model.fc2.up.weight = nn.Parameter(model.fc2.up.weight.detach().t().contiguous().t())
    assert not model.fc2.up.weight.is_contiguous()
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), model)


class Counting(nn.Module):
    """Keeps state as a tensor beside its parameters, as `nn.Module` allows."""

    def __init__(self, state=0):
        super().__init__()
        self.fc = nn.Linear(40, 40)
        self.state = state

    def get_extra_state(self):
        return torch.tensor(self.state) if isinstance(self.state, int) else self.state

    def set_extra_state(self, state):
        self.state = int(state)


def test_extra_state(tmp_path):
    model = pc.sketchify(Counting(7), 0.5, min_params=0, progress=False, allow_slower=True)
    pc.save_sketched(model, tmp_path)
    assert pc.load_sketched(Counting(), tmp_path).state == 7


def test_state_that_is_no_tensor_is_refused(tmp_path):
    model = pc.sketchify(Counting({"a": 1}), 0.5, min_params=0, progress=False, allow_slower=True)
    with pytest.raises(CheckpointError, match="_extra_state is a dict: safetensors holds tensors only"):
        pc.save_sketched(model, tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex128), torch.empty(3, device="meta")],
)
def test_tensors_that_safetensors_does_not_hold(tmp_path, tensor):
    model = sketched()
    model.register_buffer("odd", tensor)
    with pytest.raises(CheckpointError, match="odd is"):
        pc.save_sketched(model, tmp_path)
    assert names_in(tmp_path) == []


def test_a_model_that_was_never_sketched(tmp_path):
    with pytest.raises(NoTargetError):
        pc.save_sketched(Model(), tmp_path / "new")
    assert names_in(tmp_path) == []


# ------------------------------------------------------------------------------------------ writing


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
