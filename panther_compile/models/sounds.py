"""Sounds like those that models of sound are used for: harmonics of a pitch, and pink noise beside."""

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from panther_compile.models.natural import normalized

_HARMONICS = 32
_SHORTEST = 6.0  # samples of a period; the longest is half of the sound
_STEEPEST = 2.0  # amplitudes of harmonics fall as n^-slope, the slopes between 0 and this


def pink_noise(shape: Sequence[int], generator: Generator) -> Tensor:
    """Noise of the amplitude spectrum 1 / f along the last dimension, each row of mean 0 and variance 1."""
    white = torch.randn(*shape, generator=generator, dtype=torch.float32)
    spectrum = torch.fft.rfft(white)
    falls = torch.arange(spectrum.shape[-1]).clamp_min(1).float().rsqrt()
    return normalized(torch.fft.irfft(spectrum * falls, n=shape[-1]), (-1,))


def natural_sounds(shape: Sequence[int], generator: Generator) -> Tensor:
    """Sounds along the last dimension of a shape (..., samples), each of mean 0 and variance 1.

    Each has harmonics of a pitch of its own, all pitches that it can hold a few periods of alike by their
    logarithm, and pink noise, of any share between the two.
    """
    *many, samples = shape
    rows = math.prod(many)

    def drawn(low: float, high: float, count: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(rows, count, generator=generator, dtype=torch.float32)

    longest = max(_SHORTEST, samples / 2)
    period = drawn(math.log(_SHORTEST), math.log(longest)).exp()
    order = torch.arange(1, _HARMONICS + 1).float()
    amplitude = order ** -drawn(0.0, _STEEPEST) * drawn(0.0, 1.0, _HARMONICS)
    amplitude *= period / order > 2.0  # above that a sampled sound holds none
    phase = 2.0 * math.pi * drawn(0.0, 1.0, _HARMONICS)
    time = torch.arange(samples).float()
    tone = torch.zeros(rows, samples, dtype=torch.float32)
    for place, harmonic in enumerate(order):
        angle = 2.0 * math.pi * harmonic * time / period + phase[:, place, None]
        tone += amplitude[:, place, None] * angle.sin()
    noise = drawn(0.0, 1.0).square()
    mixed = (1.0 - noise) * normalized(tone, (-1,)) + noise * pink_noise((rows, samples), generator)
    return normalized(mixed, (-1,)).reshape(*shape)
