"""Layers whose weight a forward writes to stay dense, and no run changes the user's model."""

import functools

import pytest
import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False, "include": "*"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Rescaled(nn.Module):
    """Scales weights once it is called in another mode, as RWKV does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scaled = False

    def forward(self, x):
        if self.scaled == self.training:
            with torch.no_grad():
                self.rescale()
            self.scaled = not self.training
        for block in self.blocks:
            x = block(x) / (2 if self.scaled else 1)
        return x

    def rescale(self):
        for block in self.blocks:
            block.down.weight.mul_(2.0 if self.training else 0.5)


class ByPlace(Rescaled):
    def rescale(self):
        for place in range(len(self.blocks)):
            self.blocks[place].down.weight *= 2.0 if self.training else 0.5


class ByData(Rescaled):
    def rescale(self):
        for place in range(2):
            self.blocks[place].down.weight.data[:] = self.blocks[place].down.weight * 0.5


class One(Rescaled):
    """Reads a weight, which is no reason."""

    def rescale(self):
        self.blocks[1].down.weight.copy_(self.blocks[0].down.weight)


class Drawn(Rescaled):
    def rescale(self):
        for block in list(self.blocks)[:1]:
            block.up.bias.zero_()
            nn.init.constant_(self.blocks[0].down.weight, 0.1)


class Clamped(nn.Module):
    """Has methods that another module calls, as the predictions of Gemma 3n."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def predict(self, x):
        self.clamp()
        return x + self.down(self.up(x).relu())

    def clamp(self):
        if self.training:
            self.down.weight.data.clamp_(-1.0, 1.0)


def as_it_is(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)

    return wrapped


class ByAnother(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Clamped(), Clamped()])

    @as_it_is
    def forward(self, x):
        for block in self.blocks:
            x = block.predict(x)
        return x


def test_they_stay_dense_where_another_module_calls_what_writes():
    small = pc.sketchify(ByAnother(), 0.5, **OPTIONS)
    small.train()(torch.randn(4, 32))
    reasons = {line.name: line.reason for line in pc.sketch_report(small).plan.layers if line.choice is None}
    said = "forward of Clamped writes to its weight"
    assert {name for name, reason in reasons.items() if reason == said} == {"blocks.0.down", "blocks.1.down"}


@pytest.mark.parametrize(
    ("cls", "written"),
    [
        (Rescaled, {"blocks.0.down", "blocks.1.down"}),
        (ByPlace, {"blocks.0.down", "blocks.1.down"}),
        (ByData, {"blocks.0.down", "blocks.1.down"}),
        (One, {"blocks.1.down"}),
        (Drawn, {"blocks.0.up", "blocks.1.up", "blocks.0.down"}),
    ],
)
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_they_stay_dense(cls, written, data):
    torch.manual_seed(0)
    model, batches = cls(), [torch.randn(128, 32) for _ in range(4)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = pc.sketchify(model, 0.5, data=batches if data else None, **OPTIONS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.scaled
    for mode in (True, False, True):
        small.train(mode)(batches[0])
    reasons = {line.name: line.reason for line in pc.sketch_report(small).plan.layers if line.choice is None}
    said = f"forward of {cls.__name__} writes to its "
    assert {name for name, reason in reasons.items() if reason.startswith(said)} == written


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_rwkv():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.RwkvConfig(
        vocab_size=64, context_length=32, hidden_size=32, num_hidden_layers=2, rescale_every=1
    )
    model, batches = transformers.RwkvForCausalLM(config), [torch.randint(0, 64, (4, 16)) for _ in range(4)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = pc.sketchify(model, 0.5, data=batches, min_params=0, allow_slower=True, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for mode in (False, True, False):
        assert small.train(mode)(batches[0]).logits.isfinite().all()
