"""Tensors on disk, used as if they were in memory: mapped, and given back once they were read.

    a file of safetensors  ──► mapped, to be read
    a tensor in memory     ──► written to a temporary file, which is mapped

Pages come when they are read or written. While it is open they are given back several times a second:
the operating system keeps them as long as it has room for them, and reads them again where it had not.
"""

import json
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch
from torch import Tensor, nn

_SEGMENT = 64 << 20  # bytes of a temporary file, which several tensors share; a larger one has its own
_ALIGNED = 64
_INTERVAL = 0.03  # seconds; what is read between two looks is what stays in memory
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorsOnDisk:
    """A folder for tensors, to be entered while they are read and written.

    Args:
        folder: for temporary files, which have no names there, and are gone once no tensor is in them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._segment: mmap.mmap | None = None
        self._used = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._give_back, daemon=True)

    def __enter__(self) -> Self:
        """Begin to give pages back."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give no more back; tensors stay where they are."""
        self._closed.set()
        self._thread.join()
        self._segment = None

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor, in a file."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def put_module(self, module: nn.Module) -> None:
        """Put all parameters of a module that have several dimensions into a file."""
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data = self.put(parameter.data)

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Zeros in a file, which may be written over.

        Raises:
            OSError: the disk is full.
        """
        size = shape.numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if size > _SEGMENT:
            return torch.frombuffer(self._made(size), dtype=dtype).view(shape)
        if self._segment is None or self._used + size > _SEGMENT:
            self._segment, self._used = self._made(_SEGMENT), 0
        offset = self._used
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return torch.frombuffer(self._segment, dtype=dtype, count=shape.numel(), offset=offset).view(shape)

    def tensors(self, file: Path) -> dict[str, Tensor]:
        """The tensors of a safetensors file by name, to be read only; those of other types are left out."""
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            mapped = self._mapped(stream, 0, mmap.ACCESS_READ)
        found: dict[str, Tensor] = {}
        for name, entry in header.items():
            dtype = _TYPES.get(entry.get("dtype", ""))
            if dtype is None:
                continue
            begin, end = entry["data_offsets"]
            offset, count = 8 + length + begin, (end - begin) // dtype.itemsize
            if not count:
                found[name] = torch.empty(entry["shape"], dtype=dtype)
                continue
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                found[name] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(
                    entry["shape"]
                )
        return found

    def _made(self, size: int) -> mmap.mmap:
        """A new file of so many bytes, which are there on the disk."""
        with tempfile.TemporaryFile(dir=self._folder) as stream:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, size)
            else:
                stream.truncate(size)
            return self._mapped(stream, size, mmap.ACCESS_WRITE)

    def _mapped(self, stream: IO[bytes], size: int, access: int) -> mmap.mmap:
        made = mmap.mmap(stream.fileno(), size, access=access)
        with self._lock:
            self._maps.add(made)
        return made

    def _give_back(self) -> None:
        """Until it is closed, take the pages of all files out of memory again and again."""
        while hasattr(mmap.mmap, "madvise") and not self._closed.wait(_INTERVAL):
            self._drop_pages()

    def _drop_pages(self) -> None:
        with self._lock:
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)
