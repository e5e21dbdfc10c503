"""SketchedLinear: nn.Linear as two thin ones, and SketchedConv1D for Hugging Face's transposed layer.

pair:     y = up(down(x)) + b            down (r, I)       r (O + I) numbers
pivoted:  y = up(x₁ + down(x₂)) + b      down (r, I - r)   r (O + I - r) numbers: pivot.py
"""

# O out_features, I in_features, R rank
import importlib
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther_compile.candidates import LinearCandidate
from panther_compile.errors import ConfigError, RankError, WeightError
from panther_compile.factorize import factorize
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
from panther_compile.layers.lazy_weight import lazy_weight
from panther_compile.ops.linear import sketched_linear
from panther_compile.ops.linear_dispatch import has_kernel
from panther_compile.pivot import from_pivoted, split_at, to_pivoted

FORMS = ("auto", "pivoted", "pair")


class SketchedLinear(SketchedLayer):
    """A rank-r stand-in for `nn.Linear`; x of shape (..., in_features) gives (..., out_features).

    Args:
        in_features: I.
        out_features: O.
        rank: r, in 1..min(I, O).
        bias: whether there is a bias of shape (O,).
        form: "pair" or "pivoted".
        start: first column of the pivot slice, 0 or I - r (pivoted form only).
        device: where the factors are made.
        dtype: of the factors, any floating dtype.

    Raises:
        RankError: rank is outside 1..min(I, O), or not below I in the pivoted form.
        ConfigError: the form is unknown, or start does not go with it.
    """

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
        if form not in FORMS[1:]:
            raise ConfigError(f"{what}: {form=}, wanted one of {FORMS[1:]}")
        if form == "pivoted" and rank >= in_features:
            raise RankError(f"{what}: {rank=}, wanted below in_features in the pivoted form")
        if start not in ((0,) if form == "pair" else (0, in_features - rank)):
            raise ConfigError(f"{what}: {start=}, wanted 0, or {in_features - rank} in the pivoted form")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.form, self.start = form, start
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
            dtype: of the layer's parameters.
            device: of the layer's parameters; default is that of `left`.
            residual: Frobenius distance from left @ right to the weight that it approximates; the pivoted
                form may differ from left @ right by a fraction of it (pivot.py).

        Raises:
            ConfigError: the form is unknown.
            RankError: the pivoted form was asked for at full rank.
        """
        (out_features, rank), in_features = left.shape, right.shape[1]
        if form not in FORMS:
            raise ConfigError(f"{form=}, wanted one of {FORMS}")
        pivoted = None if form == "pair" else to_pivoted(left, right, dtype=dtype, residual=residual)
        if pivoted is None and form == "pivoted":
            raise RankError(f"{rank=} of a weight ({out_features}, {in_features}), wanted below full rank")
        layer = cls(
            in_features,
            out_features,
            rank,
            bias=bias is not None,
            form="pair" if pivoted is None else "pivoted",
            start=0 if pivoted is None else pivoted.start,
            device="meta",
            dtype=dtype,
        )
        # Made without data: initial values would be drawn from the user's random numbers, and lost.
        layer.to_empty(device=left.device if device is None else device)
        copy_into(layer.down.weight, right if pivoted is None else pivoted.coefficients)
        copy_into(layer.up.weight, left if pivoted is None else pivoted.columns)
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
            method: see `panther_compile.factorize.factorize`.
            sketch: random test matrix of the randomized method.
            seed: of that matrix.

        Raises:
            ConfigError, RankError: see above.
            WeightError: the weight holds NaN or Inf, or is on the meta device.
        """
        weight, bias = cls._dense_weight(layer)
        out_features, in_features = weight.shape
        what = f"{cls.__name__}.from_dense({in_features}, {out_features})"
        check_rank_or_ratio(rank, ratio, what)
        form = "pair" if method == "panther" else form
        if rank is None:
            assert ratio is not None
            rank = cls._rank_for(weight, form, int(ratio * weight.numel()))
            if rank == 0:
                raise RankError(f"{what}: {ratio=}, but rank 1 stores more")
        check_rank(rank, min(weight.shape), what)
        if weight.is_meta:
            raise WeightError(f"{what}: the weight is on the meta device")
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

    @staticmethod
    def _dense_weight(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The weight as (O, I), and the bias."""
        return layer.weight, layer.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O)."""
        if x.is_cuda is True:  # a proxy of torch.fx would answer with another proxy
            y = self._by_kernel(x)
            if y is not None:
                return y
        if self.form == "pair":
            return self.up(self.down(x))
        # From the dictionaries: attributes of modules cost a microsecond each, which shows at batch 1.
        down: Any = self._modules["down"]
        up: Any = self._modules["up"]
        if is_plain(down, nn.Linear) and is_plain(up, nn.Linear):
            weight, (up_weight, bias) = down._parameters["weight"], up._parameters.values()
            # Not for torch.export, whose graphs go on to other compilers.
            compiles = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
            product = reference.pivoted_linear_by_rows if compiles else reference.pivoted_linear
            return product(x, weight, up_weight, bias, start=self.start)
        pivots, others = split_at(x, self.rank, self.start)
        return self.up(pivots + self.down(others))

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """The result of the operator, where a Triton kernel serves x; never in a graph that is captured."""
        if torch.compiler.is_compiling():
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

    def to_dense(self) -> nn.Module:
        """An `nn.Linear` with the factors multiplied out."""
        dense = self._empty_dense()
        left, right = (factor.detach().double() for factor in self.factors())
        self._fill_dense(dense, left @ right)
        if self.bias is not None:
            copy_into(dense.bias, self.bias)  # type: ignore[arg-type]
        take_over(dense, self, self.down.weight.requires_grad)
        return dense

    def _empty_dense(self) -> nn.Module:
        like = self.up.weight
        return nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=like.device,
            dtype=like.dtype,
        )

    def _fill_dense(self, dense: nn.Module, weight: Tensor) -> None:
        copy_into(dense.weight, weight)  # type: ignore[arg-type]

    def _product(self) -> Tensor:
        left, right = self.factors()
        return left @ right

    @property
    def weight(self) -> Tensor:
        """The weight (O, I) that the factors stand for; read-only, multiplied out when it is read."""
        return lazy_weight((self.out_features, self.in_features), self.up.weight, self._product)

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

    def extra_repr(self) -> str:
        """The shape, rank, form and stored share, as `print(model)` shows them."""
        share = self.stored_numbers / self.dense_numbers
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}, form={self.form}, stored={share:.3f}"
        )

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        return self.out_features * (self.in_features + (self.bias is not None))

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`."""
        return self.out_features * self.in_features


class SketchedConv1D(SketchedLinear):
    """The stand-in for Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is (I, O)."""

    @property
    def nf(self) -> int:
        """Output features, under Conv1D's name."""
        return self.out_features

    @property
    def nx(self) -> int:
        """Input features, under Conv1D's name."""
        return self.in_features

    @property
    def weight(self) -> Tensor:
        """The weight (I, O), transposed as Conv1D keeps it."""
        shape = (self.in_features, self.out_features)
        return lazy_weight(shape, self.up.weight, lambda: self._product().t())

    @staticmethod
    def _dense_weight(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
        return layer.weight.t(), layer.bias  # type: ignore[return-value, operator]

    def _empty_dense(self) -> nn.Module:
        # The one layer that is not torch's own; importing transformers up front would cost every user.
        conv1d: Any = importlib.import_module("transformers.pytorch_utils").Conv1D
        like = self.up.weight
        with torch.device("meta"):
            dense: nn.Module = conv1d(self.out_features, self.in_features)
        return dense.to(dtype=like.dtype).to_empty(device=like.device)

    def _fill_dense(self, dense: nn.Module, weight: Tensor) -> None:
        copy_into(dense.weight, weight.t())  # type: ignore[arg-type]
