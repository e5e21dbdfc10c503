"""What the outputs of a low-rank layer are multiplied by, so that they deviate as the dense layer's do.

Outputs that are fitted by least squares deviate less than what they are fitted to, the less the more is
lost: of a deviation s they keep s', and s'² / s² is the share of the variance that is told. What follows was
trained on s. The gain s / s' of each channel restores it, as REPAIR does between models (Jordan et al., 2023,
arXiv 2211.08403), at no number and no time.
"""

from torch import Tensor

LARGEST = 2.0  # where more would be noise
_FLOOR = 1e-6  # of a usual variance, added to both


def restoring_gain(wanted: Tensor, given: Tensor, usual: Tensor | float) -> Tensor:
    """The gain of each channel (C,), from a half to twice.

    Args:
        wanted: variances of the dense layer's outputs (C,).
        given: those of what stands for them.
        usual: a variance that is not small, (C,) or of all.
    """
    floor = _FLOOR * usual
    gain = ((wanted.clamp_min(0.0) + floor) / (given.clamp_min(0.0) + floor)).sqrt()
    return gain.clamp(1.0 / LARGEST, LARGEST)


def gain_as_told(wanted: Tensor, given: Tensor) -> Tensor:
    """The same, to the power of the share of the variance that is told: where little is, noise would grow."""
    told = (given / wanted.clamp_min(1e-30)).clamp(0.0, 1.0)
    return restoring_gain(wanted, given, wanted.mean().clamp_min(1e-30)) ** told
