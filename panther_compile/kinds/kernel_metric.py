"""How much an error of a k x k kernel shows, by the data: its channels, its taps, and its outputs.

    E ‖ G^½ (W - W') p ‖² ≈ ‖ G^½ (W - W') (C ⊗ T_h ⊗ T_w)^½ ‖²,

p being the patches that the kernel reads, padding included, C the second moments of their channels, T_h and
T_w those of the pixels above and beside each other in one channel, as shares of their power; about the means
of each channel at each tap where there is a bias, which makes up for these: in short maps the outer taps read
much padding. Neighbours in images and sound are much alike, so that kernels of few frequencies do most. Each
part is a change of basis of one axis of W, which every scheme survives: what is factorized in the new bases
is taken back factor by factor. What the patches tell beyond the parts, S = E[p pᵀ], is looked at where a
kernel is fitted (`kernel_descent.py`).
"""

# O out_channels, I in_channels, G groups, kh x kw kernel, F = I kh kw
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from panther_compile.factorization.conv2d import conv_candidates
from panther_compile.factorization.gram import gram
from panther_compile.factorization.moments import MAX_ROWS, ROUNDING, ridge_on, thinned
from panther_compile.factorization.whiten import Root, root_of
from panther_compile.kinds.windows import Convolution, windows

_LEAST_PATCHES = 512  # of a batch, which kernels of many taps need
_MOST_FEATURES = 2304  # F: of more, S is not summed up
_PATCHES_EACH = 2  # of a batch, for a feature of S


@dataclass(frozen=True, slots=True)
class PatchMoments:
    """Second moments of the parts, see the file, float64, with the ridge.

    Attributes:
        channels: C (I, I); empty for a convolution with groups.
        above: T_h (kh, kh), as shares of the mean power.
        beside: T_w (kw, kw), likewise.
        mean: E[p] (I / G, kh, kw); zeros where moments are taken about zero, or there are groups.
        halves: S (F, F) of two halves of the patches, if they are known.
    """

    channels: Tensor
    above: Tensor
    beside: Tensor
    mean: Tensor
    halves: tuple[Tensor, ...] = ()

    def metric(self, gradient: Tensor | None) -> "KernelMetric":
        """The metric that they make.

        Args:
            gradient: G, float64 `(O, O)`, or None; of no use to groups.
        """
        has_groups = not self.channels.numel()
        inner = None if has_groups else root_of(self.channels)
        outer = None if has_groups or gradient is None else root_of(gradient)
        return KernelMetric(inner, (root_of(self.above), root_of(self.beside)), outer)


@dataclass(frozen=True, slots=True)
class KernelMetric:
    """Square roots of the parts, see the file.

    Attributes:
        inner: of C; None for a convolution with groups.
        taps: of T_h and T_w.
        outer: of G, or None.
    """

    inner: Root | None
    taps: tuple[Root, Root]
    outer: Root | None

    def whiten(self, weight: Tensor) -> Tensor:
        """A weight (O, I / G, kh, kw), float64, in the bases in which all errors count alike."""
        for axis, root in zip((2, 3), self.taps, strict=True):
            weight = _along(weight, axis, root.factor)
        if self.inner is not None:
            weight = _along(weight, 1, self.inner.factor)
        return weight if self.outer is None else torch.einsum("po,oihw->pihw", self.outer.factor.T, weight)

    def whiten_moments(self, moments: Tensor) -> Tensor:
        """S (F, F) in the same bases: the identity, if the parts are all that there is."""
        assert self.inner is not None
        sizes = [len(root.inverse) for root in (self.inner, *self.taps)]
        for _ in range(2):  # its rows, then its columns
            rows = moments.T.reshape(-1, *sizes)
            for axis, root in zip((1, 2, 3), (self.inner, *self.taps), strict=True):
                rows = _along(rows, axis, root.inverse.T)
            moments = rows.flatten(1)
        return moments

    def take_back(self, scheme: str, kernels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The factors in the bases of the layer, from those of a whitened weight."""
        found = [kernel.double() for kernel in kernels]
        for axis, root in zip((2, 3), self.taps, strict=True):
            found = [
                _along(kernel, axis, root.inverse) if kernel.shape[axis] == len(root.inverse) else kernel
                for kernel in found
            ]
        if self.inner is not None and scheme == "basis":  # the filters know of no channels
            by_input = found[-1].unflatten(1, (-1, len(found[0])))
            found[-1] = _along(by_input, 1, self.inner.inverse).flatten(1, 2)
        elif self.inner is not None:
            found[0] = _along(found[0], 1, self.inner.inverse)
        if self.outer is not None:
            found[-1] = torch.einsum("op,prhw->orhw", self.outer.inverse.T, found[-1])
        return tuple(found)


class KernelSums:
    """Adds up what reaches a convolution.

    Args:
        conv: the dense layer, on a plane.
        reads: the dense layer as it is; None if it is of two axes.
        centred: about the means; None where the layer has a bias.
        whole: whether S is wanted; it is left out where there are groups, or many features.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        reads: Convolution | None = None,
        *,
        centred: bool | None = None,
        whole: bool = False,
    ) -> None:
        self._conv, self._reads = conv, reads or conv
        self._centred = conv.bias is not None if centred is None else centred
        self._about: Tensor | None = None  # near the means, so that no digits are lost to them
        self._taps, self._channels = _Sums(), _Sums()
        has_whole = whole and conv.groups == 1 and conv.weight[0].numel() <= _MOST_FEATURES
        self._halves: tuple[_Sums, ...] = (_Sums(), _Sums()) if has_whole else ()

    def add(self, x: Tensor) -> None:
        """Add an input (N, I, *) or (I, *)."""
        taps = self._conv.kernel_size[0] * self._conv.kernel_size[1]
        most = max(_LEAST_PATCHES, MAX_ROWS // taps)
        if self._halves:
            most = max(most, min(MAX_ROWS, _PATCHES_EACH * self._conv.weight[0].numel()))
        patches = windows(self._reads, x, most).flatten(2).float()
        if not len(patches):
            return
        if self._about is None:
            self._about = patches.mean(0) if self._centred else torch.zeros_like(patches[0])
        patches = patches - self._about
        if self._halves:
            for half, some in zip(self._halves, patches.flatten(1).unsqueeze(1).chunk(2), strict=False):
                half.add(some)
            self._halves = self._halves[::-1]  # so that batches of one patch go to both
        self._taps.add(patches)
        if self._conv.groups == 1:
            self._channels.add(thinned(patches, max(1, MAX_ROWS // taps)).mT)

    def moments(self, ridge: float) -> PatchMoments:
        """Second moments of what was added.

        Args:
            ridge: on second moments, of their mean power.
        """
        assert self._about is not None
        taps = self._taps.moments(ridge, centred=self._centred)
        channels, mean = taps.new_zeros(0, 0), taps.new_zeros(self._conv.weight.shape[1:])
        if self._conv.groups == 1:
            channels = self._channels.moments(ridge, centred=self._centred)
            if self._centred:
                mean = (self._about.double() + self._taps.mean).view_as(mean)
        taps = taps.view(*self._conv.kernel_size, *self._conv.kernel_size)
        above, beside = torch.einsum("abcb->ac", taps), torch.einsum("abad->bd", taps)
        halves: tuple[Tensor, ...] = ()
        if all(half.patches for half in self._halves):
            halves = tuple(half.moments(ridge, centred=self._centred) for half in self._halves)
        return PatchMoments(channels, _as_shares(above), _as_shares(beside), mean, halves)

    def energies(self, gradient: Tensor | None, moments: PatchMoments) -> dict[str, Tensor]:
        """What each rank keeps of the kernel in the metric, by scheme; see `Candidate.energies`."""
        weight = moments.metric(gradient).whiten(self._conv.weight.detach().double())
        return {
            one.scheme: one.energies.cpu()
            for one in conv_candidates(weight, self._conv.groups)
            if one.energies is not None
        }


class _Sums:
    """Sums over patches (n, A, B), of their second moments over B: products in float32, sums in float64.

    Attributes:
        patches: how many there were.
    """

    def __init__(self) -> None:
        self.patches = 0
        self._total: Tensor | float = 0.0
        self._products: Tensor | float = 0.0

    def add(self, patches: Tensor) -> None:
        """Add patches."""
        self.patches += len(patches)
        self._total = self._total + patches.double().sum(0)
        self._products = self._products + gram(patches.flatten(0, 1)).double()

    @property
    def mean(self) -> Tensor:
        """E[p] (A, B)."""
        assert isinstance(self._total, Tensor)
        return self._total / self.patches

    def moments(self, ridge: float, *, centred: bool) -> Tensor:
        """E[p_aᵀ p_a] (B, B), the mean over a, about the means or zero, with the ridge."""
        assert isinstance(self._products, Tensor)
        mean = self.mean
        found = self._products / (self.patches * len(mean))
        rounding = ROUNDING * float(found.diagonal().mean())
        if centred:
            found = found - mean.T @ mean / len(mean)
        found.diagonal().add_(rounding + ridge_on(found, ridge))
        return found


def _along(weight: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Each row of a weight along an axis, times a matrix."""
    return (weight.movedim(axis, -1) @ matrix.to(weight.device)).movedim(-1, axis)


def _as_shares(covariance: Tensor) -> Tensor:
    """Second moments as shares of their mean power; of zeros, those of noise."""
    power = float(covariance.diagonal().mean())
    return covariance / power if power > 0 else torch.eye(len(covariance)).to(covariance)
