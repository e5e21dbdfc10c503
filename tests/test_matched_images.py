"""Images whose statistics are those that a model's batch norms keep."""

import copy

import pytest
import torch
from torch import nn

from panther_compile.calibration import inputs
from panther_compile.calibration.calibrate import study_model
from panther_compile.calibration.first_look import look_at
from panther_compile.calibration.unlike import off_batch_norms
from panther_compile.config import SketchConfig
from panther_compile.models.batches import Call
from panther_compile.models.matched_images import matched_images
from panther_compile.models.natural import natural_images
from panther_compile.models.synthetic import make_inputs
from panther_compile.planning.sites import find_sites
from panther_compile.planning.trace import read_graph

DRAWN = {"seed": 0, "sample": True, "progress": False}


def call(images):
    return Call((images,), {})


def striped(count, seed):
    """Images (count, 3, 16, 16) as nature has none: of one frequency each."""
    generator = torch.Generator().manual_seed(seed)
    angle, phase = (3.14 * torch.rand(2, count, 1, 1, generator=generator)).unbind()
    rows, columns = torch.arange(16)[None, :, None], torch.arange(16)[None, None]
    waves = torch.sin(1.3 * (rows * angle.cos() + columns * angle.sin()) + 2 * phase)
    return waves[:, None] * torch.tensor([1.0, 0.5, -0.5])[:, None, None] + 0.3


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained)


@pytest.fixture(scope="module")
def trained():
    """A convolutional model whose batch norms know striped images."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)]
    found = nn.Sequential(*layers, nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3))
    with torch.no_grad():
        for seed in range(80):
            found(striped(32, seed))
    return found.eval()


def start():
    return natural_images(32, 3, 16, torch.Generator().manual_seed(1))


def matched(model, images, seed=0):
    return matched_images(model, call, images, seed=seed, progress=False)


def test_statistics_come_nearer(model):
    before, after = (off_batch_norms(model, [call(one)]) for one in (start(), matched(model, start())))
    assert after < 0.5 * before
    assert off_batch_norms(model, [call(striped(32, 99))]) < after  # those of its training are the nearest


def test_images_are_the_same_for_a_seed(model):
    assert torch.equal(matched(model, start()), matched(model, start()))
    assert not torch.equal(matched(model, start()), matched(model, start(), seed=1))


def test_the_model_is_left_alone(model):
    model.train()
    model[0].weight.requires_grad_(False)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    wanted = copy.deepcopy(model.state_dict())
    make_inputs(model, 2, **DRAWN)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), wanted.values(), strict=True))
    assert model.training
    assert all(module.training for module in model)
    needs = {name: p.requires_grad for name, p in model.named_parameters()}
    assert [name for name, wants in needs.items() if not wants] == ["0.weight"]
    assert torch.equal(model[3].weight.grad, torch.ones_like(model[3].weight))
    assert model[6].weight.grad is None


@pytest.mark.slow
def test_bfloat16(model):
    images = start()[:8].bfloat16()  # a type that a CPU is slow in
    model = model.bfloat16()
    found = matched(model, images)
    assert found.dtype == torch.bfloat16
    assert off_batch_norms(model, [call(found)]) < 0.5 * off_batch_norms(model, [call(images)])
    assert "statistics of its batch norms" in make_inputs(model, 2, **DRAWN).what


def test_without_batch_norms_images_are_as_given():
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    assert torch.equal(matched(plain, start()), start())
    assert "batch norms" not in make_inputs(plain, 1, **DRAWN).what


class Infinite(torch.autograd.Function):
    """The identity, with gradients that are none."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0.0


@pytest.mark.parametrize("spoil", [Infinite.apply, torch.Tensor.detach])
def test_where_gradients_tell_nothing_images_are_as_given(model, spoil):
    class Spoilt(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, images):
            return self.inner(spoil(images))

    found = matched(Spoilt(), start())
    assert torch.equal(found, start())


@pytest.mark.parametrize("doubted", [False, True])
def test_images_made_up_are_believed_the_less_the_further_they_are_off(model, doubted):
    config = SketchConfig(min_params=256, allow_slower=True, progress=False)
    found, calls = find_sites(model, config, read_graph(model)), [call(one) for one in start().split(4)]
    off = off_batch_norms(model, calls)
    assert off > 0.1
    look = look_at(model, found.sites, calls)
    studied = study_model(model, found, config, "", calls, look, doubted=doubted)
    ridges = [off, 0.1, 1.0] if doubted else [off]  # of data that is few, what held-out batches ask for
    assert min(abs(studied.study.ridge - ridge) for ridge in ridges) < 1e-9


@pytest.mark.parametrize(
    ("off", "says"),
    [(0.1, ""), (0.5, "off them by 0.5: outputs may be further off"), (0.9, "too far to fit")],
)
def test_images_that_are_off_are_told_of(model, monkeypatch, off, says):
    monkeypatch.setattr(inputs, "off_batch_norms", lambda *_: off)
    monkeypatch.setattr(inputs, "SMALLEST", 1)
    monkeypatch.setattr(inputs, "_FIT", 2)
    config = SketchConfig(ratio=0.5, progress=False, min_params=1)
    found = find_sites(model, config, read_graph(model))
    read = inputs.read_inputs(model, found, None, config, "no data was given")
    assert says in read.what
    assert (says in read.doubt) == (off <= 0.5)
    assert bool(read.doubt) == (off == 0.5)
    assert (read.fit is None) == (off == 0.9)


def test_calls_end_behind_the_last_norm(model):
    calls = []
    model[-1].register_forward_hook(lambda *_: calls.append(1))
    found = matched(model, start())
    assert len(calls) == 1  # the first one, which shows how often norms are called
    assert torch.equal(found, matched(model[:-1], start()))
    assert not any(module._forward_pre_hooks for module in model.modules())
