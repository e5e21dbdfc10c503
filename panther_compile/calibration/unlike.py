"""Whether data is like what a model was trained on, as far as its batch norms know.

A batch norm keeps the mean m and the deviation s of each channel of its input, as they were in training.
Data that gives m' and s' is off by

    min(((m' - m) / s)², 25) + log²(s' / s)

the mean over all channels and norms. Samples of the training set are off by less than .03 from 32 samples on;
white noise, images that were not normalised and the like by .3 to 50.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from panther_compile.models.batch_norms import off_statistics
from panther_compile.models.batches import Call, run_dense
from panther_compile.models.watched import inputs_seen

UNLIKE = 0.3  # off by more, data tells less of the model's use than no data
MADE_UP_UNLIKE = 0.7  # likewise of images that were made up: without them there is nothing to go by


class NormSums:
    """Adds up what reaches the batch norms of a model that were trained.

    Args:
        model: in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and _was_trained(one)]
        self._sums = {norm: (torch.zeros((), dtype=torch.float64),) * 3 for norm in norms}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def seen(self) -> AbstractContextManager[None]:
        """While it is open, what reaches them is added."""
        return inputs_seen(self._sums, self._see)

    def off(self) -> float:
        """How far that is off their statistics; 0 if nothing reached any."""
        parts = [_off(norm, *found) for norm, found in self._sums.items() if float(found[0])]
        return sum(parts) / len(parts) if parts else 0.0

    def _see(self, norm: nn.Module, given: Tensor) -> None:
        assert isinstance(norm, _BatchNorm)
        x = given.detach().double()
        own = [place for place in range(x.dim()) if place != 1]
        new = (
            torch.tensor(float(x.numel() // x.shape[1]), dtype=torch.float64),
            x.sum(own),
            x.square().sum(own),
        )
        count, total, power = (a.to(b) + b for a, b in zip(self._sums[norm], new, strict=True))
        self._sums[norm] = count, total, power


def off_batch_norms(model: nn.Module, calls: Sequence[Call]) -> float:
    """How far data is off the statistics of a model's batch norms; 0 if it has none that were trained.

    Args:
        model: in eval mode; runs once on each batch, if it has any.
        calls: the data.

    Raises:
        DataError: the model raises on a batch.
    """
    norms = NormSums(model)
    if norms:
        with norms.seen(), torch.no_grad():
            for call in calls:
                run_dense(model, call)
    return norms.off()


def _was_trained(norm: _BatchNorm) -> bool:
    mean, variance = norm.running_mean, norm.running_var
    return mean is not None and variance is not None and bool((mean != 0).any() or (variance != 1).any())


def _off(norm: _BatchNorm, count: Tensor, total: Tensor, power: Tensor) -> float:
    mean = total / count.to(total)
    variance = (power / count.to(power) - mean.square()).clamp_min(0.0)
    return float(off_statistics(norm, mean, variance))
