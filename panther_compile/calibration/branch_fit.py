"""Low-rank branches fitted to what layers lack of the dense model's outputs, layer by layer.

A branch stands beside a layer: an adapter beside a sketched one, a residual beside a quantized one. Both
models run side by side, as when a sketch is fitted. Where they reach a layer, with x in the dense model and z
in the other, whose branches before it are fitted already, the branch D of rank k

    minimises  E ‖ G^½ (W x + s - f(z) - s' - D z - c) ‖²

f being the layer without its branch, G what errors at its output do to the result, s and s' what the output
is added to, if anything, and c a bias, if the branch has one: moments are then taken about the means. What
is chance of that is left out, see `branch_sums.py`. Layers that one forward calls several times are fitted to
all their calls in the dense model, x = z, see `repeated.py`.

Few data fit such branches too closely, so all of them are multiplied by the one share that brings the results
of batches that were not fitted to closest.
"""

# O out_features, I in_features, k rank of the branch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.branch_sums import Branch, BranchSums
from panther_compile.calibration.lockstep import fit_in_lockstep
from panther_compile.calibration.repeated import every_call
from panther_compile.calibration.residuals import find_residuals
from panther_compile.calibration.sensitivity import output_gradients, weight_of_errors
from panther_compile.config import Logits
from panther_compile.factorization.gram import gram
from panther_compile.factorization.whiten import lower_root
from panther_compile.models.batches import Call, check_rows, judged_of, kept_positions, learnt_of
from panther_compile.models.output_kind import recognize_output
from panther_compile.models.outputs import distance
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Arrival, Side, Watched, copy_sharing

RANK_STEP = 8  # of ranks that are spread
_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the branches, that are tried
_MOST_OUTPUTS = 16384  # beyond them, as of a large vocabulary, errors at all outputs count alike


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

    Returns:
        How far results on a fifth of the data, which no branch was fitted to, are from the dense model's,
        before and after; the share of the branches that is put is the best for it.
    """
    learnt = learnt_of(calls)
    judged = judged_of(calls)
    wanted, branched = _watched(dense, twins), _watched(model, layers)
    logits = recognize_output(dense, learnt).logits
    weights = _output_gradients(dense, twins, learnt, logits)
    masks = [kept_positions(model, call) for call in learnt]
    repeated = every_call(_watched(dense, twins), learnt)
    fitted: dict[str, Branch] = {}

    def fit(name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        layer = branched.watched[name].layer
        gradient = weight_of_errors(weights[name])[0] if name in weights else None
        lacking = BranchSums(centred)
        for arrival in (one.evened() for one in repeated.get(name, arrivals)):
            missing = _missing(twins[name], layer, arrival)
            check_rows(missing, name, learnt[arrival.batch])
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
        fit_in_lockstep(_watched(dense, twins), branched, learnt, fit, residuals=residuals, progress=False)
        after: dict[float, float] = {}
        for share in _SHARES:
            put_share(share)
            after[share] = _distance(branched.model, judged, targets, logits)
        best = min(_SHARES, key=lambda one: after[one])
        put_share(best)
    return before, after[best]


def _output_gradients(
    dense: nn.Module, twins: Mapping[str, nn.Module], calls: Sequence[Call], logits: Logits
) -> dict[str, Tensor]:
    """See `output_gradients`; of the layers that have not too many outputs, shrunk: branches get few data."""
    few = {
        name: twin
        for name, twin in twins.items()
        if getattr(twin, "out_features", _MOST_OUTPUTS) <= _MOST_OUTPUTS
    }
    if not few:
        return {}
    side = _watched(dense, few)
    dims = dict.fromkeys(few, -1)
    return output_gradients(
        side.model, side.watched, dims, calls, seed=0, logits=logits, progress=False, shrunk=True
    ).means


def losses_by_rank(
    dense: nn.Module,
    twins: Mapping[str, nn.Module],
    lacking: Mapping[str, Tensor],
    calls: Sequence[Call] | None,
    *,
    logits: Logits,
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
    gradients = _output_gradients(dense, twins, calls, logits)
    found = {}
    for name, covariance in _covariances(dense, twins, calls).items():
        metric, scale = weight_of_errors(gradients[name]) if name in gradients else (None, 1.0)
        core = lacking[name] @ covariance @ lacking[name].T
        if metric is not None:
            root = lower_root(metric)
            core = root.T @ core @ root
        found[name] = scale * torch.linalg.eigvalsh(core).flip(0).clamp_min(0.0)[: min(lacking[name].shape)]
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

    with side.seen_by(see), torch.no_grad():
        for call in calls:
            kept = kept_positions(side.model, call)
            call.run(side.model)
    return sums


def _distance(model: nn.Module, calls: Sequence[Call], wanted: Sequence[Any], logits: Logits) -> float:
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


def spread_ranks(
    losses: Mapping[str, Tensor], sizes: Mapping[str, int], biases: Mapping[str, int], most: float
) -> dict[str, int]:
    """Ranks that make up for most in so many bytes.

    Args:
        losses: of each layer what each rank makes up for, the largest first.
        sizes: bytes of one rank.
        biases: bytes that a branch has besides.
        most: bytes in all.
    """
    steps = []
    for name, lost in losses.items():
        for start in range(0, len(lost) - RANK_STEP + 1, RANK_STEP):
            steps.append((float(lost[start : start + RANK_STEP].sum()) / sizes[name], name))
    ranks: dict[str, int] = {}
    for _, name in sorted(steps, reverse=True):
        if (more := RANK_STEP * sizes[name] + (0 if name in ranks else biases[name])) <= most:
            ranks[name], most = ranks.get(name, 0) + RANK_STEP, most - more
    return {name: ranks[name] for name in losses if name in ranks}
