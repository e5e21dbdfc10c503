"""Second moments of what reaches a layer in the dense model (x) and in the sketched one (z)."""

# O out_features, I in_features, N rows
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.gram import gram

MAX_ROWS = 8192  # of one batch; the moments of more would be no better
SAMPLE = 1024  # rows kept to measure errors on
_KEPT = 32  # batches at least that they come from, if there are so many
ROUNDING = 1e-6  # of the mean power before the means are taken off, likewise
RIDGE = 1e-4  # of the mean power, added to both second moments: where there is no data, W is kept


@dataclass(frozen=True, slots=True)
class ResidualMoments:
    """Moments of s, the residual that a dense layer's output is added to, and of d = s - s', its change.

    Attributes:
        cross: E[d zᵀ] (O, I), float64, about the means if they are not zero.
        mean: of d (O,); zeros where moments are taken about zero.
        sample: some of the rows s, float32 (n, O).
        sample_change: the rows d at the same places, less their mean.
    """

    cross: Tensor
    mean: Tensor
    sample: Tensor
    sample_change: Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of the inputs x of the dense layer and z of the sketched one, float64.

    Attributes:
        cross: E[x zᵀ] (I, I), about the means if they are not zero, with the ridge. A narrow layer is given
            fewer features z than the dense one x: then (I, K).
        covariance: E[z zᵀ] (I, I), likewise.
        mean_x: (I,); zeros where moments are taken about zero.
        mean_z: likewise.
        rows: how many there were.
        sample_x: some of the rows x, float32 (n, I), less their mean.
        sample_z: the rows z at the same places.
        residual: of what the layer's output is added to, if known.
    """

    cross: Tensor
    covariance: Tensor
    mean_x: Tensor
    mean_z: Tensor
    rows: int
    sample_x: Tensor
    sample_z: Tensor
    residual: ResidualMoments | None = None


class MomentSums:
    """Adds rows up: products in float32, sums in float64.

    Args:
        features: of z.
        device: where the sums are kept.
        dense: features of x, if they are others.
    """

    def __init__(self, features: int, device: torch.device, dense: int | None = None) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._covariance = torch.zeros(features, features, dtype=dtype, device=device)
        self._cross: Tensor | None = None  # equal to the covariance until x and z differ
        if dense is not None:
            self._cross = torch.zeros(dense, features, dtype=dtype, device=device)
        self._sum_x = torch.zeros(dense or features, dtype=dtype, device=device)
        self._sum_z = torch.zeros(features, dtype=dtype, device=device)
        self._about: tuple[Tensor, Tensor] | None = None  # near the means, so that no digits are lost to them
        self._samples: list[tuple[Tensor, ...]] = []
        self._change: tuple[Tensor, ...] = ()  # sums of d zᵀ and of d
        self.rows = 0

    def add(self, x: Tensor, z: Tensor, residuals: tuple[Tensor, Tensor] | None = None) -> None:
        """Add rows x (N, I), and rows z (N, I) of the sketched model; they may be one tensor.

        Args:
            x: in the dense model.
            z: in the sketched one.
            residuals: rows s and s' (N, O), see `ResidualMoments`; given always or never.
        """
        if not len(x):  # as an expert is given where no token is routed to it
            return
        same = x is z
        x, z = thinned(x).float(), thinned(z).float()
        if self._about is None:
            self._about = x.mean(0), z.mean(0)
        x = x - self._about[0]
        z = x if same and self._cross is None else z - self._about[1]
        if not same and self._cross is None:
            self._cross = self._covariance.clone()
        self._covariance += gram(z)
        if self._cross is not None:
            self._cross += x.T @ z
        self._sum_x += x.sum(0)
        self._sum_z += z.sum(0)
        self.rows += len(x)
        rows = [x, z]
        if residuals is not None:
            residual = thinned(residuals[0]).float()
            change = residual - thinned(residuals[1]).float()
            sums = change.T @ z, change.sum(0)
            self._change = (
                tuple(a + b for a, b in zip(self._change, sums, strict=True)) if self._change else sums
            )
            rows += [residual, change]
        self._samples.append(tuple(thinned(one, SAMPLE // 8) for one in rows))
        if len(self._samples) == 2 * _KEPT:
            self._samples = self._samples[::2]

    def _residual_moments(self, shift_z: Tensor, mean_z: Tensor, centred: bool) -> ResidualMoments | None:
        if not self._change:
            return None
        cross, mean = (total.double() / max(1, self.rows) for total in self._change)
        cross -= torch.outer(mean, shift_z)
        if not centred:
            cross += torch.outer(mean, mean_z)
            mean = torch.zeros_like(mean)
        sample, change = (
            thinned(torch.cat(rows), SAMPLE) for rows in list(zip(*self._samples, strict=True))[2:]
        )
        return ResidualMoments(cross, mean, sample, change - mean.float())

    def moments(self, *, centred: bool, extended: Tensor | None = None, ridge: float = RIDGE) -> Moments:
        """Moments of what was added.

        Args:
            centred: about the means, for a layer with a bias, which makes up for them.
            extended: x as z tells it (I, K), where they have other features.
            ridge: of the mean power; the more, the more W counts as it is.
        """
        assert self._about is not None
        count = max(1, self.rows)
        shift_x, shift_z = (self._sum_x / count).double(), (self._sum_z / count).double()
        covariance = (self._covariance / count).double()
        cross = covariance.clone() if self._cross is None else (self._cross / count).double()
        rounding = ROUNDING * float(covariance.diagonal().mean())
        cross -= torch.outer(shift_x, shift_z)
        covariance -= torch.outer(shift_z, shift_z)
        mean_x, mean_z = self._about[0] + shift_x, self._about[1] + shift_z
        residual = self._residual_moments(shift_z, mean_z, centred)
        if not centred:
            cross += torch.outer(mean_x, mean_z)
            covariance += torch.outer(mean_z, mean_z)
            mean_x, mean_z = torch.zeros_like(mean_x), torch.zeros_like(mean_z)
        added = rounding + ridge * float(covariance.diagonal().mean().clamp_min(1e-30))
        covariance.diagonal().add_(added)
        if extended is None:
            cross.diagonal().add_(added)
        else:
            cross += added * extended
        some_x, some_z = (torch.cat(rows) for rows in list(zip(*self._samples, strict=True))[:2])
        sample_x = thinned(some_x, SAMPLE) + (self._about[0] - mean_x)
        sample_z = thinned(some_z, SAMPLE) + (self._about[1] - mean_z)
        return Moments(
            cross, covariance, mean_x, mean_z, self.rows, sample_x.float(), sample_z.float(), residual
        )


def thinned(rows: Tensor, most: int = MAX_ROWS) -> Tensor:
    """At most so many rows, evenly spread."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
