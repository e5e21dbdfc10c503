"""Sentences read aloud by eSpeak NG, whose library and voices come with the package espeakng-loader."""

import ctypes
from collections.abc import Iterator
from functools import cache
from math import gcd
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from accuracy_models.efficientnet import folder_of
from accuracy_models.texts import english_paragraphs, license_text

RATE = 16_000
FEWEST, MOST = 6, 25  # words of a sentence
_SYNCHRONOUS, _CHARACTERS, _UTF8, _WORDS_PER_MINUTE = 2, 1, 1, 1
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(ctypes.c_char)
)


class _Speaker:
    """The library, once for a process."""

    def __init__(self) -> None:
        folder = folder_of("espeakng_loader")
        self._library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
        place = str(folder / "espeak-ng-data").encode()
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, place, 0)
        if self._rate <= 0:
            raise SystemExit(f"eSpeak NG does not start with {folder}")
        self._heard: list[np.ndarray] = []
        self._callback = _CALLBACK(self._hear)
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: object) -> int:
        if samples and count:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def speak(self, text: str, voice: str, speed: int) -> np.ndarray:
        """See `speak`."""
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise SystemExit(f"eSpeak NG has no voice {voice!r}")
        self._library.espeak_SetParameter(_WORDS_PER_MINUTE, speed, 0)
        self._heard.clear()
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # voices flutter at random
        spoken = text.encode()
        self._library.espeak_Synth(
            spoken, ctypes.c_size_t(len(spoken) + 1), 0, _CHARACTERS, 0, _UTF8, None, None
        )
        sound = np.concatenate(self._heard).astype(np.float32) / 2**15
        common = gcd(RATE, self._rate)
        return resample_poly(sound, RATE // common, self._rate // common).astype(np.float32)


@cache
def _speaker() -> _Speaker:
    return _Speaker()


def speak(text: str, voice: str, speed: int = 170) -> np.ndarray:
    """Samples (T,), float32, at `RATE`.

    Args:
        text: to be read.
        voice: language and variant, "en-us+f3".
        speed: words a minute.
    """
    return _speaker().speak(text, voice, speed)


def variants() -> list[str]:
    """The names of the variants of a voice, by which speakers differ, sorted."""
    folder = folder_of("espeakng_loader") / "espeak-ng-data" / "voices" / "!v"
    return sorted(one.name for one in Path(folder).iterdir())


def sentences(domain: str) -> list[str]:
    """Sentences of Python's language reference, "in", in a shuffled order, or of the GPL, "off"."""
    texts = english_paragraphs() if domain == "in" else [" ".join(license_text().split())]
    return list(dict.fromkeys(one for text in texts for one in _sentences(text)))


def _sentences(text: str) -> Iterator[str]:
    for one in text.replace("? ", "?. ").split(". "):
        plain = one.strip().rstrip(".")
        words = plain.split()
        if FEWEST <= len(words) <= MOST and all(word.strip(",;:'\"()-").isalpha() for word in words):
            yield plain
