"""SketchedLinear: nn.Linear as two thin ones, and SketchedConv1D for Hugging Face's transposed layer.

pair:     y = up(down(x)) + b            down (r, I)       r (O + I) numbers
pivoted:  y = up(x₁ + down(x₂)) + b      down (r, I - r)   r (O + I - r) numbers: pivot.py
"""

# O out_features, I in_features, R rank
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigError, RankError, check_choice
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.factorization.factorize import factorize, probe_error
from panther_compile.factorization.pivot import from_pivoted, split_at, to_pivoted
from panther_compile.factorization.values import check_loaded
from panther_compile.kernels import reference
from panther_compile.kernels.factor_set import Factors
from panther_compile.layers.base import (
    SketchedLayer,
    Spec,
    check_rank,
    check_rank_or_ratio,
    copy_into,
    is_plain,
    take_over,
)
from panther_compile.layers.capture import is_captured, is_compiling
from panther_compile.layers.linear_replacement import Conv1DStandIn, LinearReplacement
from panther_compile.ops.linear import sketched_linear
from panther_compile.ops.linear_dispatch import has_kernel, is_left_to_torch

FORMS = ("auto", "pivoted", "pair")


class SketchedLinear(LinearReplacement):
    """A rank-r replacement of `nn.Linear`; x of shape (..., in_features) gives (..., out_features).

    Args:
        in_features: I.
        out_features: O.
        rank: r, in 1..min(I, O).
        bias: whether there is a bias of shape (O,).
        form: "pair" or "pivoted".
        start: first column of the pivot slice, 0 or I - r (pivoted form only).
        device: where the factors are made.
        dtype: type of the factors, any floating dtype.

    Raises:
        RankError: rank is outside 1..min(I, O), or not below I in the pivoted form.
        ConfigError: the form is unknown, or start does not go with it.
    """

    stages = ("down", "up")
    not_shown = ("start",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = True,
        form: str = "pair",
        start: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        what = f"{type(self).__name__}({in_features}, {out_features})"
        check_rank(rank, min(in_features, out_features), what)
        check_choice(f"{what}: form", form, FORMS[1:])
        if form == "pivoted" and rank >= in_features:
            raise RankError(f"{what}: {rank=}, wanted below in_features in the pivoted form")
        if start not in ((0,) if form == "pair" else (0, in_features - rank)):
            raise ConfigError(f"{what}: {start=}, wanted 0, or {in_features - rank} in the pivoted form")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.form = form
        self._pivot_at(start, device)
        self.scheme, self.ranks = form, (rank,)
        width = in_features if form == "pair" else in_features - rank
        self.down = nn.Linear(width, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_factors(
        cls,
        left: Tensor,
        right: Tensor,
        bias: Tensor | None,
        *,
        form: str = "auto",
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        residual: float = 0.0,
    ) -> Self:
        """A layer whose weight is left @ right.

        Args:
            left: `(O, r)`, float32 or float64.
            right: `(r, I)`, float32 or float64.
            bias: `(O,)` or None.
            form: "auto" takes the pivoted form wherever it stores less: below full rank.
            dtype: type of the layer's parameters.
            device: device of the layer's parameters; default is that of `left`.
            residual: Frobenius distance from left @ right to the weight that it approximates; the pivoted
                form may differ from left @ right by a fraction of it (pivot.py).

        Raises:
            ConfigError: the form is unknown.
            RankError: the pivoted form was asked for at full rank.
        """
        check_choice("form", form, FORMS)
        pivoted = None if form == "pair" else to_pivoted(left, right, dtype=dtype, residual=residual)
        if pivoted is None and form == "pivoted":
            (out_features, rank), in_features = left.shape, right.shape[1]
            raise RankError(f"{rank=} of a weight ({out_features}, {in_features}), wanted below full rank")
        start = None
        if pivoted is not None:
            left, right, start = pivoted.left, pivoted.right, pivoted.start
        device = left.device if device is None else device
        return cls.from_stored(left, right, bias, start=start, dtype=dtype, device=device)

    @classmethod
    def from_stored(
        cls,
        left: Tensor,
        down: Tensor,
        bias: Tensor | None,
        *,
        start: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """A layer of factors as they are stored.

        Args:
            left: `(O, r)`.
            down: `(r, I)`, or `(r, I - r)` in the pivoted form.
            bias: `(O,)` or None.
            start: first column of the pivot slice; None for a plain pair.
            dtype: type of the layer's parameters.
            device: device of the same.
        """
        (out_features, rank), width = left.shape, down.shape[1]
        layer = cls(
            width if start is None else rank + width,
            out_features,
            rank,
            bias=bias is not None,
            form="pair" if start is None else "pivoted",
            start=start or 0,
            device="meta",
            dtype=dtype,
        )
        # Made without data: initial values would be drawn from the user's random numbers, and lost.
        layer.to_empty(device=device)
        copy_into(layer.down.weight, down)
        copy_into(layer.up.weight, left)
        if bias is not None:
            copy_into(layer.up.bias, bias)
        return layer

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        *,
        rank: int | None = None,
        ratio: float | None = None,
        form: str = "auto",
        method: str = "auto",
        sketch: str = "gaussian",
        seed: int = 0,
    ) -> Self:
        """The closest layer of a rank, or of the largest rank that stores `ratio` of the weight's numbers.

        Args:
            layer: an `nn.Linear`.
            rank: in 1..min(I, O).
            ratio: in (0, 1]; exactly one of rank and ratio is given.
            form: see `from_factors`.
            method: see `panther_compile.factorization.factorize.factorize`.
            sketch: random test matrix of the randomized method.
            seed: seed of that matrix.

        Raises:
            ConfigError, RankError: see above.
            WeightError: the weight holds NaN or Inf, or is on the meta device.
        """
        dense: Any = layer
        weight, bias = cls.turned(dense.weight), dense.bias
        out_features, in_features = weight.shape
        what = f"{cls.__name__}.from_dense({in_features}, {out_features})"
        check_rank_or_ratio(rank, ratio, what)
        if rank is None:
            assert ratio is not None
            rank = cls._rank_for(weight, form, int(ratio * weight.numel()))
            if rank == 0:
                raise RankError(f"{what}: {ratio=}, but rank 1 stores more")
        check_rank(rank, min(weight.shape), what)
        check_loaded(weight, f"{what}: the weight")
        generator = torch.Generator(weight.device).manual_seed(seed)
        factors = factorize(weight, rank, method=method, sketch=sketch, generator=generator)
        new = cls.from_factors(
            factors.left,
            factors.right,
            bias,
            form=form,
            dtype=weight.dtype,
            device=weight.device,
            residual=factors.residual(weight),
        )
        take_over(new, layer, weight.requires_grad)
        return new

    @staticmethod
    def _rank_for(weight: Tensor, form: str, numbers: int) -> int:
        form = "pivoted" if form == "auto" else form
        out_features, in_features = weight.shape
        return LinearCandidate(out_features, in_features, form).largest_rank(numbers)

    def forward(self, input: Tensor) -> Tensor:
        """Map input (..., I), strided, sparse (COO or CSR) or jagged, to (..., O)."""
        if input.is_sparse_csr is True:  # a proxy of torch.fx would answer with another proxy
            input = input.to_sparse()
        is_sparse = input.is_sparse is True
        if input.is_cuda is True and not is_sparse:
            y = self._by_kernel(input)
            if y is not None:
                return y
        if self.form == "pair":
            return self.up(self.down(input))
        # From the dictionaries: attributes of modules cost a microsecond each, which shows at batch 1.
        down: Any = self._modules["down"]
        up: Any = self._modules["up"]
        if not is_sparse and is_plain(down, nn.Linear) and is_plain(up, nn.Linear):
            weight, factors = down._parameters["weight"], up._parameters
            up_weight, bias = factors["weight"], factors["bias"]  # by name: parametrizations reorder them
            # Not for torch.export, whose graphs go on to other compilers.
            by_rows = is_compiling() and not input.is_nested
            product = reference.pivoted_linear_by_rows if by_rows else reference.pivoted_linear
            return product(input, weight, up_weight, bias, start=self.start)
        pivots, others = split_at(input, self.rank, self.start)
        return self.up(self.down(others) + pivots)  # torch adds what is sparse to what is not

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """The result of the operator, where a Triton kernel serves x; never in a graph that is captured."""
        if is_captured() or is_left_to_torch():
            return None
        if not (is_plain(self.down, nn.Linear) and is_plain(self.up, nn.Linear)):
            return None
        start = self.start if self.form == "pivoted" else None
        layer = Factors(self.down.weight, self.up.weight, self.up.bias, start)
        return sketched_linear(x, *layer[:3], start=start) if has_kernel(x, [layer]) else None

    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors left (O, r) and right (r, I) of the weight, differentiable, in the layer's dtype."""
        if self.form == "pair":
            return self.up.weight, self.down.weight
        return from_pivoted(self.up.weight, self.down.weight, self.start)

    def weight_error(self, weight: Tensor, generator: torch.Generator) -> float | None:
        """See `SketchedLayer.weight_error`; estimated by Gaussian probes of the weight (O, I)."""
        left, right = (factor.detach() for factor in self.factors())
        return probe_error(weight.detach(), left, right, generator=generator)

    def to_dense(self) -> nn.Module:
        """An `nn.Linear` with the factors multiplied out."""
        left, right = (factor.detach().double() for factor in self.factors())
        return self.dense_with(left @ right)

    def _dense_weight(self) -> Tensor:
        left, right = self.factors()
        return left @ right

    def _any_weight(self) -> Tensor:
        return self.up.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias (O,), or None."""
        return self.up.bias

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rank": self.rank,
            "bias": self.bias is not None,
            "form": self.form,
            "start": self.start,
        }


def share_factor(layers: Sequence[SketchedLayer]) -> None:
    """Have all the layers use the factor of the first: the input factor, of plain pairs the output factor."""
    first = layers[0]
    for layer in layers[1:]:
        assert isinstance(first, SketchedLinear)
        assert isinstance(layer, SketchedLinear)
        if first.form == "pivoted":
            layer.down = first.down
        elif layer.bias is None:
            layer.up = first.up
        else:
            layer.up.weight = first.up.weight


class SketchedConv1D(Conv1DStandIn, SketchedLinear):
    """The replacement of Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is (I, O)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O); the argument is called as Conv1D's is."""
        return SketchedLinear.forward(self, x)
