"""Second moments of what reaches a layer in the dense model (x) and in the sketched one (z)."""

# O out_features, I in_features, N rows
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.row_sums import HalvedSums, Means

MAX_ROWS = 8192  # of one batch; the moments of more would be no better
SAMPLE = 1024  # rows kept to measure errors on
_KEPT = 32  # batches at least that they come from, if there are so many
ROUNDING = 1e-6  # of the mean power before the means are taken off, likewise
RIDGE = 1e-4  # of the mean power, added to both second moments: where there is no data, W is kept
RIDGE_OF_PLACES = 1e-2  # likewise, of rows that are places of a picture or a sound, and much alike


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
        extended: x as z tells it where nothing has changed (I, K); None if that is z.
        halves: means over two halves of the rows, without the ridge, if x and z differ, or the residual does.
    """

    cross: Tensor
    covariance: Tensor
    mean_x: Tensor
    mean_z: Tensor
    rows: int
    sample_x: Tensor
    sample_z: Tensor
    residual: ResidualMoments | None = None
    extended: Tensor | None = None
    halves: tuple[Means, ...] = ()


class MomentSums:
    """Adds rows up: products in float32, sums in float64.

    Args:
        features: of z.
        device: where the sums are kept.
        dense: features of x, if they are others.
    """

    def __init__(self, features: int, device: torch.device, dense: int | None = None) -> None:
        self._sums = HalvedSums(dense or features, features, device, apart=dense is not None)
        self._about: tuple[Tensor, Tensor] | None = None  # near the means, so that no digits are lost to them
        self._samples: list[tuple[Tensor, ...]] = []

    @property
    def rows(self) -> int:
        """How many there were."""
        return self._sums.rows

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
        z = x if same and not self._sums.differ else z - self._about[1]
        rows, change = [x, z], None
        if residuals is not None:
            residual = thinned(residuals[0]).float()
            change = residual - thinned(residuals[1]).float()
            rows += [residual, change]
        self._sums.add(x, z, change, halved=not same or change is not None)
        self._samples.append(tuple(thinned(one, SAMPLE // 8) for one in rows))
        if len(self._samples) == 2 * _KEPT:
            self._samples = self._samples[::2]

    def _residual_moments(self, means: Means, centred: bool) -> ResidualMoments | None:
        if means.change is None:
            return None
        cross, mean = means.change
        if not centred:
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
        sums = self._sums.total()
        rounding = ROUNDING * float((sums.covariance.diagonal() / max(1, sums.rows)).double().mean())
        means = sums.means(self._about, centred=centred)
        cross, covariance = means.cross, means.covariance
        mean_x, mean_z = means.x, means.z
        if not centred:
            mean_x, mean_z = torch.zeros_like(mean_x), torch.zeros_like(mean_z)
        added = rounding + ridge_on(covariance, ridge)
        covariance.diagonal().add_(added)
        if extended is None:
            cross.diagonal().add_(added)
        else:
            cross += added * extended
        some_x, some_z = (torch.cat(rows) for rows in list(zip(*self._samples, strict=True))[:2])
        sample_x = thinned(some_x, SAMPLE) + (self._about[0] - mean_x)
        sample_z = thinned(some_z, SAMPLE) + (self._about[1] - mean_z)
        return Moments(
            cross=cross,
            covariance=covariance,
            mean_x=mean_x,
            mean_z=mean_z,
            rows=sums.rows,
            sample_x=sample_x.float(),
            sample_z=sample_z.float(),
            residual=self._residual_moments(means, centred),
            extended=extended,
            halves=self._sums.halves(self._about, centred=centred),
        )


def ridge_on(covariance: Tensor, ridge: float) -> float:
    """What is added to the diagonal of second moments for a ridge, a share of their mean power."""
    return ridge * float(covariance.diagonal().mean().clamp_min(1e-30))


def thinned(rows: Tensor, most: int = MAX_ROWS) -> Tensor:
    """Some of the rows, evenly spread, at most so many."""
    return rows if len(rows) <= most else rows[spread_places(len(rows), most).to(rows.device)]


def spread_places(count: int, most: int) -> Tensor:
    """Places from 0 to `count` - 1, evenly spread, at most so many."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).long()
