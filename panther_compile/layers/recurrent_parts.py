"""RecurrentParts: what sketched recurrent layers and cells have in common, and one step of each."""

# N batch, H hidden_size
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigError
from panther_compile.layers.base import Spec, copy_into, spec_of_part
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.parts import LayerOfParts, part_of_spec


class RecurrentParts(LayerOfParts):
    """A replacement of a recurrent layer or cell of torch, with a linear layer for each of its weights.

    Attributes:
        dense_type: torch's class; `weight_NAME` and `bias_NAME` are the parameters of the part NAME.
        gates: whose products with x and h one weight holds.
    """

    not_shown = ("parts",)
    dense_type: ClassVar[type[Any]]
    gates: ClassVar[int]

    def __getattr__(self, name: str) -> Any:
        """Read `weight_NAME` and `bias_NAME` as torch's module has them, read-only, of the part NAME."""
        kind, _, part = name.partition("_")
        if kind in ("weight", "bias") and part in self._modules:
            return getattr(self._modules[part], kind)
        return super().__getattr__(name)

    @property
    def dense_weight(self) -> str:
        """See `SketchedLayer`."""
        return f"weight_{next(iter(self.part_sizes()))}"

    def part_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each weight, by name."""
        raise NotImplementedError

    @classmethod
    def options_of(cls, layer: nn.Module) -> dict[str, Any]:
        """What torch's module and its replacement are built with."""
        raise NotImplementedError

    @classmethod
    def from_parts(cls, layer: nn.Module, parts: Mapping[str, nn.Module]) -> Self:
        """The replacement of a module with weights made elsewhere, which are not copied."""
        new = cls(**cls.options_of(layer), device="meta")
        for name in new.part_sizes():
            setattr(new, name, parts[name])
        return new.train(layer.training)

    def _add_parts(
        self,
        specs: Mapping[str, Spec | None] | None,
        *,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make the parts, of a spec or dense.

        Raises:
            ConfigError: a spec names what is no weight.
        """
        sizes, given = self.part_sizes(), dict(specs or {})
        if not set(given) <= set(sizes):
            raise ConfigError(f"{type(self).__name__}: parts={sorted(given)}, wanted some of {list(sizes)}")
        for name, (inputs, outputs) in sizes.items():
            own = bias and not name.startswith("hr")
            part = part_of_spec(given.get(name), inputs, outputs, bias=own, device=device, dtype=dtype)
            self.add_module(name, part)

    def to_dense(self) -> nn.Module:
        """Torch's module with the factors multiplied out."""
        like = next(self.parameters())
        dense: nn.Module = self.dense_type(**self.options_of(self), device=like.device, dtype=like.dtype)
        for name, part in self.named_children():
            plain: Any = part.to_dense() if isinstance(part, SketchedLinear) else part
            for kind in ("weight", "bias"):
                found = getattr(plain, kind)
                if found is not None:
                    parameter = dense.get_parameter(f"{kind}_{name}")
                    copy_into(parameter, found)
                    parameter.requires_grad_(found.requires_grad)
        return dense.train(self.training)

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        sizes = self.part_sizes().items()
        return self.dense_macs + sum(out for name, (_, out) in sizes if self.bias and name[:2] != "hr")

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`; per step and sequence."""
        return sum(inputs * outputs for inputs, outputs in self.part_sizes().values())

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        parts = {name: spec_of_part(part) for name, part in self.named_children()}
        return {**self.options_of(self), "parts": parts}


def lstm_step(given: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The next state and cell (N, H) from W_ih x and W_hh h (N, 4 H), biases included."""
    i, f, g, o = (given + recurrent).chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_step(given: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """The next state (N, H) from W_ih x and W_hh h (N, 3 H), biases included."""
    (rx, zx, nx), (rh, zh, nh) = given.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
    update = (zx + zh).sigmoid()
    new = (nx + (rx + rh).sigmoid() * nh).tanh()
    return new + update * (state - new)  # not torch.lerp, which refuses a state of another type
