"""What stands in for a dense linear layer: `nn.Linear`, or Hugging Face's `Conv1D` (GPT-2)."""

# O out_features, I in_features
import importlib
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from panther_compile.layers.base import SketchedLayer, copy_into, take_over
from panther_compile.layers.lazy_weight import lazy_weight


class LinearReplacement(SketchedLayer):
    """Stands in for an `nn.Linear`.

    Attributes:
        in_features: I of the dense layer.
        out_features: O of the dense layer.
    """

    dense_type: ClassVar[type[nn.Module]] = nn.Linear
    in_features: int
    out_features: int

    @property
    @abstractmethod
    def bias(self) -> Tensor | None:
        """The bias (O,), or None."""

    @abstractmethod
    def _dense_weight(self) -> Tensor:
        """The weight (O, I), differentiable."""

    def _any_weight(self) -> Tensor:
        """A parameter that has the layer's dtype and device."""
        return next(self.parameters())

    @property
    def weight(self) -> Tensor:
        """The dense weight (O, I) that this stands for; read-only, made when it is read."""
        return lazy_weight((self.out_features, self.in_features), self._any_weight(), self._dense_weight)

    def dense_with(self, weight: Tensor) -> nn.Module:
        """The dense layer of a weight (O, I)."""
        dense = self._empty_dense()
        copy_into(dense.weight, self.turned(weight))  # type: ignore[arg-type]
        if self.bias is not None:
            copy_into(dense.bias, self.bias)  # type: ignore[arg-type]
        take_over(dense, self, next(self.parameters()).requires_grad)
        return dense

    def _empty_dense(self) -> nn.Module:
        like, bias = self._any_weight(), self.bias is not None
        size = self.in_features, self.out_features
        return nn.utils.skip_init(nn.Linear, *size, bias=bias, device=like.device, dtype=like.dtype)

    @staticmethod
    def turned(weight: Tensor) -> Tensor:
        """A weight (O, I) as the dense layer keeps it, and the other way round."""
        return weight

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        return self.out_features * (self.in_features + self.has_bias)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added, without a look at it."""
        return self.bias is not None

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`."""
        return self.out_features * self.in_features


class Conv1DStandIn(LinearReplacement):
    """Stands in for Hugging Face's `Conv1D`: a linear layer whose weight is (I, O)."""

    dense_type = nn.Module

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
        """The dense weight (I, O), transposed as Conv1D keeps it."""
        shape = (self.in_features, self.out_features)
        return lazy_weight(shape, self._any_weight(), lambda: self._dense_weight().t())

    def _empty_dense(self) -> nn.Module:
        # The one layer that is not torch's own; importing transformers up front would cost every user.
        conv1d: Any = importlib.import_module("transformers.pytorch_utils").Conv1D
        like = self._any_weight()
        with torch.device("meta"):
            dense: nn.Module = conv1d(self.out_features, self.in_features)
        return dense.to(dtype=like.dtype).to_empty(device=like.device)

    @staticmethod
    def turned(weight: Tensor) -> Tensor:
        """See `LinearReplacement.turned`."""
        return weight.t()
