"""Low-rank branches fitted to what layers lack of the dense model's outputs, layer by layer.

A branch stands beside a layer: an adapter beside a sketched one, a residual beside a quantized one. Both
models run side by side, as when a sketch is fitted. Where they reach a layer, with x in the dense model and z
in the other, whose branches before it are fitted already, the branch D of rank k

    minimises  E ‖ G^½ (W x + s - f(z) - s' - D z - c) ‖²

f being the layer without its branch, G what errors at its output do to the result, s and s' what the output
is added to, if anything, and c a bias, if the branch has one: moments are then taken about the means.

Few data fit such branches too closely, so all of them are multiplied by the one share that brings the results
of batches that were not fitted to closest.
"""

# O out_features, I in_features, k rank of the branch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.held_out import learnt_of
from panther_compile.calibration.lockstep import fit_in_lockstep
from panther_compile.calibration.residuals import find_residuals
from panther_compile.calibration.sensitivity import output_gradients, weight_of_errors
from panther_compile.config import SketchConfig
from panther_compile.factorization.gram import gram
from panther_compile.factorization.whiten import low_rank_solution, root_of
from panther_compile.models.batches import Call, check_rows, kept_positions
from panther_compile.models.output_kind import recognize_output
from panther_compile.models.outputs import distance
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Arrival, Side, Watched, copy_sharing

_FEW_ROWS = 8  # for each input
_RIDGE, _RIDGE_OF_FEW = 1e-4, 0.1  # of the mean power of the inputs
_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the branches, that are tried
_MOST_OUTPUTS = 16384  # beyond them, as of a large vocabulary, errors at all outputs count alike


@dataclass(frozen=True, slots=True)
class Branch:
    """What is added to a layer's output: up (down x) + shift, float64.

    Attributes:
        up: `(O, k)`; both factors have half of the singular values of their product.
        down: `(k, I)`.
        shift: `(O,)`; zeros of a branch without a bias.
    """

    up: Tensor
    down: Tensor
    shift: Tensor

    def scaled(self, share: float) -> "Branch":
        """A share of it."""
        return Branch(self.up * share, self.down, self.shift * share)


def fit_branches(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    dense: nn.Module,
    twins: Mapping[str, nn.Module],
    ranks: Mapping[str, int],
    calls: Sequence[Call],
    put: Callable[[str, Branch], None],
    *,
    centred: bool = False,
    start: Callable[[str], Tensor] | None = None,
    progress: bool = False,
) -> tuple[float, float]:
    """Fit the branches of some layers.

    Args:
        model: with branches, which add nothing yet.
        layers: of it, by name.
        dense: the model whose outputs are wanted.
        twins: its layers, by the same names.
        ranks: of the branches.
        calls: the data.
        put: changes a branch in place: called with a layer's name and what was fitted.
        centred: whether branches have a bias.
        start: gives, by the name of a layer, what its weight lacks (O, I): what a branch is drawn to where
            data say little. None draws it to nothing.
        progress: whether to show a bar.

    Returns:
        How far results on a fifth of the data, which no branch was fitted to, are from the dense model's,
        before and after; the share of the branches that is put is the best for it.
    """
    learnt = learnt_of(calls)
    judged = calls[len(learnt) :] or calls
    wanted, branched = _watched(dense, twins), _watched(model, layers)
    logits = SketchConfig(output=recognize_output(dense, learnt).output).logits
    weights = gradients_of(dense, twins, learnt, logits=logits, progress=progress)
    masks = [kept_positions(model, call) for call in learnt]
    fitted: dict[str, Branch] = {}

    def fit(name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        layer = branched.watched[name].layer
        gradient = weight_of_errors(weights[name])[0] if name in weights else None
        lacking = BranchSums(centred)
        for arrival in arrivals:
            missing = _missing(twins[name], layer, arrival)
            check_rows(missing, name, arrival.batch)
            lacking.add(*(kept_rows(one, masks[arrival.batch]) for one in (missing, arrival.z)))
        fitted[name] = lacking.best(gradient, ranks[name], None if start is None else start(name))
        put(name, fitted[name])
        return layer

    def put_share(share: float) -> None:
        for name, branch in fitted.items():
            put(name, branch.scaled(share))

    residuals = find_residuals(_watched(dense, twins), learnt)
    with torch.no_grad():
        targets = [call.run(wanted.model) for call in judged]
        before = _distance(branched.model, judged, targets, logits)
        fit_in_lockstep(_watched(dense, twins), branched, learnt, fit, residuals=residuals, progress=progress)
        after: dict[float, float] = {}
        for share in _SHARES:
            put_share(share)
            after[share] = _distance(branched.model, judged, targets, logits)
        best = min(_SHARES, key=lambda one: after[one])
        put_share(best)
    return before, after[best]


def gradients_of(
    dense: nn.Module,
    twins: Mapping[str, nn.Module],
    calls: Sequence[Call],
    *,
    logits: bool | None,
    progress: bool,
) -> dict[str, Tensor]:
    """See `output_gradients`; of the layers that have not too many outputs."""
    few = {
        name: twin
        for name, twin in twins.items()
        if getattr(twin, "out_features", _MOST_OUTPUTS) <= _MOST_OUTPUTS
    }
    if not few:
        return {}
    side = _watched(dense, few)
    dims = dict.fromkeys(few, -1)
    return output_gradients(side.model, side.watched, dims, calls, seed=0, logits=logits, progress=progress)


def losses_by_rank(
    dense: nn.Module,
    twins: Mapping[str, nn.Module],
    lacking: Mapping[str, Tensor],
    calls: Sequence[Call] | None,
    *,
    logits: bool | None,
) -> dict[str, Tensor]:
    """What each rank of a branch makes up for, by layer: squared singular values of G^½ D S^½, descending.

    Args:
        dense: the model.
        twins: its layers, by name.
        lacking: D, what the weight (O, I) of each lacks, float64.
        calls: the data that G and S = E[x xᵀ] are measured on; None takes the identity for both.
        logits: whether results are, see `outputs.distance`.
    """
    if calls is None:
        return {name: torch.linalg.svdvals(one).square() for name, one in lacking.items()}
    gradients = gradients_of(dense, twins, calls, logits=logits, progress=False)
    found = {}
    for name, covariance in _covariances(dense, twins, calls).items():
        metric, scale = weight_of_errors(gradients[name]) if name in gradients else (None, 1.0)
        core = lacking[name] @ covariance @ lacking[name].T
        if metric is not None:
            root = root_of(metric).factor
            core = root.T @ core @ root
        found[name] = scale * torch.linalg.eigvalsh(core).flip(0).clamp_min(0.0)
    return found


def _covariances(
    dense: nn.Module, twins: Mapping[str, nn.Module], calls: Sequence[Call]
) -> dict[str, Tensor]:
    """Σ x xᵀ (I, I), float64, of each layer that is reached."""
    side, sums = _watched(dense, twins), dict[str, Tensor]()
    kept: Tensor | None = None

    def see(name: str, x: Tensor) -> None:
        rows = kept_rows(x, kept).float()
        product = gram(rows).double()
        sums[name] = sums[name] + product if name in sums else product

    for watched in side.watched.values():
        watched.on_input = see
    with torch.no_grad():
        for call in calls:
            kept = kept_positions(side.model, call)
            call.run(side.model)
    return sums


def _distance(model: nn.Module, calls: Sequence[Call], wanted: Sequence[Any], logits: bool | None) -> float:
    """How far results are from those wanted."""
    pairs = zip(calls, wanted, strict=True)
    return sum(
        distance(one, call.run(model), kept_positions(model, call), logits=logits) for call, one in pairs
    )


def _watched(model: nn.Module, layers: Mapping[str, nn.Module]) -> Side:
    watched = {name: Watched(name, copy_sharing(layer, {})) for name, layer in layers.items()}
    new: dict[nn.Module, nn.Module] = {layers[name]: one for name, one in watched.items()}
    return Side(copy_sharing(model, new), watched)


def _missing(dense: nn.Module, layer: nn.Module, arrival: Arrival) -> Tensor:
    """What a layer lacks of the dense one's output, and of what that is added to."""
    missing: Tensor = dense(arrival.x) - layer(arrival.z)
    if arrival.residuals is None:
        return missing
    return missing + arrival.residuals[0] - arrival.residuals[1]


class BranchSums:
    """Adds up rows t (n, O) that a branch is to give and its inputs z (n, I): products float32, sums double.

    Args:
        centred: whether their means are taken off, since a bias makes up for them.
    """

    def __init__(self, centred: bool) -> None:
        self._centred = centred
        self._about: tuple[Tensor, Tensor] | None = None  # near the means, so that no digits are lost to them
        self._sums: tuple[Tensor, ...] = ()
        self._rows = 0

    def add(self, t: Tensor, z: Tensor) -> None:
        """Add rows."""
        t, z = t.float(), z.float()
        if self._about is None:
            self._about = (t.mean(0), z.mean(0)) if self._centred else (torch.zeros(()), torch.zeros(()))
        t, z = (one - mean.to(one) for one, mean in zip((t, z), self._about, strict=True))
        found = tuple(one.double() for one in (t.T @ z, gram(z), t.sum(0), z.sum(0)))
        self._sums = tuple(map(torch.add, self._sums, found)) if self._sums else found
        self._rows += len(z)

    def best(self, gradient: Tensor | None, rank: int, start: Tensor | None) -> Branch:
        """The branch of a rank: see the file for the gradient, and `fit_branches` for the start."""
        assert self._about is not None
        product, covariance, mean_t, mean_z = (one / max(1, self._rows) for one in self._sums)
        if self._centred:
            product = product - torch.outer(mean_t, mean_z)
            covariance = covariance - torch.outer(mean_z, mean_z)
            mean_t, mean_z = mean_t + self._about[0], mean_z + self._about[1]
        ridge = covariance.diagonal().mean().clamp_min(1e-30) * self._ridge(len(covariance))
        covariance.diagonal().add_(ridge)
        if start is not None:
            product = product + ridge * start.to(product)
        rank = min(rank, *product.shape)
        up, down = low_rank_solution(
            product, covariance, gradient, rank, by_outputs=product.shape[0] <= product.shape[1]
        )
        up, down = _evened(up, down)
        shift = mean_t - up @ (down @ mean_z) if self._centred else torch.zeros_like(mean_t)
        return Branch(up, down, shift)

    def _ridge(self, features: int) -> float:
        return _RIDGE_OF_FEW if self._rows < _FEW_ROWS * features else _RIDGE


def _evened(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product, each with half of its singular values."""
    (q, r), (p, t) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, values, v = torch.linalg.svd(r @ t.T)
    half = values.sqrt()
    return q @ u * half, half[:, None] * (v @ p.T)


def best_of_matrix(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors (O, k) and (k, I) of a matrix (O, I), each with half of the singular values."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    half = values[:rank].sqrt()
    return u[:, :rank] * half, half[:, None] * vh[:rank]
