"""Factors of a kernel brought closer in the metric of whole patches, all at once.

The metric that a kernel is cut in takes the second moments S of patches for a product of parts, one for each
axis (`kernel_metric.py`). In its bases S is near the identity, so that few steps of L-BFGS go far:

    minimise over the factors   ‖ (W - W') S^½ ‖²,   W' being what they multiply out to.

W' is linear in the last factor, which is fitted first, to the others as they are. What S tells beyond the
parts, S - σ I, is chance in part, the more the fewer patches there are: of two halves of the patches one says
how much of it counts, and whether factors that are brought closer by the other lose less.
"""

# O out_channels, I in_channels, F = I kh kw
from collections.abc import Sequence

import torch
from torch import Tensor

from panther_compile.factorization.conv2d import multiply_out
from panther_compile.factorization.whiten import solve

_STEPS = 40  # twice as many come no closer on other data
_MEMORY = 20  # steps that L-BFGS looks back at
_LEAST_CHANGE = 1e-7  # of the share that is lost, that ends the descent


def brought_closer(
    scheme: str, kernels: Sequence[Tensor], weight: Tensor, halves: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Closer factors of a kernel without groups, float64; the same, where halves agree on none.

    Args:
        scheme: see `factorization/conv2d.py`.
        kernels: the factors that it begins with, float64.
        weight: W, float64 `(O, I, kh, kw)`.
        halves: S of two halves of the patches, float64 `(F, F)` each; all in the bases of the parts.
    """
    learnt, judging = halves
    share = agreement(learnt, judging)
    begun, tried = _descended(scheme, kernels, weight, _flattened(learnt, share))
    if _lost(scheme, tried, weight, judging) >= _lost(scheme, begun, weight, judging):
        return kernels
    return _descended(scheme, kernels, weight, _flattened((learnt + judging) / 2, share))[1]


def agreement(first: Tensor, second: Tensor) -> float:
    """The share of S - σ I that one half tells of the other, 0 to 1; σ is the mean power."""
    one, other = first - _flattened(first, 0.0), second - _flattened(second, 0.0)
    return float(((one * other).sum() / (one.norm() * other.norm()).clamp_min(1e-30)).clamp(0.0, 1.0))


def _flattened(moments: Tensor, share: float) -> Tensor:
    """S with a share of what it tells beyond the parts."""
    found = share * moments
    found.diagonal().add_((1.0 - share) * moments.diagonal().mean())
    return found


def _descended(
    scheme: str, kernels: Sequence[Tensor], weight: Tensor, moments: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The factors with their best last one, and closer ones still."""
    begun = _with_best_last(scheme, kernels, weight, moments)
    size = float((weight.flatten(1) @ moments * weight.flatten(1)).sum()) ** 0.5
    if size <= 0.0:
        return begun, begun
    each = size ** (1.0 / len(begun))  # so that nothing is too large or small for float32
    found = [(one / each).float().contiguous().requires_grad_() for one in begun]
    wanted, metric = (weight.flatten(1) / size).float(), moments.float()
    descent = torch.optim.LBFGS(
        found,
        max_iter=_STEPS,
        history_size=_MEMORY,
        tolerance_change=_LEAST_CHANGE,
        line_search_fn="strong_wolfe",
    )

    def lost() -> Tensor:
        """The share that is lost, and its slope: one product with S gives both."""
        descent.zero_grad()
        with torch.enable_grad():
            product = multiply_out(tuple(found), 1, scheme).flatten(1)
        off = product.detach() - wanted
        moved = off @ metric
        product.backward(2.0 * moved)
        return (off * moved).sum()

    descent.step(lost)
    return begun, tuple(each * one.detach().double() for one in found)


def _with_best_last(
    scheme: str, kernels: Sequence[Tensor], weight: Tensor, moments: Tensor
) -> tuple[Tensor, ...]:
    """The same factors but for the last, which is the best for the others."""
    *others, last = kernels
    features = last[0].numel()
    each = torch.eye(features, dtype=last.dtype, device=last.device).view(features, *last.shape[1:])
    rows = multiply_out((*others, each), 1, scheme).flatten(1)  # (features, F): what each of its numbers adds
    moved = rows @ moments
    best = solve(moved @ rows.T, moved @ weight.flatten(1).T).T
    return *others, best.reshape(last.shape)


def _lost(scheme: str, kernels: Sequence[Tensor], weight: Tensor, moments: Tensor) -> float:
    """‖ (W - W') S^½ ‖²."""
    off = (multiply_out(tuple(kernels), 1, scheme) - weight).flatten(1)
    return float((off @ moments * off).sum())
