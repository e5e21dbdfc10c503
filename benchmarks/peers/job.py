"""One model to compress, and what was found out about it, kept for all methods and ratios."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from peers.budget import Shape, Stored, pair_numbers, spend
from peers.calibration import Statistics, collect, fisher
from peers.layers import check_layers, unfold_attention, weight_matrix

FISHER_SAMPLES = 128


class NotDefinedError(Exception):
    """The method is not defined for this model or ratio; the message says why."""


@dataclass
class Job:
    """A model, the layers to replace, and the calibration data.

    Attributes:
        model: dense, left as it is.
        names: of the layers to replace, attention projections as `nn.MultiheadAttention` is unfolded.
        batches: of model inputs; empty for methods without data.
        blocks: see `Subject`.
        outputs: see `Subject`.
        seed: of every random number.
        memory: what methods keep from one ratio to the next, by name of the method.
    """

    model: nn.Module
    names: tuple[str, ...]
    batches: Sequence[Any]
    blocks: tuple[str, ...]
    outputs: str
    seed: int
    memory: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def dense(self) -> nn.Module:
        """The model with its attention unfolded, checked; not to be changed."""
        dense = copy.deepcopy(self.model)
        unfold_attention(dense)
        check_layers(dense, self.names)
        return dense

    @cached_property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics of the inputs of each layer."""
        return collect(self.dense, self.names, self.batches)

    @cached_property
    def fisher(self) -> dict[str, Tensor]:
        """See `calibration.fisher`."""
        return fisher(self.dense, self.names, self.batches, self.outputs, FISHER_SAMPLES, self.seed)

    def copy(self) -> nn.Module:
        """To replace layers in."""
        return copy.deepcopy(self.dense)

    def weight(self, name: str) -> Tensor:
        """(O, I), float64."""
        return weight_matrix(self.dense.get_submodule(name))

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """(O, I) of each layer."""
        return {name: (self.weight(name).shape[0], self.weight(name).shape[1]) for name in self.names}

    @cached_property
    def biases(self) -> dict[str, int]:
        """How many numbers the bias of each layer has."""
        layers = {name: self.dense.get_submodule(name) for name in self.names}
        return {name: 0 if layer.bias is None else layer.bias.numel() for name, layer in layers.items()}

    @cached_property
    def is_linear(self) -> bool:
        """Whether all layers are linear ones."""
        return all(type(self.dense.get_submodule(name)) is nn.Linear for name in self.names)

    def budget(self, ratio: float) -> float:
        """The numbers that all weights may store at a ratio; biases count, and stay."""
        weights = sum(outputs * inputs for outputs, inputs in self.shapes.values())
        biases = sum(self.biases.values())
        return ratio * (weights + biases) - biases

    def ranks(self, ratio: float | Mapping[str, float], stored: Stored = pair_numbers) -> dict[str, int]:
        """See `budget.spend`."""
        return spend(self.shapes, self.biases, ratio, stored)
