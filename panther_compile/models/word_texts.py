"""Texts of words at random, each about a topic, for encoders that read tokens and write none.

Which tokens begin and end a text and which are words is known to the tokenizer alone. Vocabularies list words
by how often they were seen, so that the r-th is taken to come up as by the law of Zipf and Mandelbrot, with
1 / (r + 20): the tail is what shows how many words there are. Signs, digits and single letters are a seventh
of all. Tokens at random, without those that begin and end a text, are no good: attention goes to them.

Nor are texts that are all alike: a text is about something, and its words come up the more often the nearer
the model's own vectors for them are to that of its topic (Arora et al., "A latent variable model approach to
PMI-based word embeddings", TACL 2016, equation 2.1). The topic is a word, rare ones oftener than in texts.
"""

import sys
import warnings
from dataclasses import dataclass
from itertools import takewhile
from os import PathLike
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import normalize

from panther_compile.errors import first_line

_FIRST = 20.0  # added to the rank of a word
_SIGNS, _STOPS = 0.15, ".,"  # share of single characters, and which of them come up ten times as often
_LEAST = 100  # words that tell anything
_MARKS = ("##", "\u2581", "\u0120")  # of pieces inside words, or behind a space
_SHORTEST = 1 / 8  # of the length
_ABOUT = 0.35  # of the entropy of words, that a text of a topic is off words at large in the mean
_TOPICS, _SHARPEST, _HALVINGS = 64, 100.0, 20  # by which that is found


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer knows of texts.

    Attributes:
        before: tokens that each text begins with.
        after: tokens that it ends with.
        words: tokens (W,) between them.
        chances: of each (W,).
        directions: of the model's vectors for them about their mean (W, d), of length 1.
        sharpness: times the cosine to the topic, in the exponent of a word's chance.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    words: Tensor
    chances: Tensor
    directions: Tensor
    sharpness: float

    def texts(self, count: int, length: int, generator: Generator) -> Tensor:
        """Tokens (count, length)."""
        inside = length - len(self.before) - len(self.after)
        topics = torch.multinomial(self.chances.sqrt(), count, replacement=True, generator=generator)
        nearness = self.directions[topics] @ self.directions.T
        chances = self.chances * (self.sharpness * nearness).exp()
        drawn = torch.multinomial(chances, inside, replacement=True, generator=generator)
        before, after = (
            torch.tensor(one, dtype=torch.long).expand(count, -1) for one in (self.before, self.after)
        )
        return torch.cat([before, self.words[drawn], after], 1)

    def batches(self, count: int, size: int, length: int, generator: Generator) -> list[Tensor]:
        """Batches of texts, of lengths drawn evenly from an eighth of the longest on."""
        least = max(round(length * _SHORTEST), len(self.before) + len(self.after) + 1)
        lengths = torch.randint(min(least, length), length + 1, (count,), generator=generator)
        return [self.texts(size, int(one), generator) for one in lengths]


def mean_length(longest: int) -> float:
    """The mean number of tokens in a text of `Vocabulary.batches`."""
    return (1 + _SHORTEST) / 2 * longest


def find_vocabulary(model: nn.Module, vectors: Tensor) -> Vocabulary | None:
    """What the tokenizer of a model knows; None if there is none on this machine, or it knows few words.

    Args:
        model: holds its tokenizer, as those of sentence-transformers do, or was loaded by transformers from a
            folder or name at which the tokenizer is too.
        vectors: of its tokens (V, d), the weight of its embedding.
    """
    tokenizer = getattr(model, "tokenizer", None) or _beside(model)
    return None if tokenizer is None else read_vocabulary(tokenizer, vectors)


def read_vocabulary(tokenizer: Any, vectors: Tensor) -> Vocabulary | None:
    """See `find_vocabulary`; of a tokenizer of transformers."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(min(len(vectors), len(tokenizer)))))
    usual = [(place, str(name)) for place, name in enumerate(names) if place not in special]
    words = [place for place, name in usual if _is_word(name)]
    if len(words) < _LEAST:
        return None
    signs = [place for place, name in usual if len(name) == 1 and name.isascii()]
    ranked = 1 / (torch.arange(len(words), dtype=torch.float32) + _FIRST)
    often = torch.tensor([10.0 if names[place] in _STOPS else 1.0 for place in signs], dtype=torch.float32)
    share = _SIGNS if signs else 0.0
    chances = torch.cat([ranked / ranked.sum() * (1 - share), often / often.sum().clamp_min(1.0) * share])
    before, after = _ends(tokenizer, names[words[0]])
    tokens = torch.tensor(words + signs)
    found = vectors.detach()[tokens.to(vectors.device)].float().cpu()
    directions = normalize(found - found.mean(0), dim=-1)
    return Vocabulary(before, after, tokens, chances, directions, _sharpness(chances, directions))


def _sharpness(chances: Tensor, directions: Tensor) -> float:
    """The sharpness at which texts are about something, neither about all nor of one word; by bisection."""
    usual = chances.log()
    rare = chances.sqrt().cumsum(0)
    topics = torch.searchsorted(rare, (torch.arange(_TOPICS, dtype=torch.float32) + 0.5) / _TOPICS * rare[-1])
    nearness = directions[topics] @ directions.T
    wanted = -_ABOUT * (chances * usual).sum()
    least, most = 0.0, _SHARPEST
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        found = (usual + middle * nearness).log_softmax(-1)
        divergence = (found.exp() * (found - usual)).sum(-1).mean()
        least, most = (middle, most) if divergence < wanted else (least, middle)
    return least


def _ends(tokenizer: Any, word: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and after any text."""
    empty, some = (list(tokenizer(text)["input_ids"]) for text in ("", word))
    before = tuple(
        one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(empty, some, strict=False))
    )
    return before, tuple(empty[len(before) :])


def _is_word(name: str) -> bool:
    """Whether a token is two letters or more, but for its mark."""
    for mark in _MARKS:
        name = name.removeprefix(mark)
    return len(name) > 1 and name.isalpha()


def _beside(model: Any) -> Any:
    """The tokenizer where a Hugging Face model was loaded from; nothing is downloaded."""
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return tokenizer_at(name) if name and "transformers" in sys.modules else None


def tokenizer_at(place: str | PathLike[str]) -> Any:
    """The tokenizer in a folder, or of a name that transformers has kept; None if there is none.

    Warns:
        UserWarning: there is one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError):  # none is there, or what reads it is not installed
        return None
    except Exception as error:  # of a damaged file, or one of a newer format, tokenizers raises just that
        warnings.warn(f"the tokenizer at {place} cannot be read: {first_line(error)}", stacklevel=2)
        return None
