"""How close a sketch is on batches that it was not fitted to, where few data flatter it.

Layers that were fitted to few rows may answer them as the dense model does, and nothing else. All data goes
into the layers that are kept, so none is left to judge them by: the same plan is fitted once more, to the
batches that were learnt from, and judged by those held out.
"""

from panther_compile.calibration.closeness import GRADES, compare_models
from panther_compile.calibration.few_data import has_few
from panther_compile.calibration.held_out import HeldOut, Studied
from panther_compile.config import SketchConfig
from panther_compile.kinds.targets import watch
from panther_compile.models.watched import Side
from panther_compile.records import Closeness, SketchPlan
from panther_compile.reporting.tables import counted

_FLATTERED = 10.0  # times as much lost on other batches, from which on these are shown whatever the grade


def unseen_closeness(
    studied: Studied,
    config: SketchConfig,
    plan: SketchPlan,
    seen: Closeness,
    trials: HeldOut | None,
    *,
    healed: bool,
) -> Closeness:
    """The closeness on held-out batches of what the other batches make of a plan, if it is clearly less.

    Unless such a fit was made already, ranks cut as the study left them, which costs next to nothing, are
    judged first; the fit is made only if they have a worse grade.

    Args:
        studied: the model.
        config: the options.
        plan: that the sketch carries out.
        seen: of the sketch, on what it was fitted to; comes back if data is many, or flatters little.
        trials: see `Calibrated`; None if no data was fitted to.
        healed: whether the sketch was healed since, which the other fit is not.
    """
    if not seen.grade or trials is None or not has_few(studied):
        return seen

    def judged(side: Side) -> Closeness:
        calls = [call for call, _ in studied.held_out]
        fit = f"a fit to {len(studied.learnt)}{', not healed' * healed}"
        what = (
            f"{counted(len(calls), 'batch')} held out from {fit} "
            f"({seen.distance:.2g} on what it was fitted to)"
        )
        dense = watch(studied.model, {}).model
        return compare_models(dense, side.model, calls, logits=config.logits, inputs=what)

    def is_worse(one: Closeness) -> bool:
        if not one.grade:  # nothing to compare; results of another shape are as far as can be
            return one.is_of_other_shapes and seen.grade != GRADES[-1]
        return GRADES.index(one.grade) > GRADES.index(seen.grade)

    cheap = studied.cut_by_study and not trials.is_fitted_to_all(plan)
    if cheap and not is_worse(judged(trials.cut(plan))):
        return seen
    found = judged(trials.fitted_to_all(plan))
    flatters = bool(found.grade) and found.share > _FLATTERED * seen.share
    return found if flatters or is_worse(found) else seen
