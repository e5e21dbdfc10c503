"""Sums over rows x and z, whole and by halves: what second moments are made of."""

# O out_features, I features of x, K features of z
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.factorization.gram import gram


@dataclass(frozen=True, slots=True)
class Means:
    """Means over rows, float64.

    Attributes:
        cross: E[x zᵀ] (I, K), about the means or about zero.
        covariance: E[z zᵀ] (K, K), likewise.
        x: (I,).
        z: (K,).
        change: E[d zᵀ] (O, K) of a change d that comes with the rows, likewise, and E[d] (O,); or None.
    """

    cross: Tensor
    covariance: Tensor
    x: Tensor
    z: Tensor
    change: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class RowSums:
    """Sums of z zᵀ, x zᵀ, x, z, and of d zᵀ and d if d is known: products in float32, sums in float64.

    `cross` is None while x and z do not differ, and then equal to the covariance.
    """

    covariance: Tensor
    cross: Tensor | None
    x: Tensor
    z: Tensor
    change: tuple[Tensor, ...] = ()
    rows: int = 0

    @classmethod
    def zeros(cls, dense: int, features: int, device: torch.device, *, apart: bool) -> "RowSums":
        """Sums of no rows, of so many features of x and of z; `apart` if they are known to differ."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        empty = torch.zeros(features, features, dtype=dtype, device=device)
        cross = empty.new_zeros(dense, features) if apart else None
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

    def plus(self, other: "RowSums") -> "RowSums":
        """The sums of the rows of both."""
        crosses = [one.covariance if one.cross is None else one.cross for one in (self, other)]
        changes = [one.change for one in (self, other) if one.change]
        return RowSums(
            self.covariance + other.covariance,
            crosses[0] + crosses[1],
            self.x + other.x,
            self.z + other.z,
            tuple(sum(parts[1:], parts[0]) for parts in zip(*changes, strict=True)),
            self.rows + other.rows,
        )

    def means(self, about: tuple[Tensor, Tensor], *, centred: bool) -> Means:
        """Means over the rows.

        Args:
            about: of x and of z, what was subtracted from the rows before they were added.
            centred: second moments are about the means, else about zero.
        """
        count = max(1, self.rows)
        shift_x, shift_z = (self.x / count).double(), (self.z / count).double()
        mean_x, mean_z = about[0] + shift_x, about[1] + shift_z
        covariance = (self.covariance / count).double()
        cross = covariance.clone() if self.cross is None else (self.cross / count).double()
        cross -= torch.outer(shift_x, shift_z)
        covariance -= torch.outer(shift_z, shift_z)
        change = None
        if self.change:
            change, mean = (total.double() / count for total in self.change)
            change -= torch.outer(mean, shift_z)
        if not centred:
            cross += torch.outer(mean_x, mean_z)
            covariance += torch.outer(mean_z, mean_z)
            if change is not None:
                change += torch.outer(mean, mean_z)
        return Means(cross, covariance, mean_x, mean_z, None if change is None else (change, mean))


class HalvedSums:
    """Sums over rows, where wanted with a sum for each half of them.

    Args:
        dense: features of x.
        features: of z.
        device: where the sums are kept.
        apart: whether x and z are known to differ; see `RowSums`.
    """

    def __init__(self, dense: int, features: int, device: torch.device, *, apart: bool) -> None:
        self._rest = RowSums.zeros(dense, features, device, apart=apart)
        self._first: RowSums | None = None

    @property
    def rows(self) -> int:
        """How many there were."""
        return self._rest.rows + (0 if self._first is None else self._first.rows)

    @property
    def differ(self) -> bool:
        """Whether x and z have differed yet."""
        return self._rest.cross is not None

    def add(self, x: Tensor, z: Tensor, change: Tensor | None, *, halved: bool) -> None:
        """Add rows, float32; x may be z itself. If halved, the first half of them to one half of all."""
        behind = self._first is None or self._first.rows < self._rest.rows  # it gets the odd one then
        middle = (len(z) + int(behind and self._rest.rows > 0)) // 2 if halved else 0
        if middle:
            first = self._first or RowSums.zeros(x.shape[1], z.shape[1], z.device, apart=True)
            first.add(x[:middle], z[:middle], None if change is None else change[:middle])
            self._first = first
            x, z, change = x[middle:], z[middle:], None if change is None else change[middle:]
        if len(z):
            self._rest.add(x, z, change)

    def total(self) -> RowSums:
        """The sums of all rows."""
        return self._rest if self._first is None else self._rest.plus(self._first)

    def halves(self, about: tuple[Tensor, Tensor], *, centred: bool) -> tuple[Means, ...]:
        """See `RowSums.means`: of two halves, or of none where no rows were halved."""
        if self._first is None:
            return ()
        return tuple(one.means(about, centred=centred) for one in (self._first, self._rest))
