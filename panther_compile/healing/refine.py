"""Heal a sketch on the data that it was fitted to, as its options say."""

from collections.abc import Collection, Sequence

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.healing.healer import heal_layers
from panther_compile.healing.options import HealOptions
from panther_compile.healing.report import HealReport, heal_report
from panther_compile.layers.base import outermost
from panther_compile.models.batches import Call


def refine(
    small: nn.Module,
    new: Collection[nn.Module],
    dense: nn.Module,
    calls: Sequence[Call],
    config: SketchConfig,
) -> HealReport | None:
    """Heal the new layers of a model in place; None if there are none.

    Args:
        small: the sketch.
        new: those of its modules that stand for dense layers since; what was sketched before stays as it is.
        dense: the model that it was made of.
        calls: of both.
        config: the options; `refine` is a method of `heal`.

    Raises:
        DataError, HealingError: see `heal`.
    """
    inside = {part for module in new for part in module.modules()}
    layers = [layer for layer in outermost(small) if layer in inside]
    if not layers:
        return None
    options = HealOptions(
        steps=config.refine_steps,
        method=config.refine,
        output=config.output,
        seed=config.seed,
        progress=config.progress,
    )
    heal_layers(small, layers, dense, calls, options)
    return heal_report(small)
