"""Texts spliced of parts of several: what data says, in other surroundings.

Few texts show a layer few directions, and some of what they have in common is chance: what attention gathers
of one text is much the same at all of its tokens. Behind parts of other texts the words and phrases of the
data are in a context that is new, and the dense model tells what comes of it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from panther_compile.models.batches import Call

PARTS = 8  # of a text, each of another one
PART = 4  # tokens of a part at least
SHORTEST = 2 * PART  # tokens of a text that is worth it
STEPS = (1, 3)  # from text to text, in each turn: what was beside one another in the one is not in the other
MOST_TEXTS = (PARTS - 1) * max(STEPS) + 1  # from the first that a text has parts of to the last


def spliced(calls: Sequence[Call], most: int) -> Iterator[Call]:
    """Calls as long, each text with parts of the next ones: of its batch, or of the next batches of one.

    Each text is spliced in two turns, of the texts i, i + 1, i + 2, ... and i, i + 3, i + 6, ..., where there
    are more than three. Calls are left out whose tensors are not all (texts, tokens): ids, masks, types.

    Args:
        calls: of a model that reads texts.
        most: tokens that are wanted, about; of more, as large a share of the calls is taken, evenly spread.
    """
    total = sum(_shape_of(call).numel() for call in calls)
    wanted = max(1, round(len(calls) * most / max(total, 1)))
    for turn, step in enumerate(STEPS):
        count = min(len(calls), wanted - turn * len(calls))
        for place in (index * len(calls) // count for index in range(count)):
            behind = range(min(MOST_TEXTS, len(calls)))
            found = _spliced([calls[(place + by) % len(calls)] for by in behind], step)
            if found is not None:
                yield found


def _spliced(calls: Sequence[Call], step: int) -> Call | None:
    """The first call with parts of its other texts, or where it has one, of the texts of the calls behind."""
    first, shape = calls[0], _shape_of(calls[0])
    if len(shape) != 2 or shape[1] < SHORTEST:
        return None
    text_behind: Callable[[int], list[Any]]
    if shape[0] > 1:
        count, text_behind = shape[0], partial(_rolled, first.leaves)
    else:
        alike = (call for call in calls if _shape_of(call)[:1] == shape[:1] and call.form == first.form)
        texts = [call.leaves for call in alike]
        count, text_behind = len(texts), texts.__getitem__
    if step >= count:
        return None
    parts = min(PARTS, shape[1] // PART)
    sources = zip(*(text_behind(part * step % count) for part in range(parts)), strict=True)
    return first.with_leaves(_joined(ones) if isinstance(ones[0], Tensor) else ones[0] for ones in sources)


def _rolled(leaves: Sequence[Any], by: int) -> list[Any]:
    """Tensors (texts, tokens) whose first text is that so many behind."""
    return [one.roll(-by, 0) if isinstance(one, Tensor) else one for one in leaves]


def _joined(ones: Sequence[Tensor]) -> Tensor:
    """As many parts as there are tensors (texts, tokens), each of the next one, where it is in that."""
    count, longest = len(ones), max(one.shape[1] for one in ones)
    parts = [
        one[:, place * one.shape[1] // count : (place + 1) * one.shape[1] // count]
        for place, one in enumerate(ones)
    ]
    return torch.cat(parts, 1)[:, :longest]  # positions that the model has


def _shape_of(call: Call) -> torch.Size:
    """The shape that all its tensors have; empty if shapes differ, or if no tensor holds integers."""
    shapes = {one.shape for one in call.tensors}
    reads = any(one.dtype in (torch.int32, torch.int64) for one in call.tensors)
    return shapes.pop() if reads and len(shapes) == 1 else torch.Size()
