"""The sketching passes, in the order in which they claim modules."""

from panther_compile.passes.base import SketchPass
from panther_compile.passes.sketch_attention import SketchAttention
from panther_compile.passes.sketch_conv2d import SketchConv2d
from panther_compile.passes.sketch_embedding import SketchEmbedding
from panther_compile.passes.sketch_linear import SketchLinear

# Attention first: it claims its projections, which would look like any other linear layer.
SKETCH_PASSES: tuple[SketchPass, ...] = (
    SketchAttention(),
    SketchConv2d(),
    SketchLinear(),
    SketchEmbedding(),
)
