"""Silero VAD's file from the package silero-vad, sketched by `sketch_onnx`, on sentences in noise.

The file says of each 32 ms of a recording how likely there is speech, and carries the state of an LSTM, whose
weights and the convolutions before it are in the branches of an If. It is judged by the dense file's answers
on other recordings, each file with its own state. `gauntlet.py` calls `measure_vad`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from accuracy_models.efficientnet import folder_of
from accuracy_models.spoken import RATE, sentences, speak, variants
from accuracy_report import Store
from ocr import session
from onnx_peers import described, mark_of, measure_methods

NAME = "silero-vad"
RECORDINGS, SECONDS = 32, 8
STEP, CONTEXT, WIDTH = 512, 64, 128  # new samples of a call, those before them, and the width of the state
EVERY = 8  # calls, of which one is fitted to
SPEECH = 0.5  # from which it says that there is some


def recordings(seed: int, *, held_out: bool) -> np.ndarray:
    """Sentences (N, T), each after half a second to two, in noise of its own loudness."""
    random, voices = np.random.default_rng(seed), variants()
    texts, language = sentences("off" if held_out else "in"), "en-us" if held_out else "en"
    found = np.zeros((RECORDINGS, SECONDS * RATE), np.float32)
    for row in found:
        sound = speak(str(random.choice(texts)), f"{language}+{random.choice(voices)}")
        begin = int(random.uniform(0.5, 2.0) * RATE)
        sound = sound[: len(row) - begin]
        row[begin : begin + len(sound)] = sound * random.uniform(0.3, 1.0)
        row += random.standard_normal(len(row)).astype(np.float32) * 10 ** random.uniform(-4, -1.5)
    return found


def calls(path: Path, sounds: np.ndarray) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """What a file is given call by call, states of its own among it, and the chances of speech (N,)."""
    runner, state = session(path), np.zeros((2, len(sounds), WIDTH), np.float32)
    padded = np.pad(sounds, ((0, 0), (CONTEXT, 0)))
    for begin in range(0, sounds.shape[1] - STEP + 1, STEP):
        given = {"input": padded[:, begin : begin + CONTEXT + STEP], "state": state, "sr": np.array(RATE)}
        chances, state = runner.run(None, given)
        yield given, chances[:, 0]


def chances_of(path: Path, sounds: np.ndarray) -> np.ndarray:
    """Of each call and recording."""
    return np.stack([chances for _, chances in calls(path, sounds)])


def measure_vad(name: str, options: argparse.Namespace, store: Store) -> None:
    """All ratios and seeds that are not stored yet."""
    source = folder_of("silero_vad") / "data" / "silero_vad.onnx"
    sounds = recordings(1, held_out=True)
    wanted = chances_of(source, sounds)

    def draw(seed: int) -> list[dict[str, np.ndarray]]:
        return [given for given, _ in calls(source, recordings(seed, held_out=False))][::EVERY]

    def judge(path: Path) -> dict[str, float]:
        found = chances_of(path, sounds)
        return {
            "same decision": float(((found > SPEECH) == (wanted > SPEECH)).mean()),
            "off": float(np.abs(found - wanted).mean()),
        }

    for *_, report in measure_methods(name, source, options, store, draw, judge):
        title = "Silero VAD (ONNX), speech in 32 ms of sound against the dense file's word"
        inside = f"{RECORDINGS} recordings of {SECONDS} seconds, of other sentences by other voices"
        description = described(report, title, {"same decision": True, "off": False}, inside)
        store.describe(name, mark_of(source), description, quick=options.quick)
