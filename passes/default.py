"""The sketching passes, in the order in which they claim modules."""

from panther_compile.passes.base import SketchPass
from panther_compile.passes.sketch_embedding import SketchEmbedding
from panther_compile.passes.sketch_linear import SketchLinear

# Attention first: it claims its projections, which would look like any other linear layer.
SKETCH_PASSES: tuple[SketchPass, ...] = (SketchLinear(), SketchEmbedding())
