"""A plan that was given: checked against the model, its ranks carried out as they stand."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigError, ConfigTypeError, RankError
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.kinds.base import Kind
from panther_compile.kinds.parts import parts_of, scheme_of_parts, unit_name, units_of
from panther_compile.planning.coupled import SCHEME, Coupling
from panther_compile.planning.plan import with_tied
from panther_compile.planning.selection import NOT_INCLUDED
from panther_compile.planning.shared_factor import shared_numbers
from panther_compile.planning.sites import Found
from panther_compile.records import Choice, LayerPlan, Site, SketchPlan, Unit

LEFT_DENSE = "left dense by the plan"


def check_recipe(plan: object, ratio: object, max_drop: object, config: SketchConfig) -> None:
    """Raise ConfigError for options that would choose ranks, which a plan has.

    Raises:
        ConfigTypeError: it is no plan.
    """
    if not isinstance(plan, SketchPlan):
        raise ConfigTypeError(
            f"plan is a {type(plan).__name__}, wanted a SketchPlan, of plan_sketch or SketchPlan.from_json"
        )
    given = {
        "ratio": ratio is not None,
        "max_drop": max_drop is not None,
        "objective": config.objective != "size",
        "include": config.include is not None,
        "exclude": config.exclude is not None,
        "round_rank_to": config.round_rank_to is not None,
    }
    for option, there in given.items():
        if there:
            raise ConfigError(f"{option}= conflicts with plan=, which says what is sketched at which rank")
    if not plan.sketched:
        raise ConfigError(f"the plan sketches no weight of its {len(plan.layers)}, wanted one at least")
    counts = Counter(line.name for line in plan.layers)
    for line in plan.sketched:
        if counts[line.name] > 1:
            raise ConfigError(f"the plan has {counts[line.name]} lines of {line.name}, wanted one")


def config_for(plan: SketchPlan, config: SketchConfig, model: nn.Module) -> SketchConfig:
    """The options with which what the plan sketches in a model is found, however small it is.

    Raises:
        ConfigError: the model has nothing of what the plan sketches.
    """
    names = {line.name for line in plan.sketched}
    names |= {name.rpartition(".")[0] for name in names}  # an attention, whose projections the plan names
    modules = dict(model.named_modules(remove_duplicate=False))
    held = {id(one) for name in names if name in modules for one in modules[name]._parameters.values()}
    held.discard(id(None))
    if not held and not (names - {""}) & modules.keys():
        first = plan.sketched[0]
        raise ConfigError(
            f"the plan sketches {first.name} ({_shape(first.shape)}), and {type(model).__name__} has no "
            "module of any name in it: it is the plan of another model"
        )
    tied = (name for name, one in modules.items() if not held.isdisjoint(map(id, one._parameters.values())))
    names.update(tied)
    wanted = re.compile("|".join(map(re.escape, sorted(names))))
    return replace(config, include=[wanted], min_params=0, allow_slower=True)


def follow(found: Found, plan: SketchPlan, config: SketchConfig, route: str, *, data: bool) -> SketchPlan:
    """The plan for the sites of a model: schemes and ranks as given, numbers and reasons anew.

    Args:
        found: what was found with the options of `config_for`.
        plan: may have been edited, or made for another model of the same names and shapes.
        config: the options.
        route: how the sites were found.
        data: whether layers are fitted to data.

    Raises:
        ConfigError: a weight that the plan sketches is not in the model, has another shape, cannot be stored
            by its scheme; shares a factor with others than it can; or is narrow, or shares the factor of an
            input, for which there has to be data.
        RankError: a rank is out of range.
    """
    given = {line.name: line for line in plan.layers}
    lines = [_skipped(line, given.get(line.name)) for line in found.skipped]
    for site, kind in found.sites:
        together = _together(site, kind)
        for unit in with_tied(units_of(parts_of(site, kind), energies=False), site):
            lines.append(
                _line(unit, site.kind, given.pop(unit.name, None), together.get(unit.name, ()), data)
            )
    missing = [line for line in given.values() if line.choice is not None]
    if missing:
        first, reasons = missing[0], {line.name: line.reason for line in found.skipped}
        why = reasons.get(first.name, "the model has no such weight that can be sketched")
        raise ConfigError(f"the plan sketches {first.name} ({_shape(first.shape)}): {why}")
    _check_shared(lines)
    _check_linked(lines)
    place = {line.name: number for number, line in enumerate(plan.layers)}
    lines.sort(key=lambda line: place.get(line.name, len(place)))
    return SketchPlan(
        tuple(lines),
        plan.ratio,
        route,
        plan.allocation,
        plan.tried,
        undecided=plan.undecided,
        cached=plan.cached,
    )


def _skipped(line: LayerPlan, given: LayerPlan | None) -> LayerPlan:
    """A layer that was not looked for, with the plan's own reason if it has one."""
    if line.reason != NOT_INCLUDED:
        return line
    if given is None or given.choice is not None:
        return replace(line, reason=LEFT_DENSE)
    return replace(line, reason=given.reason or LEFT_DENSE, whole=given.whole)


def _together(site: Site, kind: Kind) -> dict[str, frozenset[str]]:
    """Weights that may share a factor with each weight of a site, whatever their inputs."""
    sets = [frozenset(unit_name(site, one) for one in suffixes) for suffixes in kind.may_share(site.module)]
    return {name: names for names in sets for name in names}


def _line(unit: Unit, kind: str, given: LayerPlan | None, together: Collection[str], data: bool) -> LayerPlan:
    dense = LayerPlan(unit.name, kind, unit.shape, unit.dense_numbers, None, LEFT_DENSE)
    if given is not None and given.choice is None and given.whole:
        return replace(dense, reason=given.reason, whole=True)
    if given is None or given.choice is None:
        return dense
    if given.shape != unit.shape:
        raise ConfigError(
            f"the plan's {unit.name} is {_shape(given.shape)}, the model's is {_shape(unit.shape)}"
        )
    return replace(dense, choice=_choice(unit, given.choice, together, data), reason=given.reason)


def _choice(unit: Unit, choice: Choice, together: Collection[str], data: bool) -> Choice:
    if together and choice.sharing:
        return _shared(unit, choice, together)
    if choice.link or choice.sharing:
        if not data:
            what = "narrowed with" if choice.link else "to share a factor with"
            others = ", ".join(name for name in choice.link or choice.sharing if name != unit.name)
            raise ConfigError(f"the plan has {unit.name} {what} {others}, which needs data=")
        return choice if choice.link else _shared(unit, choice)
    schemes = {candidate.scheme: candidate for candidate in unit.candidates}
    candidate = schemes.get(choice.scheme)
    if candidate is None:
        raise ConfigError(
            f"the plan stores {unit.name} as {choice.scheme!r}, wanted one of {', '.join(schemes) or 'none'}"
        )
    if not 1 <= choice.rank <= candidate.max_rank:
        raise RankError(
            f"the plan's rank {choice.rank} for {unit.name} ({_shape(unit.shape)}), wanted "
            f"1..{candidate.max_rank} as {choice.scheme!r}"
        )
    ranks = candidate.ranks(choice.rank)
    numbers = candidate.numbers(choice.rank) + unit.bias_numbers
    error = choice.error if ranks == choice.ranks else None
    return replace(choice, ranks=ranks, stored_numbers=numbers, error=error)


def _shared(unit: Unit, choice: Choice, together: Collection[str] = ()) -> Choice:
    """A choice to share a factor: with others of these, or with any of one input if there are none."""
    names, scheme = choice.sharing, scheme_of_parts(unit.shape) if together else "pivoted"
    others = set(names) <= set(together) if together else len(set(names)) > 1
    if len(unit.shape) != 2 or unit.name not in names or not others or choice.scheme != scheme:
        wanted = f"some of {', '.join(sorted(together)[:3])} ..." if together else "others of its input"
        raise ConfigError(
            f"the plan has {unit.name} share a factor as {choice.scheme!r} with {', '.join(names[:3])}"
            f"{' ...' if len(names) > 3 else ''}, wanted {scheme!r} and itself with {wanted}"
        )
    outputs, inputs = unit.shape
    largest = min(outputs, inputs - (scheme == "pivoted"))
    if not 1 <= choice.rank <= largest:
        raise RankError(
            f"the plan's rank {choice.rank} for {unit.name}, wanted 1..{largest} of a shared factor"
        )
    numbers = shared_numbers(scheme, unit.shape, choice.rank, first=names[0] == unit.name) + unit.bias_numbers
    error = choice.error if choice.ranks == (choice.rank,) else None
    return replace(choice, ranks=(choice.rank,), stored_numbers=numbers, error=error)


def _check_shared(lines: Sequence[LayerPlan]) -> None:
    """Raise ConfigError unless all that share a factor name each other, with one rank."""
    choices = {line.name: line.choice for line in lines if line.choice is not None}
    for name, choice in choices.items():
        for other in choice.sharing:
            theirs = choices.get(other)
            if theirs is None or (theirs.sharing, theirs.rank) != (choice.sharing, choice.rank):
                raise ConfigError(
                    f"the plan has {name} share a factor of rank {choice.rank} with {other}, but not {other} "
                    f"with {name} at that rank"
                )


def _check_linked(lines: Sequence[LayerPlan]) -> None:
    """Raise ConfigError unless all that are narrowed together name each other, with as many features."""
    choices = {line.name: line.choice for line in lines if line.choice is not None}
    for name, choice in choices.items():
        link = choice.link
        if link and (name not in link or choice.scheme != SCHEME):
            raise ConfigError(
                f"the plan has {name} as {choice.scheme!r} narrowed with {' > '.join(link)}, wanted "
                f"{SCHEME!r} and itself among them"
            )
        for other in link:
            theirs = choices.get(other)
            if theirs is None or (theirs.link, theirs.rank) != (link, choice.rank):
                raise ConfigError(
                    f"the plan has {name} keep {choice.rank} features of each head with {other}, but not "
                    f"{other} with {name} as many"
                )


def follow_couplings(plan: SketchPlan, couplings: Iterable[Coupling]) -> SketchPlan:
    """The plan where data show which layers are coupled: narrow ranks as given, numbers counted anew.

    Args:
        plan: of `follow`.
        couplings: the layers that can be narrowed together.

    Raises:
        ConfigError: the plan narrows other layers.
        RankError: a rank is out of range.
    """
    known = {coupling.names: coupling for coupling in couplings}
    lines = {line.name: _narrowed(line, line.choice, known) for line in plan.layers}
    changed = {
        name
        for line in plan.sketched
        if line.choice and line.choice.stored_numbers != lines[line.name].stored_numbers
        for name in line.choice.link
    }
    for name in changed:  # the error is of the layers together
        choice = lines[name].choice
        lines[name] = replace(lines[name], choice=choice and replace(choice, error=None))
    return replace(plan, layers=tuple(lines[line.name] for line in plan.layers))


def _narrowed(line: LayerPlan, choice: Choice | None, known: Mapping[tuple[str, ...], Coupling]) -> LayerPlan:
    if choice is None or not choice.link:
        return line
    coupling = known.get(choice.link)
    if coupling is None:
        raise ConfigError(
            f"the plan narrows {' > '.join(choice.link)}, which on this data do not hand features on alone"
        )
    if not 1 <= choice.rank < coupling.width:
        raise RankError(
            f"the plan's rank {choice.rank} for {line.name}, wanted 1..{coupling.width - 1} features of each "
            f"head that {' > '.join(choice.link)} keep"
        )
    features, shape = coupling.heads_of(line.name) * choice.rank, (line.shape[0], line.shape[1])
    inner = choice.ranks[1:]
    largest = LinearCandidate(*coupling.narrow_shape(line.name, shape, choice.rank), "pivoted").max_rank
    if choice.ranks[:1] != (features,) or len(inner) > 1 or not all(1 <= one <= largest for one in inner):
        raise RankError(
            f"the plan's ranks {list(choice.ranks)} for {line.name} of rank {choice.rank}, wanted "
            f"[{features}] or [{features}, 1..{largest}]: the features kept, and the rank if factorized"
        )
    bias = line.dense_numbers > math.prod(line.shape)
    numbers = coupling.numbers(line.name, shape, choice.rank, *inner, bias=bias)
    return replace(line, choice=replace(choice, stored_numbers=numbers))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
