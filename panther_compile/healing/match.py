"""How far the small model is from its teacher on a call: the loss that healing lowers.

hidden   mean over the landmarks of  E (t - s)² / Var t
output   of logits the Kullback-Leibler divergence in nats a row, else  E (t - s)² / Var t, and where there
         are positions the same of the mean over them, which shows errors that have a direction

over the positions that are no padding. Var t is of the batch, and a thousandth of its usual value at least:
some batches hold silence. What the teacher gives is computed once and kept while it fits.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import Logits
from panther_compile.errors import HealingError
from panther_compile.healing.landmarks import Hidden, shapes, watched
from panther_compile.models.batches import Call, kept_positions, run_dense
from panther_compile.models.outputs import all_named_tensors, are_logits, by_place, shown
from panther_compile.models.rows import kept_rows

OUTPUT, POOLED = "output", "pooled output"
_SMALLEST = 1e-12  # variance of what does not vary at all
_LARGE = 1e20  # least variance of numbers whose squares, or sums of these, may leave float32
_LEAST_SHARE = 1e-3  # of the usual variance, that a batch is said to have


@dataclass(frozen=True, slots=True)
class Given:
    """What a model gives for a call: the hidden states at the landmarks, and the tensors of its result."""

    hidden: Hidden
    output: list[tuple[str, Tensor]]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        tensors = [t for visits in self.hidden.values() for t in visits] + [t for _, t in self.output]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


class Match:
    """The loss of the small model on each of the calls.

    Args:
        small: the model that learns, in eval mode.
        teacher: in eval mode.
        calls: of both.
        landmarks: names of modules, see `find_landmarks`.
        logits: whether the results are logits; None: those called "logits" are.
        half: run both models under bfloat16 autocast.
        cache_bytes: what the teacher's answers may take up.
        usual: places of calls that tell how much things usually vary.

    Attributes:
        has_logits: whether a result is compared by its divergence; known once there were losses.
    """

    def __init__(
        self,
        small: nn.Module,
        teacher: nn.Module,
        calls: Sequence[Call],
        landmarks: Sequence[str],
        *,
        logits: Logits,
        half: bool,
        cache_bytes: int,
        usual: Sequence[int],
    ) -> None:
        self.small, self.teacher, self.calls, self.landmarks = small, teacher, calls, landmarks
        self._logits, self._half, self._left = logits, half, cache_bytes
        self._kept = [kept_positions(small, call) for call in calls]
        self._answers: dict[int, Given] = {}
        self.has_logits = False
        self._least = self._usual_variances(usual)

    def losses(self, place: int) -> dict[str, Tensor]:
        """The loss at each landmark, and under "output" that of the result, for the call at a place.

        Landmarks that the models do not reach alike, as often and with as many rows, have none; nor have
        those that hold nothing.

        Raises:
            HealingError: the teacher gives NaN or Inf, or results of the models do not go together.
        """
        wanted, found = self._answer(place), self._run(self.small, place)
        kept = self._kept[place]
        least = self._least
        losses = {
            name: _mean(
                _error(t, s, kept, least[name]) for t, s in zip(visits, theirs, strict=True) if t.numel()
            )
            for name, visits in wanted.hidden.items()
            if any(t.numel() for t in visits) and shapes(theirs := found.hidden[name]) == shapes(visits)
        }
        both = by_place(wanted.output, found.output)
        alike = ((name, t, s) for name, t, s in both if t.shape == s.shape and t.numel())
        # Nothing is compared where the teacher gives -Inf, as of choices that it rules out.
        pairs = [(name, *shown(t, s, self._fill(name))) for name, t, s in alike]
        if not pairs:
            raise HealingError(
                f"the results of {type(self.small).__name__} and of the teacher have no floating tensor of "
                f"equal shape: {_described(found)} and {_described(wanted)}"
            )
        self.has_logits = any(self._is_logits(name) for name, _, _ in pairs)
        losses[OUTPUT] = _mean(
            _divergence(t, s, kept)
            if self._is_logits(name)
            else _error(t, s, kept, least[OUTPUT, name]) + _pooled_error(t, s, kept, least[POOLED, name])
            for name, t, s in pairs
        )
        return losses

    @torch.no_grad()
    def _usual_variances(self, places: Sequence[int]) -> dict[Any, float]:
        """The least variance that is counted, by landmark, and by result."""
        found: dict[Any, list[float]] = defaultdict(list)
        for place in places:
            answer, kept = self._answer(place), self._kept[place]
            for name, visits in answer.hidden.items():
                found[name] += [_variance(kept_rows(one.float(), kept)) for one in visits if one.numel()]
            for name, one in answer.output:
                if not one.numel():
                    continue
                one, _ = shown(one, one, self._fill(name))
                found[OUTPUT, name].append(_variance(kept_rows(one, kept)))
                if (pooled := _pooled(one, kept)) is not None:
                    found[POOLED, name].append(_variance(pooled))
        usual = {name: _LEAST_SHARE * fmean(each) for name, each in found.items() if each}
        return defaultdict(lambda: _SMALLEST, {name: one for name, one in usual.items() if one > 0})

    def _is_logits(self, name: str) -> bool:
        return are_logits(name, self._logits)

    def _fill(self, name: str) -> float:
        return torch.finfo(torch.float32).min if self._is_logits(name) else 0.0

    def _run(self, model: nn.Module, place: int) -> Given:
        call = self.calls[place]
        device = next((t.device.type for t in model.parameters()), "cpu")
        with watched(model, self.landmarks) as hidden, torch.autocast(device, torch.bfloat16, self._half):
            output = list(all_named_tensors(run_dense(model, call)))
        return Given(hidden, output)

    def _answer(self, place: int) -> Given:
        if place in self._answers:
            return self._answers[place]
        with torch.no_grad():
            found = self._run(self.teacher, place)
        answer = replace(
            found, hidden={name: [one.detach() for one in visits] for name, visits in found.hidden.items()}
        )
        hidden = [(name, t) for name, visits in answer.hidden.items() for t in visits]
        results = [(name, t.masked_fill(t == -math.inf, 0.0)) for name, t in answer.output]
        for name, tensor in (*results, *hidden):
            if not bool(torch.isfinite(kept_rows(tensor, self._kept[place])).all()):
                raise HealingError(
                    f"the teacher's {name or OUTPUT} holds NaN or Inf on {self.calls[place].what}"
                )
        if answer.size <= self._left:
            self._left -= answer.size
            self._answers[place] = answer
        return answer


def _error(wanted: Tensor, found: Tensor, kept: Tensor | None, least: float) -> Tensor:
    """Mean squared error over the variance of what is wanted, about the mean of each column."""
    target, guess = kept_rows(wanted.float(), kept), kept_rows(found.float(), kept)
    if least > _LARGE:  # in units of a power of 2, which changes no digit
        unit = 2.0 ** (math.frexp(least)[1] // 2)
        target, guess, least = target / unit, guess / unit, least / unit**2
    return (guess - target).square().mean() / _spread(target).clamp_min(least)


def _spread(target: Tensor) -> Tensor:
    centred = target - target.mean(0) if len(target) > 1 else target
    return centred.square().mean()


def _variance(target: Tensor) -> float:
    found = float(_spread(target)) if target.numel() else 0.0
    return found if math.isfinite(found) else float(_spread(target.double()))


def _pooled_error(wanted: Tensor, found: Tensor, kept: Tensor | None, least: float) -> Tensor:
    """The error of the means over positions, of tensors (B, T, F) and (B, C, H, W); 0 of others."""
    target, guess = _pooled(wanted, kept), _pooled(found, kept)
    if target is None or guess is None:
        return wanted.new_zeros(())
    return _error(target, guess, None, least)


def _pooled(given: Tensor, kept: Tensor | None) -> Tensor | None:
    """The means over positions (B, F); None of what has none."""
    if given.dim() == 4:
        return given.float().mean((2, 3))
    if given.dim() != 3 or (kept is not None and given.shape[:2] != kept.shape):
        return None
    weights = given.new_ones(given.shape[:2], dtype=torch.float32) if kept is None else kept.float()
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1.0)
    return torch.einsum("bt,btf->bf", weights, given.float())


def _divergence(wanted: Tensor, found: Tensor, kept: Tensor | None) -> Tensor:
    """KL(teacher || small) in nats a row."""
    target = kept_rows(wanted.float(), kept).log_softmax(-1)
    guess = kept_rows(found.float(), kept).log_softmax(-1)
    return F.kl_div(guess, target, log_target=True, reduction="batchmean").clamp_min(0.0)  # rounding


def _mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def _described(given: Given) -> str:
    return ", ".join(f"{name or 'tensor'} {tuple(t.shape)}" for name, t in given.output) or "none"
