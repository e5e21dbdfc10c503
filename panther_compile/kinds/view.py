"""What data sees of a dense layer, whatever its kind: rows of input, and the matrix that they meet.

y = rows(x) Wᵀ + b          linear layers: rows are features; convolutions: rows are pixels or patches
"""

# O rows of the matrix, I columns
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.kinds.kernel_metric import KernelSums, PatchMoments
from panther_compile.kinds.table import TableSums
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice


class LinearView(ABC):
    """A dense layer as a matrix.

    Args:
        layer: the dense layer.

    Attributes:
        is_matrix: whether every scheme of the layer is one matrix of low rank, found from second moments of
            the rows; else `fit` finds it.
        channel_dim: dimension of the layer's output that holds its output features.
        is_linear: whether the rows are the input's features as they are: such a layer may share an input
            factor with others, be narrowed, and make up for what its output is added to.
        is_table: whether rows are read from it by number, not multiplied.
        has_mean: whether a shift of the rows' mean can go into the bias.
    """

    is_matrix: bool = True
    channel_dim: int = -1
    is_linear: ClassVar[bool] = True
    is_table: ClassVar[bool] = False

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @property
    def has_mean(self) -> bool:
        """Whether there is a bias that can make up for a change of the mean."""
        return self.weight_and_bias()[1] is not None

    @property
    def is_spatial(self) -> bool:
        """Whether the rows are places of a picture or a sound, which are too much alike to count each."""
        return self.channel_dim != -1

    @property
    def outputs(self) -> int:
        """Output features of the layer."""
        return len(self.weight_and_bias()[0])

    @abstractmethod
    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The matrix (O, I) and the bias (O,), or None."""

    def whole_weight(self) -> Tensor:
        """The matrix as the layer has it, where it is seen as a smaller one."""
        return self.weight_and_bias()[0]

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The layer's input as rows (n, I), padded positions left out; see `kept_rows`."""
        return kept_rows(x, kept)

    def metric(self, gradient: Tensor | None) -> Tensor | None:
        """The weight of errors at the matrix' rows (O, O) from that at the layer's output features."""
        return gradient

    @abstractmethod
    def build(self, found: FittedPair) -> SketchedLayer:
        """The replacement that stores what was fitted."""

    def input_sums(self, *, centred: bool | None = None) -> KernelSums | TableSums | None:
        """Sums over inputs, that tell what ranks of a layer keep that is no matrix; None if nothing does.

        Args:
            centred: about the means; None where the layer has a bias that makes up for them.
        """
        return None

    def cut(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        moments: PatchMoments,
        gradient: Tensor | None,
    ) -> SketchedLayer:
        """A kernel factorized in a metric, without a fit.

        Args:
            name: name of the unit, for its random numbers.
            choice: scheme and ranks.
            config: the options.
            moments: moments of what reaches it.
            gradient: weight of errors at the output features, or None.
        """
        raise AssertionError("a matrix is cut where its factors are known")

    def fit(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        arrivals: Sequence[Arrival],
        masks: Sequence[Tensor | None],
        gradient: Tensor | None,
        ridge: float,
        stored: bool,
    ) -> tuple[SketchedLayer, float, int]:
        """Fit a layer that is no matrix; gives the relative error of its output, and on how many rows, too.

        Args:
            name: name of the unit, for its random numbers.
            choice: scheme and ranks.
            config: the options.
            arrivals: what reached the layer.
            masks: mask of each of them, see `rows`.
            gradient: weight of errors at the output features, float64, or None.
            ridge: on second moments, of their mean power.
            stored: whether it is to be kept, or to be tried, for which a quicker fit is enough.
        """
        raise AssertionError("a matrix is fitted from moments")

    def fit_shares(self, shares: Tensor, gradient: Tensor | None, rank: int) -> tuple[SketchedLayer, float]:
        """The best table of a rank where each row counts so much (V,), and its relative error; see `fit`."""
        raise AssertionError("only a table has rows that are read by number")
