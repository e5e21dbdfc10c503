"""The same budget of stored numbers for every method, spent by the same ratio in every layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import nn

Choice = TypeVar("Choice")
Shape = tuple[int, int]
Stored = Callable[[int, int, int], int]
"""(O, I, rank) to the numbers that one weight stores."""


def pair_numbers(outputs: int, inputs: int, rank: int) -> int:
    """Stored numbers of two factors."""
    return rank * (outputs + inputs)


def pivoted_numbers(outputs: int, inputs: int, rank: int) -> int:
    """Stored numbers of r rows, the coefficients of the others, and the order of the outputs."""
    return rank * (inputs + outputs - rank) + outputs


def count_numbers(model: nn.Module) -> int:
    """Parameters and buffers, shared ones once."""
    tensors = {id(t): t.numel() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def spend(
    shapes: Mapping[str, Shape],
    biases: Mapping[str, int],
    ratios: float | Mapping[str, float],
    stored: Stored = pair_numbers,
) -> dict[str, int]:
    """The rank of each layer: as large as its ratio allows, then what is left over, one rank at a time.

    Args:
        shapes: (O, I) of each layer.
        biases: how many numbers its bias has; they are part of the dense count and stay.
        ratios: stored over dense numbers, of all layers or of each; the budget is their sum.
        stored: what a rank costs.
    """
    share = ratios if isinstance(ratios, Mapping) else dict.fromkeys(shapes, ratios)
    budgets = {name: share[name] * (o * i + biases[name]) - biases[name] for name, (o, i) in shapes.items()}
    ranks = {name: _largest(stored, *shapes[name], budgets[name]) for name in shapes}
    left = sum(budgets.values()) - sum(stored(*shapes[n], ranks[n]) for n in shapes)
    by_deficit: Sequence[str] = sorted(
        shapes, key=lambda n: (budgets[n] - stored(*shapes[n], ranks[n])) / budgets[n], reverse=True
    )
    for name in by_deficit:
        more = stored(*shapes[name], ranks[name] + 1) - stored(*shapes[name], ranks[name])
        if more <= left and ranks[name] < min(shapes[name]):
            ranks[name] += 1
            left -= more
    return ranks


def choose_one_each(columns: Sequence[tuple[str, Choice, float, float]], budget: float) -> dict[str, Choice]:
    """A choice for each layer, of least cost together, by an integer program to within a thousandth.

    Args:
        columns: (layer, choice, cost, stored numbers) of all choices.
        budget: of stored numbers.

    Raises:
        ValueError: no choices fit.
    """
    names = list(dict.fromkeys(name for name, *_ in columns))
    rows = [names.index(name) for name, *_ in columns]
    solved = milp(
        np.array([cost for *_, cost, _ in columns]),
        constraints=[
            LinearConstraint(coo_array((np.ones(len(columns)), (rows, range(len(columns))))), 1, 1),
            LinearConstraint(np.array([[numbers / budget for *_, numbers in columns]]), -np.inf, 1),
        ],
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-3, "time_limit": 20},
    )
    if solved.x is None:
        raise ValueError(f"no choices fit {budget:g} numbers: {solved.message}")
    return {name: choice for (name, choice, *_), taken in zip(columns, solved.x, strict=True) if taken > 0.5}


def _largest(stored: Stored, outputs: int, inputs: int, budget: float) -> int:
    low, high = 1, min(outputs, inputs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if stored(outputs, inputs, middle) <= budget else (low, middle - 1)
    return low
