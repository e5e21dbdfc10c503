"""A plan in which some layers of one input share an input factor, at no more stored numbers than before."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from panther_compile.config import SketchConfig
from panther_compile.factorization import cost
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.kinds.targets import Target
from panther_compile.planning.plan import TimedSites, judged, picks
from panther_compile.planning.sites import Found
from panther_compile.records import SketchPlan


def share_input(
    plan: SketchPlan, targets: Sequence[Target], values: Tensor, found: Found, config: SketchConfig
) -> SketchPlan | None:
    """The plan with one input factor for the targets, of the largest rank that their numbers pay for.

    Args:
        plan: in which each has its own.
        targets: two or more layers of one input.
        values: singular values of their stack in the metric of data, descending.
        found: the sites; `TimedSites` have the layers timed.
        config: the options.

    Returns:
        None if a layer stays dense, if budgets differ, or if a layer of the new rank would be too slow.
    """
    lines = {line.name: line for line in plan.layers}
    own = [lines[target.name] for target in targets]
    if any(line.choice is None or line.choice.scheme != "pivoted" or line.choice.sharing for line in own):
        return None
    budgets = {[picks(selector, one.site) for selector, _ in config.ratios()].index(True) for one in targets}
    if len(budgets) > 1:
        return None
    outputs, inputs = [line.shape[0] for line in own], own[0].shape[1]
    biases = [line.dense_numbers - math.prod(line.shape) for line in own]
    stack = LinearCandidate(sum(outputs), inputs, "pivoted", singular_values=values.cpu())
    rank = stack.largest_rank(sum(line.stored_numbers for line in own) - sum(biases))
    rank = min(rank, *outputs, inputs - 1)
    device = cost.device_class(targets[0].weight_and_bias()[0].device)
    rank -= rank % (config.round_rank_to or cost.finest_step(stack, device))
    if rank < 1:
        return None
    speed = min(cost.speedup(stack, rank, line.shape, device=device) for line in own)
    if speed < cost.WORTHWHILE and not config.allow_slower:
        return None
    names = tuple(line.name for line in own)
    for place, (line, bias) in enumerate(zip(own, biases, strict=True)):
        factor = 0 if place else rank * (inputs - rank)
        numbers = factor + rank * line.shape[0] + bias
        assert line.choice is not None
        choice = replace(
            line.choice,
            rank=rank,
            ranks=(rank,),
            stored_numbers=numbers,
            error=stack.error(rank),
            sharing=names,
        )
        changed = replace(line, choice=choice)
        if isinstance(found, TimedSites):
            changed = judged(changed, found.clock)
        if changed.choice is None:
            return None
        lines[line.name] = changed
    return replace(plan, layers=tuple(lines[line.name] for line in plan.layers))
