"""nn.LSTM, nn.GRU and their cells become sketched ones: each of their weights is a linear layer.

Before:
    %y : call_module[target=lstm](args = (%x,))      lstm: LSTM(I, H)
After:
    %y : call_module[target=lstm](args = (%x,))      lstm: SketchedLSTM(ih_l0, hh_l0)
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.kinds.base import CompositeKind
from panther_compile.kinds.match import why_not_plain
from panther_compile.layers.attention import dense_projection
from panther_compile.layers.recurrent import SketchedGRU, SketchedLSTM
from panther_compile.layers.recurrent_cell import SketchedGRUCell, SketchedLSTMCell


class _RecurrentKind(CompositeKind):
    """See the module's docstring."""

    unless_included: ClassVar[str | None] = (
        "recurrent: its sketch runs step by step in Python; left alone unless included"
    )
    _layer_type: ClassVar[type[SketchedLSTM | SketchedGRU | SketchedLSTMCell | SketchedGRUCell]]

    def matches(self, module: nn.Module) -> str | None:
        """Called by the name of torch's class."""
        dense_type = self._layer_type.dense_type
        return dense_type.__name__ if isinstance(module, dense_type) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        tensors = frozenset(self._names(module))
        return why_not_plain(module, self._layer_type.dense_type, tensors=tensors, sizes=(1, 1))

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """A linear layer for each weight, with copies of it and of its bias."""
        found: dict[str, nn.Module] = {}
        for name in self._names(module):
            kind, _, part = name.partition("_")
            if kind == "weight":
                bias = getattr(module, f"bias_{part}", None)
                found[part] = dense_projection(module.get_parameter(name), bias)
        return found

    def assemble(
        self, module: nn.Module, parts: Mapping[str, nn.Module], config: SketchConfig | None = None
    ) -> nn.Module:
        """See `Kind.assemble`."""
        return self._layer_type.from_parts(module, parts)

    def _names(self, module: nn.Module) -> Sequence[str]:
        """The names of the weights and biases."""
        assert isinstance(module, nn.RNNBase)
        return module._flat_weights_names


class LSTMKind(_RecurrentKind):
    """See the module's docstring."""

    wanted, layers, _layer_type = "nn.LSTM", (SketchedLSTM,), SketchedLSTM


class GRUKind(_RecurrentKind):
    """See the module's docstring."""

    wanted, layers, _layer_type = "nn.GRU", (SketchedGRU,), SketchedGRU


class _CellKind(_RecurrentKind):
    """A cell is called step by step by the model itself, sketched or not, and so is no exception."""

    unless_included = None

    def _names(self, module: nn.Module) -> Sequence[str]:
        return "weight_ih", "weight_hh", "bias_ih", "bias_hh"


class LSTMCellKind(_CellKind):
    """See the module's docstring."""

    wanted, layers, _layer_type = "nn.LSTMCell", (SketchedLSTMCell,), SketchedLSTMCell


class GRUCellKind(_CellKind):
    """See the module's docstring."""

    wanted, layers, _layer_type = "nn.GRUCell", (SketchedGRUCell,), SketchedGRUCell
