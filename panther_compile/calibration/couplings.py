"""Layers that hand their features to one other layer only, one by one or head by head.

    up ──► activation ──► down             gate ──► activation ─┐
                                           up ──────────────────┴ × ──► down

    value ──► attention: mixes positions, alike for all features of a head ──► output

A feature of a feed-forward part can be left out of the layer that writes it and of the one that reads it. Of
a head any change of basis passes through attention, so that the least telling directions are left out.

Found by looking, whatever the model's code is: one batch runs again and again, every layer answering what it
answered first, but for some whose answers are changed in a way that would be seen in the reader's input:

    features permuted                ──► the reader's input is permuted alike: they pass one by one
    all features the first one       ──► equal features of the reader's input belong to one head
    permuted and scaled in each head ──► alike in the reader's input: heads pass as they are

What is found is taken only if nothing else in the model sees the change, and if it is so in every batch: a
model may take one path or another, as its input is. What no batch has shown is read from the model's code
(`paths.py`): where features may go elsewhere, they are left out by zeros, and heads are no coupling.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.paths import goes_one_way
from panther_compile.kinds.targets import Target
from panther_compile.layers.own_weights import adds_bias_outside
from panther_compile.models.batches import Call, run_dense
from panther_compile.models.outputs import named_tensors
from panther_compile.models.watched import Side
from panther_compile.planning.coupled import Coupling

_BACK = 3  # layers before a reader that may be the value of its attention
# Relative: the same products in another order round otherwise.
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2
_WIDTHS = 32  # of a test: a narrow run keeps all but one in so many features

Change = Callable[[Tensor], Tensor]


@dataclass
class _Record:
    """What reached layers and came of them in a run, by name, once for each call; and its results."""

    inputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    results: list[Tensor] = field(default_factory=list)


def find_couplings(side: Side, targets: Mapping[str, Target], calls: Sequence[Call]) -> list[Coupling]:
    """The layers of a watched model that can be narrowed together; no layer is in two couplings.

    Args:
        side: the dense model, watched.
        targets: by name; only linear layers can be narrowed, and none that writes features to which the
            module around it adds a bias: that has all of them.
        calls: the batches. The first one runs some ten times, without the products of the layers, and shows
            which layers may be coupled; each other one runs once with and once without them, to confirm it.

    Raises:
        DataError: the model raises on a batch.
    """
    looker = _Looker(side, targets, calls[0])
    couplings = looker.one_by_one()
    taken = {name for coupling in couplings for name in coupling.names}
    couplings += looker.by_heads(taken)
    outside = {name for name, target in targets.items() if adds_bias_outside(target.layer)}
    couplings = [one for one in couplings if outside.isdisjoint(one.writers)]
    for call in calls[1:]:
        if not couplings:
            break
        couplings = _Looker(side, targets, call).confirmed(couplings)
    return list(_made_safe(side.model, couplings))


def _made_safe(model: nn.Module, couplings: Sequence[Coupling]) -> Iterator[Coupling]:
    """The couplings with which the model runs on paths too that no batch has taken, some at full width."""
    for coupling in couplings:
        if goes_one_way(model, coupling):
            yield coupling
        elif not coupling.padded:
            yield replace(coupling, wide=True)


class _Looker:
    def __init__(self, side: Side, targets: Mapping[str, Target], call: Call) -> None:
        self._side, self._call = side, call
        self._dense = _Record()
        for name, watched in side.watched.items():
            watched.on_input = lambda name, x: self._dense.inputs[name].append(x)
            watched.on_output = self._keep
        self._dense.results = self._run(lambda: run_dense(side.model, call))
        inputs = self._dense.inputs.items()
        order = [name for name, given in inputs if len(given) == 1 and given[0].numel()]
        self._order = [name for name in order if targets[name].view.is_linear]
        self._sizes = {name: targets[name].shape for name in self._order}

    def _keep(self, name: str, out: Tensor) -> Tensor:
        self._dense.outputs[name].append(out.clone())
        return out

    def _run(self, run: Callable[[], Any]) -> list[Tensor]:
        try:
            with torch.no_grad():
                return [tensor for _, tensor in named_tensors(run())]
        finally:
            for watched in self._side.watched.values():
                watched.on_input = watched.on_output = watched.instead = None

    def changed(self, changes: Mapping[str, Change]) -> _Record:
        """A run in which layers answer what they answered first, some of them changed; empty if it raises."""
        record = _Record()

        def answer(name: str, x: Tensor) -> Tensor:
            answers = self._dense.outputs[name]
            place = len(record.inputs[name])
            record.inputs[name].append(x)
            if place >= len(answers):  # the change has led another way: the inputs will tell
                return self._side.watched[name].layer(x)  # type: ignore[no-any-return]
            return changes[name](answers[place].clone()) if name in changes else answers[place].clone()

        for watched in self._side.watched.values():
            watched.instead = answer
        try:
            record.results = self._run(lambda: self._call.run(self._side.model))
        except torch.OutOfMemoryError:
            raise
        # The model's own code may raise anything on features that it does not expect.
        except Exception:
            return _Record()
        return record

    def confirmed(self, couplings: Sequence[Coupling]) -> list[Coupling]:
        """The couplings that another batch found, without those that this one speaks against."""
        calls = {name: len(inputs) for name, inputs in self._dense.inputs.items()}
        counts = {coupling: {calls.get(name, 0) for name in coupling.names} for coupling in couplings}
        reached = [coupling for coupling in couplings if counts[coupling] == {1}]
        if not self._holds(reached):
            reached = [coupling for coupling in reached if self._holds([coupling])]
        return [coupling for coupling in couplings if counts[coupling] == {0} or coupling in reached]

    def _before(self, reader: str, count: int) -> list[str]:
        """The last layers before a reader whose input is not its own, the last one first."""
        place = self._order.index(reader)
        x = self._dense.inputs[reader][0]
        names = [name for name in self._order[:place] if self._dense.inputs[name][0] is not x]
        return names[-count:][::-1]

    def one_by_one(self) -> list[Coupling]:
        """Links of feed-forward parts: of one writer, and of two that read one tensor."""
        found: list[Coupling] = []
        for count in (1, 2):
            wanted = [coupling for coupling in self._candidates(count) if _is_apart(coupling, found)]
            for coupling in self._seen(self._permuted(wanted)):
                if _is_apart(coupling, found):
                    found.append(coupling)
        return found

    def _candidates(self, count: int) -> list[Coupling]:
        couplings: list[Coupling] = []
        for reader in self._order:
            writers = self._before(reader, count)[::-1]
            inputs = self._sizes[reader][1]
            alike = len({id(self._dense.inputs[name][0]) for name in writers}) == 1
            sizes = {self._sizes[name][0] for name in writers}
            if len(writers) == count and alike and sizes == {inputs} and inputs > 1:
                couplings.append(Coupling(tuple(writers), reader, 1, 1, inputs, padded=False))
        return couplings

    def _permuted(self, couplings: Sequence[Coupling]) -> list[Coupling]:
        """Couplings whose reader is given permuted features when its writers permute theirs."""
        orders = {
            coupling.reader: torch.randperm(coupling.width, generator=torch.Generator().manual_seed(0))
            for coupling in couplings
        }
        changes: dict[str, Change] = {}
        for coupling in couplings:
            for name in coupling.writers:
                changes[name] = lambda out, order=orders[coupling.reader]: out[..., order.to(out.device)]  # type: ignore[misc]
        seen = self.changed(changes) if couplings else _Record()
        return [
            coupling
            for coupling in couplings
            if seen.inputs[coupling.reader]
            and _alike(seen.inputs[coupling.reader][0], self._input(coupling)[..., orders[coupling.reader]])
        ]

    def _input(self, coupling: Coupling) -> Tensor:
        """What the reader is given in the dense model."""
        return self._dense.inputs[coupling.reader][0]

    def _seen(self, couplings: Sequence[Coupling]) -> list[Coupling]:
        """Couplings that compute the same where some features are missing, or heads are changed alike."""
        # Links that have a layer in common would expect one another's changes.
        apart = [
            coupling
            for coupling in couplings
            if _is_apart(coupling, [other for other in couplings if other is not coupling])
        ]
        if not self._holds(apart):
            apart = []
        return [coupling for coupling in couplings if coupling in apart or self._holds([coupling])]

    def _holds(self, couplings: Sequence[Coupling]) -> bool:
        """Whether nothing but the readers sees that features are left out, or that heads are changed."""
        if not couplings:
            return True
        changes: dict[str, Change] = {}
        wanted: dict[str, Tensor] = {}
        for coupling in couplings:
            dense = self._input(coupling)
            if coupling.padded:
                changes[coupling.writers[0]] = _Mixed(coupling)
                wanted[coupling.reader] = _Mixed(coupling, coupling.shared)(dense)
                continue
            kept = coupling.width - max(1, coupling.width // _WIDTHS)
            changes |= dict.fromkeys(coupling.writers, lambda out, kept=kept: out[..., :kept])  # type: ignore[misc]
            wanted[coupling.reader] = dense[..., :kept]
        return self._unseen(self.changed(changes), wanted)

    def _unseen(self, seen: _Record, wanted: Mapping[str, Tensor]) -> bool:
        """Whether readers were given what is wanted, and all else is as it was."""
        for name, inputs in self._dense.inputs.items():
            expected = [wanted[name]] if name in wanted else inputs
            found = seen.inputs[name]
            if len(found) != len(expected) or not all(map(_alike, found, expected)):
                return False
        return len(seen.results) == len(self._dense.results) and all(
            map(_alike, seen.results, self._dense.results)
        )

    def by_heads(self, taken: set[str]) -> list[Coupling]:
        """Links of attention: value and output."""
        found: list[Coupling] = []
        for back in range(1, _BACK + 1):
            busy = taken | {name for coupling in found for name in coupling.names}
            pairs: dict[str, str] = {}  # by the reader
            for reader in self._order:
                before = self._before(reader, back)
                if len(before) == back and not busy & {reader, before[-1]}:
                    pairs[reader] = before[-1]
            found += self._heads_of(pairs)
        return found

    def _heads_of(self, pairs: Mapping[str, str]) -> list[Coupling]:
        if not pairs:
            return []
        first: dict[str, Change] = {
            name: lambda out: out[..., :1].expand_as(out).clone() for name in pairs.values()
        }
        seen = self.changed(first)
        couplings = []
        for reader, writer in pairs.items():
            if not seen.inputs[reader]:
                continue
            outputs, inputs = self._sizes[writer][0], self._sizes[reader][1]
            width = _head_width(seen.inputs[reader][0])
            # One head of all features is what several look like to a single position.
            if 1 < width < inputs and outputs % width == 0 and inputs % outputs == 0:
                heads = inputs // width
                couplings.append(Coupling((writer,), reader, heads, inputs // outputs, width, padded=True))
        return self._seen(couplings)


class _Mixed:
    """Permutes the features of each head and scales them by signed powers of two.

    Args:
        coupling: the heads are those of its writer.
        repeats: of each, one after the other, as a reader sees them.
    """

    def __init__(self, coupling: Coupling, repeats: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self._width = coupling.width
        shape = coupling.heads_of(coupling.writers[0]), coupling.width
        order = torch.rand(shape, generator=generator, dtype=torch.float32).argsort(-1)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        scale = sign * 2.0 ** torch.randint(-2, 3, shape, generator=generator)
        self._order, self._scale = order.repeat_interleave(repeats, 0), scale.repeat_interleave(repeats, 0)

    def __call__(self, features: Tensor) -> Tensor:
        heads = features.unflatten(-1, (-1, self._width))
        order = self._order.to(features.device).expand(heads.shape)
        return (heads.gather(-1, order) * self._scale.to(features)).flatten(-2)


def _is_apart(coupling: Coupling, others: Sequence[Coupling]) -> bool:
    """Whether no layer of a coupling is in another one."""
    return all(set(coupling.names).isdisjoint(other.names) for other in others)


def _head_width(x: Tensor) -> int:
    """How many features in a row are equal, if it is the same number all along; else 0, as without rows."""
    if not x.numel():
        return 0
    rows = x.reshape(-1, x.shape[-1])
    size = float(rows.abs().max())
    new = (rows[:, 1:] - rows[:, :-1]).abs().amax(0) > _tolerance(x) * size
    starts = [0, *(new.nonzero().flatten() + 1).tolist(), x.shape[-1]]
    widths = {b - a for a, b in itertools.pairwise(starts)}
    return widths.pop() if size > 0 and len(widths) == 1 else 0


def _alike(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    if torch.equal(found, wanted):  # as nearly all are: one look, where the rest waits for a GPU four times
        return True
    tolerance = _tolerance(wanted)
    found, wanted = found.float(), wanted.float()
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return False
    if not bool(finite.any()):
        return True
    size, apart = (torch.where(finite, x, 0.0).abs().max() for x in (wanted, found - wanted))
    return bool(size == 0 or apart <= tolerance * size)


def _tolerance(x: Tensor) -> float:
    return _HALF_TOLERANCE if x.element_size() < 4 else _TOLERANCE
