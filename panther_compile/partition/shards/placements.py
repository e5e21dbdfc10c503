"""How a tensor lies on the devices of a tensor-parallel group (its placement), and what views make of that.

The terms are those of torch's DTensor: `Shard`, `Replicate`, `Partial`.

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
class Shard:
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

    def local(self, tensor: Tensor, tp: int, rank: int) -> Tensor:
        """The local tensor of one device, which shares no memory with the whole."""
        blocks = tensor.unflatten(self.dim, (self.blocks, tp, -1)).select(self.dim + 1, rank)
        return blocks.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def full(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, from the local ones of all devices."""
        parts = [shard.unflatten(self.dim, (self.blocks, -1)) for shard in shards]
        return torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)

    def moved(self, dim: int) -> "Shard":
        """The same along another axis."""
        return Shard(dim, self.blocks)


class Replicate(enum.Enum):
    """Every device has all of a tensor; its gradient is replicated too, or `Partial` in torch's terms.

    Attributes:
        PLAIN: every device has all of the gradient.
        PARTIAL_GRADIENT: each device has a term of it, and they are summed in the backward.
        BUCKETED_GRADIENT: likewise, of a parameter, in one message together with others.
    """

    PLAIN = "plain"
    PARTIAL_GRADIENT = "partial gradient"
    BUCKETED_GRADIENT = "bucketed gradient"


Placement = Shard | Replicate


def through_view(placement: Shard, before: Sequence[int], after: Sequence[int], tp: int) -> Shard | None:
    """The placement after a reshape, if every device can reshape what it has.

    In row-major order the tensor is (outer, pieces, inner); the new shape needs an axis that starts where
    `outer` ends and divides evenly: 64 features of 4 heads go to 2 devices, 3 heads do not.

    Args:
        placement: before it.
        before: shape of the whole.
        after: likewise.
        tp: number of devices.
    """
    outer = math.prod(before[: placement.dim]) * placement.blocks
    ahead = 1
    for dim, size in enumerate(after):
        if ahead <= outer < ahead * size:
            found = Shard(dim, outer // ahead)
            return found if outer % ahead == 0 and found.fits(after, tp) else None
        ahead *= size
    return None


def through_range(placement: Shard, size: int, start: int, stop: int, tp: int) -> Shard | None:
    """The placement of a slice of the sharded axis, if it holds whole blocks."""
    block = size // placement.blocks
    if start % block or stop % block or stop <= start:
        return None
    return Shard(placement.dim, (stop - start) // block)
