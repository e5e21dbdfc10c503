"""Batch norms behind fitted layers: statistics of what reaches them now.

What layers of low rank give deviates less than what the dense ones give (`factorization/gain.py`). A batch
norm that takes its input for what it was in training hands that on. So each norm is given the statistics
under which its output has the mean and the deviation that it has in the dense model, channel by channel:

    dense       (u - m) / v,  u what reaches it, m and v of training
    sketched    (s / s' (u' - E[u']) + E[u] - m) / v

s and s' being the deviations of u and u'. It costs no number and no run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from panther_compile.factorization.gain import restoring_gain
from panther_compile.models.batch_norms import Norm, batch_norms, with_statistics
from panther_compile.models.batches import Call, run_dense
from panther_compile.models.outputs import is_finite
from panther_compile.models.watched import Arrival, copy_sharing, inputs_seen


def find_norms(model: nn.Module, calls: Iterable[Call]) -> dict[str, Norm]:
    """The batch norms that each run of a model calls once, by name.

    Args:
        model: is not changed, nor is its mode.
        calls: that it is run on.

    Raises:
        ConfigTypeError: the model cannot be copied.
    """
    if not batch_norms(model):
        return {}
    copied = copy_sharing(model, {})
    norms = set(batch_norms(copied))
    found = {name: norm for name, norm in copied.named_modules() if norm in norms}
    for call in calls:
        called = Counter[nn.Module]()

        def see(norm: nn.Module, _: Tensor, called: Counter[nn.Module] = called) -> None:
            called[norm] += 1

        with inputs_seen(found.values(), see), torch.no_grad():
            run_dense(copied, call)
        found = {name: norm for name, norm in found.items() if called[norm] == 1}
    return {name: norm for name in found if isinstance(norm := model.get_submodule(name), Norm)}


def fit_norm(norm: Norm, arrivals: Sequence[Arrival]) -> Norm | None:
    """A norm in eval mode, with the statistics of what reaches it in the sketch.

    Args:
        norm: the dense model's; is not changed.
        arrivals: what reached it in both.

    Returns:
        The norm; None if nothing has changed, or the sketch has run out of its dtype.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    if all(torch.equal(one.x, one.z) for one in arrivals):
        return None
    if not all(is_finite(one.z) for one in arrivals):
        return None
    dense_mean, dense_variance = _statistics([one.x for one in arrivals])
    mean, variance = _statistics([one.z for one in arrivals])
    kept = norm.running_var.to(variance) + norm.eps
    gain = restoring_gain(dense_variance, variance, kept)
    return with_statistics(
        norm,
        mean - (dense_mean - norm.running_mean.to(mean)) / gain,
        (kept / gain.square() - norm.eps).clamp_min(0.0),
    )


def _statistics(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel (C,), float64."""
    count = sum(x.numel() // x.shape[1] for x in inputs)
    mean = torch.stack([_by_channel(x).sum(1) for x in inputs]).sum(0) / count
    squares = [(_by_channel(x) - mean[:, None]).square().sum(1) for x in inputs]
    return mean, torch.stack(squares).sum(0) / count


def _by_channel(x: Tensor) -> Tensor:
    """A row for each channel, float64."""
    return x.movedim(1, 0).flatten(1).double()
