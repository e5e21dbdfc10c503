"""The last word on a sketched model: how close its outputs are goes into its record; a wreck is warned of."""

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from panther_compile.calibration.closeness import DESTROYED
from panther_compile.errors import SketchQualityWarning
from panther_compile.records import RECORD_ATTRIBUTE, Closeness, SketchRecord, keep_record

_NAMED = 3  # layers that lose most


def keep_verdict(small: nn.Module, closeness: Closeness, *, fitted_to: str, output: str) -> None:
    """Keep the closeness in the record of a sketched model, and warn if its outputs are destroyed.

    Args:
        small: holds a record.
        closeness: of its outputs.
        output: what its result was taken for, in words.
        fitted_to: what its layers were fitted to, in words: "data", "made-up inputs" or "weights".
    """
    record: SketchRecord = vars(small)[RECORD_ATTRIBUTE]
    keep_record(small, replace(record, closeness=closeness, output=output))
    warn_if_destroyed(record, closeness, fitted_to=fitted_to, stacklevel=5)


def warn_if_destroyed(
    record: SketchRecord, closeness: Closeness, *, fitted_to: str, stacklevel: int = 3
) -> None:
    """Warn of a sketch whose outputs are destroyed: its ratio, the cause, and what would help.

    Where its results are of another shape, so that nothing says how close they are, that is warned of.

    Args:
        record: of the sketch.
        closeness: of its outputs.
        fitted_to: see `keep_verdict`.
        stacklevel: of the warning; 3 is who called the function that calls this one.
    """
    if closeness.grade == DESTROYED:
        warnings.warn(_warning(record, closeness, fitted_to), SketchQualityWarning, stacklevel=stacklevel)
    elif closeness.is_of_other_shapes:
        warnings.warn(
            f"the sketch of ratio {record.plan.ratio}: {closeness}, so nothing says how close they are; "
            "try it on inputs of your own, or a larger ratio",
            SketchQualityWarning,
            stacklevel=stacklevel,
        )


def _warning(record: SketchRecord, closeness: Closeness, fitted_to: str) -> str:
    causes = {
        "data": "its layers, fitted to data, cannot hold what they did in so few numbers",
        "made-up inputs": "its layers were fitted to inputs that were made up",
        "weights": "its layers were fitted to their weights alone, which do not tell what matters",
    }
    remedies = ["a larger ratio"]
    if fitted_to != "data":
        remedies.insert(0, "data=, a few hundred inputs of what the model is used for")
    worst = _worst(record)
    remedies.append(f"exclude={worst}, which lose most" if worst else "exclude= for layers that matter most")
    return (
        f"the sketch of ratio {record.plan.ratio} does not answer as the dense model does; {closeness}; "
        f"{causes[fitted_to]}. Try {'; or '.join(remedies)}"
    )


def _worst(record: SketchRecord) -> list[str]:
    """Names of the layers whose outputs lose most of what the result minds; empty without data."""
    lost: list[tuple[float, Any]] = [
        (one.output_error**2 * (1.0 if one.sensitivity is None else one.sensitivity), name)
        for name, one in record.fitted.items()
        if one.output_error is not None
    ]
    return [name for _, name in sorted(lost, reverse=True)[:_NAMED]]
