"""Heal a sketch on the data that it was fitted to, as its options say."""

from collections.abc import Sequence

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.healing.healer import heal
from panther_compile.healing.report import HealReport, heal_report
from panther_compile.models.batches import Call


def refine(small: nn.Module, dense: nn.Module, calls: Sequence[Call], config: SketchConfig) -> HealReport:
    """Heal a model in place.

    Args:
        small: the sketch.
        dense: the model that it was made of.
        calls: of both.
        config: the options; `refine` is a method of `heal`.

    Raises:
        DataError, HealingError: see `heal`.
    """
    healed = heal(
        small,
        teacher=dense,
        data=calls,
        steps=config.refine_steps,
        method=config.refine,
        output=config.output,
        seed=config.seed,
        progress=config.progress,
        inplace=True,
    )
    return heal_report(healed)
