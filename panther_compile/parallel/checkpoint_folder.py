"""A folder of checkpoints: each put in place in one step, with the checksum of every file.

    run/
      step-000000100/    manifest.json .metadata __0_0.distcp __1_0.distcp ...
      step-000000200/
      .saving-.../       unfinished: never read; one that a killed process left is removed by the next

A training that went back and saves a step again makes step-000000200.1 beside it; nothing is overwritten.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from panther_compile.errors import CheckpointCorruptError, CheckpointVersionError
from panther_compile.storage import document_sha256, file_sha256, flush

MANIFEST = "manifest.json"
FORMAT, FORMAT_VERSION = "panther_compile.training", 1
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder by their names, the newest first, whole or not; of one checkpoint, itself."""
    if not folder.is_dir():
        return []
    if _NAME.fullmatch(folder.resolve().name):
        return [folder]
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)), reverse=True)
    return [path for _, path in found]


def put_in_place(scratch: Path, folder: Path, document: dict[str, Any]) -> Path:
    """Complete a checkpoint: write its manifest, then give it its name.

    Args:
        scratch: holds all other files, flushed.
        folder: of all checkpoints.
        document: the manifest, with "step" and "files".

    Returns:
        Where it is now.
    """
    document |= {"format": FORMAT, "version": FORMAT_VERSION}
    document["sha256"] = document_sha256(document)
    manifest = scratch / MANIFEST
    manifest.write_text(json.dumps(document, indent=1))
    flush(manifest, scratch)
    name = f"step-{document['step']:09d}"
    taken = {path.name for path in list_checkpoints(folder)}
    names = (name, *(f"{name}.{number}" for number in range(1, len(taken) + 1)))
    place = folder / next(one for one in names if one not in taken)
    scratch.rename(place)
    flush(folder)
    return place


def prune(folder: Path, keep: int) -> None:
    """Remove old checkpoints behind the newest that are complete.

    Args:
        folder: of all checkpoints.
        keep: complete ones that stay, with all between them.
    """
    complete = 0
    for path in list_checkpoints(folder):
        if complete >= keep:
            shutil.rmtree(path)
        elif _is_complete(path):
            complete += 1


def _is_complete(path: Path) -> bool:
    """Whether all files are there, of the sizes they were written with."""
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == record["bytes"] for name, record in files.items())
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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointCorruptError: it is missing, or was changed after it was written.
        CheckpointVersionError: it was written by a newer format.
    """
    try:
        document = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} has no manifest that can be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointCorruptError(f"{path / MANIFEST} is no manifest of a training's checkpoint")
    if document.get("version", 0) > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"{path} has the format {document['version']}, newer than {FORMAT_VERSION}: update the library"
        )
    if document.pop("sha256", None) != document_sha256(document):
        raise CheckpointCorruptError(f"{path / MANIFEST} was changed after it was written")
    return document


def find_damage(path: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> list[str]:
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
            if size != files[name]["bytes"]:
                damage.append(f"{name} has {size} bytes of {files[name]['bytes']}")
            elif file_sha256(path / name) != files[name]["sha256"]:
                damage.append(f"{name} has another checksum than it was written with")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
    return damage
