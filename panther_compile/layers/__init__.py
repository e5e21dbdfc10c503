"""The layers that stand in for dense ones."""

from panther_compile.layers.attention import SketchedMultiheadAttention
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.layers.narrow import NarrowConv1D, NarrowLinear

LAYER_TYPES: dict[str, type[SketchedLayer]] = {
    layer.__name__: layer
    for layer in (
        SketchedLinear,
        SketchedConv1D,
        SketchedEmbedding,
        SketchedConv2d,
        SketchedMultiheadAttention,
        NarrowLinear,
        NarrowConv1D,
    )
}

__all__ = [
    "LAYER_TYPES",
    "NarrowConv1D",
    "NarrowLinear",
    "SketchedConv1D",
    "SketchedConv2d",
    "SketchedEmbedding",
    "SketchedLayer",
    "SketchedLinear",
    "SketchedMultiheadAttention",
]
