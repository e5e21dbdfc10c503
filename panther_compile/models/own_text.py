"""Texts that a causal language model samples itself."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from panther_compile.errors import PantherError, first_line
from panther_compile.models.batches import Call, device_of, kept_positions, tokens_of
from panther_compile.models.outputs import named_tensors
from panther_compile.reporting.progress import ProgressBar

_CHUNK = 64  # texts sampled together
# By the code of somebody's `generate`, which may not be made for the version of transformers here.
_RAISED = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)


def text_logits(model: nn.Module, call: Callable[[Tensor], Call], ids: Tensor) -> Tensor | None:
    """The logits (B, T, V) of a causal language model; None if the model is none.

    It is one if its result has a row of logits for each token, over the tokens of an embedding, that does not
    change with the tokens behind it.

    Args:
        model: in eval mode.
        call: of tokens (B, T).
        ids: some tokens; the last ones are changed for a try.
    """
    logits = _logits(model, call, ids)
    sizes = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    if logits is None or logits.shape[:2] != ids.shape or logits.shape[2] not in sizes or ids.shape[1] < 2:
        return None
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % logits.shape[2]
    again = _logits(model, call, other)
    assert again is not None
    before, after = logits[:, :-1].float(), again[:, :-1].float()
    near = 1e-3 * float(before.std())
    return logits if float((before - after).abs().max()) <= near else None


def own_texts(
    model: nn.Module,
    call: Callable[[Tensor], Call],
    starts: Tensor,
    *,
    given: int = 1,
    seed: int,
    progress: bool | None,
) -> Tensor:
    """Texts (N, T) that go on from the first tokens of each start as the model would, at temperature 1.

    Args:
        model: a causal language model, in eval mode.
        call: of tokens (B, T).
        starts: tokens (N, T).
        given: how many of them are kept, the first ones.
        seed: of what is drawn.
        progress: whether to show a bar; None shows one on a terminal.
    """
    device = device_of(model) or torch.device("cpu")
    length = starts.shape[1]
    texts: list[Tensor] = []
    chunks = starts.to(device).split(_CHUNK)
    with torch.no_grad(), ProgressBar(total=len(chunks) * length, desc="texts", progress=progress) as bar:
        generates = _generates(model)
        for place, chunk in enumerate(chunks):
            found = _generated(model, chunk, given, seed + place) if generates else None
            generates = found is not None  # where it raises, it would for the others
            if found is not None:
                texts.append(found)
                bar.update(length)
            else:
                generator = Generator(device).manual_seed(seed + place)
                texts.append(_sampled(model, call, chunk, given, generator, bar))
    return torch.cat(texts).to(starts.device)


def beginnings(
    model: nn.Module, calls: Sequence[Call], count: int, length: int, generator: Generator
) -> Tensor | None:
    """Pieces (N, length) of the texts that calls give, at random places; None if none is as long.

    Args:
        model: tells which arguments are tokens, and which of them count.
        calls: the data.
        count: N.
        length: of a piece.
        generator: of what is drawn.
    """
    texts: list[Tensor] = []
    for call in calls:
        ids, kept = tokens_of(model, call), kept_positions(model, call)
        if ids is None:
            continue
        if kept is None or kept.shape != ids.shape:
            kept = torch.ones_like(ids, dtype=torch.bool)
        texts += [row[shows] for row, shows in zip(ids.cpu(), kept.cpu(), strict=True)]
    texts = [text for text in texts if len(text) >= length]
    if not texts:
        return None
    drawn = torch.randint(len(texts), (count,), generator=generator).tolist()
    at = torch.rand(count, generator=generator, dtype=torch.float32).tolist()
    begun = [int(share * (len(texts[one]) - length + 1)) for one, share in zip(drawn, at, strict=True)]
    return torch.stack([texts[one][first : first + length] for one, first in zip(drawn, begun, strict=True)])


def _generates(model: Any) -> bool:
    """Whether it is a Hugging Face model with `generate`, which keeps a cache."""
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can()) and callable(getattr(model, "generate", None))


def _generated(model: Any, chunk: Tensor, given: int, seed: int) -> Tensor | None:
    """What `generate` gives; None if that raises, as of caches that it does not know, or is no such texts."""
    torch.manual_seed(seed)  # generate draws from the global generator, which the verbs put back
    first = chunk[:, :given]
    try:
        found = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_beams=1,
            num_return_sequences=1,
            repetition_penalty=1.0,
            eos_token_id=None,  # it goes on after the end of a text, as training texts do
            pad_token_id=0,
            max_new_tokens=chunk.shape[1] - given,
            return_dict_in_generate=False,
        )
    except (PantherError, torch.OutOfMemoryError):
        raise
    except _RAISED as error:
        name, what = type(model).__name__, f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"{name} is sampled by its forward, as its generate ends in {what}", stacklevel=2)
        return None
    return found if isinstance(found, Tensor) and found.shape == chunk.shape else None


def _sampled(
    model: nn.Module,
    call: Callable[[Tensor], Call],
    chunk: Tensor,
    given: int,
    generator: Generator,
    bar: Any,
) -> Tensor:
    """One call for each token; a model that wants texts of full length is given what follows at random."""
    chunk = chunk.clone()
    fixed = not _runs(model, call, chunk[:, :given])
    for place in range(given, chunk.shape[1]):
        logits = _logits(model, call, chunk if fixed else chunk[:, :place])
        assert logits is not None
        chances = logits[:, place - 1].float().softmax(-1)
        chunk[:, place] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        bar.update()
    bar.update(given)
    return chunk


def _runs(model: nn.Module, call: Callable[[Tensor], Call], ids: Tensor) -> bool:
    try:
        logits = _logits(model, call, ids)
    # The model's own code decides what it takes, and may raise anything.
    except Exception:
        return False
    return logits is not None and logits.shape[1] == ids.shape[1]


def _logits(model: nn.Module, call: Callable[[Tensor], Call], ids: Tensor) -> Tensor | None:
    """The tensor called "logits", else the first one, if it has three dimensions."""
    device = device_of(model) or ids.device
    with torch.no_grad():
        found = list(named_tensors(call(ids.to(device)).run(model)))
    tensors = dict(reversed(found))
    first = tensors.get("logits", found[0][1] if found else None)
    return first if first is not None and first.dim() == 3 else None
