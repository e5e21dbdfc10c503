"""Activation checkpointing within a budget: the one rule of what is planned and of what runs.

A budget is a share of the bytes that a unit would keep without checkpointing; its inputs are kept in any case
and count in neither. Where a unit is computed again, all its operations run but those whose results are kept,
so that what keeping saves adds up: a knapsack chooses the most seconds within the bytes.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np

from panther_compile.errors import ConfigError

_CELLS = 4096


def check_mode(option: str, given: object, known: Sequence[str | None]) -> None:
    """Refuse what is neither a known kind of activation checkpointing nor a budget.

    Args:
        option: its name.
        given: for it.
        known: kinds; None is not named.

    Raises:
        ConfigError: it is none of them, and no number between 0 and 1.
    """
    if is_budget(given) or ((given is None or isinstance(given, str)) and given in known):
        return
    names = ", ".join(repr(one) for one in known if one is not None)
    raise ConfigError(
        f"{option}={given!r} is none of {names}, and no budget: that is a float between 0 and 1, the share "
        "of bytes to keep"
    )


def is_budget(mode: object) -> bool:
    """Whether a way of activation checkpointing is a share of bytes to keep."""
    return isinstance(mode, float) and 0 < mode < 1


def choose_kept(seconds: Sequence[float], sizes: Sequence[int], limit: int) -> frozenset[int]:
    """Numbers of the results to keep, by a dynamic program: the most seconds within the limit.

    Sizes count in steps of what divides all of them, or else of 1 / 4096 of the limit, rounded up.

    Args:
        seconds: that each operation takes to run again.
        sizes: bytes of their results.
        limit: bytes of all that are kept.
    """
    fitting = [number for number, size in enumerate(sizes) if size <= limit and seconds[number] > 0]
    step = max(gcd(*(sizes[number] for number in fitting)), -(-limit // _CELLS), 1)
    best = np.zeros(limit // step + 1)  # of each room, the seconds that the results so far can save in it
    taken = np.zeros((len(fitting), len(best)), bool)
    steps = [-(-sizes[number] // step) for number in fitting]
    for row, number in enumerate(fitting):
        reached = best[: max(0, len(best) - steps[row])] + seconds[number]
        taken[row, steps[row] :] = reached > best[steps[row] :]
        best[steps[row] :] = np.maximum(reached, best[steps[row] :])
    room, kept = len(best) - 1, []
    for row in reversed(range(len(fitting))):
        if taken[row, room]:
            kept.append(fitting[row])
            room -= steps[row]
    return frozenset(kept)
