"""SketchedLSTM and SketchedGRU: torch's recurrent layers with sketched weights, one step after the other.

    LSTM   i, f, g, o = W_ih x + W_hh h + b;  c = σ(f) c + σ(i) tanh(g);  h = W_hr (σ(o) tanh(c))
    GRU    r, z = σ(W_ih x + W_hh h + b);  n = tanh(W_in x + b_in + r (W_hn h + b_hn));  h = (1 - z) n + z h

W_hr is there with projections alone. The products with x are made for all steps at once.
"""

# L steps, N batch, I input_size, H hidden_size, P proj_size or H, D directions
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from panther_compile.layers.base import Spec
from panther_compile.layers.capture import kept_whole
from panther_compile.layers.recurrent_parts import RecurrentParts, gru_step, lstm_step

State: TypeAlias = Tensor | tuple[Tensor, Tensor]
_OPTIONS = (
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
)


class _SketchedRecurrent(RecurrentParts):
    """A replacement of `nn.LSTM` or `nn.GRU` whose weights are linear layers of low rank, or dense ones.

    Inputs, states, packed sequences and results are those of torch's layer. Dropout between layers draws
    other random numbers.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: of the stack.
        bias: whether there are biases.
        batch_first: whether inputs are (N, L, I), not (L, N, I).
        dropout: of what a layer hands to the next, in training.
        bidirectional: whether each layer also runs backwards.
        proj_size: of the LSTM's output, 0 for H.
        parts: spec of a `SketchedLinear` for each weight ("ih_l0", "hh_l0_reverse", ...); None for an
            `nn.Linear`.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ConfigError: parts names what is no weight.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        parts: Mapping[str, Spec | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, dropout
        self.bidirectional, self.proj_size = bidirectional, proj_size
        self._add_parts(parts, bias=bias, device=device, dtype=dtype)

    def part_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each weight, by name."""
        output = self.proj_size or self.hidden_size
        directions = 2 if self.bidirectional else 1
        sizes: dict[str, tuple[int, int]] = {}
        for layer in range(self.num_layers):
            width = self.input_size if layer == 0 else output * directions
            for suffix in ("", "_reverse")[:directions]:
                sizes[f"ih_l{layer}{suffix}"] = width, self.gates * self.hidden_size
                sizes[f"hh_l{layer}{suffix}"] = output, self.gates * self.hidden_size
                if self.proj_size:
                    sizes[f"hr_l{layer}{suffix}"] = self.hidden_size, self.proj_size
        return sizes

    @classmethod
    def options_of(cls, layer: nn.Module) -> dict[str, Any]:
        """See `RecurrentParts`; a GRU has no projections."""
        found = {name: getattr(layer, name) for name in _OPTIONS}
        return found | ({"proj_size": layer.proj_size} if layer.proj_size else {})

    def flatten_parameters(self) -> None:
        """Do nothing: the weights of torch's layer are one buffer for cuDNN, these are layers."""

    def forward(self, input: Tensor | PackedSequence, hx: State | None = None) -> tuple[Any, State]:
        """Run over a sequence as torch's layer does.

        Args:
            input: (L, N, I), (N, L, I) with `batch_first`, (L, I), or packed.
            hx: the first states (D layers, N, P), of an LSTM with the cells (D layers, N, H); zeros unless
                given.

        Returns:
            The outputs (L, N, D P), as the input is given, and the last states.

        Raises:
            ValueError: the input has other dimensions, or an LSTM is given one state.
            RuntimeError: a state has another shape.
        """
        if (node := kept_whole(self, input, hx)) is not None:
            return node  # type: ignore[no-any-return]
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        if input.dim() not in (2, 3):
            given = f"{type(self).__name__}: got an input of shape {tuple(input.shape)}"
            raise ValueError(f"{given}, wanted two or three dimensions")
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if batched and self.batch_first else x
        states = self._listed(hx, (x.shape[1],) if batched else ())
        if states is not None and not batched:
            states = [one.unsqueeze(1) for one in states]
        out, last = self._run(x, states, None)
        if batched:
            return (out.transpose(0, 1) if self.batch_first else out), self._state(last)
        return out.squeeze(1), self._state([one.squeeze(1) for one in last])

    def _run_packed(self, packed: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        data, sizes, order, back = packed
        x, lengths = pad_packed_sequence(PackedSequence(data, sizes))
        states = self._listed(hx, (x.shape[1],))
        if states is not None and order is not None:
            states = [one.index_select(1, order) for one in states]
        steps = torch.arange(len(x), device=x.device)[:, None]
        out, last = self._run(x, states, (steps < lengths.to(x.device))[..., None])
        if back is not None:
            last = [one.index_select(1, back) for one in last]
        return PackedSequence(pack_padded_sequence(out, lengths).data, sizes, order, back), self._state(last)

    def _listed(self, hx: State | None, batch: tuple[int, ...]) -> list[Tensor] | None:
        """The states that a run begins with; refuses what torch's layer refuses, with its errors.

        Args:
            hx: as given.
            batch: (N,), or nothing of an input without batch.
        """
        if hx is None:
            return None
        states, output = [hx] if isinstance(hx, Tensor) else list(hx), self.proj_size or self.hidden_size
        widths = (output,) if self.dense_type is nn.GRU else (output, self.hidden_size)
        if len(states) != len(widths):
            raise ValueError(f"{type(self).__name__}: got {len(states)} states, wanted {len(widths)}")
        for state, width in zip(states, widths, strict=True):
            wanted = (self.num_layers * (2 if self.bidirectional else 1), *batch, width)
            if state.shape != wanted:
                raise RuntimeError(
                    f"{type(self).__name__}: got a state of shape {tuple(state.shape)}, wanted {wanted}"
                )
        return states

    def _run(
        self, x: Tensor, states: list[Tensor] | None, valid: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers over x (L, N, I); `valid` (L, N, 1) is False behind the end of a sequence."""
        directions = ("", "_reverse")[: 2 if self.bidirectional else 1]
        last: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            if layer and self.training and self.dropout:
                x = F.dropout(x, self.dropout)
            outs = []
            for place, suffix in enumerate(directions):
                index = layer * len(directions) + place
                first = None if states is None else [one[index] for one in states]
                out, state = self._direction(f"_l{layer}{suffix}", x, first, valid, backwards=bool(suffix))
                outs.append(out)
                last.append(state)
            x = torch.cat(outs, dim=-1) if len(outs) > 1 else outs[0]
        return x, [torch.stack(one) for one in zip(*last, strict=True)]

    def _direction(
        self, suffix: str, x: Tensor, state: list[Tensor] | None, valid: Tensor | None, *, backwards: bool
    ) -> tuple[Tensor, list[Tensor]]:
        given = self.get_submodule(f"ih{suffix}")(x)
        recur = self.get_submodule(f"hh{suffix}")
        project = self.get_submodule(f"hr{suffix}") if self.proj_size else None
        state = self._zeros(given) if state is None else state
        outs: list[Tensor] = []
        steps = range(len(x) - 1, -1, -1) if backwards else range(len(x))
        for step in steps:
            new = self._step(given[step], recur(state[0]), state, project)
            if valid is not None:
                new = [torch.where(valid[step], one, old) for one, old in zip(new, state, strict=True)]
                outs.append(new[0].masked_fill(~valid[step], 0.0))
            else:
                outs.append(new[0])
            state = new
        return torch.stack(outs[::-1] if backwards else outs), state

    def _zeros(self, given: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _step(
        self, given: Tensor, recurrent: Tensor, state: list[Tensor], project: nn.Module | None
    ) -> list[Tensor]:
        """The next states from W_ih x (N, gates H) and W_hh h (N, gates H)."""
        raise NotImplementedError

    def _state(self, last: list[Tensor]) -> State:
        return last[0] if len(last) == 1 else (last[0], last[1])


class SketchedLSTM(_SketchedRecurrent):
    """A low-rank replacement of `nn.LSTM`, projections included; see its base."""

    dense_type, gates = nn.LSTM, 4

    def _zeros(self, given: Tensor) -> list[Tensor]:
        batch = given.shape[1]
        hidden = given.new_zeros(batch, self.proj_size or self.hidden_size)
        return [hidden, given.new_zeros(batch, self.hidden_size)]

    def _step(
        self, given: Tensor, recurrent: Tensor, state: list[Tensor], project: nn.Module | None
    ) -> list[Tensor]:
        hidden, cell = lstm_step(given, recurrent, state[1])
        return [hidden if project is None else project(hidden), cell]


class SketchedGRU(_SketchedRecurrent):
    """A low-rank replacement of `nn.GRU`; see its base."""

    dense_type, gates = nn.GRU, 3

    def _zeros(self, given: Tensor) -> list[Tensor]:
        return [given.new_zeros(given.shape[1], self.hidden_size)]

    def _step(
        self, given: Tensor, recurrent: Tensor, state: list[Tensor], project: nn.Module | None
    ) -> list[Tensor]:
        return [gru_step(given, recurrent, state[0])]
