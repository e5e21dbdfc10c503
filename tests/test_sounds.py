"""Sounds that are made up: what they are like, and which models are fitted to them."""

import copy
import functools

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.models.sounds import natural_sounds, pink_noise
from panther_compile.models.synthetic import make_inputs

SAMPLES = 1024


class Frames(nn.Module):
    """A pitch detector: 2-D convolutions along the samples of frames (N, 1024), as CREPE's."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, (32, 1), (8, 1)), nn.BatchNorm2d(16)
        self.second, self.third = nn.Conv2d(16, 24, (16, 1), (4, 1)), nn.Conv2d(24, 24, (8, 1), (4, 1))
        self.head = nn.Linear(24 * 6, 10)

    def forward(self, frames):
        x = self.norm(self.first(frames[:, None, :, None])).relu()
        return self.head(self.third(self.second(x).relu()).relu().flatten(1))


class Wave(nn.Module):
    """The same of sounds (N, 1, samples)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 16, 32, 8), nn.BatchNorm1d(16)
        self.second, self.third = nn.Conv1d(16, 24, 16, 4), nn.Conv1d(24, 24, 8, 4)
        self.head = nn.Linear(24, 10)

    def forward(self, sounds):
        x = self.norm(self.first(sounds)).relu()
        return self.head(self.third(self.second(x).relu()).relu().mean(-1))


def trained(kind):
    """A model whose batch norm knows sounds of loudness 0.1."""
    return copy.deepcopy(_trained(kind))


@functools.cache
def _trained(kind):
    torch.manual_seed(0)
    model = kind().train()
    model.norm.momentum = None  # the mean of all batches
    shape = (32, SAMPLES) if kind is Frames else (32, 1, SAMPLES)
    for seed in range(8):
        model(0.1 * natural_sounds(shape, torch.Generator().manual_seed(seed)))
    return model.eval()


def made(model):
    return make_inputs(model, 2, seed=0, sample=True, progress=False)


def test_each_sound_is_of_mean_0_and_variance_1():
    for make in (natural_sounds, pink_noise):
        for shape in [(50, 400), (3, 2, 256), (4, 3)]:
            sounds = make(shape, torch.Generator().manual_seed(0))
            assert sounds.shape == shape
            if shape[-1] > 100:
                assert sounds.mean(-1).abs().max() < 1e-5
                torch.testing.assert_close(sounds.square().mean(-1), torch.ones(shape[:-1]))


def test_most_sounds_have_a_pitch_and_noise_has_none():
    def periodic(sounds):
        """The largest correlation of a sound with itself some samples later."""
        power = torch.fft.rfft(sounds, n=2 * SAMPLES).abs().square()
        found = torch.fft.irfft(power)[:, : SAMPLES // 2]
        rises = (found[:, 1:-1] > found[:, :-2]) & (found[:, 1:-1] > found[:, 2:])  # past the first fall
        return (found[:, 1:-1] / found[:, :1]).where(rises, torch.zeros(())).amax(-1)

    sounds = natural_sounds((200, SAMPLES), torch.Generator().manual_seed(0))
    noise = pink_noise((200, SAMPLES), torch.Generator().manual_seed(0))
    assert periodic(sounds).median() > 0.6
    assert periodic(noise).median() < 0.4


@pytest.mark.parametrize("kind", [Frames, Wave])
def test_a_model_of_sounds_is_given_them_as_loud_as_its_batch_norms_know(kind):
    found = made(trained(kind))
    assert found.telling
    assert "sounds of harmonics and pink noise, as loud as" in found.what
    (sounds,) = found.calls[0].args
    assert sounds.shape[-1] in ((SAMPLES,) if kind is Frames else (16000, SAMPLES))
    assert len(sounds) == (32 if sounds.shape[-1] == SAMPLES else 8)
    assert 0.05 < float(sounds.std()) < 0.2


def test_without_batch_norms_nothing_is_fitted_to_them():
    model = Wave()
    model.norm = nn.Identity()
    found = made(model.eval())
    assert not found.telling
    assert found.what == "made-up inputs (sounds of harmonics and pink noise)"


def test_layers_are_fitted_to_them_unasked(monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    monkeypatch.setattr("panther_compile.calibration.inputs._FIT", 6)
    model = trained(Frames)
    sounds = 0.1 * natural_sounds((64, SAMPLES), torch.Generator().manual_seed(9))

    def lost(small):
        with torch.no_grad():
            return float((small(sounds) - model(sounds)).square().mean())

    options = {"min_params": 0, "allow_slower": True, "progress": False}
    small = pc.sketchify(model, 0.6, **options)
    plain = pc.sketchify(model, 0.6, synthetic=False, **options)
    assert {row.method for row in pc.sketch_report(small).sketched} == {"calibrated"}
    assert lost(small) < 0.7 * lost(plain)
