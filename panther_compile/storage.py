"""Files that are there whole or not at all, with their checksums.

write      a scratch folder beside the place ──► fsync ──► one rename ──► fsync of the folder
together   `locked`: several renames and removals in one folder, by one writer at a time
killed     the scratch folder of a process that died is removed by the next writer: nobody holds its lock

A checksum tells a file that was cut short or changed by accident. It is no signature: whoever can write the
file can write its checksum too.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointVersionError,
    ConfigError,
    ConfigTypeError,
)

if sys.platform != "win32":
    import fcntl

SCRATCH_PREFIX = ".saving-"
UNFINISHED = (SCRATCH_PREFIX, ".saving.", ".writing-")  # what a writer that was killed has left, of old too
_LOCK, _IN_USE = ".saving.lock", ".in-use"
# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def checked_path(given: object, name: str) -> Path:
    """The path that an argument gives.

    Raises:
        ConfigTypeError: it is none.
        ConfigError: no file can be called so.
    """
    if not isinstance(given, str | os.PathLike):
        raise ConfigTypeError(f"{name}={given!r} is a {type(given).__name__}, wanted a path")
    if given == "":
        raise ConfigError(f"{name}={given!r}, wanted a path; '.' is the folder that the process is in")
    if "\0" in os.fsdecode(given):
        raise ConfigError(f"{name}={given!r} holds a NUL, which no file's name does")
    return Path(os.fsdecode(given))


def check_folder(folder: Path, *, made: bool) -> None:
    """Look whether files can be written into a folder, before hours of work are done for them.

    Args:
        folder: is left as it is.
        made: whether it will be made, with those around it, if it is missing.

    Raises:
        OSError: they cannot.
    """
    while made and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        kind = NotADirectoryError if folder.exists() else FileNotFoundError
        code = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise kind(code, os.strerror(code), str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def file_sha256(path: Path) -> str:
    """The checksum of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def document_sha256(document: Mapping[str, Any]) -> str:
    """The checksum of a JSON document, without its own entry "sha256"."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_document(file: Path, document: Mapping[str, Any], form: str, version: int) -> None:
    """Write a JSON document with its format, its version and its checksum; `read_document` reads it."""
    whole = {"format": form, "version": version, **document}
    whole["sha256"] = document_sha256(whole)
    file.write_text(json.dumps(whole, indent=1))


def read_document(text: bytes, file: Path, form: str, version: int) -> dict[str, Any]:
    """The JSON document that `write_document` wrote.

    Args:
        text: what the file holds.
        file: its path, for messages.
        form: the format that it must be of.
        version: the newest that is known.

    Raises:
        CheckpointCorruptError: it is no JSON, of another format, or was changed after it was written.
        CheckpointVersionError: it is of a newer version.
    """
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != form:
            raise CheckpointCorruptError(f"{file} is not a {form} file")
        found = document.get("version")
        if type(found) is not int or found > version:
            raise CheckpointVersionError(
                f"{file} has format version {found!r}, this panther_compile reads up to {version}: upgrade it"
            )
        checksum = document_sha256(document)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file} is not JSON, it was cut short or changed: {error}") from error
    if document.get("sha256") != checksum:
        raise CheckpointCorruptError(f"{file} was changed after it was written: its checksum does not match")
    return document


def flush(*paths: Path) -> None:
    """Have files on disk, or the names in a folder."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_file(place: Path, write: Callable[[Path], object]) -> None:
    """Put a file in its place, whole or not at all.

    Args:
        place: the file; its folder exists.
        write: called with the path to write to.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    with scratch_folder(place.parent) as scratch:
        draft = scratch / "file"
        write(draft)
        flush(draft)
        os.replace(draft, place)
    flush(place.parent)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A new folder inside another one, removed at the end; what killed writers left there is removed too.

    Raises:
        OSError: it cannot be made.
    """
    with locked(folder):
        sweep(folder)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=SCRATCH_PREFIX))
        mark = _hold(scratch / _IN_USE)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # what stays is swept by the next writer
        if mark is not None:
            mark.close()


def sweep(folder: Path) -> None:
    """Remove the scratch folders of writers that died. Call it while the folder is locked.

    A folder of such a name that holds other things than a writer's is left alone.
    """
    for scratch in folder.glob(f"{SCRATCH_PREFIX}*"):
        mark = scratch / _IN_USE
        with suppress(OSError):  # another user's, or its writer has just removed it
            if not mark.exists():
                scratch.rmdir()  # its writer died before it wrote anything
            elif held := _hold(mark, wait=False):
                shutil.rmtree(scratch)
                held.close()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder, in this process and others; waits for those that are in it.

    Where the file system has no locks, a warning says that writers are not kept apart.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / _LOCK
    file = _hold(path)
    try:
        yield
    finally:
        path.unlink(
            missing_ok=True
        )  # before it is free: whoever waits for it looks whether it is still there
        if file is not None:
            # Closing it alone would leave the lock with processes that were forked meanwhile.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()


def _hold(path: Path, *, wait: bool = True) -> IO[bytes] | None:
    """Lock a file, made if missing, until it is closed; None without locks, or where it is held already."""
    if sys.platform == "win32":
        return None
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass  # the one who held it has removed it
        except OSError as error:
            file.close()
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{path.parent} is on a file system without locks: two writers are not kept apart there",
                stacklevel=2,
            )
            return None
        file.close()
