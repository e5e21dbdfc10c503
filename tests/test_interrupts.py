"""An interrupt at any line of the library leaves the user's model and files as they were."""

import random
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True, "include": "*"}
PACKAGE = str(Path(pc.__file__).parent)
ROOT = str(Path(pc.__file__).parents[1])
FOLDERS = (PACKAGE, f"{ROOT}/passes", f"{ROOT}/kernels")


class Interrupts:
    """Counts lines of the library that run in this thread, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(FOLDERS) else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def dense(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 24),
        nn.ReLU(),
        nn.TransformerEncoderLayer(24, 2, 32, dropout=0.0, batch_first=True),
        nn.Linear(24, 16),
    ).train()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 16, generator=generator, dtype=torch.float32) for _ in range(5)]


def seen(model):
    """All that a caller could see of a model."""
    state = {key: one.detach().clone() for key, one in model.state_dict().items()}
    modules = [
        (name, id(one), type(one), one.training, len(one._forward_hooks), len(one._forward_pre_hooks))
        for name, one in model.named_modules()
    ]
    flags = [(name, id(one), one.requires_grad, one.grad is None) for name, one in model.named_parameters()]
    return modules, flags, state


def assert_same(model, before):
    modules, flags, state = seen(model)
    assert (modules, flags) == before[:2]
    assert all(torch.equal(one, state[key]) for key, one in before[2].items())


def assert_surroundings(random_state, threads):
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert set(threading.enumerate()) <= threads
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.backends.mha.get_fastpath_enabled()


class Sketching:
    """`sketchify`, with data or without; a copy, or in place."""

    def __init__(self, folder, **options):
        self.options = options
        self.model, self.small = dense(), None
        self.before = seen(self.model)

    def __call__(self):
        self.small = pc.sketchify(self.model, 0.5, **OPTIONS, **self.options)
        if self.options.get("inplace"):
            self.model, self.small = dense(), self.model  # the next one
            self.before = seen(self.model)

    def check(self):
        x = batches()[0]
        if self.options.get("inplace") and any(
            isinstance(one, pc.SketchedLinear) for one in self.model.modules()
        ):
            assert self.model(x).shape == x.shape  # the last step had begun
            self.model = dense()
            self.before = seen(self.model)
        assert_same(self.model, self.before)


class Densifying:
    def __init__(self, folder):
        self.small = pc.sketchify(dense(), 0.5, **OPTIONS)
        self.before = seen(self.small)

    def __call__(self):
        pc.densify(self.small)

    def check(self):
        assert_same(self.small, self.before)


class Saving:
    """`save_sketched` over a checkpoint, and `load_sketched`."""

    def __init__(self, folder):
        self.folder = folder
        self.models = [pc.sketchify(dense(seed), 0.5, **OPTIONS) for seed in (1, 2)]
        pc.save_sketched(self.models[0], folder)

    def __call__(self):
        for model in self.models:
            pc.save_sketched(model, self.folder)
        pc.load_sketched(dense(), self.folder)

    def check(self):
        found = pc.load_sketched(dense(), self.folder).state_dict()
        wanted = [one.state_dict() for one in self.models]
        assert any(all(torch.equal(found[key], one[key]) for key in one) for one in wanted)


class Resuming:
    """`sketchify(resume=)`, which goes on from what is there."""

    def __init__(self, folder):
        self.place, self.times = folder / "work", 0
        self.model = dense()
        self.before = seen(self.model)
        self.wanted = pc.sketchify(dense(), 0.5, data=batches(), **OPTIONS).state_dict()

    def __call__(self):
        self.times += 1
        place = self.place.with_name(f"work{self.times}")
        self.last = place
        pc.sketchify(self.model, 0.5, data=batches(), resume=place, **OPTIONS)

    def check(self):
        assert_same(self.model, self.before)
        found = pc.sketchify(self.model, 0.5, data=batches(), resume=self.last, **OPTIONS).state_dict()
        assert all(torch.equal(found[key], one) for key, one in self.wanted.items())


class Healing:
    def __init__(self, folder):
        self.teacher = dense().eval()
        self.small = pc.sketchify(self.teacher, 0.5, **OPTIONS)
        self.before = seen(self.teacher), seen(self.small)

    def __call__(self):
        pc.heal(self.small, teacher=self.teacher, data=batches(), steps=4, progress=False)

    def check(self):
        assert_same(self.teacher, self.before[0])
        assert_same(self.small, self.before[1])


class Exporting:
    def __init__(self, folder):
        self.place = folder / "out.onnx"
        self.small = pc.sketchify(nn.Sequential(nn.Linear(24, 24)), 0.5, **OPTIONS)
        self.before = seen(self.small)
        self()
        self.whole = self.place.read_bytes()

    def __call__(self):
        pc.export_onnx(self.small, torch.randn(2, 24, generator=torch.Generator().manual_seed(0)), self.place)

    def check(self):
        assert_same(self.small, self.before)
        assert self.place.read_bytes() == self.whole


def interrupt_often(case, times, seed):
    with Interrupts() as whole:
        case()
    draw = random.Random(seed)
    for _ in range(times):
        at = draw.randint(1, whole.lines)
        random_state, threads = torch.random.get_rng_state(), set(threading.enumerate())
        try:
            with Interrupts(at):
                case()
        except KeyboardInterrupt:
            pass
        print(f"line {at} of {whole.lines}")
        case.check()
        assert_surroundings(random_state, threads)


CASES = {
    "sketchify": lambda folder: Sketching(folder),
    "data": lambda folder: Sketching(folder, data=batches(), narrow=False),
    "inplace": lambda folder: Sketching(folder, inplace=True),
    "inplace with data": lambda folder: Sketching(folder, data=batches(), inplace=True),
    "densify": Densifying,
    "save": Saving,
    "resume": Resuming,
    "heal": Healing,
    "export": Exporting,
}


@pytest.mark.parametrize("name", ["sketchify", "data", "inplace", "save"])
def test_an_interrupt_at_some_lines(tmp_path, name):
    interrupt_often(CASES[name](tmp_path), 1 if name == "data" else 4, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_many_lines(tmp_path, name):
    interrupt_often(CASES[name](tmp_path), 60, seed=1)
