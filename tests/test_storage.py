"""Files are whole or not there, whoever writes beside, and whenever a writer is killed."""

import os
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from onnx_models import OPTIONS as ONNX_OPTIONS
from onnx_models import mlp, random, run
from processes import Killed, started
from safetensors.torch import save_file
from torch import nn

import panther_compile as pc
from panther_compile import checkpoint
from panther_compile.errors import CheckpointCorruptError, CheckpointError, OnnxError, ResumeError
from panther_compile.storage import locked, replace_file, scratch_folder

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True, "include": "*"}
DATA_OPTIONS = {**OPTIONS, "narrow": False}


def dense(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 40)).eval()


def sketched(seed):
    return pc.sketchify(dense(seed), 0.5, **OPTIONS)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def names_in(path):
    return sorted(file.name for file in path.iterdir())


# ---------------------------------------------------------------------------------------- one folder


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    inside = []

    def enter(number):
        with locked(tmp_path):
            inside.append((number, "in"))
            time.sleep(0.01)
            inside.append((number, "out"))

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 16
    assert all(inside[i][0] == inside[i + 1][0] for i in range(0, 16, 2))
    assert names_in(tmp_path) == []


def test_a_lock_is_kept_between_processes(tmp_path):
    def hold():
        with locked(tmp_path):
            (tmp_path / "held").touch()
            time.sleep(60)

    with started(hold) as process:
        while not (tmp_path / "held").exists():
            time.sleep(0.005)
        waiter = threading.Thread(target=lambda: replace_file(tmp_path / "mine", lambda f: f.touch()))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        assert not (tmp_path / "mine").exists()
        process.kill()
        waiter.join(20)
    assert names_in(tmp_path) == ["held", "mine"]


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """As a worker of a loader that is started while a thread writes a checkpoint."""
    waiter = threading.Thread(target=lambda: replace_file(tmp_path / "mine", lambda f: f.touch()))
    with ExitStack() as stack:
        with locked(tmp_path):
            waiter.start()
            time.sleep(0.05)
            stack.enter_context(started(lambda: time.sleep(60)))
        waiter.join(5)
        assert names_in(tmp_path) == ["mine"]


def test_what_a_killed_writer_left_is_swept_by_the_next(tmp_path):
    def write():
        with scratch_folder(tmp_path) as scratch:
            (scratch / "half").write_bytes(b"x" * 1000)
            (tmp_path / "begun").touch()
            time.sleep(60)

    with started(write) as process:
        while not (tmp_path / "begun").exists():
            time.sleep(0.005)
        with scratch_folder(tmp_path):  # one that lives is left alone
            assert len(list(tmp_path.glob(".saving-*/half"))) == 1
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        process.kill()
    assert len(list(tmp_path.glob(".saving-*"))) == 1
    (tmp_path / ".saving-for-later").mkdir()  # the user's own
    (tmp_path / ".saving-for-later" / "notes").touch()
    with scratch_folder(tmp_path):
        assert len(list(tmp_path.glob(".saving-*"))) == 2
    assert names_in(tmp_path) == [".saving-for-later", "begun"]


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="without locks: two writers are not kept apart"):
        replace_file(tmp_path / "file", lambda file: file.write_text("text"))
    assert (tmp_path / "file").read_text() == "text"
    assert names_in(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    place = tmp_path / "file"
    place.write_text("old")

    def write(draft):
        draft.write_text("ne")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_file(place, write)
    assert place.read_text() == "old"
    assert names_in(tmp_path) == ["file"]


# ---------------------------------------------------------------------------- checkpoints and writers


def test_two_writers_of_one_directory_do_not_destroy_it(tmp_path, monkeypatch):
    """The first has put its plan in place when the second comes, and then cleans up."""
    first, second = sketched(1), sketched(2)
    replace, entered = os.replace, []

    def replace_slowly(source, target):
        replace(source, target)
        if str(target).endswith("sketch.json") and not entered:
            entered.append(threading.Thread(target=pc.save_sketched, args=(second, tmp_path)))
            entered[0].start()
            entered[0].join(0.3)

    monkeypatch.setattr(os, "replace", replace_slowly)
    pc.save_sketched(first, tmp_path)
    entered[0].join()
    assert torch.equal(weights(pc.load_sketched(dense(), tmp_path)), weights(second))
    assert len(names_in(tmp_path)) == 2


def test_a_reader_reads_again_when_a_writer_came_between(tmp_path, monkeypatch):
    first, second = sketched(1), sketched(2)
    pc.save_sketched(first, tmp_path)
    read = checkpoint._read_document
    writes = [second, first]  # and then the first again: the plan is the same, the file another

    def read_then_write(path):
        document = read(path)
        if writes:
            pc.save_sketched(writes.pop(0), path)
        return document

    monkeypatch.setattr(checkpoint, "_read_document", read_then_write)
    assert torch.equal(weights(pc.load_sketched(dense(), tmp_path)), weights(first))
    (file,) = tmp_path.glob("weights-*")
    file.unlink()
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        pc.load_sketched(dense(), tmp_path)


def test_writers_and_a_reader_in_processes_of_their_own(tmp_path):
    models = [sketched(1), sketched(2)]
    pc.save_sketched(models[0], tmp_path)

    def save_for_ever(model):
        while True:
            pc.save_sketched(model, tmp_path)

    with started(save_for_ever, models[0]), started(save_for_ever, models[1]):
        seen, both = [], False
        while len(seen) < 100 or not both:  # both writers have had their turn
            seen.append(weights(pc.load_sketched(dense(), tmp_path)))
            both = both or not torch.equal(seen[-1], seen[0])
            assert len(seen) < 10_000
    assert all(any(torch.equal(found, weights(model)) for model in models) for found in seen)


def test_an_interrupt_right_after_the_plan_is_in_place(tmp_path, monkeypatch):
    """The weights that it names have to stay."""
    replace = os.replace

    def replace_and_stop(source, target):
        replace(source, target)
        if str(target).endswith("sketch.json"):
            raise KeyboardInterrupt

    pc.save_sketched(sketched(1), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_stop)
        with pytest.raises(KeyboardInterrupt):
            pc.save_sketched(sketched(2), tmp_path)
    assert torch.equal(weights(pc.load_sketched(dense(), tmp_path)), weights(sketched(2)))


# -------------------------------------------------------------------------------------------- kill -9


class Saving:
    """`save_sketched` of two models by turns."""

    def __init__(self, folder):
        self.place = folder / "saved"
        self.models = [sketched(1), sketched(2)]
        self()

    def __call__(self):
        for model in self.models:
            pc.save_sketched(model, self.place)

    def check(self):
        found = weights(pc.load_sketched(dense(), self.place))
        assert any(torch.equal(found, weights(model)) for model in self.models)


class SketchingOnnx:
    """`sketch_onnx` at two ratios by turns, onto one file with its weights beside it."""

    def __init__(self, folder):
        import onnx

        self.source, self.place = mlp(folder / "in.onnx"), folder / "there" / "out.onnx"
        self.place.parent.mkdir()
        onnx.save(onnx.load(self.source), self.source, save_as_external_data=True, size_threshold=0)
        self.x, self.wanted = random(3, 48), []
        for ratio in (0.5, 0.7):
            pc.sketch_onnx(self.source, self.place, ratio, verify=False, **ONNX_OPTIONS)
            self.wanted.append(run(self.place, self.x)[0])

    def __call__(self):
        for ratio in (0.5, 0.7):
            pc.sketch_onnx(self.source, self.place, ratio, verify=False, **ONNX_OPTIONS)

    def check(self):
        found = run(self.place, self.x)[0]
        assert any((found == wanted).all() for wanted in self.wanted)


class Exporting:
    """`export_onnx` of two models by turns."""

    def __init__(self, folder):
        self.place, self.x = folder / "out.onnx", torch.randn(3, 40)
        self.models = [sketched(1), sketched(2)]
        self()

    def __call__(self):
        for model in self.models:
            pc.export_onnx(model, self.x, self.place, verify=False)

    def check(self):
        found = torch.from_numpy(run(self.place, self.x.numpy())[0])
        assert any(torch.allclose(found, model(self.x), atol=1e-5) for model in self.models)


class Resuming:
    """`sketchify(resume=)`, which finds what the killed call has done."""

    def __init__(self, folder):
        self.place = folder / "work"
        self.data = [torch.randn(64, 40) for _ in range(3)]
        self.wanted = weights(pc.sketchify(dense(), 0.5, data=self.data, **DATA_OPTIONS))

    def __call__(self):
        for ratio in (0.4, 0.5, 0.6):
            pc.sketchify(dense(), ratio, data=self.data, resume=self.place, **DATA_OPTIONS)

    def check(self):
        small = pc.sketchify(dense(), 0.5, data=self.data, resume=self.place, **DATA_OPTIONS)
        assert torch.equal(weights(small), self.wanted)


def kill_often(make, folder, times):
    case = make(folder)
    for seed in range(times):
        Killed(case, seed).run()
        case.check()
    assert len(list(folder.rglob(".saving*"))) <= 2  # of the last one that was killed
    case()
    assert not list(folder.rglob(".saving*"))


@pytest.mark.parametrize(("make", "times"), [(Saving, 4), (SketchingOnnx, 2), (Resuming, 1)])
def test_kill_9_leaves_what_was_there(tmp_path, make, times):
    kill_often(make, tmp_path, times)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("make", [Saving, SketchingOnnx, Resuming, Exporting])
def test_kill_9_at_fifty_moments(tmp_path, make):
    kill_often(make, tmp_path, 50)


# -------------------------------------------------------------------------------------------- no space


@pytest.mark.parametrize("limit", [100, 2_000, 5_000])
def test_a_limit_on_the_size_of_files(tmp_path, limit):
    """As a full disk: the first bytes are written, then comes an error."""
    model = sketched(1)
    pc.save_sketched(model, tmp_path)

    def save():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            pc.save_sketched(sketched(2), tmp_path)

    with started(save) as process:
        assert process.wait() == 0
    assert torch.equal(weights(pc.load_sketched(dense(), tmp_path)), weights(model))
    assert not list(tmp_path.glob(".saving*"))


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        pytest.param(Resuming, 3_000, marks=pytest.mark.slow),
        pytest.param(Resuming, 100, marks=pytest.mark.slow),
        pytest.param(Exporting, 300, marks=pytest.mark.slow),
        pytest.param(Exporting, 4_000, marks=pytest.mark.slow),
    ],
)
def test_a_limit_on_the_size_of_other_files(tmp_path, make, limit):
    """The file that was there is whole; work that is kept goes on from what was done."""
    case = make(tmp_path)
    if make is Resuming:
        case()

    def write():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if make is Resuming:
            case.place = tmp_path / "full"
        with pytest.raises(OnnxError if make is Exporting else ResumeError):
            case()

    with started(write) as process:
        assert process.wait() == 0
    case.check()
    assert not list(tmp_path.rglob(".saving*"))


def test_replace_file_takes_any_writer(tmp_path):
    replace_file(tmp_path / "t.safetensors", lambda file: save_file({"a": torch.ones(3)}, file))
    assert names_in(tmp_path) == ["t.safetensors"]
