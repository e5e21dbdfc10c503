"""SketchedLSTMCell and SketchedGRUCell: torch's recurrent cells with sketched weights; see `recurrent.py`."""

# N batch, I input_size, H hidden_size
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigError
from panther_compile.layers.base import Spec, copy_into
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.parts import LayerOfParts, part_of_spec, spec_of_part
from panther_compile.layers.recurrent import gru_step, lstm_step

_OPTIONS = ("input_size", "hidden_size", "bias")


class _SketchedCell(LayerOfParts):
    """A replacement of `nn.LSTMCell` or `nn.GRUCell` whose weights are linear layers, of low rank or dense.

    Args:
        input_size: I.
        hidden_size: H.
        bias: whether there are biases.
        parts: spec of a `SketchedLinear` for "ih" and "hh"; None for an `nn.Linear`.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ConfigError: parts names what is no weight.
    """

    dense_type: ClassVar[type[nn.RNNCellBase]]
    gates: ClassVar[int]
    ih: nn.Module
    hh: nn.Module

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        parts: Mapping[str, Spec | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        given = dict(parts or {})
        if not set(given) <= {"ih", "hh"}:
            raise ConfigError(f"{type(self).__name__}: parts={sorted(given)}, wanted some of ['ih', 'hh']")
        for name, inputs in (("ih", input_size), ("hh", hidden_size)):
            outputs = self.gates * hidden_size
            part = part_of_spec(given.get(name), inputs, outputs, bias=bias, device=device, dtype=dtype)
            self.add_module(name, part)

    @classmethod
    def from_parts(cls, layer: nn.RNNCellBase, parts: Mapping[str, nn.Module]) -> Self:
        """The replacement of a cell with weights made elsewhere, which are not copied."""
        new = cls(**_options_of(layer), device="meta")
        new.ih, new.hh = parts["ih"], parts["hh"]
        return new.train(layer.training)

    def _check(self, input: Tensor, *states: Tensor) -> None:
        """Refuse what torch's cells refuse, with the errors that they raise."""
        for one, width in ((input, self.input_size), *((state, self.hidden_size) for state in states)):
            given = f"{type(self).__name__}: got a tensor of shape {tuple(one.shape)}"
            if one.dim() not in (1, 2):
                raise ValueError(f"{given}, wanted one or two dimensions")
            if one.shape[-1] != width:
                raise RuntimeError(f"{given}, wanted {width} features")

    def to_dense(self) -> nn.RNNCellBase:
        """Torch's cell with the factors multiplied out."""
        like = next(self.parameters())
        dense = self.dense_type(**_options_of(self), device=like.device, dtype=like.dtype)
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
        return self.dense_macs + (2 * self.gates * self.hidden_size if self.bias else 0)

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`; per call and sample."""
        return self.gates * self.hidden_size * (self.input_size + self.hidden_size)

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        parts = {name: spec_of_part(part) for name, part in self.named_children()}
        return {**_options_of(self), "parts": parts}

    def extra_repr(self) -> str:
        """The options and the stored share; the parts show themselves."""
        shown = [f"{name}={value}" for name, value in _options_of(self).items()]
        return f"{', '.join(shown)}, stored={self.stored_numbers / self.dense_numbers:.3f}"


class SketchedLSTMCell(_SketchedCell):
    """A low-rank replacement of `nn.LSTMCell`; see its base."""

    dense_type, gates = nn.LSTMCell, 4

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            input: (N, I) or (I,).
            hx: the state and the cell, (N, H) or (H,) each; zeros unless given.

        Returns:
            The next state and cell.

        Raises:
            ValueError: a tensor has more than two dimensions, or none.
            RuntimeError: a tensor has another number of features.
        """
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else None
        state, cell = (zeros, zeros) if hx is None else hx
        assert state is not None
        assert cell is not None
        self._check(input, state, cell)
        return lstm_step(self.ih(input), self.hh(state), cell)


class SketchedGRUCell(_SketchedCell):
    """A low-rank replacement of `nn.GRUCell`; see its base."""

    dense_type, gates = nn.GRUCell, 3

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step.

        Args:
            input: (N, I) or (I,).
            hx: the state (N, H) or (H,); zeros unless given.

        Returns:
            The next state.

        Raises:
            ValueError: a tensor has more than two dimensions, or none.
            RuntimeError: a tensor has another number of features.
        """
        state = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else hx
        self._check(input, state)
        return gru_step(self.ih(input), self.hh(state), state)


def _options_of(layer: nn.Module) -> dict[str, Any]:
    """What torch's cell and its replacement are built with."""
    return {name: getattr(layer, name) for name in _OPTIONS}
