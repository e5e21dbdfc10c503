"""A folder in which the work on a model is kept as it is done, so that a later call need not do it again.

    calibration.json            what it is the work of: model, data, options
    study.safetensors           the study of the dense model
    tried-<how>-<plan>.json     how a plan did on held-out data
    layers-<plan>/*.safetensors one file for each fitted layer

Ratios share a folder: they share the study, and each plan has its own layers.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.narrow import Between
from panther_compile.calibration.study import Study
from panther_compile.calibration.work_folder import WorkFolder, file_of_layer
from panther_compile.config import SketchConfig
from panther_compile.errors import CheckpointError
from panther_compile.kinds.kernel_metric import PatchMoments
from panther_compile.kinds.registry import described_layer
from panther_compile.layers.base import SketchedLayer, copy_into, take_over
from panther_compile.models.batches import Call
from panther_compile.planning.coupled import Coupling, CouplingLosses
from panther_compile.records import Fitted, SketchPlan
from panther_compile.tensors_on_disk import TensorsOnDisk
from panther_compile.typed_json import read_record

FORMAT = "panther_compile.calibration 8"
MANIFEST, STUDY = "calibration.json", "study.safetensors"
_SINGLE = ("values", "weights", "shares")  # of a study: a tensor of a name
_PARTS = {"factors": 3, "links": 6, "patches": 4}  # several
# Options that change no study and no layer of a given plan; the layers found stand for the selectors.
_FREE = ("ratio", "cache_ratio", "include", "exclude", "inplace", "progress", "refine")

FittedLayer = tuple[SketchedLayer, Fitted]


@dataclass(frozen=True, slots=True)
class KeptStudy:
    """What a study holds beside tensors, see `Study`.

    Attributes:
        costs: see `Study`; so for the next four.
        power: of kernels.
        reached: rows of a unit.
        shared: sets of layers of one input.
        ridge: on second moments.
        links: its couplings, and what is lost without each.
    """

    costs: dict[str, float]
    power: dict[str, float]
    reached: dict[str, int]
    shared: list[list[list[str]]]
    ridge: float
    links: list[tuple[Coupling, float]]


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A fitted layer: its type, its `sketch_spec`, and what came of its weight."""

    type: str
    spec: dict[str, Any]
    fitted: Fitted


@dataclass(frozen=True, slots=True)
class KeptTrial:
    """Distances of a plan's results on held-out batches."""

    distances: list[float]


class CalibrationFolder(WorkFolder):
    """Work on one model, data and options.

    Args:
        path: made if missing.
        identity: what decides whose work it is, see `identity_of`.

    Raises:
        ConfigTypeError: the path is none.
        ResumeError: the folder holds the work of another run, or other files, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, str]) -> None:
        super().__init__(path, MANIFEST, {"format": FORMAT, **identity})

    def study(self, device: torch.device, disk: TensorsOnDisk | None = None) -> Study | None:
        """The study kept here, None if there is none; mapped from its file where tensors are kept on disk."""
        record = self.read_record(STUDY)
        if record is None:
            return None
        tensors = self._copies(STUDY, device) if disk is None else disk.tensors(self.path / STUDY)
        with self.refusing_changes(STUDY):
            found = read_record(KeptStudy, record, "the record")
            plain = {
                field.name: getattr(found, field.name) for field in fields(found) if field.name != "links"
            }
            study = Study(**plain, disk=disk)
            parts: dict[tuple[str, str], list[Tensor]] = {}
            for key, tensor in sorted(tensors.items()):  # by the place of a part, where there are several
                kind, _, name = key.partition("/")
                if kind in _PARTS:
                    parts.setdefault((kind, name.partition("/")[2]), []).append(tensor)
                elif kind in _SINGLE:
                    getattr(study, kind)[name] = tensor
                elif kind == "energies":
                    scheme, _, unit = name.partition("/")
                    study.energies.setdefault(unit, {})[scheme] = tensor.cpu()
            for (kind, name), held in parts.items():
                if len(held) != _PARTS[kind]:
                    raise CheckpointError(f"{len(held)} parts of {name!r}, wanted {_PARTS[kind]}")
            for coupling, total in found.links:
                *between, counts, narrowed, members = parts.pop(("links", coupling.name))
                study.between[coupling.name] = Between(*between)
                study.losses[coupling.name] = CouplingLosses(
                    coupling, counts.cpu(), narrowed.cpu(), members.cpu(), total
                )
            factors = {
                name: (one[0], one[1], one[2]) for (kind, name), one in parts.items() if kind == "factors"
            }
            study.factors.update(factors)
            patches = {
                name: PatchMoments(one[0], one[1], one[2], one[3])
                for (kind, name), one in parts.items()
                if kind == "patches"
            }
            study.patches.update(patches)
        return study

    def keep_study(self, study: Study) -> None:
        """Keep it; raises ResumeError if it cannot be written."""
        tensors = {f"{kind}/{name}": t for kind in _SINGLE for name, t in getattr(study, kind).items()}
        for name, kept in study.energies.items():
            tensors |= {f"energies/{scheme}/{name}": t for scheme, t in kept.items()}
        for name, parts in study.factors.items():
            tensors |= {f"factors/{place}/{name}": part for place, part in enumerate(parts)}
        for name, moments in study.patches.items():
            of_patches = (moments.channels, moments.above, moments.beside, moments.mean)
            tensors |= {f"patches/{place}/{name}": part for place, part in enumerate(of_patches)}
        for name, lost in study.losses.items():
            one = study.between[name]
            told_of = (one.basis, one.covariance, one.mean, lost.kept, lost.narrowed, lost.members)
            tensors |= {f"links/{place}/{name}": part for place, part in enumerate(told_of)}
        record = {key.name: getattr(study, key.name) for key in fields(KeptStudy) if key.name != "links"}
        record["links"] = [(asdict(one.coupling), one.total) for one in study.losses.values()]
        self.write_tensors(STUDY, tensors, record)

    def tried(self, plan: SketchPlan, how: str, batches: int) -> list[float] | None:
        """How a plan did on so many batches, its layers made in that way; None if it is not kept."""
        name = _trial_file(plan, how)
        kept = self.read_json(name)
        if kept is None:
            return None
        with self.refusing_changes(name):
            tried = read_record(KeptTrial, kept, "it").distances
            if len(tried) != batches:
                raise CheckpointError(f"it has {len(tried)} distances, wanted {batches}")
        return tried

    def keep_tried(self, plan: SketchPlan, how: str, distances: Sequence[float]) -> None:
        """Keep it; raises ResumeError if it cannot be written."""
        self.write_json(_trial_file(plan, how), {"distances": list(distances)})

    def layer(self, plan: SketchPlan, name: str, dense: nn.Module) -> FittedLayer | None:
        """The layer that was fitted in the place of a dense one, None if it was not yet."""
        weight: Any = dense.weight
        file = _layer_file(plan, name)
        record = self.read_record(file)
        if record is None:
            return None
        tensors = self._copies(file, weight.device)
        with self.refusing_changes(file):
            found = read_record(KeptLayer, record, "the record")
            layer = described_layer(found.type, found.spec, name, weight.dtype)
            stands_for: Any = layer.weight
            if stands_for.shape != weight.shape:
                raise CheckpointError(
                    f"its weight is {tuple(stands_for.shape)}, wanted {tuple(weight.shape)}"
                )
            held = layer.state_dict(keep_vars=True)
            shapes = {key: (tuple(one.shape), one.dtype) for key, one in held.items()}
            if shapes != {key: (tuple(one.shape), one.dtype) for key, one in tensors.items()}:
                raise CheckpointError(f"its tensors are not those of a {found.type} of that spec")
        layer = layer.to_empty(device=weight.device)
        for key, one in layer.state_dict(keep_vars=True).items():
            copy_into(one, tensors[key])
        take_over(layer, dense, weight.requires_grad)
        return layer, found.fitted

    def keep_layer(self, plan: SketchPlan, name: str, layer: SketchedLayer, fitted: Fitted) -> None:
        """Keep it; raises ResumeError if it cannot be written."""
        record = {"type": type(layer).__name__, "spec": layer.sketch_spec(), "fitted": asdict(fitted)}
        self.write_tensors(_layer_file(plan, name), layer.state_dict(), record)

    def _copies(self, file: str, device: torch.device) -> dict[str, Tensor]:
        """The tensors of a file, in memory."""
        return {key: tensor.clone() for key, tensor in self.read_tensors(file, device)}


def identity_of(
    model: nn.Module, layers: Sequence[str], config: SketchConfig, calls: Sequence[Call]
) -> dict[str, str]:
    """What decides whether two runs do the same work, as words and hashes.

    Args:
        model: its structure and all its tensors count.
        layers: names of those that were found.
        config: the options.
        calls: the data; of what is neither a tensor nor a plain value in it only the type counts.
    """
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    structure = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    words: list[str] = []
    digest = hashlib.sha256()
    for call in calls:
        before = len(words)
        _describe([call.args, call.kwargs], words, digest)
        words[before:] = [" ".join(words[before:])]
    shapes = "; ".join(dict.fromkeys(words))
    digest.update("\n".join(words).encode())
    options = {
        field.name: str(getattr(config, field.name)) for field in fields(config) if field.name not in _FREE
    }
    return {
        "model": f"{type(model).__name__}, {len(state)} tensors, {_hash_of(structure, state)}",
        "data": f"{len(calls)} batches of {shapes[:200]}, {digest.hexdigest()[:16]}",
        "layers": f"{len(layers)}, {_hash_of(layers, {})}",
        "torch": torch.__version__,
        **{f"option {name}": value for name, value in options.items()},
    }


def _describe(value: Any, words: list[str], digest: Any) -> None:
    """Add what a value is, in words, and the bytes of its tensors."""
    if isinstance(value, Tensor):
        words.append(f"{'x'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}")
        digest.update(_bytes_of(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            words.append(f"{key}:")
            _describe(item, words, digest)
    elif isinstance(value, list | tuple):
        for item in value:
            _describe(item, words, digest)
    else:
        plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        words.append(repr(value) if plain else type(value).__qualname__)


def _hash_of(words: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256("\n".join(words).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()[:16]


def _bytes_of(tensor: Tensor) -> Any:
    """The numbers of a tensor as bytes, which a hash takes fast enough to take all; none if it is sparse."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return b""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _key(plan: SketchPlan) -> str:
    """A key of what the plan does, not of how it came about."""
    done = [
        (line.name, line.choice.scheme, line.choice.ranks, line.choice.sharing, line.choice.link)
        for line in plan.sketched
        if line.choice
    ]
    return hashlib.sha256(json.dumps(done).encode()).hexdigest()[:16]


def _layer_file(plan: SketchPlan, name: str) -> str:
    return f"layers-{_key(plan)}/{file_of_layer(name)}"


def _trial_file(plan: SketchPlan, how: str) -> str:
    return f"tried-{how}-{_key(plan)}.json"
