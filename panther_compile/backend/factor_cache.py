"""Factors remembered by the weights that they were computed from, and forgotten with them."""

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary


class _Steps:
    """How many steps of optimizers a tensor has taken since it was first watched."""

    taken = 0


_STEPS = WeakTensorKeyDictionary()  # of each tensor of a snapshot


def _count_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step of the tensors that are watched: one with `fused=True` raises no version."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            steps = _STEPS.get(parameter)
            if steps is not None and parameter.grad is not None:
                steps.taken += 1


register_optimizer_step_post_hook(_count_steps)


class Snapshot:
    """Identities of tensors, and of their values; keeps none alive.

    A write in place raises the tensor's version, but for two: a step of a fused optimizer, so that steps are
    counted, and what a batch norm in training does to its statistics, so that vectors that are no parameters
    are compared number by number. A write through `tensor.data` is not noticed; a new `tensor.data` is. Of
    tensors that are used as they are, whatever they hold, only a replacement need be noticed.

    Args:
        tensors: to tell again.
        used: tensors that are kept elsewhere for as long as this is; of these the values may change.
    """

    def __init__(self, tensors: Sequence[Tensor], used: Iterable[Tensor] = ()) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        alive = {id(tensor) for tensor in used}  # their identities belong to nobody else
        self._kept = [(place, id(tensor)) for place, tensor in enumerate(tensors) if id(tensor) in alive]
        watched = [(place, tensor) for place, tensor in enumerate(tensors) if id(tensor) not in alive]
        self._states = []
        statistics: dict[torch.device, list[int]] = {}
        for place, tensor in watched:
            steps = _STEPS.setdefault(tensor, _Steps())
            state = tensor._version, tensor.data_ptr(), steps.taken
            self._states.append((place, weakref.ref(tensor), steps, state))
            if tensor.dim() == 1 and not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
                statistics.setdefault(tensor.device, []).append(place)
        self._statistics = [
            (device, places, _numbers(tensors, places)) for device, places in statistics.items()
        ]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors with the same values."""
        if len(tensors) != len(self._references):
            return False
        for place, reference, steps, state in self._states:
            tensor = tensors[place]
            if reference() is not tensor or (tensor._version, tensor.data_ptr(), steps.taken) != state:
                return False
        if any(id(tensors[place]) != known for place, known in self._kept):
            return False
        return all(
            torch.equal(_numbers(tensors, places), known)
            for device, places, known in self._statistics
            if device.type != "cuda"
            or not torch.cuda.is_current_stream_capturing()  # nothing can be read then
        )

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, whatever their values."""
        return len(tensors) == len(self._references) and all(
            reference() is tensor for reference, tensor in zip(self._references, tensors, strict=True)
        )

    @property
    def is_alive(self) -> bool:
        """Whether all the tensors are still there."""
        return all(reference() is not None for reference in self._references)


def _numbers(tensors: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """A copy, in one piece: on a GPU one comparison waits once."""
    return torch.cat([tensors[place].detach() for place in places])


class FactorCache:
    """The sketched layers of a list of weights; the last result for each list's first matrix."""

    def __init__(self) -> None:
        self._entries = WeakTensorKeyDictionary()

    def find(self, weights: Sequence[Tensor], key: object) -> Mapping[str, nn.Module] | None:
        """The layers kept for the weights as they are now, under an equal key."""
        first = _first_matrix(weights)
        entry = None if first is None else self._entries.get(first)
        if entry is None:
            return None
        snapshot, kept_key, layers = entry
        known = kept_key == key and snapshot.matches(weights)
        found: Mapping[str, nn.Module] | None = layers if known else None
        return found

    def keep(self, weights: Sequence[Tensor], key: object, layers: Mapping[str, nn.Module]) -> None:
        """Remember the layers as long as the first matrix of the weights lives."""
        first = _first_matrix(weights)
        if first is not None:
            self._entries[first] = (Snapshot(weights), key, layers)


def _first_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    return next((weight for weight in weights if weight.dim() > 1), None)


def origins(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[object]:
    """What tells the numbers of each tensor, for a key: its place in a weight, or a digest.

    A graph pass may have computed a tensor, as `fold_batchnorm` does, or cut it, and another graph of the
    same weights not.

    Args:
        tensors: of the layers that are factorized.
        weights: that stand beside the key.
    """
    places: dict[int, int] = {}
    for place, weight in enumerate(weights):
        places.setdefault(weight.untyped_storage().data_ptr(), place)
    found: list[object] = []
    for tensor in tensors:
        held_by = places.get(tensor.untyped_storage().data_ptr())
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if held_by is None:
            found.append((layout, _digest(tensor)))
        else:
            found.append((layout, held_by, tensor.storage_offset()))
    return found


def _digest(tensor: Tensor) -> bytes:
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(numbers.data).digest()
