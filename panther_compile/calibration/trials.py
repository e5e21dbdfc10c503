"""A trial on held-out batches: the closest choice that is closer beyond noise is taken, or the plain one."""

import math
from collections.abc import Mapping, Sequence

NOISE = 1.0  # standard errors of the difference, over the batches, within which a difference is noise
ALIKE = 0.02  # of the distance, if there is but one batch


def pick(distances: Mapping[str, Sequence[float]], plain: str) -> tuple[str, str]:
    """The closest choice of those that are closer than the plain one beyond noise, and why not the closest.

    Args:
        distances: of each choice, batch by batch, the batches in one order.
        plain: the choice that needs no trial.
    """
    means = {name: sum(found) / len(found) for name, found in distances.items()}
    why = ""
    for name in sorted(means, key=lambda name: means[name]):
        if name == plain:
            break
        gain, noise = means[plain] - means[name], _noise(distances[plain], distances[name])
        if gain > noise:
            return name, why and f"{why}: {name} is taken"
        why = why or f"{name} is {gain:.2g} closer, within noise ({noise:.2g})"
    return plain, why and f"{why}: {plain} is kept"


def _noise(plain: Sequence[float], other: Sequence[float]) -> float:
    """How much closer one may be in the mean by chance."""
    gains = [a - b for a, b in zip(plain, other, strict=True)]
    if len(gains) < 2:
        return ALIKE * plain[0]
    mean = sum(gains) / len(gains)
    return NOISE * math.sqrt(sum((one - mean) ** 2 for one in gains) / (len(gains) - 1) / len(gains))
