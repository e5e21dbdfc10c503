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
class Half:
    """What a half of the rows gives, without the ridge; see `Moments`.

    Attributes:
        cross: E[x zᵀ] (I, K).
        covariance: E[z zᵀ] (K, K).
        change: E[d zᵀ] (O, K), see `ResidualMoments`, or None.
    """

    cross: Tensor
    covariance: Tensor
    change: Tensor | None


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
        halves: two of the rows, if x and z differ, or the residual does.
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
    halves: tuple[Half, ...] = ()


@dataclass(slots=True)
class _Sums:
    """Sums over rows: of z zᵀ, x zᵀ, x, z, and of d zᵀ and d if d is known.

    `cross` is None while x and z do not differ, and then equal to the covariance.
    """

    covariance: Tensor
    cross: Tensor | None
    x: Tensor
    z: Tensor
    change: tuple[Tensor, ...] = ()
    rows: int = 0

    @classmethod
    def zeros(cls, dense: int, features: int, device: torch.device, *, apart: bool) -> "_Sums":
        dtype = torch.float32 if device.type == "mps" else torch.float64
        size = {"dtype": dtype, "device": device}
        cross = torch.zeros(dense, features, **size) if apart else None  # type: ignore[call-overload]
        empty = torch.zeros(features, features, **size)  # type: ignore[call-overload]
        return cls(empty, cross, empty.new_zeros(dense), empty.new_zeros(features))

    def add(self, x: Tensor, z: Tensor, change: Tensor | None) -> None:
        """Add rows, float32; x may be z itself."""
        if x is not z and self.cross is None:
            self.cross = self.covariance.clone()
        self.covariance += gram(z)
        if self.cross is not None:
            self.cross += x.T @ z
        self.x += x.sum(0)
        self.z += z.sum(0)
        self.rows += len(z)
        if change is not None:
            sums = change.T @ z, change.sum(0)
            known = self.change
            self.change = tuple(a + b for a, b in zip(known, sums, strict=True)) if known else sums

    def plus(self, other: "_Sums") -> "_Sums":
        """The sums of the rows of both."""
        crosses = [one.covariance if one.cross is None else one.cross for one in (self, other)]
        changes = [one.change for one in (self, other) if one.change]
        return _Sums(
            self.covariance + other.covariance,
            crosses[0] + crosses[1],
            self.x + other.x,
            self.z + other.z,
            tuple(sum(parts[1:], parts[0]) for parts in zip(*changes, strict=True)),
            self.rows + other.rows,
        )

    def half(self, about: tuple[Tensor, Tensor], *, centred: bool) -> Half:
        """Moments about the means, or else about zero, which is `about` away from where rows are taken."""
        count = max(1, self.rows)
        mean_x, mean_z = (self.x / count).double(), (self.z / count).double()
        covariance = (self.covariance / count).double()
        cross = covariance.clone() if self.cross is None else (self.cross / count).double()
        cross -= torch.outer(mean_x, mean_z)
        covariance -= torch.outer(mean_z, mean_z)
        change = None
        if self.change:
            change, mean = ((total / count).double() for total in self.change)
            change -= torch.outer(mean, mean_z)
        if not centred:
            mean_x, mean_z = mean_x + about[0], mean_z + about[1]
            cross += torch.outer(mean_x, mean_z)
            covariance += torch.outer(mean_z, mean_z)
            if change is not None:
                change += torch.outer(mean, mean_z)
        return Half(cross, covariance, change)


class MomentSums:
    """Adds rows up: products in float32, sums in float64.

    Args:
        features: of z.
        device: where the sums are kept.
        dense: features of x, if they are others.
    """

    def __init__(self, features: int, device: torch.device, dense: int | None = None) -> None:
        self._sums = _Sums.zeros(dense or features, features, device, apart=dense is not None)
        self._first: _Sums | None = (
            None  # the first half of each batch in which x and z, or residuals, differ
        )
        self._about: tuple[Tensor, Tensor] | None = None  # near the means, so that no digits are lost to them
        self._samples: list[tuple[Tensor, ...]] = []

    @property
    def rows(self) -> int:
        """How many there were."""
        return self._sums.rows + (0 if self._first is None else self._first.rows)

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
        z = x if same and self._sums.cross is None else z - self._about[1]
        rows, change = [x, z], None
        if residuals is not None:
            residual = thinned(residuals[0]).float()
            change = residual - thinned(residuals[1]).float()
            rows += [residual, change]
        middle = len(z) // 2 if not same or change is not None else 0
        if middle:
            self._first = self._first or _Sums.zeros(x.shape[1], z.shape[1], z.device, apart=True)
            self._first.add(x[:middle], z[:middle], None if change is None else change[:middle])
            x, change = x[middle:], None if change is None else change[middle:]
            z = z[middle:]
        self._sums.add(x, z, change)
        self._samples.append(tuple(thinned(one, SAMPLE // 8) for one in rows))
        if len(self._samples) == 2 * _KEPT:
            self._samples = self._samples[::2]

    def _halves(self, *, centred: bool) -> tuple[Half, ...]:
        if self._first is None or self._about is None:
            return ()
        return tuple(one.half(self._about, centred=centred) for one in (self._first, self._sums))

    def _residual_moments(
        self, sums: _Sums, shift_z: Tensor, mean_z: Tensor, centred: bool
    ) -> ResidualMoments | None:
        if not sums.change:
            return None
        cross, mean = (total.double() / max(1, sums.rows) for total in sums.change)
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
        sums = self._sums if self._first is None else self._sums.plus(self._first)
        count = max(1, sums.rows)
        shift_x, shift_z = (sums.x / count).double(), (sums.z / count).double()
        covariance = (sums.covariance / count).double()
        cross = covariance.clone() if sums.cross is None else (sums.cross / count).double()
        rounding = ROUNDING * float(covariance.diagonal().mean())
        cross -= torch.outer(shift_x, shift_z)
        covariance -= torch.outer(shift_z, shift_z)
        mean_x, mean_z = self._about[0] + shift_x, self._about[1] + shift_z
        residual = self._residual_moments(sums, shift_z, mean_z, centred)
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
            cross,
            covariance,
            mean_x,
            mean_z,
            self.rows,
            sample_x.float(),
            sample_z.float(),
            residual,
            extended,
            self._halves(centred=centred),
        )


def thinned(rows: Tensor, most: int = MAX_ROWS) -> Tensor:
    """At most so many rows, evenly spread."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
