"""The tensors of a Hugging Face folder, by their names in its model."""

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from panther_compile.errors import ModelSourceError
from panther_compile.layers.own_weights import Lifted
from panther_compile.names import dotted, owner_of
from panther_compile.planning.own_weights import lifted_tensors
from panther_compile.tensors_on_disk import TensorsOnDisk

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 500_000_000  # of a file that is written, which is held in memory until it is full


class StoredWeights:
    """The tensors of a folder, by their names in the model; mapped when they are asked for."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._folder = folder
        dtype = getattr(getattr(model, "config", None), "dtype", None)
        keeps_some = getattr(model, "_keep_in_fp32_modules", None)
        self._dtype = dtype if isinstance(dtype, torch.dtype) and not keeps_some else None
        try:
            self._files = self._read_files()
            self._stored, self._made = _names_in_model(model, self._files)
            for pair in getattr(model, "all_tied_weights_keys", {}).items():  # stored under one of the names
                for name, other in (pair, pair[::-1]):
                    if name not in self._stored and other in self._stored:
                        self._stored[name] = self._stored[other]
            self._lifted: dict[str, Lifted] = {}
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ModelSourceError(f"{folder} is no folder of safetensors files: {error}") from error

    def _read_files(self) -> dict[str, str]:
        if (self._folder / WEIGHTS).is_file() or not (self._folder / INDEX).is_file():
            # Beside an index it is what transformers reads, too.
            with safe_open(self._folder / WEIGHTS, framework="pt") as stream:
                return dict.fromkeys(stream.keys(), WEIGHTS)
        index = json.loads((self._folder / INDEX).read_text())
        return {str(name): str(file) for name, file in index["weight_map"].items()}

    def missing(self, model: Any) -> list[str]:
        """Names of parameters of the folder's model that nothing in the files is or becomes."""
        ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        return [
            name
            for name, _ in model.named_parameters()
            if name not in self._stored
            and name not in self._made
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def misfits(self, model: nn.Module) -> list[str]:
        """Parameters of the folder's model that have another shape in the files, with both shapes."""
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        in_file = defaultdict[str, list[str]](list)
        for name in shapes:
            if name in self._stored:
                in_file[self._files[self._stored[name]]].append(name)
        found = []
        for file, names in in_file.items():
            with safe_open(self._folder / file, framework="pt") as stream:
                for name in names:
                    shape = tuple(stream.get_slice(self._stored[name]).get_shape())
                    if shape != shapes[name]:
                        found.append(f"{name} ({shape} in place of {shapes[name]})")
        return found

    def read_lifted(self, model: nn.Module) -> None:
        """Have tensors of layers that stand for parameters read from those; see `lift_own_weights`."""
        self._lifted = lifted_tensors(model)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self._dense(name) in self._stored

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model, mapped from its file."""
        lifted, stored = self._lifted.get(name), self._stored[self._dense(name)]
        if lifted is None or lifted.place is None:
            found = self._read(stored)
        else:
            with safe_open(self._folder / self._files[stored], framework="pt") as stream:
                found = self._cast(stream.get_slice(stored)[lifted.place])
        return found.t().contiguous() if lifted is not None and lifted.transposed else found

    def _dense(self, name: str) -> str:
        """The name of the parameter that a tensor is of."""
        return self._lifted[name].parameter if name in self._lifted else name

    def map_matrices(self, model: nn.Module, disk: TensorsOnDisk) -> None:
        """Have the parameters of several dimensions of the folder's model mapped, and their pages given back.

        Those that the model holds otherwise than the files, as of another dtype, stay as they are.
        """
        files: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or name not in self._stored:
                continue
            file = self._files[self._stored[name]]
            if file not in files:
                files[file] = disk.tensors(self._folder / file)
            stored = files[file].get(self._stored[name])
            if stored is not None and (stored.shape, stored.dtype) == (parameter.shape, parameter.dtype):
                parameter.data = stored

    def others(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """All tensors but those of some names, file by file, under the names that they have there."""
        left_out = {self._stored[self._dense(name)] for name in names}
        for name, lifted in self._lifted.items():  # matrices beside others of one parameter that are left out
            stored = self._stored.get(lifted.parameter)
            if stored in left_out and name not in names:
                yield f"{stored}{name.removeprefix(lifted.parameter)}", self.tensor(name)
        for stored in sorted(self._files, key=lambda name: (self._files[name], name)):
            if stored not in left_out:
                yield stored, self._read(stored)

    def _read(self, stored: str) -> Tensor:
        with safe_open(self._folder / self._files[stored], framework="pt") as stream:
            return self._cast(stream.get_tensor(stored))

    def _cast(self, tensor: Tensor) -> Tensor:
        """The tensor as transformers would load it."""
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def module(self, skeleton: nn.Module, name: str) -> nn.Module:
        """A module of the model with its weights."""
        made = copy.deepcopy(skeleton)
        for part, parameter in list(made.named_parameters(remove_duplicate=False)):
            weight = self.tensor(dotted(name, part))
            setattr(*owner_of(made, part), nn.Parameter(weight, parameter.requires_grad))
        return made


def _names_in_model(model: Any, stored: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Names in the files by those in the model; and those of what transformers makes of several tensors."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    own = model.state_dict()
    found: dict[str, str] = {}
    made: set[str] = set()
    for name in stored:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converted is None:
            found[renamed] = name
        else:
            made.add(renamed)
    return found, made
