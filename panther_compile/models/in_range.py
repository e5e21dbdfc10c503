"""Lookups are checked before a kernel makes them.

A CPU refuses an index that is out of range. A GPU stops, and takes along all that its process has on it: a
model can be tried there on inputs that may be too long for it only if something looks first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_TABLES = (_ATEN.embedding, _ATEN._embedding_bag, _ATEN._embedding_bag_forward_only)
_ALONG = (_ATEN.gather, _ATEN.index_select, _ATEN.scatter, _ATEN.scatter_add, _ATEN.index_add)


class InRange(TorchDispatchMode):
    """Where an operator looks up what a tensor does not have, IndexError is raised in its place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look, then run the operator."""
        for index, least, size in _lookups(func.overloadpacket, args):
            if index.numel() and not index.is_meta:
                low, high = (int(one) for one in index.aminmax())
                if low < least or high >= size:
                    raise IndexError(f"{func} looks up {low} to {high} of {size}")
        return func(*args, **(kwargs or {}))


def _lookups(operator: Any, args: Sequence[Any]) -> Iterator[tuple[Tensor, int, int]]:
    """Indices, the least that is allowed, and the size of what is indexed."""
    if operator in _TABLES:
        yield args[1], 0, args[0].shape[0]
    elif operator in _ALONG and args[0].dim():
        yield args[2], 0, args[0].shape[args[1]]
    elif operator is _ATEN.index:
        for index, size in zip(args[1], args[0].shape, strict=False):
            if index is not None and index.dtype is not torch.bool:
                yield index, -size, size
