"""Tensors of a model that transformers makes of others in a folder: several of one, one of several.

Of a file's `Wqkv` it makes the weights of `q_proj`, `k_proj` and `v_proj`, of those of single experts one
that holds them all. `conversions.py` says what becomes of them where layers are sketched.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Converted:
    """What a converter of transformers makes of some tensors of a folder."""

    def __init__(self, converter: WeightConverter, first: str, model: Any) -> None:
        """Hold no tensors yet.

        Args:
            converter: of transformers, as it is for all layers.
            first: the name in the model of the first tensor that is made.
            model: is asked for its configuration.
        """
        self.converter = converter
        self.sources: dict[str, str] = {}
        self.shapes: dict[str, torch.Size] = {}
        self._first, self._model = first, model

    def made(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors of the model, by name.

        Args:
            read: a tensor of the folder, by its name there.
        """
        converter = copy.deepcopy(self.converter)
        for source in sorted(self.sources, key=_by_numbers):  # experts in their order
            converter.add_tensor(self._first, source, self.sources[source], read(source))
        found = converter.convert(self._first, model=self._model, config=self._model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}

    def look(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Find out what is made, and in what shapes, without weights; nothing of parts that do not fit.

        Args:
            shapes: those of tensors of the folder, by their names there.
        """
        try:
            made = self.made(lambda source: torch.empty(tuple(shapes[source]), device="meta"))
        except (RuntimeError, ValueError, KeyError, IndexError):  # one of them lacks, as gates of experts
            made = {}
        self.shapes = {name: one.shape for name, one in made.items()}


def _by_numbers(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts names as transformers does, numbers in them by what they are."""
    return [
        (not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)
    ]


def names_in_model(
    model: Any, stored: Iterable[str], shapes_of: Callable[[Iterable[str]], Mapping[str, Sequence[int]]]
) -> tuple[dict[str, str], list[Converted]]:
    """Names in the files by those in the model; and what transformers makes of the others.

    Args:
        model: of the folder, maybe without weights.
        stored: names in the files.
        shapes_of: asks the files for the shapes of some of them.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    own = model.state_dict()
    found: dict[str, str] = {}
    converted: dict[str, Converted] = {}
    for name in stored:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if renamed not in own and name in own:  # stored as the model has it, where a pattern fits by chance
            renamed, pattern = name, None
        if pattern is None:
            found[renamed] = name
        elif renamed in own:
            one = converted.setdefault(renamed, Converted(by_pattern[pattern], renamed, model))
            one.sources[name] = pattern
    shapes = shapes_of(source for one in converted.values() for source in one.sources)
    for one in converted.values():
        one.look(shapes)
    return found, list(converted.values())
