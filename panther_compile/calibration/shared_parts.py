"""Parts of one module, such as the experts of a mixture, and one factor for all of a set of them.

Each part e has n_e inputs of its own, of covariance S_e; errors at its output weigh c_e G_e (`Study.cost`).
The factor is found from all parts in the study, and each part is then fitted beside it where its inputs come:

    output factor   U = G^-½ [Σ c_e G^½ W_e S_e W_eᵀ G^½]_r, the largest r eigenvectors, G the mean of c_e G_e
    input factor    that of the stack of all W_e (`shared_input.py`) in the covariance of all inputs,
                    Σ n_e S_e / Σ n_e

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
        self._rows: dict[tuple[str, ...], int] = {}
        self._reached: dict[tuple[str, ...], list[Target]] = {}

    def add(self, name: str, covariance: Tensor, cost: float, rows: int) -> None:
        """Add a part: c W S Wᵀ (O, O) for an output factor, n S for an input factor.

        Args:
            name: of the part.
            covariance: S (I, I), float64.
            cost: c, see `Study.cost`.
            rows: n, how many reach it.
        """
        target = self._targets[name]
        if not target.together:
            return
        if target.shared_scheme == "pair":
            weight = target.weight_and_bias()[0].detach().double()
            part = cost * weight @ covariance @ weight.T
        else:
            part = rows * covariance
        total, known = self._sums.get(target.together), self._rows.get(target.together, 0)
        self._sums[target.together] = part if total is None else total.add_(part)
        self._rows[target.together] = known + rows
        self._reached.setdefault(target.together, []).append(target)

    def complete(self, passed: Collection[str]) -> Iterator[tuple[Sequence[Target], Tensor]]:
        """The sets whose sums hold all that data reaches, and these sums; each is given once.

        For an input factor the sum is over all rows, so that it is the covariance of all.
        """
        for names, waiting in list(self._waiting.items()):
            waiting.difference_update(passed)
            if not waiting:
                del self._waiting[names]
                reached = self._reached.pop(names, [])
                total, rows = self._sums.pop(names, None), self._rows.pop(names, 0)
                if total is not None and len(reached) > 1:
                    yield reached, total if reached[0].shared_scheme == "pair" else total / rows


def best_of_parts(
    weights: Sequence[Tensor], metrics: Iterable[Tensor | None], total: Tensor, scheme: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of some weights as one, in the metric of data, and its factors, float64.

    Args:
        weights: W_e `(O, I)`.
        metrics: c_e G_e, float64 `(O, O)`; or None for all.
        total: see `PartSums.complete`.
        scheme: "pair" for an output factor, "pivoted" for an input factor.

    Returns:
        Values (m,), descending; left (O, m) and right (m, Σ I), or left (Σ O, m) and right (m, I).
    """
    if scheme != "pair":
        stack, nothing = Stack.of(weights, metrics), total.new_zeros(len(total))
        moments = Moments(total, total, nothing, nothing, 0, nothing, nothing)
        left, right = best_of_stack(stack, moments, root_of(total))
        return term_sizes(left, right, total, None), torch.cat(stack.parts(left)), right
    known = [whole(one) for one in metrics if one is not None]
    outer = sum(known, torch.zeros_like(total)) if known else torch.eye(len(total)).to(total)
    root = root_of(outer / outer.diagonal().mean())
    values, vectors = torch.linalg.eigh(root.factor.T @ total @ root.factor)
    vectors = vectors.flip(1)
    right = torch.cat([vectors.T @ root.factor.T @ one.detach().double() for one in weights], 1)
    return values.flip(0).clamp_min(0.0).sqrt(), root.inverse.T @ vectors, right
