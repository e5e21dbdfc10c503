"""Lookups are checked before a kernel makes them.

A CPU refuses an index that is out of range. A GPU stops, and takes along all that its process has on it: a
model can be tried there on inputs that may be too long for it only if something looks first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# By function: where its index is among the arguments, and where what is indexed.
_TABLES = {
    F.embedding: (0, "input", 1, "weight"),
    F.embedding_bag: (0, "input", 1, "weight"),
    torch.embedding: (1, "indices", 0, "weight"),
}
_ALONG = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("gather", "index_select", "scatter", "scatter_add", "index_add")
} | {Tensor.scatter_, Tensor.scatter_add_, Tensor.index_add_}


class InRange(TorchFunctionMode):
    """Raise IndexError where a function of torch looks up what a tensor does not have."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look, then run the function."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            for index, least, size in _lookups(func, args, kwargs):
                _check(func, index, least, size)
        return func(*args, **kwargs)


def _check(func: Any, index: Any, least: int, size: int) -> None:
    if isinstance(index, Tensor) and index.numel() and not index.is_meta:
        low, high = (int(one) for one in index.aminmax())
        if low < least or high >= size:
            raise IndexError(f"{func.__name__} looks up {low} to {high} of {size}")


def _lookups(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, int, int]]:
    """Indices, the least that is allowed, and the size of what is indexed."""

    def given(place: int, name: str) -> Any:
        return args[place] if place < len(args) else kwargs[name]

    if func in _TABLES:
        place, name, of_table, table = _TABLES[func]
        yield given(place, name), 0, given(of_table, table).shape[0]
    elif func in _ALONG and given(0, "input").dim():
        yield given(2, "index"), 0, given(0, "input").shape[given(1, "dim")]
    elif func is Tensor.__getitem__:
        table, index = args
        dim = 0
        for one in index if isinstance(index, tuple) else (index,):
            if one is Ellipsis:
                return  # what is behind it is counted from the other end
            if isinstance(one, Tensor) and one.dtype not in (torch.bool, torch.uint8):
                yield one, -table.shape[dim], table.shape[dim]
            if one is not None:
                dim += one.dim() if isinstance(one, Tensor) and one.dtype is torch.bool else 1
