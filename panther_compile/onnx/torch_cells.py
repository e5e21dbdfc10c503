"""ONNX's recurrent operators in torch: LSTM, and GRU as torch computes it."""

# T steps, N batch, D directions, H hidden size
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LSTM, _GRU = (0, 2, 3, 1), (1, 0, 2)  # torch's gates, by their places among ONNX's
_PLAIN = {"hidden_size", "direction", "linear_before_reset", "layout", "outputs"}


class UnknownOperatorError(Exception):
    """An operator, or a use of one, is not known here."""


def lstm(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Y (T, D, N, H), Y_h and Y_c (D, N, H)."""
    x, weights, starts = _read(inputs, given, _LSTM, states=2)
    y, h, c = torch.lstm(x, starts, weights, True, 1, 0.0, False, len(weights) > 4, False)
    return _by_direction(y, len(h)), h, c


def gru(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Y (T, D, N, H) and Y_h (D, N, H).

    Raises:
        UnknownOperatorError: the reset gate comes before the product, as it does by default.
    """
    if not given.get("linear_before_reset", 0):
        raise UnknownOperatorError("GRU with linear_before_reset=0 is not known here")
    x, weights, (start,) = _read(inputs, given, _GRU, states=1)
    y, h = torch.gru(x, start, weights, True, 1, 0.0, False, len(weights) > 4, False)
    return _by_direction(y, len(h)), h


def _by_direction(y: Tensor, directions: int) -> Tensor:
    return y.unflatten(-1, (directions, -1)).transpose(1, 2)


def _read(
    inputs: list[Any], given: Mapping[str, Any], gates: tuple[int, ...], *, states: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What torch takes: the input, the weights of each direction, and the states to start with."""
    x, w, r, b, lengths, *others = [*inputs, *[None] * 8][:8]
    unusual = set(given) - _PLAIN or given.get("layout", 0) or given.get("direction") == "reverse"
    if unusual or lengths is not None or any(one is not None for one in others[states:]):
        raise UnknownOperatorError("a recurrent node with lengths or options of its own is not known here")
    directions, hidden = w.shape[0], r.shape[-1]
    b = w.new_zeros(directions, 2 * len(gates) * hidden) if b is None else b

    def ordered(one: Tensor) -> Tensor:
        return one.unflatten(0, (len(gates), hidden))[list(gates)].flatten(0, 1)

    weights = [
        ordered(one) for place in range(directions) for one in (w[place], r[place], *b[place].chunk(2))
    ]
    zeros = x.new_zeros(directions, x.shape[1], hidden)
    return x, weights, [zeros if one is None else one for one in others[:states]]
