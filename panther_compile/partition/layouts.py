"""How a tensor lies on the devices of a tensor-parallel group, and what becomes of that under views.

A sharded axis is cut into blocks, and each block into as many equal pieces as there are devices. One block is
the plain case. Several are for what was stored together and is used apart, as queries, keys and values:

    axis of 12, 2 devices, 1 block      0 0 0 0 0 0 1 1 1 1 1 1
    axis of 12, 2 devices, 3 blocks     0 0 1 1|0 0 1 1|0 0 1 1         split in 3: each part lies plainly
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Sharded along one axis.

    Attributes:
        dim: the axis, counted from the front.
        blocks: equal parts of it that are sharded each.
    """

    dim: int
    blocks: int = 1

    def fits(self, shape: Sequence[int], tp: int) -> bool:
        """Whether every device gets the same."""
        return 0 <= self.dim < len(shape) and shape[self.dim] % (self.blocks * tp) == 0

    def shard(self, tensor: Tensor, tp: int, rank: int) -> Tensor:
        """The piece of one device, which shares no memory with the whole."""
        blocks = tensor.unflatten(self.dim, (self.blocks, tp, -1)).select(self.dim + 1, rank)
        return blocks.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole, of the pieces of all devices."""
        parts = [shard.unflatten(self.dim, (self.blocks, -1)) for shard in shards]
        return torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)

    def moved(self, dim: int) -> "Layout":
        """The same along another axis."""
        return Layout(dim, self.blocks)


class Whole(enum.Enum):
    """Every device has all of a tensor; what differs is its gradient.

    Attributes:
        SAME: every device has all of the gradient.
        SUMMED: each device has a term of it: it is summed in the backward.
        JOINED: likewise, of a parameter, together with others in one message.
    """

    SAME = "same"
    SUMMED = "summed"
    JOINED = "joined"


State = Layout | Whole


def through_view(layout: Layout, before: Sequence[int], after: Sequence[int], tp: int) -> Layout | None:
    """The layout after a reshape, if every device can reshape what it has.

    In row-major order the tensor is (outer, pieces, inner); the new shape needs an axis that starts where
    `outer` ends and divides evenly: 64 features of 4 heads go to 2 devices, 3 heads do not.

    Args:
        layout: before it.
        before: shape of the whole.
        after: likewise.
        tp: number of devices.
    """
    outer = math.prod(before[: layout.dim]) * layout.blocks
    ahead = 1
    for dim, size in enumerate(after):
        if ahead <= outer < ahead * size:
            found = Layout(dim, outer // ahead)
            return found if outer % ahead == 0 and found.fits(after, tp) else None
        ahead *= size
    return None


def through_range(layout: Layout, size: int, start: int, stop: int, tp: int) -> Layout | None:
    """The layout of a slice of the sharded axis, if it holds whole blocks."""
    block = size // layout.blocks
    if start % block or stop % block or stop <= start:
        return None
    return Layout(layout.dim, (stop - start) // block)
