"""Parts of one module, such as the experts of a mixture, and one factor for all of a set of them.

Each part e has inputs of its own, of covariance S_e; errors at its output weigh s_e G_e (`sensitivity.py`).
The factor is found from all parts in the study, and each part is then fitted beside it where its inputs come:

    output factor   U = G^-½ [Σ s_e G^½ W_e S_e W_eᵀ G^½]_r, the largest r eigenvectors, G the mean of s_e G_e
    input factor    that of the stack of all W_e (`shared_input.py`) in the mean of the S_e

The first is the best one where all G_e are alike, the second where all S_e are.
"""

# O out_features, I in_features, R rank
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from panther_compile.calibration.shared_input import Stack, best_of_stack
from panther_compile.factorization.metric import whole
from panther_compile.factorization.moments import Moments
from panther_compile.factorization.whiten import root_of, term_sizes
from panther_compile.kinds.targets import Target


class PartSums:
    """What is needed of parts that may share a factor, summed over each set of them.

    Args:
        targets: all that is studied, by name.
    """

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self._targets = targets
        self._waiting = {one.together: set(one.together) for one in targets.values() if one.together}
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._reached: dict[tuple[str, ...], list[Target]] = {}

    def add(self, name: str, covariance: Tensor, sensitivity: float) -> None:
        """Add a part: s W S Wᵀ (O, O) for an output factor, S for an input factor, from S (I, I) and s."""
        target = self._targets[name]
        if not target.together:
            return
        if target.shared_scheme == "pair":
            weight = target.weight_and_bias()[0].detach().double()
            covariance = sensitivity * weight @ covariance @ weight.T
        total = self._sums.get(target.together)
        self._sums[target.together] = covariance.clone() if total is None else total.add_(covariance)
        self._reached.setdefault(target.together, []).append(target)

    def complete(self, passed: Collection[str]) -> Iterator[tuple[Sequence[Target], Tensor]]:
        """The sets whose sums hold all that data reaches, and these sums; each is given once."""
        for names, waiting in list(self._waiting.items()):
            waiting.difference_update(passed)
            if not waiting:
                del self._waiting[names]
                reached = self._reached.pop(names, [])
                total = self._sums.pop(names, None)
                if total is not None and len(reached) > 1:
                    yield reached, total


def best_of_parts(
    weights: Sequence[Tensor], metrics: Iterable[Tensor | None], total: Tensor, scheme: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of some weights as one, in the metric of data, and its factors, float64.

    Args:
        weights: W_e `(O, I)`.
        metrics: s_e G_e, float64 `(O, O)`; or None for all.
        total: see `PartSums.add`.
        scheme: "pair" for an output factor, "pivoted" for an input factor.

    Returns:
        Values (m,), descending; left (O, m) and right (m, Σ I), or left (Σ O, m) and right (m, I).
    """
    if scheme != "pair":
        stack, covariance = Stack.of(weights, metrics), total / len(weights)
        nothing = covariance.new_zeros(len(covariance))
        moments = Moments(covariance, covariance, nothing, nothing, 0, nothing, nothing)
        left, right = best_of_stack(stack, moments, root_of(covariance))
        return term_sizes(left, right, covariance, None), torch.cat(stack.parts(left)), right
    known = [whole(one) for one in metrics if one is not None]
    outer = sum(known, torch.zeros_like(total)) if known else torch.eye(len(total)).to(total)
    root = root_of(outer / outer.diagonal().mean())
    values, vectors = torch.linalg.eigh(root.factor.T @ total @ root.factor)
    vectors = vectors.flip(1)
    right = torch.cat([vectors.T @ root.factor.T @ one.detach().double() for one in weights], 1)
    return values.flip(0).clamp_min(0.0).sqrt(), root.inverse.T @ vectors, right
