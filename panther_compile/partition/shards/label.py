"""Tensors and layers that are sharded over the tp axis: the labelling of least cost of `choices`.

Three ways to find it, in this order:

    elimination   exact, whatever is paid: where tensors may lie along a sequence (the default) and the graph
                  is narrow, as those of models are. No minimum cut is made there.
    one cut       of the labels replicated and sharded alone (`sequence_parallel=False`): exact wherever all
                  paths from a tensor to another pass the same number of layers, modulo two, as in
                  transformers and residual networks of pairs. Elsewhere roof duality and a search bound it
                  (`energy`).
    moves         in wide graphs with a sequence: the third label comes in by moves that are minimum cuts
                  (`expansion`), from what the cut found, so that the cost never grows. No bound is known.
"""

import itertools

from panther_compile.partition.shards.choices import Choices
from panther_compile.partition.shards.elimination import LARGEST, eliminate
from panther_compile.partition.shards.problem import Problem
from panther_compile.partition.shards.sharding_plan import REPLICATED, SEQUENCE, SHARDED, ShardingPlan

# Cuts, where one is not enough for replicated and sharded; and those of one move.
_MOST_CUTS, _CUTS_OF_A_MOVE = 64, 2


def find_sharding_plan(problem: Problem, largest: int = LARGEST) -> ShardingPlan:
    """The labelling of least cost; with sequences in a wide graph, the best that moves find.

    Args:
        problem: of `build_problem`.
        largest: number of entries that the tables of `eliminate` may have.
    """
    choices = Choices(problem)
    has_sequence = any(SEQUENCE in options for options in choices.labels.options)
    best = eliminate(choices.labels, largest) if has_sequence else None
    if best is not None:
        return choices.plan(best, 0.0)
    labels, minimum = choices.solve(SHARDED, choices.labels.first(), _MOST_CUTS, free=False)
    if not has_sequence:
        return choices.plan(labels, minimum.gap)
    turns, failed = itertools.cycle((SEQUENCE, REPLICATED, SHARDED)), 0
    while failed < 3:
        moved, _ = choices.solve(next(turns), labels, _CUTS_OF_A_MOVE)
        if choices.labels.cost(moved) < choices.labels.cost(labels):
            labels, failed = moved, 0
        elif SEQUENCE in labels:
            failed += 1
        else:
            break
    return choices.plan(labels, None)
