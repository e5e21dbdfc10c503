"""Places where the output of a layer is added to what went around it.

    s ──┬──► norm ──► ... ──► layer ──y──► + ──► v = y + s
        └──────────────────────────────────┘

In the sketched model s carries the errors of all layers before. A layer whose output is added to it can make
up for the part of them that shows in its own input: it is fitted to W x + (s - s') instead of W x, s' being
what goes around it in the sketched model.

Found by looking, whatever the model's code is: y, s and v pass in or out of modules, and y + s
is v to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batches import Call
from panther_compile.models.outputs import is_dense, is_transformed
from panther_compile.models.watched import Side, Watched

_CANDIDATES = 16  # of the tensors seen before a layer, that it may be added to
_LOOKS = 6  # at tensors seen after it, that may be the sum
_PROBE = 64  # numbers compared before all are


@dataclass(frozen=True, slots=True)
class Passage:
    """What passes into a module ("in", its first tensor) or out of it ("out")."""

    module: str
    kind: str


Residuals = Mapping[str, Passage]
"""By the name of a layer, where what its output is added to was last seen when the layer is reached."""

Seen = Callable[[Passage, Tensor], None]


def observe(model: nn.Module, passages: set[Passage], seen: Seen) -> AbstractContextManager[object]:
    """While the context is open, tell of every tensor at these passages.

    Args:
        model: that is run.
        passages: of its modules.
        seen: called with each, in the order of the run.
    """
    stack = ExitStack()
    for passage in passages:
        module = model.get_submodule(passage.module)
        if passage.kind == "in":

            def enter(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], at: Passage = passage
            ) -> None:
                _tell(seen, at, (*args, *kwargs.values()))

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        else:

            def leave(_: nn.Module, args: object, out: object, at: Passage = passage) -> None:
                _tell(seen, at, out if isinstance(out, tuple | list) else (out,))

            stack.callback(module.register_forward_hook(leave).remove)
    return stack


def find_residuals(side: Side, calls: Sequence[Call]) -> dict[str, Passage]:
    """The layers of a watched model whose output is added to a tensor, and where that is seen.

    A layer is left out if it is not added to the same in every batch that reaches it.

    Args:
        side: the dense model, watched; runs once on each batch.
        calls: the batches.
    """
    seen: dict[str, set[Passage | None]] = {}
    for call in calls:
        for name, passage in _residuals_of(side, call).items():
            seen.setdefault(name, set()).add(passage)
    return {name: one for name, (one, *others) in seen.items() if one is not None and not others}


def _residuals_of(side: Side, call: Call) -> dict[str, Passage | None]:
    """The same in one batch, of every layer that it reaches."""
    recent: dict[int, _Sighting] = {}  # holds the tensors, so that no address is used again
    entered: dict[str, list[_Sighting]] = {}
    pending: dict[str, _Pending] = {}
    found: dict[str, Passage] = {}

    def see(passage: Passage, tensor: Tensor) -> None:
        known = recent.pop(id(tensor), None) is not None
        sighting = recent[id(tensor)] = _Sighting(passage, tensor, _probe(tensor))
        if not known:
            for name, one in list(pending.items()):
                source = one.source_of(sighting)
                if source is not None:
                    found[name] = source
                if source is not None or one.looks == 0:
                    del pending[name]

    def enter(name: str, x: Tensor) -> None:
        if x.numel():  # an expert may be called with no token
            entered.setdefault(name, list(recent.values())[::-1])

    def leave(name: str, out: Tensor) -> Tensor:
        if name in entered:
            alike = [one for one in entered[name] if _are_alike(one.tensor, out)]
            if name not in found and name not in pending and alike:
                pending[name] = _Pending(out, _probe(out), alike[:_CANDIDATES], _LOOKS)
            entered[name] = []
        return out

    with side.seen_by(enter, leave), observe(side.model, _passages(side.model), see), torch.no_grad():
        call.run(side.model)
    return {name: found.get(name) for name in entered}


@dataclass(frozen=True, slots=True)
class _Sighting:
    """A tensor, where it was last seen, and its first numbers."""

    passage: Passage
    tensor: Tensor
    probe: Tensor


def _probe(tensor: Tensor) -> Tensor:
    """The first numbers of a tensor, on the CPU: to look at them must not wait for a GPU each time."""
    return tensor.flatten()[:_PROBE].cpu()


def _are_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


@dataclass(slots=True)
class _Pending:
    """The output of a layer, the tensors that it may be added to, and how often the sum is looked for."""

    out: Tensor
    probe: Tensor
    candidates: list[_Sighting]
    looks: int

    def source_of(self, total: _Sighting) -> Passage | None:
        if total.tensor is self.out or not _are_alike(total.tensor, self.out):
            return None
        self.looks -= 1
        for source in self.candidates:
            if torch.equal(self.probe + source.probe, total.probe) and torch.equal(
                self.out + source.tensor, total.tensor
            ):
                return source.passage
        return None


def _passages(model: nn.Module) -> set[Passage]:
    """All modules but the parts of watched and sketched ones, which not every copy of a model has."""
    hidden = {
        part
        for module in model.modules()
        if isinstance(module, Watched | SketchedLayer)
        for part in module.modules()
        if part is not module
    }
    names = {name for name, module in model.named_modules() if module not in hidden}
    return {Passage(name, kind) for name in names for kind in ("in", "out")}


def _tell(seen: Seen, passage: Passage, values: tuple[Any, ...] | list[Any]) -> None:
    tensor = next((value for value in values if isinstance(value, Tensor) and is_dense(value)), None)
    if tensor is not None and not is_transformed(tensor):
        seen(passage, tensor)
