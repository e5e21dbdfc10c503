"""ONNX's recurrent operators in torch: RNN, LSTM and GRU."""

# T steps, N batch, D directions, H hidden size
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

_RNN, _LSTM, _GRU = (0,), (0, 2, 3, 1), (1, 0, 2)  # torch's gates, by their places among ONNX's
_PLAIN = {"hidden_size", "direction", "linear_before_reset", "layout", "activations", "outputs"}
_USUAL = {"RNN": ["tanh"], "LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}

# (T, N, I), or rows of lines of several lengths, and how many there are each step.
_Steps = tuple[Tensor, ...]
_Cell = Callable[[_Steps, list[Tensor], list[Tensor], bool], Sequence[Tensor]]


class UnknownOperatorError(Exception):
    """An operator, or a use of one, is not known here."""


def rnn(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Y (T, D, N, H) and Y_h (D, N, H)."""

    def run(x: _Steps, weights: list[Tensor], starts: list[Tensor], both: bool) -> Sequence[Tensor]:
        return _called(torch.rnn_tanh, x, starts[0], weights, both)

    return _run("RNN", run, inputs, given, _RNN, states=1)


def lstm(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Y (T, D, N, H), Y_h and Y_c (D, N, H)."""

    def run(x: _Steps, weights: list[Tensor], starts: list[Tensor], both: bool) -> Sequence[Tensor]:
        return _called(torch.lstm, x, starts, weights, both)

    return _run("LSTM", run, inputs, given, _LSTM, states=2)


def gru(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Sequence[Tensor]:
    """Y (T, D, N, H) and Y_h (D, N, H); the reset gate is before the product with the state or behind it."""

    def run(x: _Steps, weights: list[Tensor], starts: list[Tensor], both: bool) -> Sequence[Tensor]:
        return _called(torch.gru, x, starts[0], weights, both)

    cell = run if given.get("linear_before_reset", 0) else _reset_before
    return _run("GRU", cell, inputs, given, _GRU, states=1)


def _called(
    cell: Callable[..., Sequence[Tensor]], x: _Steps, starts: Any, weights: list[Tensor], both: bool
) -> Sequence[Tensor]:
    """What a layer of torch's gives, of steps that are all as long, or not."""
    batch_first = [False] if len(x) == 1 else []
    return cell(*x, starts, weights, True, 1, 0.0, False, both, *batch_first)


def _reset_before(steps: _Steps, weights: list[Tensor], starts: list[Tensor], both: bool) -> Sequence[Tensor]:
    """A GRU of the paper's first form, arXiv 1406.1078: torch's resets what the product gives."""
    if len(steps) > 1:
        raise UnknownOperatorError("GRU with lengths that resets before its product is not known here")
    (x,), found, ends = steps, [], []
    for place, state in enumerate(starts[0]):
        from_input, from_state, input_bias, state_bias = weights[4 * place : 4 * place + 4]
        hidden = state.shape[-1]
        arrived = x @ from_input.T + input_bias + state_bias
        states = []
        for step in arrived.flip(0) if place else arrived:
            reset, update = (step[:, : 2 * hidden] + state @ from_state[: 2 * hidden].T).sigmoid().chunk(2, 1)
            new = (step[:, 2 * hidden :] + (reset * state) @ from_state[2 * hidden :].T).tanh()
            state = torch.lerp(new, state, update)
            states.append(state)
        found.append(torch.stack(states[::-1] if place else states))
        ends.append(state)
    return torch.cat(found, -1), torch.stack(ends)


def _run(
    name: str,
    cell: _Cell,
    inputs: list[Any],
    given: Mapping[str, Any],
    gates: tuple[int, ...],
    *,
    states: int,
) -> Sequence[Tensor]:
    """What a node gives, by a cell that takes torch's weights, and goes forward, or in both directions.

    Raises:
        UnknownOperatorError: a node has options of its own.
    """
    x, w, r, b, lengths, *others = [*inputs, *[None] * 8][:8]
    activations = [one.lower() for one in given.get("activations", ())]
    directions, hidden = w.shape[0], r.shape[-1]
    unusual = set(given) - _PLAIN or given.get("layout", 0)
    unusual = unusual or activations not in ([], _USUAL[name] * directions)
    if unusual or any(one is not None for one in others[states:]):
        raise UnknownOperatorError(f"{name} with options of its own is not known here")
    b = w.new_zeros(directions, 2 * len(gates) * hidden) if b is None else b

    def ordered(one: Tensor) -> Tensor:
        return one.unflatten(0, (len(gates), hidden))[list(gates)].flatten(0, 1)

    weights = [
        ordered(one) for place in range(directions) for one in (w[place], r[place], *b[place].chunk(2))
    ]
    zeros = x.new_zeros(directions, x.shape[1], hidden)
    starts = [zeros if one is None else one for one in others[:states]]
    turned = _turned if given.get("direction") == "reverse" else _as_it_is
    x = turned(x, lengths)
    if lengths is None:
        y, *ends = cell((x,), weights, starts, directions > 1)
    else:
        packed = pack_padded_sequence(x, lengths.long(), enforce_sorted=False)
        starts = [one[:, packed.sorted_indices] for one in starts]
        rows, *ends = cell((packed.data, packed.batch_sizes), weights, starts, directions > 1)
        y, _ = pad_packed_sequence(PackedSequence(rows, *packed[1:]), total_length=len(x))
        ends = [one[:, packed.unsorted_indices] for one in ends]
    return turned(y, lengths).unflatten(-1, (directions, -1)).transpose(1, 2), *ends


def _as_it_is(x: Tensor, lengths: Tensor | None) -> Tensor:
    return x


def _turned(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Lines (T, N, I) from their ends on; what is behind a line stays there."""
    if lengths is None:
        return x.flip(0)
    places = torch.arange(len(x)).unsqueeze(1)
    places = torch.where(places < lengths, lengths - 1 - places, places)
    return x.gather(0, places.unsqueeze(-1).expand_as(x))
