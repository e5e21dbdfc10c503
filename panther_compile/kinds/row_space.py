"""A layer of very many inputs and fewer outputs, fitted in the row space of its weight.

    W = L Qᵀ,  Q (I, O) orthonormal:    W x = L u,  u = Qᵀ x

Second moments of u are of O features in place of I, as of the 25,088 of the first linear layer of VGG-16.
Where inputs are as in the dense model nothing is lost: the best W' of a rank is a projection of W, whose rows
lie in that space. Where layers before have changed them, only what of the change lies there is made up for.
"""

# O out_features, I in_features, r rank
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.factorization.pivot import from_pivoted, to_pivoted
from panther_compile.kinds.base import Kind
from panther_compile.kinds.view import LinearView
from panther_compile.layers.base import SketchedLayer
from panther_compile.memory import memory_of

_HELD = 14 * 8  # bytes that a fit holds at its peak for each of I x I second moments, measured


class RowSpaceView(LinearView):
    """A matrix (O, I) of more columns than rows, as a square one.

    Args:
        view: of the layer as it is.
    """

    is_linear = False

    def __init__(self, view: LinearView) -> None:
        super().__init__(view.layer)
        self.channel_dim = view.channel_dim
        self._view = view

    @property
    def outputs(self) -> int:
        """See `LinearView`."""
        return self._view.outputs

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """L (O, O), float32, and the bias."""
        return self._parts[1], self._view.weight_and_bias()[1]

    def whole_weight(self) -> Tensor:
        """See `LinearView`."""
        return self._view.whole_weight()

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The coordinates u as rows (n, O), float32."""
        return self._view.rows(x, kept).float() @ self._parts[0]

    def metric(self, gradient: Tensor | None) -> Tensor | None:
        """See `LinearView`."""
        return self._view.metric(gradient)

    def build(self, found: FittedPair) -> SketchedLayer:
        """See `LinearView`; the pivots are sought among the inputs anew."""
        left, right = found.left, found.right
        assert right is not None
        if found.start is not None:
            left, right = from_pivoted(left, right, found.start)
        right = right @ self._parts[0].T.to(right)
        if found.start is None:
            return self._view.build(replace(found, right=right))
        pair = to_pivoted(left, right, dtype=self.whole_weight().dtype)
        assert pair is not None
        return self._view.build(replace(found, left=pair.left, right=pair.right, start=pair.start))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """Q and L."""
        basis, upper = torch.linalg.qr(self.whole_weight().detach().float().T)
        return basis, upper.T.contiguous()


def view_within_memory(kind: Kind, layer: nn.Module) -> LinearView | str:
    """What data sees of a layer, its second moments within memory, or why data leaves it alone."""
    view = kind.view(layer)
    if isinstance(view, str) or not view.is_matrix:
        return view
    weight = view.weight_and_bias()[0]
    (outputs, inputs), there = weight.shape, memory_of(weight.device)
    if _HELD * inputs**2 <= there:
        return view
    if outputs < inputs and _HELD * outputs**2 <= there:
        return RowSpaceView(view)
    needed = _HELD * min(outputs, inputs) ** 2
    return f"to fit it takes {needed / 1e9:,.0f} GB of memory, and there are {there / 1e9:,.0f}"
