"""Save a sketched model and load it again: safetensors and a JSON plan, never pickle.

A directory holds `sketch.json` and the weights file it names. The weights are written under a name made
from their checksum, then `sketch.json` is put in place in one step: a directory holds a whole checkpoint,
the old one or the new one, at every moment. Files that `sketch.json` no longer names are removed last.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from panther_compile.config import OF_CLASS, check_device, check_is_module
from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from panther_compile.kinds.plain_form import note_origin, plain_form
from panther_compile.kinds.registry import described_layer
from panther_compile.layers.base import (
    SketchedLayer,
    check_held,
    keeps_numbers_elsewhere,
    sketched_layers,
)
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.models.substitute import check_plain_tensors, copy_with, warn_of_functions
from panther_compile.models.wrapped import unwrapped
from panther_compile.names import dotted, is_persistent, owner_of
from panther_compile.planning.own_weights import lifted, lower_own_weights
from panther_compile.planning.sites import check_module
from panther_compile.records import RECORD_ATTRIBUTE, SketchRecord, keep_record
from panther_compile.storage import (
    checked_path,
    file_sha256,
    flush,
    locked,
    read_document,
    scratch_folder,
    write_document,
)
from panther_compile.typed_json import read_record

FORMAT, FORMAT_VERSION = "panther_compile.sketch", 1
PLAN_FILE = "sketch.json"
# "weights-", the first 16 hexadecimal digits of the checksum, ".safetensors"; no other file is ever removed.
_WEIGHTS_NAME = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The file of all tensors, and its checksum."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """A sketched layer: its name in the model, its type, and its `sketch_spec`."""

    name: str
    type: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SketchDocument:
    """What `sketch.json` holds.

    Attributes:
        format: FORMAT.
        version: FORMAT_VERSION, or an earlier one.
        model: name of the model's class.
        weights: where the tensors are.
        aliases: other names of a tensor that is stored under its first one.
        frozen: names of parameters that need no gradient.
        layers: the sketched layers.
        record: what was done to the model; None if that is not known.
        sha256: the checksum of all the rest.
    """

    format: str
    version: int
    model: str
    weights: WeightsFile
    aliases: dict[str, str]
    frozen: list[str]
    layers: list[SavedLayer]
    record: SketchRecord | None
    sha256: str


def save_sketched(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a sketched model into a directory, whole or not at all.

    Args:
        model: a result of `sketchify`; what torch.compile or DDP wraps, the model or parts of it, is saved
            without that.
        directory: made if missing; a checkpoint already there is replaced.

    Raises:
        ConfigTypeError: the model is no module, or the directory no path.
        NoTargetError: the model holds no sketched layer.
        CheckpointError: a file cannot be written, the model keeps state that safetensors cannot hold, or a
            factor makes its weight of other tensors.
    """
    path = checked_path(directory, "directory")
    check_is_module("model", model)
    model = unwrapped(model)
    advice = "call sketchify first"
    if RECORD_ATTRIBUTE in vars(model):
        advice = "all its layers are dense, and torch.save(model.state_dict()) keeps them"
    layers = sketched_layers(model, advice)
    check_held(model, "call save_sketched")
    tensors, aliases = _split_aliases(_state(model))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with scratch_folder(path) as scratch:
            weights, plan = scratch / "weights", scratch / PLAN_FILE
            save_file(tensors, weights)
            checksum = file_sha256(weights)
            weights_name = f"weights-{checksum[:16]}.safetensors"
            document = {
                "model": type(model).__name__,
                "weights": {"file": weights_name, "sha256": checksum},
                "aliases": aliases,
                "frozen": [n for n, p in _all_parameters(model).items() if not p.requires_grad],
                "layers": layers_to_json(model, layers),
                "record": record_to_json(model.__dict__.get(RECORD_ATTRIBUTE)),
            }
            write_document(plan, document, FORMAT, FORMAT_VERSION)
            weights.chmod(plan.stat().st_mode)  # safetensors writes for the owner alone
            flush(weights, plan)
            with locked(path):
                _put_in_place(weights, path / weights_name, plan, path / PLAN_FILE)
                flush(path)
                for old in path.iterdir():
                    if _WEIGHTS_NAME.fullmatch(old.name) and old.name != weights_name:
                        old.unlink()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from error


def load_sketched(
    skeleton: Model, directory: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> Model:
    """Rebuild a sketched model from a directory and the dense architecture.

    Args:
        skeleton: a model of the architecture that was sketched; it is not changed, its weights are not
            used, and it may be on the meta device.
        directory: written by `save_sketched`.
        device: where the weights go; default is where the skeleton is, or the CPU for a meta skeleton.

    Raises:
        ConfigError, ConfigTypeError: the skeleton, the directory or the device is none, or numbers lack.
        WrappedModelError: the skeleton, or a part of it, is wrapped in DDP, FSDP or torch.compile.
        CheckpointError: there is no checkpoint, or it cannot be read.
        CheckpointCorruptError: it is truncated, was changed after it was written, or describes no sketch.
        CheckpointVersionError: it was written by a newer format.
        CheckpointMismatchError: it is of another model than the skeleton.
    """
    path = checked_path(directory, "directory")
    check_is_module("skeleton", skeleton)
    check_module(skeleton)
    warn_of_functions(skeleton, "", stacklevel=2)
    if device is None:
        device = next((p.device for p in skeleton.parameters() if not p.is_meta), torch.device("cpu"))
    check_device(device)
    document, tensors = _read(path, torch.device(device))
    base = lifted(skeleton)
    model = copy_with(base, empty_layers(base, document.layers, document.model, path))
    lower_own_weights(model)
    _fill(model, tensors, document, path)
    check_plain_tensors(model)
    turn_off_nested_tensors(model)
    keep_record(model, document.record)
    return model  # type: ignore[return-value]


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, non-persistent buffers too: a meta skeleton lacks them."""
    state = model.state_dict()
    state.update({name: b for name, b in _all_buffers(model).items() if name not in state})
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} is a {type(value).__name__}: safetensors holds tensors only")
        if isinstance(value, UninitializedParameter | UninitializedBuffer) or keeps_numbers_elsewhere(value):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, and safetensors holds no numbers of it: save the model "
                "before it is quantized or sharded, and do that again after load_sketched"
            )
        if value.is_meta:
            raise CheckpointError(f"{name} is on the meta device: there is nothing to save")
        if value.layout != torch.strided or value.is_quantized or value.dtype == torch.complex128:
            raise CheckpointError(f"{name} is {value.layout} of {value.dtype}: safetensors does not hold it")
    return state


def _all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by name, a shared one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _all_buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _empty_buffers(model: nn.Module) -> set[str]:
    """The buffers that no state dict has, and that hold nothing yet."""
    return {
        dotted(prefix, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is None and not is_persistent(module, name)
    }


def _split_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors by their first name, and {other name: first name} of those that are shared."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, str(value.device))
        owner = first.setdefault(key, name) if value.numel() else name
        if owner != name:
            aliases[name] = owner
        else:
            # A view into another tensor is written on its own: safetensors refuses overlaps.
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def layers_to_json(model: nn.Module, layers: list[SketchedLayer]) -> list[dict[str, Any]]:
    """The name, type and `sketch_spec` of each layer: what `empty_layers` needs to make it again."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    return [
        {"name": names[id(layer)], "type": type(layer).__name__, "spec": layer.sketch_spec()}
        for layer in layers
    ]


def record_to_json(record: SketchRecord | None) -> dict[str, Any] | None:
    """The record in JSON values; None of none."""
    return None if record is None else asdict(record)


def record_from_json(record: object, where: str) -> SketchRecord | None:
    """What `record_to_json` was given; raises CheckpointError if it is no record."""
    return None if record is None else read_record(SketchRecord, record, where)


def _read(path: Path, device: torch.device) -> tuple[SketchDocument, dict[str, Tensor]]:
    """The plan and the tensors that belong together; again, if a writer has replaced them meanwhile."""
    while True:
        before = _stamp(path / PLAN_FILE)
        try:
            document = _read_document(path)
            return document, _read_weights(path, document, device)
        except CheckpointError:
            if _stamp(path / PLAN_FILE) == before:
                raise


def _stamp(file: Path) -> tuple[int, ...] | None:
    """What changes when a file is replaced; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_document(path: Path) -> SketchDocument:
    file = path / PLAN_FILE
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} holds no readable checkpoint: {error}") from error
    return read_record(SketchDocument, read_document(text, file, FORMAT, FORMAT_VERSION), str(file))


def _read_weights(path: Path, document: SketchDocument, device: torch.device) -> dict[str, Tensor]:
    name, wanted = document.weights.file, document.weights.sha256
    if not _WEIGHTS_NAME.fullmatch(name):
        raise CheckpointCorruptError(
            f"{path / PLAN_FILE} names its weights {name!r}, wanted weights-<16 hexadecimal digits>"
            ".safetensors"
        )
    file = path / name
    try:
        found = file_sha256(file)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{file} is missing, {PLAN_FILE} names it") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if found != wanted:
        raise CheckpointCorruptError(
            f"{file} was truncated or changed: its sha256 is {found[:16]}..., wanted {wanted[:16]}..."
        )
    try:
        with safe_open(file, framework="pt") as held:
            # Copies: what is read is mapped from the file and would change with it.
            tensors = {key: held.get_tensor(key).to(device, copy=True) for key in held.keys()}  # noqa: SIM118
    except torch.OutOfMemoryError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # the last where a writer has just removed it
        raise CheckpointError(f"cannot read {file}: {error}") from error
    wrong = [alias for alias, first in document.aliases.items() if first not in tensors or alias in tensors]
    if wrong:
        raise CheckpointCorruptError(
            f"{path / PLAN_FILE} calls {wrong[0]!r} another name of {document.aliases[wrong[0]]!r}, wanted a "
            f"tensor of {file.name}, and a name that is none"
        )
    return tensors | {alias: tensors[first] for alias, first in document.aliases.items()}


def empty_layers(
    skeleton: nn.Module, layers: Iterable[SavedLayer], model: str, path: str | Path
) -> dict[nn.Module, nn.Module]:
    """A sketched layer without data for each dense layer of the skeleton that was replaced.

    Args:
        skeleton: a model of the architecture that was sketched.
        layers: see `layers_to_json`.
        model: the class that was sketched.
        path: where it was read, for messages.

    Raises:
        CheckpointCorruptError: no layer can be made of what is said of one.
        CheckpointMismatchError: the skeleton lacks a layer, or has it in another size.
        CheckpointVersionError: a type of layer, or one of its arguments, is not known here.
    """
    new: dict[nn.Module, nn.Module] = {}
    for entry in layers:
        try:
            old = skeleton.get_submodule(entry.name)
        except AttributeError as error:
            raise CheckpointMismatchError(
                f"{path} is a sketch of a {model}; the skeleton, a {type(skeleton).__name__}, "
                f"has no layer {entry.name!r}"
            ) from error
        layer = described_layer(entry.type, entry.spec, f"{path}: {entry.name!r}").adopt(old)
        _check_size(old, layer, entry.name, model, path)
        new[old] = note_origin(old, layer).train(old.training)
    return new


# What a layer and the one that it replaces have in common, and no tensor tells.
_GEOMETRY = (
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
    "num_heads",
    "batch_first",
    "add_zero_attn",
)


def _check_size(old: nn.Module, new: SketchedLayer, name: str, model: str, path: str | Path) -> None:
    """Raise CheckpointMismatchError unless `new` stands for a layer of the size of `old`."""
    plain = plain_form(old)
    numbers = sum(tensor.numel() for tensor in (*plain.parameters(), *plain.buffers()))
    if isinstance(old, SketchedLayer):
        numbers = old.dense_numbers
    elif OF_CLASS in vars(old) and getattr(new, "bias", None) is None:  # the module around it has the bias
        numbers -= sum(one.numel() for key, one in old.named_parameters(recurse=False) if key == "bias")
    old_weight, new_weight = getattr(plain, "weight", None), getattr(new, "weight", None)
    found, wanted = getattr(old_weight, "shape", None), getattr(new_weight, "shape", None)
    if numbers != new.dense_numbers or found != wanted:
        raise CheckpointMismatchError(
            f"{path} is a sketch of a {model} of another size: {name!r} replaces a layer of "
            f"{new.dense_numbers:,} numbers, the skeleton has a {type(old).__name__} of {numbers:,}"
            + (f" (weights {tuple(wanted)} and {tuple(found)})" if wanted and found else "")
        )
    for option in _GEOMETRY:
        given, asked = getattr(new, option, None), getattr(plain, option, None)
        if given is not None and asked is not None and given != asked:
            raise CheckpointMismatchError(
                f"{path} is a sketch of a {model} with another {name!r}: its {option} is {given}, "
                f"the skeleton's {asked}"
            )


def _fill(model: nn.Module, tensors: dict[str, Tensor], document: SketchDocument, path: Path) -> None:
    """Put the tensors into the model, tie what was tied, freeze what was frozen."""
    _drop_parametrizations(model, tensors)
    persistent, buffers = set(model.state_dict()), _all_buffers(model)
    device = next((tensor.device for tensor in tensors.values()), None)
    for name, buffer in buffers.items():
        owner, leaf = owner_of(model, name)
        if isinstance(owner, NarrowLinear) and leaf == "places" and name not in tensors:
            tensors[name] = owner.first_places(device)  # as it was before narrow layers kept them
        if leaf == "trailing":
            tensors.setdefault(name, buffer.to(device))  # likewise
    # What a model works out for itself, as tables of positions, may be of another size, or not there yet.
    empty = _empty_buffers(model) & set(tensors)
    wanted, given = persistent | set(buffers) | empty, set(tensors)
    if wanted != given:
        missing, unexpected = sorted(wanted - given), sorted(given - wanted)
        raise CheckpointMismatchError(
            f"{path} is a sketch of a {document.model}, which does not fit the skeleton, a "
            f"{type(model).__name__}: {len(missing)} tensors missing ({', '.join(missing[:3])}), "
            f"{len(unexpected)} unexpected ({', '.join(unexpected[:3])})"
        )
    _check_tensors(model, tensors, document, path)
    frozen = set(document.frozen)
    parameters = _all_parameters(model)
    made: dict[str, nn.Parameter] = {}
    for name in parameters:
        first = document.aliases.get(name, name)
        if first not in made:
            made[first] = nn.Parameter(tensors[first], name not in frozen)
        owner, leaf = owner_of(model, name)
        owner._parameters[leaf] = made[first]
    for name in (*buffers, *empty):
        owner, leaf = owner_of(model, name)
        owner._buffers[leaf] = tensors[name]
    for name in persistent - set(parameters) - set(buffers):  # the extra state of a module, as a tensor
        owner_of(model, name)[0].set_extra_state(tensors[name])


def _drop_parametrizations(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Have weights that are stored as they are, not as what makes them, be so in the model."""
    for name, module in model.named_modules():
        for key in list(module.parametrizations) if parametrize.is_parametrized(module) else ():
            if dotted(name, key) in tensors:
                parametrize.remove_parametrizations(module, key)


def _check_tensors(
    model: nn.Module, tensors: dict[str, Tensor], document: SketchDocument, path: Path
) -> None:
    """Raise CheckpointMismatchError unless what is saved fits; of what is worked out only the type counts."""
    parameters = _all_parameters(model)
    for name, tensor in (parameters | _all_buffers(model)).items():
        is_kept = name in parameters or is_persistent(model, name)
        if is_kept and tensor.shape != tensors[name].shape:
            raise CheckpointMismatchError(
                f"{path} is a sketch of a {document.model} of another size: {name} has shape "
                f"{tuple(tensors[name].shape)}, the skeleton wants {tuple(tensor.shape)}"
            )
        if _holds_fractions(tensor) != _holds_fractions(tensors[name]):
            raise CheckpointMismatchError(
                f"{path} is a sketch of a {document.model} with other numbers: {name} is "
                f"{tensors[name].dtype}, the skeleton's {tensor.dtype}"
            )


def _holds_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _put_in_place(weights: Path, weights_place: Path, plan: Path, plan_place: Path) -> None:
    """Move both files to where they belong, the plan last; if that fails, leave the old checkpoint alone."""
    is_new = not weights_place.exists()
    os.replace(weights, weights_place)
    try:
        os.replace(plan, plan_place)  # from here on the new checkpoint is the one in place
    except BaseException:
        if is_new and plan.exists():  # an interrupt may come right after the plan was put in place
            weights_place.unlink()
        raise
