"""The rate of each step: given or found, then down along a cosine, and lower where steps lead astray."""

import math

FIRST, TOP = 4e-4, 6.4e-3  # between which a rate is looked for
USUAL = 1.6e-3  # where there are too few steps to look for one
WARM_UP = 0.1  # share of the steps
_DOUBLINGS = round(math.log2(TOP / FIRST))
_LEAST_STEPS = 5  # to double it in
_MOST_SEARCH = 0.25  # share of the steps
_EVALUATIONS = 10  # of the held-out batches, once the rate is found
_ASTRAY = 1.25  # times the loss before the first step
_SLOWER, _FAR_SLOWER = 0.5, 0.25  # factor of a rate that leads above that loss, and so far above
_SLOWEST = 0.01  # least share of the rate given


class Rates:
    """What changes of a factor a step makes, relative to its size.

    A rate that is given is warmed up to. If none is, it doubles a few times in the first steps, as long as
    the loss on held-out batches is below that before the first one; where it no longer is, half is taken.

    Args:
        given: the rate at the top of the schedule, or None.
        steps: to be taken in all.
        first: the loss on the batches that are held out, before the first step.

    Attributes:
        top: the rate at the top of the schedule as it is now.
    """

    def __init__(self, given: float | None, steps: int, first: float) -> None:
        self._steps, self._first, self._begun = steps, first, 0
        self._stretch = max(_LEAST_STEPS, math.ceil(WARM_UP * steps / _DOUBLINGS))
        self._warm: float = _DOUBLINGS * self._stretch
        self._searches = given is None and self._warm <= _MOST_SEARCH * steps
        if not self._searches:
            self._warm = _warm_up(steps)
        self.top = given or (TOP if self._searches else USUAL)
        self._least = _SLOWEST * (given or USUAL)

    def at(self, step: int) -> float:
        """The rate of a step; the first one is step 1."""
        taken = step - self._begun
        if self._searches:
            return FIRST * 2 ** (taken / self._stretch)
        if taken < self._warm:
            return self.top * taken / self._warm
        left = self._steps - self._begun - self._warm
        return self.top * 0.5 * (1 + math.cos(math.pi * (taken - self._warm) / (left + 1)))

    def is_due(self, step: int) -> bool:
        """Whether to look after a step how the model does."""
        every = self._stretch if self._searches else max(1, self._steps // _EVALUATIONS)
        return step % every == 0 or step == self._steps

    @property
    def can_be_lowered(self) -> bool:
        """Whether the rate may be lowered further."""
        return self.top > self._least

    def leads_astray(self, step: int, loss: float) -> bool:
        """Whether the rate leads above the loss before the first step, far above where it was not looked for.

        It is lowered then, and warmed up to anew.

        Args:
            step: after which the model was looked at.
            loss: on the batches that are held out.
        """
        if self._searches:
            is_astray, rate = loss > self._first, _SLOWER * self.at(step)
        else:
            is_astray, rate = self.can_be_lowered and self.is_far_astray(loss), _FAR_SLOWER * self.top
        self._searches = self._searches and step < self._warm and not is_astray
        if is_astray:
            self.top, self._begun, self._warm = rate, step, _warm_up(self._steps - step)
        return is_astray

    def is_far_astray(self, loss: float) -> bool:
        """Whether a loss is so far above the first one that no more steps are needed to tell."""
        return loss > _ASTRAY * self._first


def _warm_up(steps: int) -> float:
    return max(1.0, WARM_UP * steps)
