"""Layers that hold a linear layer for each of their weights, sketched or dense."""

import torch
from torch import nn

from panther_compile.layers.base import SketchedLayer, Spec
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.narrow import NarrowLinear


class LayerOfParts(SketchedLayer):
    """A layer whose parts are linear layers, each a child of its own name."""

    scheme = "parts"

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Ranks of the sketched parts."""
        return tuple(part.rank for part in self.children() if isinstance(part, SketchedLinear))


def part_of_spec(
    spec: Spec | None,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear | SketchedLinear | NarrowLinear:
    """A part with initial numbers: of a spec, or dense for None."""
    if spec is None:
        return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)
    layer_type = NarrowLinear if "side" in spec else SketchedLinear
    return layer_type(**spec, device=device, dtype=dtype)
