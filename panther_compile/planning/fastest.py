"""Plans where time counts: fewer layers until the whole is faster, never slower than the plain sketch."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import nn

from panther_compile.errors import NoTargetError
from panther_compile.planning.plan import PAYS, TimedSites
from panther_compile.planning.sites import Found
from panther_compile.planning.timing import without_least
from panther_compile.records import SketchPlan, WholeTimes


class CarriedOut(Protocol):
    """A plan carried out."""

    @property
    def new(self) -> Mapping[nn.Module, nn.Module]:
        """The sketched layers, by the dense ones."""

    @property
    def plan(self) -> SketchPlan:
        """What was carried out."""


M = TypeVar("M", bound=CarriedOut)


def fastest(found: TimedSites, fit: Callable[[Found], M]) -> tuple[M, WholeTimes | None]:
    """The sketch whose whole model is faster, and the times taken of it; None if nothing was sketched.

    Layers that do not pay alone are dense, and more of them until the whole model is faster. What comes of
    that is held against the sketch that is made where time does not count, which may gain as a whole what its
    layers do not gain alone; that one is taken if it is measured faster.

    Args:
        found: the sites with their clocks.
        fit: carries out the plan for some sites; where they hold no clocks, time does not count.

    Raises:
        NoTargetError: no sketch is faster; the reasons are those of the layers.
    """
    tried: set[tuple[object, ...]] = set()
    failed: NoTargetError | None = None
    best: tuple[M, WholeTimes | None] | None = None
    try:
        best = _layer_by_layer(found, fit, tried)
    except NoTargetError as error:
        failed = error
    try:
        plain = fit(Found(found.sites, found.skipped, found.order))
    except NoTargetError:
        plain = None
    if plain is not None and plain.new and _choices(plain.plan) not in tried:
        times = found.whole(plain.new)
        speed = 0.0 if best is None or best[1] is None else best[1].speedup
        if times.speedup >= PAYS and times.speedup > speed:
            return plain, times
    if best is None:
        assert failed is not None
        raise failed
    return best


def _layer_by_layer(
    found: TimedSites, fit: Callable[[Found], M], tried: set[tuple[object, ...]]
) -> tuple[M, WholeTimes | None]:
    while True:
        made = fit(found)
        if not made.new:
            return made, None
        times = found.whole(made.new)
        tried.add(_choices(made.plan))
        if times.speedup >= PAYS:
            return made, times
        found = without_least(found, made.plan, times)


def _choices(plan: SketchPlan) -> tuple[object, ...]:
    """Equal for two plans that store the same in the same way."""
    return tuple(
        (line.name, line.choice and (line.choice.scheme, line.choice.ranks)) for line in plan.sketched
    )
