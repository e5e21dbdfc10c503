"""What a rank holds of a whole tensor, as boxes: read and written by torch.distributed.checkpoint.

    plain tensor          one box, all of it
    fully_shard           one box of rows                              (a DTensor says which)
    tensor parallel       one box, or one for each block of a layout   (queries, keys and values together)
    both                  the rows of fully_shard lie in what tensor parallelism has left: each block gives
                          the box of those of its rows that this rank has

Only boxes are stored, in coordinates of the whole, so that any mesh reads what any other has written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from panther_compile.partition.shards.placements import Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor.

    Attributes:
        offsets: of its first corner in the whole.
        tensor: the box; a view of what the rank trains with, or a copy of it.
        whole: shape of the whole.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    whole: tuple[int, ...]

    def copied(self) -> "Piece":
        """The piece with a copy of its tensor on the CPU."""
        return Piece(self.offsets, self.tensor.to("cpu", copy=True), self.whole)


def whole_shape(tensor: Tensor, layout: Shard | None, tp: int) -> tuple[int, ...]:
    """Shape of the tensor that all ranks together hold.

    Args:
        tensor: of this rank.
        layout: on the tp axis, None if every rank of it has all.
        tp: size of the axis.
    """
    shape = tuple(tensor.shape)
    if layout is None:
        return shape
    return (*shape[: layout.dim], shape[layout.dim] * tp, *shape[layout.dim + 1 :])


def find_pieces(tensor: Tensor, layout: Shard | None, tp: int, rank: int) -> list[Piece]:
    """What a rank holds, as boxes that share memory with the tensor.

    Args:
        tensor: plain, or a DTensor over replicas.
        layout: on the tp axis, None if every rank of it has all.
        tp: size of the axis.
        rank: along the axis.
    """
    local = tensor.detach()
    start = (0,) * local.ndim
    whole = whole_shape(tensor, layout, tp)
    if isinstance(local, DTensor):
        (chunk,) = local.__create_chunk_list__()
        start, local = tuple(chunk.offsets), local.to_local()
    if layout is None:
        return [Piece(start, local, whole)]
    dim = layout.dim
    block = whole[dim] // layout.blocks
    width = block // tp
    pieces = []
    for number in range(layout.blocks):
        first = max(start[dim], number * width)
        last = min(start[dim] + local.shape[dim], (number + 1) * width)
        if first < last:
            place = number * block + rank * width + first - number * width
            box = local.narrow(dim, first - start[dim], last - first)
            pieces.append(Piece((*start[:dim], place, *start[dim + 1 :]), box, whole))
    return pieces


class PieceSavePlanner(DefaultSavePlanner):
    """Writes lists of pieces; those that several ranks hold are written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item for each piece."""
        self.plan = SavePlan(
            [_write_item(key, piece) for key, pieces in self.state_dict.items() for piece in pieces]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The piece at an index."""
        return _piece_at(self.state_dict, index)


class _PieceLoadPlanner(DefaultLoadPlanner):
    """Reads into lists of pieces."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take pieces where torch's own planner takes tensors."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What has to be read for each piece."""
        assert self.metadata is not None
        items = []
        for key, pieces in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, [_chunk(piece) for piece in pieces])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The piece at an index."""
        return _piece_at(self.state_dict, index)


class PieceReader:
    """Reads a folder that torch.distributed.checkpoint has written, each rank what it needs."""

    def __init__(self, folder: Path) -> None:
        """Read the table of contents, a pickle: check its origin first."""
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._reader.set_up_storage_reader(self._metadata, True)

    def stored(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Key, shape and dtype of every tensor."""
        for key, stored in self._metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            yield key, tuple(stored.size), stored.properties.dtype

    def read(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        """Copy what is stored into pieces, in place."""
        planner = _PieceLoadPlanner()
        planner.set_up_planner(dict(wanted), self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


def _write_item(key: str, piece: Piece) -> WriteItem:
    chunk = _chunk(piece)
    return WriteItem(
        MetadataIndex(key, chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(piece.tensor),
            size=torch.Size(piece.whole),
        ),
    )


def _piece_at(held: Mapping[str, Sequence[Piece]], index: MetadataIndex) -> Tensor:
    offsets = tuple(index.offset or ())
    return next(piece.tensor for piece in held[index.fqn] if piece.offsets == offsets)
