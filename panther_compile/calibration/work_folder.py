"""A folder in which work is kept as it is done, so that a later call need not do it again.

    a manifest       what it is the work of; that of another run is refused
    *.json           records
    *.safetensors    tensors, with a record among their metadata

Every file is written under another name and then put in place: it is there whole, or not at all.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from panther_compile.errors import CheckpointError, ConfigError, ResumeError
from panther_compile.storage import UNFINISHED, checked_path, replace_file

_RECORD = "told"  # its key among the metadata of a file of tensors
_UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError)


class WorkFolder:
    """Files of one run, which later calls of the same run find.

    Args:
        path: made if missing.
        manifest: the name of the file that says what run it is.
        identity: what decides whose work it is.

    Raises:
        ConfigTypeError: the path is none.
        ResumeError: the folder holds the work of another run, or other files, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: str, identity: Mapping[str, str]) -> None:
        self.path = checked_path(path, "resume")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            is_empty = all(one.name.startswith(UNFINISHED) for one in self.path.iterdir())
        except OSError as error:
            raise ResumeError(f"resume={str(path)!r} is no folder that can be written: {error}") from error
        kept = self.read_json(manifest)
        if kept is None:
            if not is_empty:
                raise ResumeError(
                    f"resume={str(path)!r} holds files but no {manifest}: wanted an empty or new folder, or "
                    "one that an earlier call has worked in"
                )
            self.write_json(manifest, identity)
        elif kept != identity:
            different = [
                f"\n  {key}: {kept.get(key, 'nothing')} there, {identity.get(key, 'nothing')} here"
                for key in sorted({*kept, *identity})
                if kept.get(key) != identity.get(key)
            ]
            raise ResumeError(f"resume={str(path)!r} holds the work of another run{''.join(different)}")

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).exists()

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A record; None if there is no such file."""
        if not self.has(name):
            return None
        with self.refusing_changes(name, _UNREADABLE):
            found = json.loads((self.path / name).read_text())
            if not isinstance(found, dict):
                raise CheckpointError(f"it is a {type(found).__name__}")
        return found

    def write_json(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record."""
        self._write(name, lambda draft: draft.write_text(json.dumps(record, indent=1)))

    def read_record(self, name: str) -> dict[str, Any] | None:
        """The record beside tensors; None if there is no such file."""
        if not self.has(name):
            return None
        with self.refusing_changes(name, _UNREADABLE), safe_open(self.path / name, framework="pt") as kept:
            found: dict[str, Any] = json.loads(kept.metadata()[_RECORD])
        return found

    def read_tensors(self, name: str, device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file, by name; those on the CPU are mapped from it."""
        with (
            self.refusing_changes(name, _UNREADABLE),
            safe_open(self.path / name, framework="pt", device=str(device or "cpu")) as kept,
        ):
            for key in kept.keys():  # noqa: SIM118
                yield key, kept.get_tensor(key)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Keep tensors, and the record beside them."""
        held = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        self._write(name, lambda draft: save_file(held, draft, {_RECORD: json.dumps(record)}))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        place = self.path / name
        try:
            place.parent.mkdir(exist_ok=True)
            replace_file(place, write)
        except (OSError, SafetensorError) as error:
            raise ResumeError(f"cannot write {place}: {error}") from error

    @contextmanager
    def refusing_changes(
        self, name: str, errors: tuple[type[Exception], ...] = (CheckpointError, ConfigError, KeyError)
    ) -> Iterator[None]:
        """A file that says what no call has written is a ResumeError.

        Args:
            name: of the file.
            errors: by which that is noticed.
        """
        try:
            yield
        except errors as error:
            place = self.path / name
            raise ResumeError(f"{place} cannot be read, it was cut short or changed: {error}") from error


def file_of_layer(name: str) -> str:
    """The name of the file of a layer's tensors, whatever a layer is called."""
    return f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"
