"""A folder of checkpoints: each put in place in one step, with the checksum of every file.

    run/
      step-000000100/    manifest.json .metadata __0_0.distcp __1_0.distcp ...
      step-000000200/
      .saving-.../       unfinished: never read; one that a killed process left is removed by the next

A training that went back and saves a step again makes step-000000200.1 beside it; nothing is overwritten.
"""

import re
import shutil
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from panther_compile.errors import CheckpointCorruptError, CheckpointVersionError
from panther_compile.storage import file_sha256, flush, read_document, write_document
from panther_compile.typed_json import read_record

MANIFEST = "manifest.json"
FORMAT, FORMAT_VERSION = "panther_compile.training", 1
_ITEMS, _COUNTS, _TUPLE, _TENSOR = _WORDS = "(items)", "(counts)", "(tuple)", "(tensor)"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_FILE = re.compile(r"\.?[\w-]+(\.[\w-]+)*")  # no path


@dataclass(frozen=True, slots=True)
class KeptFile:
    """Size and checksum of a file, as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class KeptOptimizer:
    """What an optimizer holds that is no tensor.

    Attributes:
        type: name of its class.
        groups: different sets of options.
        group_of: by the name of a parameter, the place of its options among `groups`.
        numbers: of its state, likewise, by their keys.
    """

    type: str
    groups: list[dict[str, Any]]
    group_of: dict[str, int]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` holds.

    Attributes:
        format: FORMAT.
        version: FORMAT_VERSION, or an earlier one.
        step: that was saved.
        extra: what the user saved with it.
        mesh: sizes of its axes.
        names: of the model's tensors, each with the first name of the same tensor.
        files: all others of the checkpoint, by name.
        optimizer: what it holds beside tensors.
        sha256: the checksum of all the rest.
        sketches: the specs of sketched layers, by name; empty in older ones.
    """

    format: str
    version: int
    step: int
    extra: dict[str, Any]
    mesh: dict[str, int]
    names: dict[str, str]
    files: dict[str, KeptFile]
    optimizer: KeptOptimizer
    sha256: str
    sketches: dict[str, dict[str, Any]] = field(default_factory=dict)


def pack(value: Any) -> Any:
    """What JSON has no word for, in words that it has: tuples, tensors, counters, keys that are no texts."""
    if isinstance(value, Mapping):
        is_plain = all(isinstance(key, str) for key in value) and not set(_WORDS) & set(value)
        if is_plain and not isinstance(value, Counter):
            return {key: pack(one) for key, one in value.items()}
        items = [[pack(key), pack(one)] for key, one in value.items()]
        return {_COUNTS if isinstance(value, Counter) else _ITEMS: items}
    if isinstance(value, tuple):
        return {_TUPLE: [pack(one) for one in value]}
    if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
        numbers = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(value.shape), b64encode(numbers.tobytes()).decode()]}
    return [pack(one) for one in value] if isinstance(value, list) else value


def unpack(value: Any, file: Path) -> Any:
    """What `pack` was given.

    Raises:
        CheckpointCorruptError: it gave no such thing.
    """
    try:
        return _unpack(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointCorruptError(f"{file} holds what was never packed: {error}") from error


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(one) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TUPLE}:
        return tuple(_unpack(one) for one in value[_TUPLE])
    if set(value) == {_TENSOR}:
        name, shape, text = value[_TENSOR]
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a tensor of {name!r}")
        return torch.tensor(list(b64decode(text)), dtype=torch.uint8).view(dtype).reshape(shape)
    if set(value) == {_ITEMS}:
        return {_unpack(key): _unpack(one) for key, one in value[_ITEMS]}
    if set(value) == {_COUNTS}:
        return Counter({_unpack(key): _unpack(one) for key, one in value[_COUNTS]})
    return {key: _unpack(one) for key, one in value.items()}


def list_checkpoints(folder: Path, step: int | None = None) -> list[Path]:
    """Checkpoints of a folder by their names, the newest first, whole or not; of one checkpoint, itself.

    Args:
        folder: of all.
        step: that they are of; any if None.
    """
    if not folder.is_dir():
        return []
    if _NAME.fullmatch(folder.resolve().name):
        return [folder]
    found = [
        (match, path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and step in (None, int(match[1]))
    ]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)), reverse=True)
    return [path for _, path in found]


def keep_one(folder: Path, step: int) -> None:
    """Remove all checkpoints of a folder but the newest of a step.

    Args:
        folder: of all checkpoints.
        step: of the one that stays.
    """
    kept = list_checkpoints(folder, step)[:1]
    for path in list_checkpoints(folder):
        if path not in kept:
            shutil.rmtree(path)


def put_in_place(scratch: Path, folder: Path, document: dict[str, Any]) -> Path:
    """Complete a checkpoint: write its manifest, then give it its name.

    Args:
        scratch: holds all other files, flushed.
        folder: of all checkpoints.
        document: the manifest, with "step" and "files".

    Returns:
        Where it is now.
    """
    manifest = scratch / MANIFEST
    write_document(manifest, document, FORMAT, FORMAT_VERSION)
    flush(manifest, scratch)
    name = f"step-{document['step']:09d}"
    taken = {path.name for path in list_checkpoints(folder)}
    names = (name, *(f"{name}.{number}" for number in range(1, len(taken) + 1)))
    place = folder / next(one for one in names if one not in taken)
    scratch.rename(place)
    flush(folder)
    return place


def prune(folder: Path, keep: int, written: Path) -> None:
    """Remove old checkpoints behind the newest that are complete.

    Args:
        folder: of all checkpoints.
        keep: complete ones that stay, with all between them.
        written: the last one, which stays in any case.
    """
    complete = 0
    for path in list_checkpoints(folder):
        if path == written:
            complete += 1
        elif complete >= keep:
            shutil.rmtree(path)
        elif _is_complete(path):
            complete += 1


def _is_complete(path: Path) -> bool:
    """Whether all files are there, of the sizes they were written with."""
    try:
        files = read_manifest(path).files
        return all((path / name).stat().st_size == record.bytes for name, record in files.items())
    except (CheckpointCorruptError, CheckpointVersionError, OSError):
        return False


def describe_files(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file, as they are read back.

    Args:
        folder: that holds them.
        pattern: of their names.
    """
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.glob(pattern))
    }


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointCorruptError: it is missing, was changed after it was written, or says what cannot be.
        CheckpointVersionError: it was written by a newer format.
    """
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointCorruptError(f"{path} has no manifest that can be read: {error}") from error
    manifest = read_record(Manifest, read_document(text, file, FORMAT, FORMAT_VERSION), str(file))
    _check(manifest, file)
    return manifest


def _check(manifest: Manifest, file: Path) -> None:
    """Raise CheckpointCorruptError for what no type tells."""
    groups = len(manifest.optimizer.groups)
    wrong = [
        *(f"the step {manifest.step}" for _ in range(manifest.step < 0)),
        *(f"a file {name!r}" for name in manifest.files if not _FILE.fullmatch(name)),
        *(
            f"a group {one} of {groups}"
            for one in manifest.optimizer.group_of.values()
            if not 0 <= one < groups
        ),
    ]
    if wrong:
        raise CheckpointCorruptError(f"{file} speaks of {wrong[0][:200]}, which cannot be")


def find_damage(path: Path, files: Mapping[str, KeptFile], names: Iterable[str]) -> list[str]:
    """What is wrong with files of a checkpoint, one line each.

    Args:
        path: of the checkpoint.
        files: of its manifest.
        names: of those to look at.
    """
    damage = []
    for name in names:
        try:
            size = (path / name).stat().st_size
            if size != files[name].bytes:
                damage.append(f"{name} has {size} bytes of {files[name].bytes}")
            elif file_sha256(path / name) != files[name].sha256:
                damage.append(f"{name} has another checksum than it was written with")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
    return damage
