"""Factors remembered by the weights that they were computed from, and forgotten with them."""

import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class Snapshot:
    """Which tensors, and which values: each write in place raises a tensor's version. Keeps none alive.

    A write through `tensor.data` raises no version, and is not noticed; a new `tensor.data` is. Of tensors
    that are used as they are, whatever they hold, only a replacement need be noticed.

    Args:
        tensors: to tell again.
        used: tensors that are kept elsewhere for as long as this is; of these the values may change.
    """

    def __init__(self, tensors: Sequence[Tensor], used: Iterable[Tensor] = ()) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        alive = {id(tensor) for tensor in used}  # their identities belong to nobody else
        self._kept = [(place, id(tensor)) for place, tensor in enumerate(tensors) if id(tensor) in alive]
        self._states = [
            (place, weakref.ref(tensor), tensor._version, tensor.data_ptr())
            for place, tensor in enumerate(tensors)
            if id(tensor) not in alive
        ]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors with the same values."""
        if len(tensors) != len(self._references):
            return False
        for place, reference, version, address in self._states:
            tensor = tensors[place]
            if reference() is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        return all(id(tensors[place]) == known for place, known in self._kept)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, whatever their values."""
        return len(tensors) == len(self._references) and all(
            reference() is tensor for reference, tensor in zip(self._references, tensors, strict=True)
        )

    @property
    def is_alive(self) -> bool:
        """Whether all the tensors are still there."""
        return all(reference() is not None for reference in self._references)


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
