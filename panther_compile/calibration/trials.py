"""A trial on held-out batches: what comes closest is taken, or the plain choice where that is noise."""

import math
from collections.abc import Mapping, Sequence

NOISE = 1.0  # standard errors of the difference, over the batches, within which a difference is noise
ALIKE = 0.02  # of the distance, if there is but one batch


def pick(distances: Mapping[str, Sequence[float]], plain: str) -> tuple[str, str]:
    """The choice of the least mean distance, and why not where the plain one is kept in its place.

    Args:
        distances: of each choice, batch by batch, the batches in one order.
        plain: the choice that needs no trial.
    """
    means = {name: sum(found) / len(found) for name, found in distances.items()}
    best = min(means, key=lambda name: means[name])
    if best == plain:
        return plain, ""
    gains = [a - b for a, b in zip(distances[plain], distances[best], strict=True)]
    gain = means[plain] - means[best]
    noise = ALIKE * means[plain]
    if len(gains) > 1:
        noise = NOISE * math.sqrt(sum((one - gain) ** 2 for one in gains) / (len(gains) - 1) / len(gains))
    if gain > noise:
        return best, ""
    return plain, f"{best} is {gain:.2g} closer, within noise ({noise:.2g}): {plain} is kept"
