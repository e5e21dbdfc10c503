"""SketchedLSTMCell and SketchedGRUCell: torch's recurrent cells with sketched weights; see `recurrent.py`."""

# N batch, I input_size, H hidden_size
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import Spec
from panther_compile.layers.capture import kept_whole
from panther_compile.layers.recurrent_parts import RecurrentParts, gru_step, lstm_step


class _SketchedCell(RecurrentParts):
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
        self._add_parts(parts, bias=bias, device=device, dtype=dtype)

    def part_sizes(self) -> dict[str, tuple[int, int]]:
        """See `RecurrentParts`."""
        outputs = self.gates * self.hidden_size
        return {"ih": (self.input_size, outputs), "hh": (self.hidden_size, outputs)}

    @classmethod
    def options_of(cls, layer: nn.Module) -> dict[str, Any]:
        """See `RecurrentParts`."""
        return {name: getattr(layer, name) for name in ("input_size", "hidden_size", "bias")}

    def _products(self, input: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        """W_ih x and W_hh h, of the first state; refuses what torch's cells refuse, with their errors."""
        for one, width in ((input, self.input_size), *((state, self.hidden_size) for state in states)):
            given = f"{type(self).__name__}: got a tensor of shape {tuple(one.shape)}"
            if one.dim() not in (1, 2):
                raise ValueError(f"{given}, wanted one or two dimensions")
            if one.shape != (*input.shape[:-1], width):
                raise RuntimeError(f"{given}, wanted {(*input.shape[:-1], width)}")
        return self.ih(input), self.hh(states[0])


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
            RuntimeError: a tensor has another shape.
        """
        if (node := kept_whole(self, input, hx)) is not None:
            return node  # type: ignore[no-any-return]
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else None
        state, cell = (zeros, zeros) if hx is None else hx
        assert state is not None
        assert cell is not None
        given, recurrent = self._products(input, state, cell)
        return lstm_step(given, recurrent, cell.to(given.dtype))


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
            RuntimeError: a tensor has another shape.
        """
        if (node := kept_whole(self, input, hx)) is not None:
            return node  # type: ignore[no-any-return]
        state = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else hx
        given, recurrent = self._products(input, state)
        return gru_step(given, recurrent, state.to(given.dtype))
