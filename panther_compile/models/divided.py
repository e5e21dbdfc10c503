"""Batches divided into smaller ones, where the model takes their samples one by one."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from panther_compile.models.batches import Call
from panther_compile.models.outputs import is_dense, named_tensors

_NEAR = 1e-3  # of the largest number of a result: the same products in another order round otherwise


def divided(model: nn.Module, calls: Sequence[Call], wanted: int) -> list[Call]:
    """Calls, at least so many if samples allow: the first dimension of all tensors is divided.

    A call is left whole where a tensor has another first dimension, or where the results of the parts are
    not those of the whole, which is tried on the first call of each form.

    Args:
        model: in eval mode; runs twice on the calls that are tried.
        calls: of it.
        wanted: number of calls; if there are as many, nothing is done.
    """
    if len(calls) >= wanted:
        return list(calls)
    parts = -(-wanted // len(calls))
    return _divided(model, calls, [parts] * len(calls))


def divided_by_results(model: nn.Module, calls: Sequence[Call], most: int) -> list[Call]:
    """Calls whose results have at most so many numbers each, if samples allow: see `divided`.

    How many a result has is seen from the first sample of the first call, and taken to go with the numbers
    that the model is given, so that of texts it goes with their lengths.

    Args:
        model: in eval mode; runs on a sample, and twice on the calls that are tried if some are too large.
        calls: of it.
        most: numbers of a result.
    """
    if _samples_of(calls[0]) < 2:
        return list(calls)
    sample = _cut(calls[0], [1])[0]
    found = _results(model, [sample])
    given = sum(one.numel() for one in sample.tensors)
    if not found or not given:
        return list(calls)
    rate = sum(one.numel() for _, one in found[0]) / given
    sizes = [rate * sum(one.numel() for one in call.tensors) for call in calls]
    return _divided(model, calls, [max(1, math.ceil(size / most)) for size in sizes])


def first_samples(model: nn.Module, calls: Sequence[Call]) -> list[Call]:
    """The first call whole, and of each other its first sample alone: enough to see which way a model takes.

    A call is left whole where its tensors have other first dimensions, where it has another form than the
    first one, or where the first one's results are not those of its samples.

    Args:
        model: in eval mode; runs twice on the first call.
        calls: of it.
    """
    first, *others = calls
    if not others:
        return [first]
    samples, form = _samples_of(first), _form_of(first)
    if samples < 2 or not _are_alike(model, first, _cut(first, [1, samples - 1]), samples):
        return list(calls)
    alone = (_samples_of(call) > 1 and _form_of(call) == form for call in others)
    return [first, *(_cut(call, [1])[0] if one else call for call, one in zip(others, alone, strict=True))]


def _divided(model: nn.Module, calls: Sequence[Call], wanted: Sequence[int]) -> list[Call]:
    """Each call in so many parts, if it can be divided."""
    tried: list[tuple[object, bool]] = []
    found: list[Call] = []
    for call, parts in zip(calls, wanted, strict=True):
        cut, form = _parts_of(call, parts), (_form_of(call), _samples_of(call))
        if len(cut) == 1:
            found.append(call)
            continue
        known = next((alike for one, alike in tried if one == form), None)
        if known is None:
            known = _are_alike(model, call, cut, _samples_of(call))
            tried.append((form, known))
        found += cut if known else [call]
    return found


def _parts_of(call: Call, parts: int) -> list[Call]:
    samples = _samples_of(call)
    if samples < 2:
        return [call]
    return _cut(call, [len(places) for places in torch.arange(samples).tensor_split(min(parts, samples))])


def _samples_of(call: Call) -> int:
    """The first dimension of all its tensors; 0 if they have none in common, or one is sparse or nested."""
    sizes = {one.shape[0] if is_dense(one) and one.dim() else 0 for one in call.tensors}
    return sizes.pop() if len(sizes) == 1 else 0


def _form_of(call: Call) -> object:
    """Places of its tensors, and what else it is given: flags and numbers may choose another way."""
    return call.form, [one if isinstance(one, bool | int | float | str) else type(one) for one in call.leaves]


def _cut(call: Call, sizes: Sequence[int]) -> list[Call]:
    """Calls of so many of its samples, one after the other."""
    ends = list(accumulate(sizes, initial=0))
    return [
        call.with_leaves(one[first:end] if isinstance(one, Tensor) else one for one in call.leaves)
        for first, end in pairwise(ends)
    ]


def _are_alike(model: nn.Module, call: Call, parts: Sequence[Call], samples: int) -> bool:
    """Whether results of parts, one after the other, are those of the whole."""
    results = _results(model, [call, *parts])
    if not results:
        return False
    whole, *found = results
    if any([name for name, _ in one] != [name for name, _ in whole] for one in found):
        return False
    return bool(whole) and all(
        _is_joined([one[place][1] for one in found], wanted, samples)
        for place, (_, wanted) in enumerate(whole)
    )


def _results(model: nn.Module, calls: Sequence[Call]) -> list[list[tuple[str, Tensor]]]:
    """The tensors of the result of each call; none at all if the model does not run on one of them."""
    with torch.no_grad():
        try:
            return [list(named_tensors(call.run(model))) for call in calls]
        except torch.OutOfMemoryError:
            raise
        # The model's own code may raise anything on fewer samples.
        except Exception:
            return []


def _is_joined(parts: Sequence[Tensor], wanted: Tensor, samples: int) -> bool:
    if any(not one.dim() or one.shape[1:] != wanted.shape[1:] for one in parts) or len(wanted) != samples:
        return False
    sizes = [len(one) for one in parts]
    if sum(sizes) != samples:
        return False
    near = _NEAR * float(wanted.abs().nan_to_num(posinf=0.0).max())
    return all(
        torch.allclose(one.float(), piece.float(), rtol=0.0, atol=near, equal_nan=True)
        for one, piece in zip(parts, wanted.split(sizes), strict=True)
    )
