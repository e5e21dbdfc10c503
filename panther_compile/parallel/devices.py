"""The mesh of a partition laid over the ranks: who holds which stages, and who speaks to whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from panther_compile.errors import ParallelError
from panther_compile.partition.records import RUN_AXES, Mesh


@dataclass(frozen=True)
class Devices:
    """This rank's place in the mesh.

    Attributes:
        shape: sizes of the axes.
        mesh: over all ranks, with the axes "dp", "pp" and "tp".
        device: of this rank.
        rank: of this process.
        dp: place of this rank along the axis.
        pp: place along that axis.
        tp: place along that axis.
        timeout: of every group.
    """

    shape: Mesh
    mesh: DeviceMesh
    device: torch.device
    rank: int
    dp: int
    pp: int
    tp: int
    timeout: timedelta

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along an axis only."""
        return self.mesh.get_group(axis)

    def subgroup(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Some places of this rank's pipeline; None where this rank is at none of them.

        Every rank has to call this, in the same order.

        Args:
            places: along the pp axis.
        """
        mine = None
        for dp, tp in product(range(self.shape.dp), range(self.shape.tp)):
            ranks = [self.shape.rank(dp, place, tp) for place in places]
            made = dist.new_group(ranks, timeout=self.timeout)
            if self.rank in ranks:
                mine = made
        return mine

    def replica_mesh(self, shard_size: int | None) -> DeviceMesh:
        """What `fully_shard` takes: the dp axis, or two axes for hybrid sharding.

        Args:
            shard_size: replicas that share one set of parameters; all of them if None.
        """
        if shard_size is None or shard_size == self.shape.dp:
            return self.mesh["dp"]
        sizes = (self.shape.dp // shard_size, shard_size, self.shape.pp, self.shape.tp)
        names = ("dp_replicate", "dp_shard", "pp", "tp")
        mesh = _make_mesh(self.device, sizes, names)
        return mesh["dp_replicate", "dp_shard"]


def check_axes(shape: Mesh) -> None:
    """Refuse a mesh with an axis that is planned alone.

    Raises:
        ParallelError: devices divide a sequence.
    """
    if shape.cp > 1:
        raise ParallelError(
            f"cp={shape.cp} is planned and cannot be run: torch {torch.__version__} has "
            "torch.distributed.tensor.experimental.context_parallel, whose attention has no sharding "
            "strategy for CPUs, and which graphs in stages and shards cannot call; plan with cp=1"
        )


def lay_out(shape: Mesh, device: torch.device, timeout: timedelta) -> Devices:
    """Make the device mesh and its groups; every rank has to call this.

    Args:
        shape: of the partition.
        device: of this rank.
        timeout: of the user's process group.
    """
    mesh = _make_mesh(device, (shape.dp, shape.pp, shape.tp), RUN_AXES)
    rank = dist.get_rank()
    rest, tp = divmod(rank, shape.tp)
    dp, pp = divmod(rest, shape.pp)
    return Devices(shape, mesh, device, rank, dp, pp, tp, timeout)


def _make_mesh(device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh with the options of the user's process group: torch's own would wait for half an hour."""
    options = dist.distributed_c10d._get_default_group()._get_backend(device).options
    return init_device_mesh(
        device.type, sizes, mesh_dim_names=names, backend_override=dict.fromkeys(names, options)
    )


def place_stages(stages: int, pp: int, *, zigzag: bool) -> tuple[int, ...]:
    """The device of each stage: round after round, or there and back again.

    Args:
        stages: along the model.
        pp: devices.
        zigzag: every second round runs backwards, so that the first device also holds the last stage.
    """
    places = []
    for stage in range(stages):
        turn, place = divmod(stage, pp)
        places.append(pp - 1 - place if zigzag and turn % 2 else place)
    return tuple(places)
