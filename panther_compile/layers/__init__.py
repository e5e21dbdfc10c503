"""The layers that stand in for dense ones."""

from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear

__all__ = ["SketchedConv1D", "SketchedLayer", "SketchedLinear"]
