"""What batch norms know of inputs in training, and how far others are from it.

A norm keeps the mean m and the deviation s of each channel of its input. Inputs that give m' and s' are off
by

    min(((m' - m) / s)², 25) + log²(s' / s)

the mean over its channels.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from panther_compile.models.batches import Call
from panther_compile.models.half_products import half_products
from panther_compile.models.outputs import is_finite
from panther_compile.models.watched import inputs_seen

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

_SMALLEST, _LARGEST = 1e-6, 25.0


def batch_norms(model: nn.Module) -> list[Norm]:
    """Norms that keep statistics."""
    return [one for one in model.modules() if isinstance(one, Norm) and one.running_mean is not None]


def with_statistics(norm: Norm, mean: Tensor, variance: Tensor) -> Norm:
    """A copy of a norm in eval mode, with these statistics (C,) and own parameters; its hooks are shared."""
    made = copy.copy(norm).eval()
    made._parameters = {
        name: None if one is None else nn.Parameter(one.detach().clone(), one.requires_grad)
        for name, one in norm._parameters.items()
    }
    made._buffers = {name: None if one is None else one.clone() for name, one in norm._buffers.items()}
    assert made.running_mean is not None
    assert made.running_var is not None
    made.running_mean.copy_(mean)
    made.running_var.copy_(variance)
    return made


def take_statistics(norm: Norm, other: Norm) -> None:
    """Give a norm the statistics of another."""
    for name in ("running_mean", "running_var"):
        norm.get_buffer(name).copy_(other.get_buffer(name))


def off_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> Tensor:
    """How far statistics are from those that a norm keeps, a number in their dtype.

    Args:
        norm: of C channels.
        mean: of its inputs (C,).
        variance: likewise.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    deviation = norm.running_var.to(variance).clamp_min(_SMALLEST).sqrt()
    off = (mean - norm.running_mean.to(mean)) / deviation
    wide = (variance + _SMALLEST).sqrt().log() - deviation.log()
    return off.square().clamp_max(_LARGEST).mean() + wide.square().mean()


class _Through(BaseException):
    """Ends a run behind the last norm; not an error that a model's code may catch."""


class Misfit:
    """How far what reaches norms in a call of a model is off their statistics, the mean over the norms.

    The first call shows how often norms are called; the later ones end there, as a decoder of large maps may
    take most of the time.

    Args:
        model: in eval mode.
        norms: of it.
    """

    def __init__(self, model: nn.Module, norms: Sequence[Norm]) -> None:
        self._model, self._norms = model, norms
        self._times: int | None = None

    def __call__(self, call: Call) -> Tensor:
        """Run the model and give one number; one that needs no input where no norm is called."""
        parts: list[Tensor] = []

        def see(norm: nn.Module, given: Tensor) -> None:
            assert isinstance(norm, Norm)
            x = given.float()
            own = [place for place in range(x.dim()) if place != 1]
            parts.append(off_statistics(norm, x.mean(own), x.var(own, unbiased=False)))
            if len(parts) == self._times:
                raise _Through

        with inputs_seen(self._norms, see), suppress(_Through):
            call.run(self._model)
        if self._times is None:
            self._times = len(parts)
        if not parts:
            return torch.zeros((), dtype=torch.float32, requires_grad=True)
        return torch.stack(parts).mean()


def gradients_of(model: nn.Module, loss: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The gradient of a model's loss for each tensor; None if one does not arrive or is not finite."""
    if not loss.requires_grad:
        return None
    with half_products(model):
        found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return None if any(one is None or not is_finite(one) for one in found) else found
