"""How close a sketched model's outputs are to the dense model's on the same inputs, in numbers and in a word.

Logits are compared by the Kullback-Leibler divergence of their rows, other tensors by their squared distance.
Both are put over what an answer that is always the same would lose: of logits that is the information that a
row gives about the choice, H(mean p) - mean H(p), of other tensors their variance. That share is 0 where the
models are equal and 1 where the sketched one tells nothing of the dense one's answers, whatever their scale.
Tensors that are the same for all rows, but for rounding, are put over their size, as those of one row are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther_compile.config import Logits
from panther_compile.factorization.moments import thinned
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.models.batches import Call, kept_positions
from panther_compile.models.outputs import BOXES, all_named_tensors, are_logits, by_place, log_chances, shown
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import copy_sharing
from panther_compile.records import Closeness

GOOD, NOTICEABLE, DESTROYED = GRADES = "good", "noticeable", "destroyed"  # the worst last
MOST_CALLS = 8  # evenly spread over those given
_MOST_ROWS = 1024  # of one tensor of one call
_GOOD_KL, _DESTROYED_KL = 0.05, 1.0  # nats a row
_GOOD_SHARE, _DESTROYED_SHARE = 0.05, 0.5
_LEAST_VARIANCE = 1e-12  # of the mean square, and no less than rounding makes; of less the answers are one
_SMALLEST = 1e-30  # of answers that are zeros
_LEAST_INFORMATION = 1e-4  # nats a row; a dense model that tells less of its inputs knows none of them


def compare_outputs(
    model: nn.Module,
    new: Mapping[nn.Module, nn.Module],
    calls: Sequence[Call],
    *,
    logits: Logits,
    inputs: str,
) -> Closeness:
    """Run the model as it is and with layers replaced, and compare the results.

    Args:
        model: the dense model; neither it nor what replaces its layers is changed.
        new: the sketched layers, by the dense ones.
        calls: of both; at most `MOST_CALLS` of them are used.
        logits: whether the results are logits; None: those called "logits" are.
        inputs: what the calls hold, in words.

    Raises:
        ConfigTypeError: the model cannot be copied.
    """
    copies = {old: copy_sharing(layer, {}) for old, layer in new.items()}  # they change their mode
    dense, sketched = (copy_sharing(model, one) for one in ({}, copies))
    turn_off_nested_tensors(sketched)
    return compare_models(dense, sketched, calls, logits=logits, inputs=inputs)


def compare_models(
    dense: nn.Module, sketched: nn.Module, calls: Sequence[Call], *, logits: Logits, inputs: str
) -> Closeness:
    """The same of two models as they are."""
    results = OutputSums()
    with torch.no_grad():
        for call in calls[:: math.ceil(len(calls) / MOST_CALLS)]:
            kept = kept_positions(dense, call)
            results.see(_pairs(call.run(dense), call.run(sketched), logits), kept)
    return results.closeness(inputs)


class Pair(NamedTuple):
    """A tensor of the results of both models.

    Attributes:
        is_logits: whether it holds logits.
        wanted: the dense model's.
        found: the sketched model's.
        is_answer: whether it is looked at where there are logits, as they are, and boxes beside them.
    """

    is_logits: bool
    wanted: Tensor
    found: Tensor
    is_answer: bool


class OutputSums:
    """Adds up how far results are apart, over the calls of two models."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, bool], _Sums] = {}
        self._seen = self._other = self._empty = 0  # tensors; of another shape; without a finite number

    def see(self, pairs: Sequence[Pair], kept: Tensor | None = None) -> None:
        """Add the tensors of one result; `kept` is False at positions (batch, length) of padding."""
        for place, (is_logits, wanted, found, is_answer) in enumerate(pairs):
            if wanted.numel() == found.numel() == 0:
                continue
            self._seen += 1
            if wanted.shape != found.shape:  # as long as the model says it is, as speech may be
                self._other += 1
                continue
            if not bool(wanted.isfinite().any()):
                self._empty += 1
                continue
            one = self._sums.setdefault((place, is_logits), _LogitSums() if is_logits else _FeatureSums())
            one.is_answer = is_answer
            one.see(wanted, found, kept)

    def closeness(self, inputs: str) -> Closeness:
        """The closeness of the tensor that lost most; of logits and boxes, where there are logits."""
        has_logits = any(is_logits for _, is_logits in self._sums)
        sums = [one for one in self._sums.values() if one.is_answer or not has_logits]
        if self._other:
            inputs = f"{inputs}, but for {self._other} of {self._seen} results, of another shape"
        if not sums and self._other:
            return Closeness.of_other_shapes()  # as far as `outputs.distance` has it
        if not sums and self._empty:
            return Closeness.unknown("the dense model's results are NaN or infinite throughout")
        if not sums:
            return Closeness.unknown("the model's result holds no floating tensor")
        return max((one.closeness(inputs) for one in sums), key=lambda one: one.share)


def paired(name: str, wanted: Tensor, found: Tensor, *, is_logits: bool) -> Pair:
    """A tensor of both results, by the name that it has in them."""
    return Pair(is_logits, wanted, found, is_logits or name in BOXES)


def _pairs(wanted: Any, found: Any, logits: Logits) -> list[Pair]:
    """Each tensor of a result."""
    both = by_place(all_named_tensors(wanted), all_named_tensors(found))
    return [paired(name, one, other, is_logits=are_logits(name, logits)) for name, one, other in both]


@dataclass
class _Sums:
    """Adds up what was seen of one tensor of the results."""

    rows: int = 0
    is_answer: bool = False

    def see(self, wanted: Tensor, found: Tensor, kept: Tensor | None) -> None:
        """Add the rows of one call."""
        raise NotImplementedError

    def closeness(self, inputs: str) -> Closeness:
        """The closeness of all that was seen."""
        raise NotImplementedError


@dataclass
class _LogitSums(_Sums):
    divergence: float = 0.0
    entropy: float = 0.0
    alike: int = 0
    chances: Tensor | None = None

    def see(self, wanted: Tensor, found: Tensor, kept: Tensor | None) -> None:
        wanted, found = (thinned(kept_rows(one, kept), _MOST_ROWS) for one in (wanted, found))
        for target, guess in log_chances(wanted, found):
            self._add(target, guess)

    def _add(self, target: Tensor, guess: Tensor) -> None:
        chances = target.exp()
        self.rows += len(target)
        self.divergence += float((chances * (target - guess)).nansum() if _finite(guess) else math.inf)
        self.entropy -= float((chances * target).nansum())
        self.alike += int((target.argmax(-1) == guess.argmax(-1)).sum())
        total = chances.sum(0)
        self.chances = (
            total if self.chances is None or len(self.chances) != len(total) else self.chances + total
        )

    def closeness(self, inputs: str) -> Closeness:
        assert self.chances is not None
        mean = self.chances / self.chances.sum()
        information = float(-(mean * mean.clamp_min(1e-30).log()).sum()) - self.entropy / self.rows
        divergence = max(0.0, self.divergence / self.rows)
        share = divergence / max(information, _LEAST_INFORMATION)
        grade = NOTICEABLE
        if divergence <= _GOOD_KL and share <= _GOOD_SHARE:
            grade = GOOD
        elif divergence >= _DESTROYED_KL or share >= _DESTROYED_SHARE:
            grade = DESTROYED
        return Closeness(grade, "KL", divergence, share, self.alike / self.rows, inputs)


@dataclass
class _FeatureSums(_Sums):
    error: float = 0.0
    size: float = 0.0
    total: Tensor | None = None
    rounding: float = _LEAST_VARIANCE

    def see(self, wanted: Tensor, found: Tensor, kept: Tensor | None) -> None:
        if wanted.is_floating_point():
            self.rounding = max(self.rounding, (2 * torch.finfo(wanted.dtype).eps) ** 2)
        target, guess = (one.double() for one in shown(kept_rows(wanted, kept), kept_rows(found, kept), 0.0))
        self.rows += len(target)
        self.error += float((guess - target).square().sum()) if _finite(guess) else math.inf
        self.size += float(target.square().sum())
        total = target.sum(0)
        self.total = total if self.total is None or len(self.total) != len(total) else self.total + total

    def closeness(self, inputs: str) -> Closeness:
        assert self.total is not None
        centre = float(self.total.square().sum()) / self.rows if self.rows > 1 else 0.0
        variance = self.size - centre
        if variance <= self.rounding * self.size:  # of rounding alone: the size is what is known
            variance = self.size
        share = self.error / (variance or _SMALLEST)
        grade = NOTICEABLE
        if share <= _GOOD_SHARE:
            grade = GOOD
        elif share >= _DESTROYED_SHARE:
            grade = DESTROYED
        return Closeness(grade, "relative error", math.sqrt(share), share, None, inputs)


def _finite(tensor: Tensor) -> bool:
    return not bool(tensor.isnan().any())
