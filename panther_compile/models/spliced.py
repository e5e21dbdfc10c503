"""Texts spliced of the halves of two: what data says, in other surroundings.

Few texts show a layer few directions, and some of what they have in common is chance. The second half of one
text behind the first half of another has words and phrases of the data in a context that is new, and the
dense model tells what comes of it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from panther_compile.models.batches import Call

SHORTEST = 8  # tokens of a text that is worth it


def spliced(calls: Sequence[Call], most: int) -> Iterator[Call]:
    """Calls as long, each text with the second half of the next one: of its batch, or of a batch of one.

    Calls are left out whose tensors are not all (texts, tokens): ids, masks, types.

    Args:
        calls: of a model that reads texts.
        most: tokens that are wanted, about; of more, as large a share of the calls is taken, evenly spread.
    """
    total = sum(_shape_of(call).numel() for call in calls)
    count = min(len(calls), max(1, round(len(calls) * most / max(total, 1))))
    for place in (index * len(calls) // count for index in range(count)):
        found = _spliced(calls[place], calls[(place + 1) % len(calls)])
        if found is not None:
            yield found


def _spliced(call: Call, following: Call) -> Call | None:
    shape = _shape_of(call)
    if len(shape) != 2 or shape[1] < SHORTEST:
        return None
    leaves, form = tree_flatten((call.args, call.kwargs))
    others, other_form = tree_flatten((following.args, following.kwargs))
    if shape[0] > 1:
        others = [one.roll(-1, 0) if isinstance(one, Tensor) else one for one in leaves]
    elif form != other_form or _shape_of(following)[:1] != shape[:1] or following is call:
        return None
    pairs = zip(leaves, others, strict=True)
    halves = [_joined(one, other) if isinstance(one, Tensor) else one for one, other in pairs]
    return Call(*tree_unflatten(halves, form))


def _joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one[:, : one.shape[1] // 2], other[:, other.shape[1] // 2 :]], 1)


def _shape_of(call: Call) -> torch.Size:
    """The shape that all its tensors have; empty if shapes differ, or if no tensor holds integers."""
    leaves, _ = tree_flatten((call.args, call.kwargs))
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    shapes = {one.shape for one in tensors}
    reads = any(one.dtype in (torch.int32, torch.int64) for one in tensors)
    return shapes.pop() if reads and len(shapes) == 1 else torch.Size()
