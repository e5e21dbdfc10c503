"""NarrowLinear: a linear layer without some of the features that it writes, or reads.

Two layers are narrowed together: the first writes fewer features, the second reads no more than those.

    between two layers of a feed-forward part              between value and output of attention heads
    up: I ──► n          I ──► k                           value: I ──► H · D         I ──► H · k, and zeros
    activation      ──►  activation                        attention             ──►  attention
    down: n ──► O        k ──► O                           output: H · D ──► O        k of each D ──► O

What is between two layers of a feed-forward part never sees the features that are left out. Attention needs
its heads at their full width: the features left out are written as zeros, and not read.

A model may take another path than data showed, and hand the second layer the features of a layer that writes
them all. It then picks those that it reads: `places` says which they were in the dense layer. Where the first
one's features may go elsewhere, it is `wide`: it writes zeros for those that are left out.
"""

# O out_features, I in_features, H heads, D features of a head, K kept features of a head
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from panther_compile.errors import ConfigError, check_choice
from panther_compile.layers.base import Spec, check_rank, spec_of_part, take_over
from panther_compile.layers.capture import kept_whole
from panther_compile.layers.lazy_weight import lazy_weight
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.linear_replacement import Conv1DStandIn, LinearReplacement

SIDES = ("out", "in")


class NarrowLinear(LinearReplacement):
    """Stands in for `nn.Linear`, of whose outputs or inputs it keeps the first K of each head.

    Args:
        in_features: I of the dense layer.
        out_features: O of the dense layer.
        kept: K, in 1..D, of each head.
        side: "out" keeps outputs, "in" inputs.
        heads: H, that the features on that side are divided into; D = O / H, or I / H.
        padded: whether x and y keep the dense layer's widths: outputs left out are zeros, inputs left out
            are not read. Otherwise they are H K wide on that side; x may be I wide all the same, and those
            at `places` are read.
        wide: whether y is O wide on the side "out" though not padded, zeros where nothing is kept.
        bias: whether there is a bias.
        factors: spec of the `SketchedLinear` that maps between the narrow widths; None for an `nn.Linear`.
        device: where the weight is made.
        dtype: of the weight, any floating dtype.

    Attributes:
        places: which of the dense layer's features are kept, int32 `(H K,)`, in the order in which they are
            written or read; None where padded, the first K of each head being kept.

    Raises:
        ConfigError: the side is unknown, or heads do not divide the features.
        RankError: kept is outside 1..D.
    """

    scheme = "narrow"
    not_shown = ("factors",)
    places: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kept: int,
        *,
        side: str,
        heads: int = 1,
        padded: bool = False,
        wide: bool = False,
        bias: bool = True,
        factors: Spec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        what = f"{type(self).__name__}({in_features}, {out_features})"
        check_choice(f"{what}: side", side, SIDES)
        features = out_features if side == "out" else in_features
        if heads < 1 or features % heads:
            raise ConfigError(f"{what}: {heads=}, wanted a divisor of {features}")
        check_rank(kept, features // heads, what)
        self.in_features, self.out_features = in_features, out_features
        self.side, self.heads, self.kept, self.padded, self.wide = side, heads, kept, padded, wide
        shape = (in_features, heads * kept) if side == "out" else (heads * kept, out_features)
        self.register_buffer("places", None if padded else self.first_places(device))
        self.narrow: nn.Linear | SketchedLinear
        if factors is None:
            self.narrow = nn.Linear(*shape, bias=bias, device=device, dtype=dtype)
            return
        if (factors["in_features"], factors["out_features"], factors["bias"]) != (*shape, bias):
            raise ConfigError(f"{what}: {factors=}, wanted those of a layer {shape} with {bias=}")
        self.narrow = SketchedLinear(**factors, device=device, dtype=dtype)

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Features that are kept, and the rank of what maps between them if it is factorized."""
        inner = self.narrow.ranks if isinstance(self.narrow, SketchedLinear) else ()
        return (self.heads * self.kept, *inner)

    @classmethod
    def around(
        cls,
        inner: nn.Linear | SketchedLinear,
        like: nn.Module,
        *,
        side: str,
        heads: int,
        padded: bool,
        wide: bool = False,
        places: Tensor | None = None,
    ) -> "NarrowLinear":
        """The replacement of a dense layer.

        Args:
            inner: `(H K, I)` on the side "out", `(O, H K)` on "in"; not copied.
            like: the dense layer, an `nn.Linear` or Hugging Face's `Conv1D`; gives mode and `requires_grad`.
            side: see the class; so for the next three.
            heads: H.
            padded: whether widths are kept.
            wide: whether y is.
            places: see the class; the first K of each head unless given.
        """
        dense: Any = like.weight
        linear = isinstance(like, nn.Linear)
        outputs, inputs = dense.shape if linear else dense.shape[::-1]
        features = inner.out_features if side == "out" else inner.in_features
        layer = (cls if linear else NarrowConv1D)(
            inputs,
            outputs,
            features // heads,
            side=side,
            heads=heads,
            padded=padded,
            wide=wide,
            bias=inner.bias is not None,
            factors=spec_of_part(inner),
            device="meta",
        )
        layer.narrow = inner
        if not padded:
            places = layer.first_places() if places is None else places
            layer.places = places.to(device=dense.device, dtype=torch.int32)
        take_over(layer, like, dense.requires_grad)
        if inner.bias is not None:
            old: Any = like.bias
            inner.bias.requires_grad_(old.requires_grad)
        return layer

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Give a copy of `places`: averages that are written into a state dict would round them down."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.places is not None and not keep_vars:
            destination[f"{prefix}places"] = self.places.clone()

    def first_places(self, device: torch.device | str | None = None) -> Tensor:
        """The places of the first K features of each head, int32 `(H K,)`."""
        width = (self.out_features if self.side == "out" else self.in_features) // self.heads
        heads = torch.arange(self.heads, dtype=torch.int32, device=device) * width
        return (heads[:, None] + torch.arange(self.kept, dtype=torch.int32, device=device)).flatten()

    def forward(self, input: Tensor) -> Tensor:
        """Map input (..., I) to (..., O), narrow on one side unless padded."""
        if (node := kept_whole(self, input)) is not None:
            return node  # type: ignore[no-any-return]
        if self.side == "out":
            values = self.narrow(input)
            return self.pad(values, -1) if self.padded or self.wide else values
        return self.narrow(self.read(input))

    def read(self, input: Tensor) -> Tensor:
        """What the side "in" reads of its input, (..., H K)."""
        if self.padded:
            return input.unflatten(-1, (self.heads, -1))[..., : self.kept].flatten(-2)
        width = input.shape[-1]  # a number, one of torch.export's or, in torch.jit.trace, a tensor
        # A proxy of torch.fx has none; the path that is traced is the one that data showed.
        if not isinstance(width, fx.Proxy) and width == self.in_features:
            input = self._picked(input)
        return input

    def _picked(self, values: Tensor) -> Tensor:
        """What is read of all features (..., I)."""
        assert self.places is not None
        return values.index_select(-1, self.places)

    def pad(self, values: Tensor, dim: int) -> Tensor:
        """Values with zeros for what was left out of a dimension H K, which becomes H D."""
        width = self.out_features if self.side == "out" else self.in_features
        if self.places is not None:
            shape = list(values.shape)
            shape[dim] = width
            return values.new_zeros(shape).index_copy(dim, self.places.long(), values)
        values = values.movedim(dim, -1).unflatten(-1, (self.heads, self.kept))
        return F.pad(values, (0, width // self.heads - self.kept)).flatten(-2).movedim(-1, dim)

    def weight_error(self, weight: Tensor, generator: torch.Generator) -> float | None:
        """None: see `SketchedLayer.weight_error`."""
        return None

    def to_dense(self) -> nn.Module:
        """The ordinary layer, with zeros for what was left out: in its place, last in each head if padded."""
        inner: Any = self.narrow.to_dense() if isinstance(self.narrow, SketchedLinear) else self.narrow
        return self.dense_with(self._padded_weight(inner.weight.detach()))

    def _dense_weight(self) -> Tensor:
        return self._padded_weight(_weight(self.narrow))

    def _padded_weight(self, weight: Tensor) -> Tensor:
        return self.pad(weight, 0 if self.side == "out" else 1)

    def with_inner(self, inner: nn.Linear | SketchedLinear) -> Self:
        """The same layer with another one between the narrow widths, which is not copied."""
        spec = self.sketch_spec() | {"factors": spec_of_part(inner)}
        new = type(self)(**spec, device="meta").train(self.training)
        new.narrow = inner
        for name, buffer in self.named_buffers(recurse=False):
            new.register_buffer(name, buffer.clone())
        return new

    @property
    def bias(self) -> Tensor | None:
        """The bias (O,) of `to_dense`, or None; on the side "out" read-only, made when it is read."""
        bias = self.narrow.bias
        if bias is None or self.side == "in":
            return bias
        return lazy_weight((self.out_features,), bias, lambda: self.pad(bias, -1))

    @property
    def has_bias(self) -> bool:
        """See `LinearReplacement.has_bias`."""
        return self.narrow.bias is not None

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "kept": self.kept,
            "side": self.side,
            "heads": self.heads,
            "padded": self.padded,
            **({"wide": True} if self.wide else {}),
            "bias": self.has_bias,
            "factors": spec_of_part(self.narrow),
        }


def _weight(layer: nn.Linear | SketchedLinear) -> Tensor:
    if isinstance(layer, nn.Linear):
        return layer.weight
    left, right = layer.factors()
    return left @ right


def inner_layer(layer: Any) -> Any:
    """The layer that does the work: of a narrow one that between the narrow widths, else itself."""
    return layer.narrow if isinstance(layer, NarrowLinear) else layer


class NarrowConv1D(Conv1DStandIn, NarrowLinear):
    """The replacement of Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is (I, O)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O); the argument is called as Conv1D's is."""
        return NarrowLinear.forward(self, x)
