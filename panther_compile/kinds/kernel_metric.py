"""How much an error of a k x k kernel shows, by the data: its channels, its taps, and its outputs.

    E ‖ G^½ (W - W') p ‖² ≈ ‖ G^½ (W - W') (C ⊗ T_h ⊗ T_w)^½ ‖²,

p being the patches that the kernel reads, C = E[z zᵀ] the second moments of its input's channels, T_h and T_w
those of the pixels above and beside each other in one channel, as shares of their power. Neighbours in images
and sound are much alike, so that kernels of few frequencies do most. Each part is a change of basis of one
axis of W, which every scheme survives: what is factorized in the new bases is taken back factor by factor.
"""

# O out_channels, I in_channels, G groups, kh x kw kernel
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from panther_compile.factorization.conv2d import conv_candidates
from panther_compile.factorization.moments import MomentSums
from panther_compile.factorization.whiten import Root, root_of
from panther_compile.kinds.windows import Convolution, rows_read, windows


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
    """

    def __init__(self, conv: nn.Conv2d, reads: Convolution | None = None) -> None:
        self._conv, self._reads = conv, reads or conv
        device = conv.weight.device
        self._channels = MomentSums(conv.in_channels, device) if conv.groups == 1 else None
        self._taps = MomentSums(conv.kernel_size[0] * conv.kernel_size[1], device)

    def add(self, x: Tensor) -> None:
        """Add an input (N, I, *) or (I, *)."""
        axes = len(self._reads.kernel_size)
        if self._channels is not None:
            rows = rows_read(self._reads, x)
            self._channels.add(rows, rows)
        rows = windows(self._reads, x.reshape(-1, 1, *x.shape[-axes:])).flatten(1)
        self._taps.add(rows, rows)

    def metric(self, gradient: Tensor | None, ridge: float) -> KernelMetric:
        """The metric of what was added.

        Args:
            gradient: G, float64 `(O, O)`, or None; of no use to groups.
            ridge: on second moments, of their mean power.
        """
        channels = None if self._channels is None else self._channels.moments(centred=False, ridge=ridge)
        inner = None if channels is None else root_of(channels.covariance)
        outer = None if channels is None or gradient is None else root_of(gradient)
        taps = self._taps.moments(centred=False, ridge=ridge).covariance
        taps = taps.view(*self._conv.kernel_size, *self._conv.kernel_size)
        above, beside = torch.einsum("abcb->ac", taps), torch.einsum("abad->bd", taps)
        return KernelMetric(inner, (_root_of_share(above), _root_of_share(beside)), outer)

    def energies(self, gradient: Tensor | None, ridge: float) -> dict[str, Tensor]:
        """What each rank keeps of the kernel in the metric, by scheme; see `Candidate.energies`."""
        weight = self.metric(gradient, ridge).whiten(self._conv.weight.detach().double())
        return {
            one.scheme: one.energies.cpu()
            for one in conv_candidates(weight, self._conv.groups)
            if one.energies is not None
        }


def _along(weight: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Each row of a weight along an axis, times a matrix."""
    return (weight.movedim(axis, -1) @ matrix.to(weight.device)).movedim(-1, axis)


def _root_of_share(covariance: Tensor) -> Root:
    """The root of second moments as shares of their mean power; of zeros, those of noise."""
    power = float(covariance.diagonal().mean())
    return root_of(covariance / power if power > 0 else torch.eye(len(covariance)).to(covariance))
