"""Hugging Face's Conv1D (GPT-2), a linear layer whose weight is (I, O), becomes SketchedConv1D."""

from typing import ClassVar

from torch import nn

from panther_compile.kinds.linear import LinearKind
from panther_compile.kinds.match import why_not_plain
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.layers.narrow import NarrowConv1D


class HuggingFaceConv1DKind(LinearKind):
    """See the module's docstring."""

    wanted = "Conv1D"
    layers = (SketchedConv1D, NarrowConv1D)
    may_be_head = False
    functionals = ()
    onnx = None
    _layer_type: ClassVar[type[SketchedLinear]] = SketchedConv1D
    _transposed = True

    def matches(self, module: nn.Module) -> str | None:
        """Called "Conv1D"; known without importing transformers."""
        cls = type(module)
        is_one = cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
        return "Conv1D" if is_one else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        return why_not_plain(module, type(module), tensors=frozenset({"weight", "bias"}))
