"""Frames of synthetic sound at 16 kHz: voices, strings, pipes and chords that glide, shake and rustle."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

RATE, FRAME = 16000, 1024
LOWEST, HIGHEST = 60.0, 900.0  # Hz
_TIME = torch.arange(2 * FRAME) / RATE  # the frame is the last half, so that strings have been plucked
_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return float(low + (high - low) * torch.rand((), generator=generator))


def _phase(pitch: float, generator: torch.Generator) -> Tensor:
    """Cycles of a pitch that glides by up to a semitone a frame and shakes by up to half of one."""
    glide = _uniform(-1, 1, generator) / 12 / FRAME * RATE
    depth, speed = _uniform(0, 0.5, generator) / 12, _uniform(4, 8, generator)
    shake = depth * torch.sin(2 * math.pi * (speed * _TIME + _uniform(0, 1, generator)))
    return torch.cumsum(pitch * 2.0 ** (glide * _TIME + shake), 0) / RATE


def _sum(phase: Tensor, amplitudes: list[float], generator: torch.Generator) -> Tensor:
    offsets = torch.rand(len(amplitudes), generator=generator)
    waves = [
        amplitude * torch.sin(2 * math.pi * ((k + 1) * phase + offset))
        for k, (amplitude, offset) in enumerate(zip(amplitudes, offsets, strict=True))
    ]
    return torch.stack(waves).sum(0)


def _partials(pitch: float, most: int) -> int:
    return max(1, min(most, int(0.45 * RATE / pitch)))


def voice(pitch: float, generator: torch.Generator) -> Tensor:
    """Harmonics below the formants of a vowel."""
    vowel = _VOWELS[int(torch.randint(len(_VOWELS), (), generator=generator))]
    size = _uniform(0.85, 1.2, generator)

    def loudness(hertz: float) -> float:
        peaks = sum(1 / (1 + ((hertz - size * f) / (60 + 0.06 * f)) ** 2) for f in vowel)
        return (0.03 + peaks) / (hertz / 100)

    amplitudes = [loudness((k + 1) * pitch) for k in range(_partials(pitch, 40))]
    return _sum(_phase(pitch, generator), amplitudes, generator)


def plucked(pitch: float, generator: torch.Generator) -> Tensor:
    """A string whose high partials die first, plucked at some point of its length."""
    point, damping = _uniform(0.1, 0.5, generator), _uniform(2, 8, generator)
    phase = _phase(pitch, generator)
    waves = []
    for k in range(1, _partials(pitch, 30) + 1):
        amplitude = math.sin(math.pi * k * point) / k
        stretched = k * math.sqrt(1 + 1e-4 * k * k)
        waves.append(amplitude * torch.exp(-damping * k * _TIME) * torch.sin(2 * math.pi * stretched * phase))
    return torch.stack(waves).sum(0)


def bowed(pitch: float, generator: torch.Generator) -> Tensor:
    """A sawtooth through a few random resonances."""
    resonances = [_uniform(200, 4000, generator) for _ in range(4)]

    def loudness(k: int) -> float:
        near = sum(1 / (1 + ((k * pitch - f) / 150) ** 2) for f in resonances)
        return (0.3 + near) / k

    return _sum(_phase(pitch, generator), [loudness(k + 1) for k in range(_partials(pitch, 40))], generator)


def blown(pitch: float, generator: torch.Generator) -> Tensor:
    """A pipe: few harmonics, odd ones above all, and breath."""
    odd = _uniform(0.0, 1.0, generator)
    amplitudes = [(1.0 if k % 2 == 0 else odd) * 0.45**k for k in range(_partials(pitch, 8))]
    tone = _sum(_phase(pitch, generator), amplitudes, generator)
    return tone + _uniform(0.02, 0.2, generator) * torch.randn(len(_TIME), generator=generator)


def chord(pitch: float, generator: torch.Generator) -> Tensor:
    """Three strings at once, in a key or none."""
    steps = [0.0, _uniform(2, 5, generator), _uniform(6, 12, generator)]
    return torch.stack([plucked(pitch * 2 ** (step / 12), generator) for step in steps]).sum(0)


def rustle(pitch: float, generator: torch.Generator) -> Tensor:
    """Noise whose power falls with the frequency."""
    noise = torch.fft.rfft(torch.randn(len(_TIME), generator=generator))
    frequency = torch.arange(len(noise)).clamp_min(1)
    return torch.fft.irfft(noise / frequency ** _uniform(0, 1, generator), n=len(_TIME)) + 0 * pitch


Instrument = Callable[[float, torch.Generator], Tensor]


def frames(instruments: tuple[Instrument, ...], count: int, seed: int) -> Tensor:
    """(count, FRAME), each of mean 0 and deviation 1, with noise 5 to 40 dB below the sound."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for place in range(count):
        pitch = LOWEST * (HIGHEST / LOWEST) ** _uniform(0, 1, generator)
        sound = instruments[place % len(instruments)](pitch, generator)
        noise = torch.randn(len(sound), generator=generator)
        level = 10 ** (-_uniform(5, 40, generator) / 20) * sound.std()
        found.append((sound + level * noise)[FRAME:])
    sounds = torch.stack(found)
    sounds = sounds - sounds.mean(1, keepdim=True)
    return sounds / sounds.std(1, keepdim=True).clamp_min(1e-10)
