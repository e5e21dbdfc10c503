"""The best state of a model that learns, by the loss on batches that it never learns from."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn


class BestState:
    """The state of some parameters that did best when it was looked at; the first one, to begin with.

    Args:
        parameters: of the model that learns.
        judge: the losses by name of the model as it is, on batches that are held out.
        objective: what such losses come to, a scalar.

    Attributes:
        before: losses of the first state.
        after: losses of the best one.
        first: what those of the first state come to.
        least: what those of the best one come to.
        step: after which the best one was; 0 for the first.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        judge: Callable[[], dict[str, Tensor]],
        objective: Callable[[dict[str, Tensor]], Tensor],
    ) -> None:
        self._parameters, self._judge, self._objective = parameters, judge, objective
        found, self.first = self._look()
        self.before = self.after = found
        self.least, self.step = self.first, 0
        self._start = self._kept = _copies(parameters)

    def look(self, step: int) -> float:
        """The loss of the parameters as they are after a step; they are kept if none did better."""
        found, loss = self._look()
        if loss < self.least:
            self.least, self.after, self.step = loss, found, step
            self._kept = _copies(self._parameters)
        return loss

    def restore(self) -> None:
        """Give the parameters the best state."""
        _copy(self._kept, self._parameters)

    def put_back(self, parts: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
        """The names of parts that do better as they were first, and are so in the best state from now on."""
        names = []
        for name, part in parts if self.step else ():
            own = {id(parameter) for parameter in part.parameters()}
            trial = [
                first if id(parameter) in own else kept
                for parameter, first, kept in zip(self._parameters, self._start, self._kept, strict=True)
            ]
            _copy(trial, self._parameters)
            found, loss = self._look()
            if loss < self.least:
                self.least, self.after, self._kept = loss, found, trial
                names.append(name)
        return tuple(names)

    def _look(self) -> tuple[dict[str, float], float]:
        losses = self._judge()
        return numbers(losses), float(self._objective(losses))


def numbers(losses: Mapping[str, Tensor]) -> dict[str, float]:
    """Losses as plain numbers."""
    return {name: float(loss.detach()) for name, loss in losses.items()}


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
