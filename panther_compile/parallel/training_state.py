"""What a checkpoint holds of a training: every tensor by its key, and how it is put back.

model.NAME             parameters and buffers
replica.DP.NAME        buffers of the replicas but the first: statistics of batch norms are each one's own
optimizer.KEY.NAME     "exp_avg", "momentum_buffer", ...
rng.DEVICE.RANK        state of torch's generators, restored on the mesh that it was saved on

Tied tensors go by their first name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from panther_compile.errors import some_names
from panther_compile.parallel import optimizer_state
from panther_compile.parallel.checkpoint_folder import Manifest
from panther_compile.parallel.engine import ParallelEngine
from panther_compile.parallel.model_state import held_buffers, held_parameters
from panther_compile.parallel.pieces import Piece, PieceReader, find_pieces, whole_shape

MODEL = "model."

Names = Mapping[Tensor, str]
Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def find_state(engine: ParallelEngine, optimizer: Optimizer, names: Names) -> dict[str, list[Piece]]:
    """What this rank holds, in place; of several copies, the first.

    Args:
        engine: of this rank.
        optimizer: likewise.
        names: of its parameters.
    """
    found = {key: _pieces(engine, name, held[0]) for key, (name, held) in _model_tensors(engine).items()}
    parameters = {name: parameter for parameter, name in names.items()}
    for name, state in optimizer_state.find_tensors(optimizer, names).items():
        parameter = parameters[name]
        is_divided = isinstance(parameter, DTensor) or name in engine.layouts
        for key, value in state.items():
            whole = optimizer_state.follows(value, parameter, is_divided=is_divided)
            found[f"optimizer.{key}.{name}"] = (
                _pieces(engine, name, value) if whole else find_pieces(value, None, 1, 0)
            )
    for device, value in _generators(engine):
        found[f"rng.{device}.{engine.devices.rank}"] = find_pieces(value, None, 1, 0)
    return found


def find_differences(
    engine: ParallelEngine, optimizer: Optimizer, names: Names, manifest: Manifest, stored: Stored
) -> Iterator[str]:
    """Why a checkpoint cannot be that of an engine and an optimizer, one line each.

    Args:
        engine: of this rank.
        optimizer: likewise.
        names: of its parameters.
        manifest: of the checkpoint.
        stored: shape and dtype of its tensors.
    """
    own, theirs = set(engine.names.first.values()), set(manifest.names.values())
    if own - theirs:
        yield f"it lacks {some_names(own - theirs)} of this model"
    if theirs - own:
        yield f"this model lacks {some_names(theirs - own)} of it"
    yield from engine.names.other_sketches(manifest.sketches)
    for key, (name, held) in _model_tensors(engine).items():
        wanted = whole_shape(held[0], engine.layouts.get(name), engine.devices.shape.tp), held[0].dtype
        has = stored.get(_stored_key(key, name, stored), wanted)
        if has != wanted:
            yield f"{name} is {_form_text(*wanted)} in this model and {_form_text(*has)} in it"
    if own == theirs:
        yield from optimizer_state.find_differences(optimizer, names, manifest.optimizer, engine.task.unread)


def restore_state(
    engine: ParallelEngine,
    optimizer: Optimizer,
    names: Names,
    manifest: Manifest,
    reader: PieceReader,
    stored: Stored,
) -> None:
    """Read what this rank needs, and put it into the engine, the optimizer and torch's generators.

    Args:
        engine: of this rank.
        optimizer: likewise.
        names: of its parameters.
        manifest: of the checkpoint.
        reader: of its tensors.
        stored: shape and dtype of each.
    """
    model = _model_tensors(engine)
    wanted = {
        _stored_key(key, name, stored): _pieces(engine, name, held[0]) for key, (name, held) in model.items()
    }
    state: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in names}
    copies: dict[str, list[Tensor]] = {}
    for parameter, name in names.items():
        copies.setdefault(name, []).append(parameter)
    for stored_key, (shape, dtype) in stored.items():
        kind, _, rest = stored_key.partition(".")
        key, _, name = rest.partition(".")
        if kind != "optimizer" or name not in copies:
            continue
        parameter = copies[name][0]
        if shape == whole_shape(parameter, engine.layouts.get(name), engine.devices.shape.tp):
            value = torch.zeros_like(parameter.detach(), dtype=dtype)
            wanted[stored_key] = _pieces(engine, name, value)
        else:
            value = torch.zeros(shape, dtype=dtype)
            wanted[stored_key] = find_pieces(value, None, 1, 0)
        for copy in copies[name]:  # load_state_dict copies it
            state[copy][key] = value
    generators = {}
    if manifest.mesh == asdict(engine.devices.shape):
        for device, value in _generators(engine):
            key = f"rng.{device}.{engine.devices.rank}"
            if key in stored:
                generators[device] = value
                wanted[key] = find_pieces(value, None, 1, 0)
    reader.read(wanted)
    with torch.no_grad():
        for _, held in model.values():
            for other in held[1:]:
                other.copy_(held[0])
    optimizer_state.restore(optimizer, names, state, manifest.optimizer)
    for device, value in generators.items():
        if device == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(device).set_rng_state(value, engine.devices.device)


def _model_tensors(engine: ParallelEngine) -> dict[str, tuple[str, list[Tensor]]]:
    """Key -> name and copies of each tensor of this rank that is part of the model's state dict."""
    kept = set(engine.names.first.values())
    found: dict[str, tuple[str, list[Tensor]]] = {}

    def add(key: str, name: str, tensor: Tensor) -> None:
        if name in kept:
            found.setdefault(key, (name, []))[1].append(tensor)

    replica = engine.devices.dp
    for stage in engine.stages.values():
        for name, parameter in held_parameters(stage):
            add(MODEL + name, name, parameter)
        for name, buffer in held_buffers(stage):
            add(f"replica.{replica}.{name}" if replica else MODEL + name, name, buffer)
    for name, tensor in engine.names.rest.items():
        add(MODEL + name, name, tensor)
    return found


def _stored_key(key: str, name: str, stored: Iterable[str]) -> str:
    """The key of a tensor in a checkpoint: a replica that was not saved is like the first."""
    return key if key in stored else MODEL + name


def _pieces(engine: ParallelEngine, name: str, tensor: Tensor) -> list[Piece]:
    return find_pieces(tensor, engine.layouts.get(name), engine.devices.shape.tp, engine.devices.tp)


def _generators(engine: ParallelEngine) -> Iterator[tuple[str, Tensor]]:
    """States of the generators that dropout on this rank draws from."""
    yield "cpu", torch.get_rng_state()
    device = engine.devices.device
    if device.type != "cpu":
        yield device.type, torch.get_device_module(device.type).get_rng_state(device)


def _form_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} of {str(dtype).removeprefix('torch.')}"
