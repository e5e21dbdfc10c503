"""Resemblyzer's speaker encoder (Wan et al. 2018), three layers of nn.LSTM, with its package's weights."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from accuracy_models.efficientnet import folder_of
from accuracy_models.minilm import compare
from accuracy_models.spoken import RATE, sentences, speak, variants
from accuracy_models.subject import Subject

BATCH, HELD_OUT, PIECES = 32, 256, 256
HEAL_PIECES, HEAL_STEPS = 1024, 300
MELS, WIDTH, DEPTH = 40, 256, 3
FRAMES, WINDOW, STEP = 160, 400, 160  # frames of a piece; samples
LOUDNESS = 10 ** (-30 / 20)  # root mean square of the samples
VOICES = {"in": ("en-us", "en"), "off": ("de", "ru")}


class VoiceEncoder(nn.Module):
    """The network of the package, by its names, without what it needs to read sound files."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, WIDTH, DEPTH, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, mels_BTM: Tensor) -> Tensor:
        """(B, T, 40) powers to unit embeddings (B, 256)."""
        _, (hidden, _) = self.lstm(mels_BTM)
        return F.normalize(F.relu(self.linear(hidden[-1])), dim=1)


class WrittenOut(nn.Module):
    """A layer of nn.LSTM as two linear layers, called step by step, for methods that know no other layers."""

    def __init__(self, lstm: nn.LSTM, place: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(MELS if place == 0 else WIDTH, 4 * WIDTH)
        self.of_state = nn.Linear(WIDTH, 4 * WIDTH)
        for layer, kind in ((self.of_input, "ih"), (self.of_state, "hh")):
            layer.weight = getattr(lstm, f"weight_{kind}_l{place}")
            layer.bias = getattr(lstm, f"bias_{kind}_l{place}")

    def forward(self, x_BTI: Tensor) -> Tensor:
        """(B, T, I) to the states (B, T, H)."""
        state = cell = x_BTI.new_zeros(len(x_BTI), WIDTH)
        states = []
        for given in self.of_input(x_BTI).unbind(1):
            entered, kept, new, shown = (given + self.of_state(state)).chunk(4, -1)
            cell = kept.sigmoid() * cell + entered.sigmoid() * new.tanh()
            state = shown.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)


class WrittenOutEncoder(nn.Module):
    """The network with its LSTM written out; the same answers."""

    def __init__(self, model: VoiceEncoder) -> None:
        super().__init__()
        self.lstm = nn.Sequential(*(WrittenOut(model.lstm, place) for place in range(DEPTH)))
        self.linear = model.linear

    def forward(self, mels_BTM: Tensor) -> Tensor:
        """(B, T, 40) powers to unit embeddings (B, 256)."""
        return F.normalize(F.relu(self.linear(self.lstm(mels_BTM)[:, -1])), dim=1)


def load_voice_encoder() -> VoiceEncoder:
    """The network with the package's weights; the package itself, which wants librosa, is not imported."""
    model = VoiceEncoder()
    kept = torch.load(folder_of("resemblyzer") / "pretrained.pt", map_location="cpu")["model_state"]
    model.load_state_dict({name: value for name, value in kept.items() if name in model.state_dict()})
    return model.eval()


def mels(sound: np.ndarray) -> Tensor:
    """Powers (T, 40) of sounds of the loudness that the model knows, as librosa computes them."""
    sound = sound * (LOUDNESS / np.sqrt(np.mean(sound**2)))
    filters = mel_filter_bank(WINDOW // 2 + 1, MELS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    found = spectrogram(
        sound,
        window_function(WINDOW, "hann"),
        WINDOW,
        STEP,
        fft_length=WINDOW,
        power=2.0,
        pad_mode="constant",
        mel_filters=filters,
    )
    return torch.from_numpy(found.T.astype(np.float32))


def pieces(domain: str, count: int, seed: int, speakers: slice) -> list[Tensor]:
    """Batches (B, 160, 40): 1.6 seconds each of a sentence, each by the next of some speakers."""
    texts = sentences("in")
    names = [f"{language}+{one}" for one in variants()[speakers] for language in VOICES[domain]]
    found = []
    for place in range(count):
        number = seed * count + place
        text = ". ".join(texts[one % len(texts)] for one in (number, number + 1))  # one may be too short
        spoken = mels(speak(text, names[number % len(names)]))
        begin = int(torch.randint(len(spoken) - FRAMES, (), generator=torch.Generator().manual_seed(number)))
        found.append(spoken[begin : begin + FRAMES])
    return list(torch.stack(found).split(BATCH))


@torch.inference_mode()
def embed(model: nn.Module, batches: list[Tensor]) -> Tensor:
    """Unit embeddings (pieces, 256)."""
    return torch.cat([model(batch) for batch in batches])


def resemblyzer(cache: Path, quick: bool) -> Subject:
    """1.4 M parameters; speakers that are judged by are none of those that it is fitted to."""
    del cache
    return _subject(load_voice_encoder(), "LSTM", ("lstm", "linear"), quick)


def resemblyzer_written_out(cache: Path, quick: bool) -> Subject:
    """The same with linear layers in place of `nn.LSTM`, which the peers can take."""
    del cache
    model = WrittenOutEncoder(load_voice_encoder()).eval()
    return _subject(model, "LSTM written out as linear layers", ("lstm.*", "linear"), quick)


def _subject(model: nn.Module, how: str, include: tuple[str, ...], quick: bool) -> Subject:
    parts = 4 if quick else 1
    judged, known = slice(0, None, 2), slice(1, None, 2)
    held_out = pieces("in", HELD_OUT // parts, 0, judged)
    reference = embed(model, held_out)
    return Subject(
        title=f"Resemblyzer, embeddings of speakers ({how}) against those of the dense model",
        model=model,
        blocks=(),
        calibration=lambda domain, seed: pieces(domain, PIECES // parts, 1 + seed, known),
        in_domain=f"{PIECES} pieces of 1.6 seconds of other sentences, other speakers",
        off_domain=f"{PIECES} pieces of German and Russian voices",
        healing=lambda domain, seed: pieces(domain, HEAL_PIECES // parts, 1 + seed, known),
        healed_on=f"{HEAL_PIECES} such pieces, {BATCH} at a time",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=lambda small: compare(embed(small, held_out), reference),
        metrics={"Spearman": True, "cosine": True, "neighbours": True},
        outputs="values",
        options={"include": include, "allow_slower": True},
        remark="Voices are eSpeak NG's.",
    )
