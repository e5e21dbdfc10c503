"""Factors remembered by the weights that they were computed from, and forgotten with them."""

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class Snapshot:
    """Which tensors, and which values: each write in place raises a tensor's version. Keeps none alive.

    A write through `tensor.data` raises no version, and is not noticed; a new `tensor.data` is.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._states = [(weakref.ref(tensor), tensor._version, tensor.data_ptr()) for tensor in tensors]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors with the same values."""
        for (reference, version, address), tensor in zip(self._states, tensors, strict=True):
            if reference() is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        return True

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._states)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, whatever their values."""
        return all(
            reference() is tensor for (reference, _, _), tensor in zip(self._states, tensors, strict=True)
        )

    @property
    def is_alive(self) -> bool:
        """Whether all the tensors are still there."""
        return all(reference() is not None for reference, _, _ in self._states)


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
        count, snapshot, kept_key, layers = entry
        known = count == len(weights) and kept_key == key and snapshot.matches(weights)
        found: Mapping[str, nn.Module] | None = layers if known else None
        return found

    def keep(self, weights: Sequence[Tensor], key: object, layers: Mapping[str, nn.Module]) -> None:
        """Remember the layers as long as the first matrix of the weights lives."""
        first = _first_matrix(weights)
        if first is not None:
            self._entries[first] = (len(weights), Snapshot(weights), key, layers)


def _first_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    return next((weight for weight in weights if weight.dim() > 1), None)
