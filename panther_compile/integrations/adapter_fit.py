"""Adapters fitted to what a sketch lacks of the dense model's outputs, layer by layer.

Both models run side by side, as when a sketch is fitted. Where they reach a layer, with x in the dense model
and z in the adapted one, whose adapters before it are fitted already, the adapter D of rank k

    minimises  E ‖ G^½ (W x + b + s - L R z - b' - s' - D z) ‖²

G being what errors at an output do to the result, s and s' what the output is added to, if anything.
"""

# O out_features, I in_features, k rank of the adapter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.held_out import learnt_of
from panther_compile.calibration.lockstep import fit_in_lockstep
from panther_compile.calibration.residuals import find_residuals
from panther_compile.calibration.sensitivity import output_gradients, weight_of_errors
from panther_compile.config import SketchConfig
from panther_compile.factorization.whiten import low_rank_solution
from panther_compile.models.batches import Call, Data, kept_positions, record_calls
from panther_compile.models.output_kind import recognize_output
from panther_compile.models.outputs import distance
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Arrival, Side, Watched, copy_sharing

_FEW_ROWS = 8  # for each input
_RIDGE, _RIDGE_OF_FEW = 1e-4, 0.1  # of the mean power of the inputs


def fit_adapters(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    dense: nn.Module,
    twins: Mapping[str, nn.Module],
    ranks: Mapping[str, int],
    data: Data,
    put: Callable[[str, Tensor, Tensor], None],
) -> tuple[float, float]:
    """Fit the adapters of some layers.

    Args:
        model: with adapters, which add nothing yet.
        layers: of it, by name.
        dense: the model that was sketched.
        twins: its layers, by the same names.
        ranks: of the adapters.
        data: see `sketchify`.
        put: changes an adapter in place: called with a layer's name and the factors (O, k) and (k, I).

    Returns:
        How far results on a fifth of the data, which nothing was fitted to, are from the dense model's,
        before and after.
    """
    every = record_calls(model, data)
    calls = learnt_of(every)
    judged = every[len(calls) :] or every
    wanted, adapted = _watched(dense, twins), _watched(model, layers)
    logits = SketchConfig(output=recognize_output(dense, calls).output).logits
    weights = output_gradients(
        wanted.model,
        wanted.watched,
        dict.fromkeys(twins, -1),
        calls,
        seed=0,
        logits=logits,
        progress=False,
    )
    masks = [kept_positions(model, call) for call in calls]

    def fit(name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        layer = adapted.watched[name].layer
        gradient = weight_of_errors(weights[name])[0] if name in weights else None
        lacking, inputs = _lacking(twins[name], layer, arrivals, masks)
        put(name, *_best(lacking, inputs, gradient, ranks[name]))
        return layer

    residuals = find_residuals(_watched(dense, twins), calls)
    with torch.no_grad():
        targets = [call.run(wanted.model) for call in judged]
        before = _distance(adapted.model, judged, targets, logits)
        fit_in_lockstep(_watched(dense, twins), adapted, calls, fit, residuals=residuals, progress=False)
        after = _distance(adapted.model, judged, targets, logits)
    return before, after


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


def _lacking(
    dense: nn.Module, layer: nn.Module, arrivals: Sequence[Arrival], masks: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Rows that the adapter is to give (n, O), and its inputs (n, I), float64."""
    lacking, inputs = [], []
    for arrival in arrivals:
        missing = dense(arrival.x) - layer(arrival.z)
        if arrival.residuals is not None:
            missing = missing + arrival.residuals[0] - arrival.residuals[1]
        kept = masks[arrival.batch]
        lacking.append(kept_rows(missing, kept).double())
        inputs.append(kept_rows(arrival.z, kept).double())
    return torch.cat(lacking), torch.cat(inputs)


def _best(lacking: Tensor, inputs: Tensor, gradient: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
    """The factors (O, k) and (k, I), each with half of the singular values of their product."""
    rows, features = inputs.shape
    covariance = inputs.T @ inputs / rows
    ridge = _RIDGE_OF_FEW if rows < _FEW_ROWS * features else _RIDGE
    covariance.diagonal().add_(ridge * covariance.diagonal().mean().clamp_min(1e-30))
    product = lacking.T @ inputs / rows
    rank = min(rank, *product.shape)
    left, right = low_rank_solution(
        product, covariance, gradient, rank, by_outputs=product.shape[0] <= product.shape[1]
    )
    (q, r), (p, t) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, values, v = torch.linalg.svd(r @ t.T)
    half = values.sqrt()
    return q @ u * half, half[:, None] * (v @ p.T)
