"""Save a sketched model and load it again: safetensors and a JSON plan, never pickle.

A directory holds `sketch.json` and the weights file it names. The weights are written under a name made
from their checksum, then `sketch.json` is put in place in one step: a directory holds a whole checkpoint,
the old one or the new one, at every moment. Files that `sketch.json` no longer names are removed last.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVersionError,
    NoTargetError,
)
from panther_compile.layers import LAYER_TYPES
from panther_compile.layers.base import SketchedLayer, outermost
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.records import (
    RECORD_ATTRIBUTE,
    Choice,
    Fitted,
    LayerPlan,
    SketchPlan,
    SketchRecord,
    keep_record,
)
from panther_compile.substitute import copy_with
from panther_compile.trace import clone_structure

FORMAT, FORMAT_VERSION = "panther_compile.sketch", 1
PLAN_FILE = "sketch.json"
# "weights-", the first 16 hexadecimal digits of the checksum, ".safetensors"; no other file is ever removed.
_WEIGHTS_PATTERN = "weights-" + "[0-9a-f]" * 16 + ".safetensors"
Model = TypeVar("Model", bound=nn.Module)


def save_sketched(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a sketched model into a directory, whole or not at all.

    Args:
        model: a result of `sketchify`.
        directory: made if missing; a checkpoint already there is replaced.

    Raises:
        NoTargetError: the model holds no sketched layer.
        CheckpointError: a file cannot be written, or the model keeps state that safetensors cannot hold.
    """
    layers = list(outermost(model))
    if not layers:
        raise NoTargetError(f"{type(model).__name__} holds no sketched layer: call sketchify first")
    tensors, aliases = _split_aliases(_state(model))
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as scratch:
            weights, plan = Path(scratch, "weights"), Path(scratch, PLAN_FILE)
            save_file(tensors, weights)
            checksum = _file_sha256(weights)
            weights_name = f"weights-{checksum[:16]}.safetensors"
            document = {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "model": type(model).__name__,
                "weights": {"file": weights_name, "sha256": checksum},
                "aliases": aliases,
                "frozen": [n for n, p in _all_parameters(model).items() if not p.requires_grad],
                "layers": _layers_to_json(model, layers),
                "record": _record_to_json(model.__dict__.get(RECORD_ATTRIBUTE)),
            }
            document["sha256"] = _document_sha256(document)
            plan.write_text(json.dumps(document, indent=1))
            weights.chmod(plan.stat().st_mode)  # safetensors writes for the owner alone
            _flush(weights, plan)
            _put_in_place(weights, path / weights_name, plan, path / PLAN_FILE)
        for old in path.glob(_WEIGHTS_PATTERN):
            if old.name != weights_name:
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
        CheckpointError: there is no checkpoint, or it cannot be read.
        CheckpointCorruptError: it is truncated, or was changed after it was written.
        CheckpointVersionError: it was written by a newer format.
        CheckpointMismatchError: it is of another model than the skeleton.
    """
    path = Path(directory)
    document = _read_document(path)
    if device is None:
        device = next((p.device for p in skeleton.parameters() if not p.is_meta), torch.device("cpu"))
    tensors = _read_weights(path, document, torch.device(device))
    base: nn.Module = skeleton
    if isinstance(skeleton, fx.GraphModule):
        base = clone_structure(skeleton)
        lift_functional(base)  # type: ignore[arg-type]
    model = copy_with(base, _empty_layers(base, document, path))
    _fill(model, tensors, document, path)
    turn_off_nested_tensors(model)
    keep_record(model, _record_from_json(document["record"]))
    return model  # type: ignore[return-value]


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, non-persistent buffers too: a meta skeleton lacks them."""
    state = model.state_dict()
    state.update({name: b for name, b in _all_buffers(model).items() if name not in state})
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} is a {type(value).__name__}: safetensors holds tensors only")
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


def _layers_to_json(model: nn.Module, layers: list[SketchedLayer]) -> list[dict[str, Any]]:
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    return [
        {"name": names[id(layer)], "type": type(layer).__name__, "spec": layer.sketch_spec()}
        for layer in layers
    ]


def _record_to_json(record: SketchRecord | None) -> dict[str, Any] | None:
    return None if record is None else asdict(record)


def _record_from_json(record: dict[str, Any] | None) -> SketchRecord | None:
    if record is None:
        return None
    plan = record["plan"]
    lines = []
    for line in plan["layers"]:
        choice = line["choice"]
        if choice is not None:
            sharing = tuple(choice.get("sharing", ()))  # of a factor that is shared; there was none earlier
            link = tuple(choice.get("link", ()))
            choice = Choice(**choice | {"ranks": tuple(choice["ranks"]), "sharing": sharing, "link": link})
        lines.append(LayerPlan(**line | {"shape": tuple(line["shape"]), "choice": choice}))
    fitted = {name: Fitted(**one | {"ranks": tuple(one["ranks"])}) for name, one in record["fitted"].items()}
    return SketchRecord(SketchPlan(**plan | {"layers": tuple(lines)}), fitted)


def _read_document(path: Path) -> dict[str, Any]:
    file = path / PLAN_FILE
    try:
        document = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} holds no readable checkpoint: {error}") from error
    except ValueError as error:
        raise CheckpointCorruptError(f"{file} is not JSON, it was cut short or changed: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointCorruptError(f"{file} is not a {FORMAT} file")
    version = document.get("version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"{file} has format version {version!r}, this panther_compile reads up to {FORMAT_VERSION}: "
            "upgrade it"
        )
    if document.get("sha256") != _document_sha256(document):
        raise CheckpointCorruptError(f"{file} was changed after it was written: its checksum does not match")
    return document


def _read_weights(path: Path, document: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    name, wanted = document["weights"]["file"], document["weights"]["sha256"]
    file = path / Path(name).name
    try:
        found = _file_sha256(file)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{file} is missing, {PLAN_FILE} names it") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if found != wanted:
        raise CheckpointCorruptError(
            f"{file} was truncated or changed: its sha256 is {found[:16]}..., wanted {wanted[:16]}..."
        )
    try:
        # A copy: what load_file gives is mapped from the file and would change with it.
        tensors = {key: value.clone() for key, value in load_file(file, device=str(device)).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    tensors.update({alias: tensors[first] for alias, first in document["aliases"].items()})
    return tensors


def _empty_layers(skeleton: nn.Module, document: dict[str, Any], path: Path) -> dict[nn.Module, nn.Module]:
    """A sketched layer without data for each dense layer of the skeleton that was replaced."""
    new: dict[nn.Module, nn.Module] = {}
    for entry in document["layers"]:
        name = entry["name"]
        try:
            old = skeleton.get_submodule(name)
        except AttributeError as error:
            raise CheckpointMismatchError(
                f"{path} is a sketch of a {document['model']}; the skeleton, a {type(skeleton).__name__}, "
                f"has no layer {name!r}"
            ) from error
        layer_type = LAYER_TYPES.get(entry["type"])
        if layer_type is None:
            raise CheckpointVersionError(
                f"{path} holds a {entry['type']} ({name!r}), which this panther_compile does not know: "
                "upgrade it"
            )
        layer = layer_type(**entry["spec"], device="meta")
        _check_size(old, layer, name, document, path)
        new[old] = layer.train(old.training)
    return new


def _check_size(old: nn.Module, new: SketchedLayer, name: str, document: dict[str, Any], path: Path) -> None:
    """Raise CheckpointMismatchError unless `new` stands for a layer of the size of `old`."""
    numbers = sum(tensor.numel() for tensor in (*old.parameters(), *old.buffers()))
    if isinstance(old, SketchedLayer):
        numbers = old.dense_numbers
    old_weight, new_weight = getattr(old, "weight", None), getattr(new, "weight", None)
    found, wanted = getattr(old_weight, "shape", None), getattr(new_weight, "shape", None)
    if numbers != new.dense_numbers or found != wanted:
        raise CheckpointMismatchError(
            f"{path} is a sketch of a {document['model']} of another size: {name!r} replaces a layer of "
            f"{new.dense_numbers:,} numbers, the skeleton has a {type(old).__name__} of {numbers:,}"
            + (f" (weights {tuple(wanted)} and {tuple(found)})" if wanted and found else "")
        )


def _fill(model: nn.Module, tensors: dict[str, Tensor], document: dict[str, Any], path: Path) -> None:
    """Put the tensors into the model, tie what was tied, freeze what was frozen."""
    persistent = set(model.state_dict())
    buffers = _all_buffers(model)
    wanted, given = persistent | set(buffers), set(tensors)
    if wanted != given:
        missing, unexpected = sorted(wanted - given), sorted(given - wanted)
        raise CheckpointMismatchError(
            f"{path} is a sketch of a {document['model']}, which does not fit the skeleton, a "
            f"{type(model).__name__}: {len(missing)} tensors missing ({', '.join(missing[:3])}), "
            f"{len(unexpected)} unexpected ({', '.join(unexpected[:3])})"
        )
    _check_shapes(model, tensors, document, path)
    frozen = set(document["frozen"])
    parameters = _all_parameters(model)
    made: dict[str, nn.Parameter] = {}
    for name in parameters:
        first = document["aliases"].get(name, name)
        if first not in made:
            made[first] = nn.Parameter(tensors[first], name not in frozen)
        owner, leaf = _owner(model, name)
        owner._parameters[leaf] = made[first]
    for name in buffers:
        owner, leaf = _owner(model, name)
        owner._buffers[leaf] = tensors[name]
    for name in persistent - set(parameters) - set(buffers):  # the extra state of a module, as a tensor
        _owner(model, name)[0].set_extra_state(tensors[name])


def _check_shapes(model: nn.Module, tensors: dict[str, Tensor], document: dict[str, Any], path: Path) -> None:
    for name, tensor in (_all_parameters(model) | _all_buffers(model)).items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointMismatchError(
                f"{path} is a sketch of a {document['model']} of another size: {name} has shape "
                f"{tuple(tensors[name].shape)}, the skeleton wants {tuple(tensor.shape)}"
            )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _put_in_place(weights: Path, weights_place: Path, plan: Path, plan_place: Path) -> None:
    """Move both files to where they belong, the plan last; if that fails, leave the old checkpoint alone."""
    is_new = not weights_place.exists()
    os.replace(weights, weights_place)
    try:
        os.replace(plan, plan_place)  # from here on the new checkpoint is the one in place
    except BaseException:
        if is_new:
            weights_place.unlink()
        raise


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _document_sha256(document: dict[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _flush(*files: Path) -> None:
    """Have the files on disk before they are put in place."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
