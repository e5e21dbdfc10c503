"""What single outputs of a convolution read, and single pixels: some of them, in place of whole maps.

Second moments of a few thousand rows are as good as those of a map of a million pixels, and what is not
computed costs nothing.
"""

# N batch, I in_channels, n outputs that are looked at
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.factorization.moments import MAX_ROWS, spread_places
from panther_compile.layers.convolution import padded

_AT_ONCE = 1 << 24  # numbers
_GATHERED = 1 << 18  # of them, whose places are listed at once

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def windows(conv: Convolution, x: Tensor, most: int = MAX_ROWS) -> Tensor:
    """What at most so many outputs read, each all the taps of the kernel: (n, I, *kernel_size).

    The outputs are evenly spread over those of all inputs, in their order.

    Args:
        conv: with any padding, stride and dilation.
        x: (N, I, *) or (I, *), before padding; of any number of channels, as each is looked at alone.
        most: n at most.
    """
    return torch.cat(list(windows_in_parts(conv, x, most)))


def windows_in_parts(conv: Convolution, x: Tensor, most: int) -> Iterator[Tensor]:
    """The same, a few at once: together they may be many times what they are made of."""
    axes = len(conv.kernel_size)
    view = padded(conv, _with_batch(x, axes))
    for axis in range(axes):
        reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1) + 1
        view = view.unfold(2 + axis, reach, conv.stride[axis])
    return _some(_every(view, conv.dilation), axes, most)


def pixels(x: Tensor, axes: int, most: int = MAX_ROWS) -> Tensor:
    """Pixels of x (N, I, *) or (I, *) as rows (n, I), evenly spread, at most so many."""
    return torch.cat(list(_some(_with_batch(x, axes), axes, most)))


def rows_read(conv: Convolution, x: Tensor) -> Tensor:
    """Rows (n, I) of what a convolution reads of x: of one tap the pixels that it steps on, else of all."""
    axes = len(conv.kernel_size)
    steps_over = all(size == 1 for size in conv.kernel_size)
    return pixels(_every(x, conv.stride) if steps_over else x, axes)


def _with_batch(x: Tensor, axes: int) -> Tensor:
    return x if x.dim() == axes + 2 else x.unsqueeze(0)


def _every(x: Tensor, steps: Iterable[int]) -> Tensor:
    """One in so many along each of the last axes."""
    index: Any = (..., *(slice(None, None, step) for step in steps))
    return x[index]


def _some(view: Tensor, axes: int, most: int) -> Iterator[Tensor]:
    """A sample (n, I, *rest) of the places of a view (N, I, *places, *rest), yielded in parts.

    All numbers of a part are taken by their place in memory: an index for each axis of the view takes three
    to six times as long.
    """
    view = view.detach()
    sizes = torch.Size((len(view), *view.shape[2 : 2 + axes]))
    steps = (view.stride(0), *view.stride()[2 : 2 + axes])
    each = (view.shape[1], *view.shape[2 + axes :])
    within = _offsets(each, (view.stride(1), *view.stride()[2 + axes :]), view.device)
    extent = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True)) + 1
    memory = view.as_strided((extent,), (1,)) if view.numel() else view.flatten()
    for part in spread_places(sizes.numel(), most).split(max(1, _AT_ONCE // max(1, len(within)))):
        places = zip(torch.unravel_index(part, sizes), steps, strict=True)
        starts = sum((place * step for place, step in places), torch.zeros_like(part)).to(view.device)
        rows = view.new_empty(len(part), len(within))
        several = max(1, _GATHERED // max(1, len(within)))
        for some, into in zip(starts.split(several), rows.split(several), strict=True):
            torch.index_select(memory, 0, (some[:, None] + within).flatten(), out=into.view(-1))
        yield rows.view(-1, *each)


def _offsets(sizes: Sequence[int], steps: Sequence[int], device: torch.device) -> Tensor:
    """How far from the first number of an array those of all its places are in memory, in their order."""
    found = torch.zeros(1, dtype=torch.long, device=device)
    for size, step in zip(sizes, steps, strict=True):
        found = (found[:, None] + torch.arange(size, device=device) * step).flatten()
    return found
