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

from panther_compile.errors import ModelSourceError
from panther_compile.integrations.conversions import without_sketched
from panther_compile.integrations.converted_weights import Converted, names_in_model
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
            self._stored, self._converted = names_in_model(model, self._files, self._shapes_stored)
            self._made = {name: one for one in self._converted for name in one.shapes}
            for pair in getattr(model, "all_tied_weights_keys", {}).items():  # stored under one of the names
                for name, other in (pair, pair[::-1]):
                    if name not in self._stored and other in self._stored:
                        self._stored[name] = self._stored[other]
            self._lifted: dict[str, Lifted] = {}
            self._last: tuple[Converted, dict[str, Tensor]] | None = None
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
        wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        held = self._shapes_stored(self._stored[name] for name in wanted if name in self._stored)
        shapes = {name: held[stored] for name, stored in self._stored.items() if name in wanted}
        shapes |= {name: tuple(one.shapes[name]) for name, one in self._made.items()}
        return [
            f"{name} ({shapes[name]} in place of {shape})"
            for name, shape in wanted.items()
            if shapes.get(name, shape) != shape
        ]

    def _shapes_stored(self, stored: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors as they are stored, with one opening of each file."""
        in_file = defaultdict[str, list[str]](list)
        for name in stored:
            in_file[self._files[name]].append(name)
        found: dict[str, tuple[int, ...]] = {}
        for file, names in in_file.items():
            with safe_open(self._folder / file, framework="pt") as stream:
                found.update((name, tuple(stream.get_slice(name).get_shape())) for name in names)
        return found

    def read_lifted(self, model: nn.Module) -> None:
        """Have tensors of layers that stand for parameters read from those; see `lift_own_weights`."""
        self._lifted = lifted_tensors(model)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        dense = self._dense(name)
        return dense in self._stored or dense in self._made

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model, mapped from its file, or made of what is there."""
        lifted, dense = self._lifted.get(name), self._dense(name)
        stored = self._stored.get(dense, "")
        if dense in self._made:
            made = self._convert(self._made[dense])[dense]
            found = made.clone() if lifted is None or lifted.place is None else made[lifted.place].clone()
        elif lifted is None or lifted.place is None:
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

    def others(self, model: nn.Module, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """All tensors but those of some names, under the names that they have in the files.

        What a converter of transformers would make of them, which touches a sketched layer, is made here, and
        has the names of the model: it is left out when the folder is loaded, see `conversions.py`.

        Args:
            model: of the folder, with its sketched layers.
            names: that are left out.
        """
        left_out = {self._stored[dense] for dense in map(self._dense, names) if dense in self._stored}
        dropped = {dense for dense in map(self._dense, names) if dense in self._made}
        for name, lifted in self._lifted.items():  # matrices beside others of one parameter that are left out
            stored = self._stored.get(lifted.parameter)
            if name not in names and (stored in left_out or lifted.parameter in dropped):
                yield f"{stored or lifted.parameter}{name.removeprefix(lifted.parameter)}", self.tensor(name)
        kept = without_sketched(model, get_model_conversion_mapping(model))
        patterns = {tuple(one.source_patterns) for one in kept}
        for converted in self._converted:
            is_left = tuple(converted.converter.source_patterns) not in patterns
            if not is_left and dropped.isdisjoint(converted.shapes):
                continue
            left_out |= converted.sources.keys()
            for name in converted.shapes:
                if name not in dropped:
                    yield name, self.tensor(name)
        for stored in sorted(self._files, key=lambda name: (self._files[name], name)):
            if stored not in left_out:
                yield stored, self._read(stored)

    def _convert(self, converted: Converted) -> dict[str, Tensor]:
        """What is made of some tensors; the last is kept, as layers ask for one after another."""
        if self._last is None or self._last[0] is not converted:
            self._last = None
            self._last = converted, converted.made(self._read)
        return self._last[1]

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
