"""Checkpoints of a training: written behind its back, whole or not at all, and read by any mesh.

save     copy to the CPU ──► a thread: torch.distributed.checkpoint into .saving-... , checksums of what
         can be read back, manifest, rename ──► step-000000100
load     the newest checkpoint with the right checksums ──► each rank reads the boxes that it needs

The folder has to be one that all ranks reach. What the tensors are called: see `training_state`.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from panther_compile.config import read_integer
from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    ConfigTypeError,
    PantherError,
    ProcessGroupError,
    RankMismatchError,
)
from panther_compile.parallel import optimizer_state
from panther_compile.parallel.agreement import find_timeout, named_failures
from panther_compile.parallel.checkpoint_folder import (
    describe_files,
    find_damage,
    list_checkpoints,
    pack,
    prune,
    put_in_place,
    read_manifest,
    unpack,
)
from panther_compile.parallel.engine import ParallelEngine
from panther_compile.parallel.model_state import with_specs
from panther_compile.parallel.pieces import Piece, PieceReader, PieceSavePlanner, find_pieces
from panther_compile.parallel.training_state import MODEL, find_differences, find_state, restore_state
from panther_compile.storage import checked_path, locked, scratch_folder, sweep


@dataclass(frozen=True)
class Resumed:
    """What a training goes on from.

    Attributes:
        step: that was saved.
        extra: that was saved with it.
        path: of the checkpoint.
    """

    step: int
    extra: dict[str, Any]
    path: Path = field(repr=False)


class TrainingCheckpoints:
    """Saves and restores an engine and its optimizer, in a folder that all ranks can reach.

    Every rank makes one and calls the same methods in the same order.

        >>> checkpoints = pc.TrainingCheckpoints("run", keep=2)
        >>> resumed = checkpoints.load(engine, optimizer)
        >>> for step in range(resumed.step if resumed else 0, steps):
        ...     train_one_step(step)
        ...     if (step + 1) % 100 == 0:
        ...         checkpoints.save(engine, optimizer, step=step + 1, extra={"seed": 0})
        >>> checkpoints.wait()

    As a context it waits at the end, and gives back the connections that it writes by: for one that is made
    anew for each save.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        """Make the folder, and remove what a process that was killed has left unfinished in it.

        Args:
            folder: of the checkpoints.
            keep: complete checkpoints of the latest steps that stay; others are removed after each save, but
                for the one that was just written.

        Raises:
            ConfigError, ConfigTypeError: `keep` is not 1 or more, or the folder no path.
            ProcessGroupError: there is no process group.
            CheckpointError: the folder cannot be made.
        """
        self._folder = checked_path(folder, "folder")
        self._keep = read_integer("keep", keep, 1)
        if not dist.is_available() or not dist.is_initialized():
            raise ProcessGroupError(
                "no process group: call torch.distributed.init_process_group(...) before "
                "TrainingCheckpoints; read_state_dict reads a checkpoint without one"
            )
        self._rank = dist.get_rank()
        kind = next(iter(dist.distributed_c10d._get_default_group()._device_types))
        # A group of its own: the thread that writes must not come between the collectives of the training.
        self._group = dist.new_group(backend="gloo", timeout=find_timeout(kind))
        self._writing: Future[None] | None = None
        if self._rank == 0:
            _warn_of_shared_store()
        with self._named("TrainingCheckpoints"):
            self._agree(self._on_first_rank(self._clean), CheckpointError)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait, and end the group of ranks that it writes by."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)

    def save(
        self,
        engine: ParallelEngine,
        optimizer: Optimizer,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy everything to the CPU, and write it while the training goes on.

        Waits for the save before this one, and raises what went wrong in it. Gradients are not saved. What is
        written stays, also where a training that went back finds later steps in the folder: these stay too
        then, and `load` takes the latest step; give another training a folder of its own.

        Args:
            engine: whose parameters and buffers are saved.
            optimizer: of `engine.parameters()`; torch's `ZeroRedundancyOptimizer` too, whose states are then
                saved as those of the optimizer that it divides.
            step: of the training.
            extra: what else is needed to go on (place in the data, schedulers): numbers, texts, None, small
                tensors, lists, tuples and mappings of such, the same on every rank. Tensors come back on the
                CPU.

        Raises:
            CheckpointError: the last save failed, or there is something that cannot be saved.
            ConfigError, ConfigTypeError: `step` or `extra` is none, or it is no engine or no optimizer.
        """
        self.wait()
        self._check(engine, optimizer)
        step = read_integer("step", step, 0)
        optimizer = optimizer_state.own_part(optimizer)
        names = optimizer_state.name_parameters(engine, optimizer)
        held = find_state(engine, optimizer, names)
        copies = {key: [piece.copied() for piece in pieces] for key, pieces in held.items()}
        try:
            text = json.dumps({"step": step, "extra": pack(dict(extra or {}))})
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"extra={extra!r} cannot be written as JSON: {error}") from error
        document = {
            **json.loads(text),
            "mesh": asdict(engine.devices.shape),
            "names": dict(engine.names.first),
            "sketches": dict(engine.names.sketches),
        }
        described = optimizer_state.describe(optimizer, names)
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = thread.submit(self._write, copies, document, described)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the last save is in place; call this before the process group is destroyed.

        Raises:
            CheckpointError: it could not be written.
            CommunicationError: another rank did not answer.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self, pieces: Mapping[str, list[Piece]], document: dict[str, Any], described: Mapping[str, Any]
    ) -> None:
        with self._named(f"save of step {document['step']}"), ExitStack() as stack:
            made: list[Path] = []
            problems = self._on_first_rank(
                lambda: made.append(stack.enter_context(scratch_folder(self._folder)) / "checkpoint")
            )
            gathered = self._gather((document, described["type"]))
            differing = [rank for rank, one in enumerate(gathered) if one != gathered[0]]
            if differing:
                raise RankMismatchError(
                    f"ranks {differing} save another step, extra or optimizer than rank 0: "
                    f"step {document['step']} and extra {document['extra']} here, on rank {self._rank}"
                )
            self._agree(problems, CheckpointError)
            scratch = next(iter(self._gather(made)))[0]
            try:
                save(
                    dict(pieces),
                    storage_writer=FileSystemWriter(scratch),
                    planner=PieceSavePlanner(),
                    process_group=self._group,
                )
            except CheckpointException as error:
                failed = ", ".join(f"rank {rank}: {one[0]}" for rank, one in error.failures.items())
                raise CheckpointError(f"cannot write {scratch}: {failed}") from error
            files: dict[str, Any] = {}
            problems = _try(lambda: files.update(describe_files(scratch, f"__{self._rank}_*")))
            self._agree(problems, CheckpointError)
            parts = self._gather((files, described))

            def finish() -> None:
                self._finish(scratch, document, parts)
                stack.close()  # before any rank hears that all is done

            self._agree(self._on_first_rank(finish), CheckpointError)

    def _finish(self, scratch: Path, document: dict[str, Any], parts: list[Any]) -> None:
        files = describe_files(scratch, ".metadata")
        for held, _ in parts:
            files |= held
        document |= {"files": files, "optimizer": optimizer_state.merge(one for _, one in parts)}
        with locked(self._folder):
            prune(self._folder, self._keep, put_in_place(scratch, self._folder, document))

    def latest(self) -> Path | None:
        """The newest checkpoint whose files have the right checksums; None if there is none at all.

        Every rank reads its share of the files. Those that were passed over are named in a warning.

        Raises:
            CheckpointCorruptError: there are checkpoints, and none is whole.
        """
        self.wait()
        with self._named("latest"):
            return self._find_newest()

    def load(
        self, engine: ParallelEngine, optimizer: Optimizer, *, step: int | None = None
    ) -> Resumed | None:
        """Restore an engine and its optimizer from the newest whole checkpoint, of whatever mesh.

        Args:
            engine: of the model that was saved.
            optimizer: of `engine.parameters()`, of the kind that was saved.
            step: whose checkpoint is wanted; the latest if None.

        Returns:
            The step to go on from, or None if the folder has no such checkpoint.

        Raises:
            CheckpointCorruptError: there are checkpoints, and none is whole.
            CheckpointMismatchError: it is of another model or optimizer; what differs is named.
        """
        self.wait()
        self._check(engine, optimizer)
        with self._named("load"):
            path = self._find_newest(step)
            if path is None:
                return None
            manifest, reader = read_manifest(path), PieceReader(path)
            extra = unpack(manifest.extra, path)
            part = optimizer_state.own_part(optimizer)
            names = optimizer_state.name_parameters(engine, part)
            stored = {key: (shape, dtype) for key, shape, dtype in reader.stored()}
            differences = find_differences(engine, part, names, manifest, stored)
            self._agree([f"{path}: {one}" for one in differences], CheckpointMismatchError)
            problems = _try(lambda: restore_state(engine, part, names, manifest, reader, stored))
            self._agree(problems, CheckpointError)
            optimizer_state.take_options(optimizer)
        return Resumed(manifest.step, extra, path)

    def _find_newest(self, step: int | None = None) -> Path | None:
        shown: list[Any] = [[path.name for path in list_checkpoints(self._folder, step)]]
        dist.broadcast_object_list(shown, 0, group=self._group)

        def damage(path: Path) -> list[str]:
            try:
                files = read_manifest(path).files
                share = sorted(files)[self._rank :: dist.get_world_size()]
                mine = find_damage(path, files, share)
            except CheckpointCorruptError as error:
                mine = [str(error)]
            return [one for part in self._gather(mine) for one in part]

        return _newest([self._folder / name for name in shown[0]], damage, tell=self._rank == 0)

    def _named(self, action: str) -> AbstractContextManager[None]:
        return named_failures(f"rank {self._rank}, {action}")

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def _agree(self, problems: list[str], error: type[PantherError]) -> None:
        """Raise on all ranks what went wrong on one, so that none waits for another."""
        everyone = self._gather(problems)
        messages = dict.fromkeys(one for mine in everyone for one in mine)
        if messages:
            raise error("; ".join(messages))

    @staticmethod
    def _check(engine: ParallelEngine, optimizer: Optimizer) -> None:
        if not isinstance(engine, ParallelEngine):
            raise ConfigTypeError(f"engine is a {type(engine).__name__}, wanted a ParallelEngine")
        if not isinstance(optimizer, Optimizer):
            raise ConfigTypeError(f"optimizer is a {type(optimizer).__name__}, wanted an Optimizer")

    def _on_first_rank(self, action: Callable[[], None]) -> list[str]:
        return _try(action) if self._rank == 0 else []

    def _clean(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder):
            sweep(self._folder)


def read_state_dict(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The model of the newest whole checkpoint of a folder, in one process: for `model.load_state_dict`.

    Args:
        folder: of `TrainingCheckpoints`, or one checkpoint of it.

    Returns:
        Parameters and buffers on the CPU, in the order and under the names of the model's own state dict.

    Raises:
        ConfigError, ConfigTypeError: the folder is no path.
        CheckpointError: there is no checkpoint.
        CheckpointCorruptError: there is none that is whole.
    """
    path = checked_path(folder, "folder")
    newest = _newest(list_checkpoints(path), _damage, tell=True)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    manifest, reader = read_manifest(newest), PieceReader(newest)
    names = manifest.names
    tensors = {
        key.removeprefix(MODEL): torch.empty(shape, dtype=dtype)
        for key, shape, dtype in reader.stored()
        if key.startswith(MODEL)
    }
    reader.read({MODEL + name: find_pieces(tensor, None, 1, 0) for name, tensor in tensors.items()})
    if missing := set(names.values()) - set(tensors):
        raise CheckpointCorruptError(f"{newest} names {min(missing)!r}, and holds no such tensor")
    return with_specs({name: tensors[first] for name, first in names.items()}, manifest.sketches)


def _try(action: Callable[[], None]) -> list[str]:
    """What went wrong, in words."""
    try:
        action()
    except (OSError, PantherError) as error:
        return [str(error)]
    return []


def _warn_of_shared_store() -> None:
    """Restarted ranks that share the store of torchrun may find the addresses of those that died.

    https://github.com/pytorch/pytorch/issues/135712
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        warnings.warn(
            "a restart by torchrun may hang, because torch keeps the addresses of processes that died: start "
            "it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment",
            stacklevel=3,
        )


def _damage(path: Path) -> list[str]:
    try:
        files = read_manifest(path).files
    except CheckpointCorruptError as error:
        return [str(error)]
    return find_damage(path, files, files)


def _newest(paths: Iterable[Path], find: Callable[[Path], list[str]], *, tell: bool) -> Path | None:
    """The first checkpoint without damage; None if there is none at all."""
    broken: list[str] = []
    for path in paths:
        damage = find(path)
        if not damage:
            if broken and tell:
                warnings.warn(f"{'; '.join(broken)}; {path} is taken instead", stacklevel=3)
            return path
        broken.append(f"{path} is damaged ({'; '.join(damage)})")
    if broken:
        raise CheckpointCorruptError(f"there is no whole checkpoint: {'; '.join(broken)}")
    return None
