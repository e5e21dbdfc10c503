"""The smallest ratio whose score stays within a drop, in few evaluations.

Between the largest ratio that is known to fail and the smallest one that is known to pass, the next one is
where the logarithm of the drop, taken as linear, meets the drop allowed; but never so near to an end that
halving what is left would take more evaluations than there are. A score that does not rise with the ratio
costs evaluations, never the answer's truth: what is chosen was measured, and passes.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real

import torch
from torch import Tensor, nn

from panther_compile.config import read_number
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    EvaluateError,
    NoTargetError,
    RatioSearchError,
)
from panther_compile.models.derivatives import gradients_for
from panther_compile.models.surroundings import eval_mode
from panther_compile.reporting.ratio_curve import RatioCurve

Evaluate = Callable[[nn.Module], float]
"""From a model its score: higher is better."""

RATIOS = (0.05, *(step / 100 for step in range(6, 100, 2)))
MOST = 7  # evaluations; 2 ** MOST is more than there are ratios
# Where to begin: the others where nothing can be sketched at those before.
_BEGINNINGS = tuple(
    RATIOS.index(percent / 100) for percent in (50, 74, 26, 86, 38, 62, 14, 94, 44, 56, 68, 32, 80, 20, 98, 5)
)


def check_search(ratio_given: bool, max_drop: object, evaluate: object) -> None:
    """Check what asks for a search: both or neither.

    Args:
        ratio_given: whether a ratio was asked for.
        max_drop: see `RatioCurve`, or None.
        evaluate: see `Evaluate`, or None.

    Raises:
        ConfigError: one is given without the other, or a ratio too; or max_drop is negative or infinite.
        ConfigTypeError: either is of the wrong type.
    """
    if max_drop is None and evaluate is None:
        return
    if max_drop is None or evaluate is None:
        given, missing = ("evaluate", "max_drop") if max_drop is None else ("max_drop", "evaluate")
        raise ConfigError(f"{given}= without {missing}=: wanted both, to search for the ratio, or neither")
    if not 0.0 <= read_number("max_drop", max_drop) < math.inf:
        raise ConfigError(f"max_drop={max_drop!r}, wanted a finite number, at least 0")
    if not callable(evaluate):
        raise ConfigTypeError(
            f"evaluate is a {type(evaluate).__name__}, wanted a function from the model to its score"
        )
    if ratio_given:
        raise ConfigError("ratio= conflicts with max_drop=, which searches for it: wanted one of the two")


def search_ratio(score_at: Callable[[float], float], dense_score: float, max_drop: float) -> RatioCurve:
    """Search `RATIOS` with at most `MOST` evaluations, down to neighbours where one passes.

    Args:
        score_at: score of the model at a ratio. It may raise NoTargetError where there is no point in it: too
            little to store one rank, below the ratios that have been scored; too much to be faster, above.
        dense_score: of the dense model.
        max_drop: how far below that a score may be.

    Raises:
        RatioSearchError: nothing that was measured passes.
        NoTargetError: nothing can be sketched at any ratio asked for.
    """
    curve = RatioCurve((), dense_score, max_drop, None)
    drops: dict[int, float] = {}
    low, high = -1, len(RATIOS)  # neither end is asked for again
    place, score = _first_score(score_at)
    for left in reversed(range(MOST)):
        if drops:
            if high - low <= 1:
                break
            place = _next_place(drops, low, high, left, max_drop)
            try:
                score = score_at(RATIOS[place])
            except NoTargetError:
                low, high = (place, high) if place < min(drops) else (low, place)
                continue
        drops[place] = dense_score - score
        passes = curve.passes(score)
        low, high = (low, place) if passes else (place, high)
        curve = RatioCurve(
            (*curve.points, (RATIOS[place], score)),
            dense_score,
            max_drop,
            RATIOS[place] if passes else curve.ratio,
        )
    if curve.ratio is None:
        raise RatioSearchError(f"no ratio keeps the score within max_drop={max_drop:g}\n{curve}")
    return curve


def _first_score(score_at: Callable[[float], float]) -> tuple[int, float]:
    """The first of the places to begin with where something can be sketched, and its score.

    Raises:
        NoTargetError: of the first, where there is none.
    """
    refused: NoTargetError | None = None
    for place in _BEGINNINGS:
        try:
            return place, score_at(RATIOS[place])
        except NoTargetError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _next_place(drops: dict[int, float], low: int, high: int, left: int, max_drop: float) -> int:
    """Strictly between low and high, so that `left` halvings can settle what is left on either side."""
    fail, passing = drops.get(low), drops.get(high)
    if fail is None or passing is None or not math.isfinite(fail - passing):
        wanted = (low + high) // 2
    else:
        if passing > 0.0 and max_drop > 0.0:
            part = math.log(fail / max_drop) / math.log(fail / passing)
        else:
            part = (fail - max_drop) / (fail - passing)
        wanted = low + math.ceil(part * (high - low))
    room = 2**left
    least, most = max(low + 1, high - room), min(high - 1, low + room)
    return min(max(wanted, least), most)


def measured(evaluate: Evaluate, model: nn.Module, what: str) -> float:
    """The score of a model in eval mode, without gradients; its modes and the random numbers are put back.

    Args:
        evaluate: the user's function.
        model: to be scored.
        what: the model is called in messages.

    Raises:
        EvaluateError: evaluate raised, or gave NaN, +Inf or no number.
    """
    with _for_evaluation(model):
        try:
            score = evaluate(model)
        # The user's function runs here, and may raise anything.
        except Exception as error:
            raise EvaluateError(f"evaluate raised on {what} ({type(error).__name__}: {error})") from error
    if isinstance(score, Tensor) and score.numel() == 1 and not score.is_complex():
        score = score.item()  # type: ignore[assignment]
    if isinstance(score, bool) or not isinstance(score, Real):
        raise EvaluateError(f"evaluate gave a {type(score).__name__} for {what}, wanted a number")
    score = float(score)
    if math.isnan(score) or score == math.inf:
        raise EvaluateError(f"evaluate gave {score} for {what}, wanted a number; higher is better")
    return score


@contextmanager
def _for_evaluation(model: nn.Module) -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state = random.getstate()
    try:
        with eval_mode(model), torch.random.fork_rng(devices), torch.no_grad(), gradients_for(model):
            yield
    finally:
        random.setstate(state)
