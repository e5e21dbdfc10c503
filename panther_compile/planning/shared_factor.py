"""A plan in which weights store one factor in common, at no more stored numbers than before.

    scheme "pivoted"   A_i (x₁ + C x₂)   one input factor C    r (Σ O_i + I - r) numbers
    scheme "pair"      U C_i x           one output factor U   r (O + Σ I_i) numbers

Layers of one input may share an input factor. Of parts of one module, such as the experts of a mixture, that
may share, it is the factor of the longer side, whose numbers count once then. At equal numbers r is larger
than apart; whether that is better depends on how much the weights have in common.
"""

# O out_features, I in_features, R rank
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from panther_compile.config import SketchConfig
from panther_compile.factorization import cost
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.factorization.shared_basis import shared_values
from panther_compile.kinds.parts import parts_of, scheme_of_parts, unit_name
from panther_compile.kinds.weights import LARGEST_SPECTRUM
from panther_compile.planning.plan import TimedSites, budget_of, judged, make_plan
from panther_compile.planning.sites import Found
from panther_compile.records import LayerPlan, Site, SketchPlan

# One factor for several weights is taken where less than this share is lost of what is lost apart.
WORTH_SHARING = 0.95


def plan_by_weights(found: Found, config: SketchConfig, route: str) -> SketchPlan:
    """The plan without data: see `make_plan`; parts of one module share a factor where that loses less."""
    plan = make_plan(found, config, route)
    for site, kind in found.sites:
        for suffixes in kind.may_share(site.module):
            parts = parts_of(site, kind)
            names = [unit_name(site, suffix) for suffix in suffixes]
            weights: dict[str, Any] = {name: parts[name].weight for name in names}
            plan = _share_parts(plan, site, weights, found, config)
    return plan


def _share_parts(
    plan: SketchPlan, site: Site, weights: Mapping[str, Tensor], found: Found, config: SketchConfig
) -> SketchPlan:
    """The plan with one factor for some parts of a site, if the squared errors of all sum to less so."""
    lines = {line.name: line for line in plan.sketched if line.name in weights}
    shape = next(iter(weights.values())).shape
    known = len(lines) == len(weights) and all(_error(line) is not None for line in lines.values())
    if len(weights) < 2 or not known or max(shape) > LARGEST_SPECTRUM:
        return plan
    scheme = scheme_of_parts(shape)
    values = shared_values(list(weights.values()), scheme)
    shared = share_factor(plan, dict.fromkeys(weights, site), values, found, config, scheme=scheme)
    if shared is None:
        return plan
    apart = sum(
        (_error(lines[name]) or 0.0) ** 2 * float(weight.detach().double().square().sum())
        for name, weight in weights.items()
    )
    rank = next(line.choice.rank for line in shared.sketched if line.choice and line.name in weights)
    return shared if float(values[rank:].square().sum()) < WORTH_SHARING * apart else plan


def _error(line: LayerPlan) -> float | None:
    return None if line.choice is None else line.choice.error


def shared_numbers(scheme: str, shape: tuple[int, ...], rank: int, *, first: bool) -> int:
    """What one of several weights (O, I) stores; the shared factor is the first one's."""
    outputs, inputs = shape
    if scheme == "pair":
        return rank * inputs + (rank * outputs if first else 0)
    return rank * outputs + (rank * (inputs - rank) if first else 0)


def share_factor(
    plan: SketchPlan,
    sites: Mapping[str, Site],
    values: Tensor,
    found: Found,
    config: SketchConfig,
    *,
    scheme: str,
) -> SketchPlan | None:
    """The plan with one factor for some weights, of the largest rank that their numbers pay for.

    Args:
        plan: in which each has its own.
        sites: that two or more weights belong to, by their names.
        values: singular values of the weights as one, descending; in the metric of data if there is any.
        found: the sites; `TimedSites` have the layers timed.
        config: the options.
        scheme: "pivoted" for an input factor, "pair" for an output factor.

    Returns:
        None if a layer stays dense, if budgets differ, or if a layer of the new rank would be too slow.
    """
    lines = {line.name: line for line in plan.layers}
    own = [lines[name] for name in sites]
    if any(line.choice is None or line.choice.scheme != "pivoted" or line.choice.sharing for line in own):
        return None
    if len({budget_of(one, config) for one in sites.values()}) > 1:
        return None
    outputs, inputs = ([line.shape[side] for line in own] for side in (0, 1))
    biases = [line.dense_numbers - math.prod(line.shape) for line in own]
    whole = (sum(outputs), inputs[0]) if scheme == "pivoted" else (outputs[0], sum(inputs))
    stack = LinearCandidate(*whole, scheme, singular_values=values.cpu())
    rank = stack.largest_rank(sum(line.stored_numbers for line in own) - sum(biases))
    rank = min(rank, *outputs, min(inputs) - (scheme == "pivoted"))
    device = cost.device_class(next(next(iter(sites.values())).module.parameters()).device)
    rank -= rank % (config.round_rank_to or cost.finest_step(stack, device))
    if rank < 1:
        return None
    speed = min(cost.speedup(stack, rank, line.shape, device=device) for line in own)
    if speed < cost.WORTHWHILE and not config.allow_slower:
        return None
    for place, (line, bias) in enumerate(zip(own, biases, strict=True)):
        assert line.choice is not None
        choice = replace(
            line.choice,
            scheme=scheme,
            rank=rank,
            ranks=(rank,),
            stored_numbers=shared_numbers(scheme, line.shape, rank, first=place == 0) + bias,
            error=stack.error(rank),
            sharing=tuple(sites),
        )
        changed = replace(line, choice=choice)
        if isinstance(found, TimedSites):
            changed = judged(changed, found.clock)
        if changed.choice is None:
            return None
        lines[line.name] = changed
    return replace(plan, layers=tuple(lines[line.name] for line in plan.layers))
