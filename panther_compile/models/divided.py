"""Batches divided into smaller ones, where the model takes their samples one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from panther_compile.models.batches import Call
from panther_compile.models.outputs import named_tensors

_NEAR = 1e-3  # of the largest number of a result: the same products in another order round otherwise


def divided(model: nn.Module, calls: Sequence[Call], wanted: int) -> list[Call]:
    """At least so many calls, if samples allow: the first dimension of all tensors is divided.

    A call is left whole where a tensor has another first dimension, or where the results of the parts are
    not those of the whole.

    Args:
        model: in eval mode; runs twice on each sample.
        calls: of it.
        wanted: number of calls; if there are as many, nothing is done.
    """
    if len(calls) >= wanted:
        return list(calls)
    parts = -(-wanted // len(calls))
    return [part for call in calls for part in _parts_of(model, call, parts)]


def _parts_of(model: nn.Module, call: Call, parts: int) -> list[Call]:
    leaves, form = tree_flatten((call.args, call.kwargs))
    sizes = {one.shape[0] if one.dim() else 0 for one in leaves if isinstance(one, Tensor)}
    samples = sizes.pop() if len(sizes) == 1 else 0
    if samples < 2:
        return [call]
    places = torch.arange(samples).tensor_split(min(parts, samples))
    found = []
    for some in places:
        first, last = int(some[0]), int(some[-1]) + 1
        part: list[Any] = [one[first:last] if isinstance(one, Tensor) else one for one in leaves]
        found.append(Call(*tree_unflatten(part, form)))
    return found if _are_alike(model, call, found, samples) else [call]


def _are_alike(model: nn.Module, call: Call, parts: Sequence[Call], samples: int) -> bool:
    """Whether results of parts, one after the other, are those of the whole."""
    with torch.no_grad():
        try:
            whole = list(named_tensors(call.run(model)))
            found = [list(named_tensors(part.run(model))) for part in parts]
        except torch.OutOfMemoryError:
            raise
        # The model's own code may raise anything on fewer samples.
        except Exception:
            return False
    if any([name for name, _ in one] != [name for name, _ in whole] for one in found):
        return False
    return bool(whole) and all(
        _is_joined([one[place][1] for one in found], wanted, samples)
        for place, (_, wanted) in enumerate(whole)
    )


def _is_joined(parts: Sequence[Tensor], wanted: Tensor, samples: int) -> bool:
    if any(not one.dim() or one.shape[1:] != wanted.shape[1:] for one in parts) or len(wanted) != samples:
        return False
    joined, wanted = torch.cat(list(parts)).float(), wanted.float()
    size = float(wanted.abs().nan_to_num(posinf=0.0).max())
    return joined.shape == wanted.shape and torch.allclose(
        joined, wanted, rtol=0.0, atol=_NEAR * size, equal_nan=True
    )
