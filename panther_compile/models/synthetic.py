"""Inputs made up for a model without data, by what it says of its own inputs.

What `forward` takes is read off its signature, the configuration and the first layers, and then tried: the
first form that the model runs on is taken, of images the first on which no convolution sees a map of less
than 4 x 4, if there is one.

    tokens   of a causal language model: texts that it samples itself, a random token first, at temperature 1;
             of an encoder whose tokenizer is at hand: words at random, see `word_texts.py`; else tokens drawn
             evenly
    images   with the spectrum of natural ones, see `natural.py`; where there are batch norms, of the colours
             and contrasts that give their statistics, and nearer to them by descent, see `matched_images.py`
    videos   images that move, for volumes as well
    sounds   noise of the spectrum 1 / f
    vectors  normal numbers

Texts that the model sampled or of words, images and videos are near enough to what the model is used for to
fit layers to; the other kinds show whether two models differ, and are no good for that.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from panther_compile.errors import DataError, first_line
from panther_compile.models.batches import Call, device_of, interleaved
from panther_compile.models.in_range import InRange
from panther_compile.models.input_forms import BATCH, Form, forms_of, table_of_tokens
from panther_compile.models.matched_images import matched_images
from panther_compile.models.natural import match_batch_norms
from panther_compile.models.outputs import named_tensors
from panther_compile.models.own_text import beginnings, own_texts, text_logits
from panther_compile.models.spliced import spliced
from panther_compile.models.watched import copy_sharing, inputs_seen
from panther_compile.models.word_texts import Vocabulary, find_vocabulary, mean_length

MODEL = "model"
"""Given as data: inputs that are made up."""

_TEXTS = 32  # of a batch, where they cost nothing
MOST_SPLICED = 40_960  # tokens of texts that are spliced
MOST_TOKENS = 10 * 8 * 128  # of texts beside data, where those are many
WANTED_TOKENS = 4 * 64 * 128  # of data and a model's own texts together, where data are few
OWN_TEXTS = 3  # tokens of the model's own for each one of data, at most
BEGUN = 16  # tokens of the data that a text of the model's own begins with
WORDS_BESIDE = 1 / 8  # tokens of words at random for each one of data
MOST_WORDS_BESIDE = 65_536  # tokens of an embedding; larger ones are of many languages, and data of one
_OF_MAPS = "images", "videos"
_PIXELS = 4  # a side of the smallest map; on one of 1 x 1 all images are alike


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Inputs that were made up.

    Attributes:
        calls: of the model.
        what: they are, in words.
        telling: whether they say what the model is used for, so that layers can be fitted to them.
    """

    calls: tuple[Call, ...]
    what: str
    telling: bool


def make_inputs(
    model: nn.Module, batches: int, *, seed: int, sample: bool, progress: bool | None
) -> Synthetic:
    """Make inputs up for a model.

    Args:
        model: runs in eval mode in a copy that shares its parameters; is not changed.
        batches: how many, of 8 inputs each, of 32 texts of words, or of up to 32 sounds.
        seed: of what is drawn.
        sample: whether inputs are to be like what the model is used for, which takes many calls of it: texts
            sampled token by token, words, images that give its statistics. Else tokens and images are drawn.
        progress: whether to show a bar; None shows one on a terminal.

    Raises:
        DataError: what the model takes is not known here, or it does not run on what was tried.
        ConfigTypeError: the model cannot be copied.
    """
    quiet = copy_sharing(model, {})
    generator = torch.Generator().manual_seed(seed)
    form = _form_of(quiet, generator)
    many = form.make(batches * form.batch, generator)
    texts = None
    if sample and _is_of_texts(quiet, form, many):
        texts = _own_texts(quiet, form, many, seed, progress)
    elif sample:
        vocabulary = _vocabulary_of(quiet, form)
        if vocabulary is not None:
            words = vocabulary.batches(batches, _TEXTS, many[0].numel(), generator)
            texts = _word_texts(quiet, form, words)
    if texts is not None:
        return replace(texts, what=f"made-up inputs ({texts.what})")
    what, telling = f"made-up inputs ({form.kind} at random)", False
    if form.kind == "images" and sample:
        many, matched = match_batch_norms(quiet, form.call, many)
        many = matched_images(quiet, form.call, many, seed=seed, progress=progress)
        statistics = " that give the statistics of its batch norms" if matched else ""
        what, telling = f"made-up inputs (images of natural spectra{statistics})", True
    elif form.kind == "videos" and sample:
        many, matched = match_batch_norms(quiet, form.call, many)
        colours = ", of the colours that its batch norms know" if matched else ""
        what, telling = f"made-up inputs (images of natural spectra that move{colours})", True
    elif form.natural:
        many, telling = match_batch_norms(quiet, form.call, many)
        loud = ", as loud as its batch norms know them" if telling else ""
        what = f"made-up inputs (sounds of harmonics and pink noise{loud})"
    return Synthetic(_calls(quiet, form, many.split(form.batch)), what, telling)


def texts_beside(
    model: nn.Module, calls: Sequence[Call], tokens: int, *, seed: int, progress: bool | None
) -> Synthetic | None:
    """Texts to be fitted to beside data: a causal language model's own, or for an encoder spliced ones.

    A model's own texts are as good as data, and are three times as many where data are few, see
    `own_tokens`; each begins with a piece of the data, where that has texts. So are those that are spliced of
    several of the data, which are twice as many; words at random are an eighth, and none where they would be
    of many languages. None if the model reads no texts.

    Args:
        model: see `make_inputs`.
        calls: the data.
        tokens: of the data, that count.
        seed: of what is drawn.
        progress: whether to show a bar; None shows one on a terminal.

    Raises:
        DataError: what the model takes is not known here, or it does not run on what was tried.
        ConfigTypeError: the model cannot be copied.
    """
    quiet = copy_sharing(model, {})
    generator = torch.Generator().manual_seed(seed)
    form = _form_of(quiet, generator)
    few = form.make(2, generator)
    length = few[0].numel()
    if _is_of_texts(quiet, form, few):
        count = math.ceil(own_tokens(tokens) / length / BATCH) * BATCH
        starts, given = form.make(count, generator), 1
        begun = beginnings(quiet, calls, len(starts), min(BEGUN, length // 2), generator)
        if begun is not None:
            given = begun.shape[1]
            starts[:, :given] = begun
        return _own_texts(quiet, form, starts, seed, progress, given)
    if form.kind != "tokens":
        return None
    parts = [_spliced_texts(calls)]
    vocabulary = _vocabulary_of(quiet, form, MOST_WORDS_BESIDE)
    if vocabulary is not None:
        count = math.ceil(min(tokens, MOST_TOKENS) * WORDS_BESIDE / mean_length(length) / BATCH)
        parts.append(_word_texts(quiet, form, vocabulary.batches(count, BATCH, length, generator)))
    parts = [one for one in parts if one.calls]
    if not parts:
        return None
    return Synthetic(
        interleaved(*(one.calls for one in parts)), " and ".join(one.what for one in parts), True
    )


def own_tokens(tokens: int) -> int:
    """How many tokens of a model's own texts go beside so many of data.

    As many, up to MOST_TOKENS, but more where data are few: up to OWN_TEXTS times as many, until both come to
    WANTED_TOKENS.
    """
    return max(min(tokens, MOST_TOKENS), min(OWN_TEXTS * tokens, WANTED_TOKENS - tokens))


def _own_texts(
    model: nn.Module, form: Form, starts: Tensor, seed: int, progress: bool | None, given: int = 1
) -> Synthetic:
    texts = own_texts(model, form.call, starts, given=given, seed=seed, progress=progress)
    what = f"{len(texts)} texts that the model sampled" + (" behind pieces of it" if given > 1 else "")
    return Synthetic(_calls(model, form, texts.split(BATCH)), what, True)


def _spliced_texts(calls: Sequence[Call]) -> Synthetic:
    """Texts of the data that have parts of others."""
    found = tuple(spliced(calls, MOST_SPLICED))
    count = sum(len(call.tensors[0]) for call in found)
    return Synthetic(found, f"{count} texts spliced of parts of them", True)


def _word_texts(model: nn.Module, form: Form, texts: Sequence[Tensor]) -> Synthetic:
    """Batches of them."""
    return Synthetic(_calls(model, form, texts), f"{sum(map(len, texts))} texts of words at random", True)


def _vocabulary_of(model: nn.Module, form: Form, most: float = math.inf) -> Vocabulary | None:
    """The words that a model reads; None where it reads none, or they are not known, or are too many."""
    embedding = table_of_tokens(model)
    if form.kind != "tokens" or not form.alone or embedding is None or embedding.num_embeddings > most:
        return None
    return find_vocabulary(model, embedding.weight)


def _is_of_texts(model: nn.Module, form: Form, many: Tensor) -> bool:
    """Whether the model is a causal language model, which can go on with tokens."""
    return form.kind == "tokens" and text_logits(model, form.call, many[:2]) is not None


def _calls(model: nn.Module, form: Form, batches: Iterable[Tensor]) -> tuple[Call, ...]:
    """Calls with these inputs, where the model is."""
    device = device_of(model) or torch.device("cpu")
    return tuple(form.call(one.to(device)) for one in batches)


def _form_of(model: nn.Module, generator: Generator) -> Form:
    """The first form that the model runs on; images that are too small to tell only if no others are."""
    said, small = "", None
    for form in forms_of(model):
        with _SmallestMap(model) as smallest:
            (call,) = _calls(model, form, [_without_padding(model, form, form.make(2, generator))])
            refusal = _refusal(model, call)
        if refusal is not None:
            said = refusal
        elif form.kind not in _OF_MAPS or smallest.side >= _PIXELS:
            return form
        else:
            small = small or form
    if small is not None:
        return small
    name = type(model).__name__
    if said:
        raise DataError(f"inputs of {name} cannot be made up: it ran on none that were tried ({said})")
    raise DataError(f"inputs of {name} cannot be made up: what its forward takes is not known here")


def _without_padding(model: nn.Module, form: Form, inputs: Tensor) -> Tensor:
    """Inputs whose tokens are no padding: RoBERTa's positions count the others, and take as many from behind.

    So a text that is as long as the table of positions fits if there is padding in it, and others do not.
    """
    padding = getattr(table_of_tokens(model), "padding_idx", None) if form.kind == "tokens" else None
    return inputs if padding is None else inputs.where(inputs != padding, 1 if padding == 0 else padding - 1)


class _SmallestMap(ExitStack):
    """The smaller side of the smallest map or frame that a convolution of several taps reads in here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.side: float = math.inf

        def see(_: nn.Module, x: Any) -> None:
            if isinstance(x, Tensor):
                self.side = min(self.side, *x.shape[-2:])

        convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d | nn.Conv3d)]
        self.enter_context(inputs_seen([one for one in convolutions if max(one.kernel_size) > 1], see))


def _refusal(model: nn.Module, call: Call) -> str | None:
    """Why the model gives no finite number on a call; None if it does. What it warns of is of no use."""
    try:
        with torch.no_grad(), InRange(), warnings.catch_warnings(action="ignore"):
            result = call.run(model)
    # The model's own code decides what it takes, and may raise anything; what it says is passed on.
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"[:120]
    tensors = [tensor for _, tensor in named_tensors(result)]
    finite = any(not tensor.is_meta and bool(tensor.isfinite().any()) for tensor in tensors)
    return None if finite else "its result holds no finite number"
