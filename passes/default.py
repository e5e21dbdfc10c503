"""The graph passes, in the order in which they run."""

from collections.abc import Sequence

from panther_compile.passes.drop_dead_code import drop_dead_code
from panther_compile.passes.fold_batchnorm import fold_batchnorm
from panther_compile.passes.fuse_epilogue import fuse_epilogue
from panther_compile.passes.fuse_gating import fuse_gating
from panther_compile.passes.fuse_residual import fuse_residual
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.passes.lift_sketched import lift_sketched
from panther_compile.passes.merge_shared_inputs import merge_shared_inputs
from panther_compile.passes.runner import GraphPass
from panther_compile.passes.trim_kernels import trim_kernels

# One form of graph for all that follows; a graph of Dynamo needs lift_parameters before.
NORMALIZE = (GraphPass(lift_functional, exact=True), GraphPass(lift_sketched, exact=True))
BEFORE_SKETCHING = (GraphPass(fold_batchnorm, exact=True), GraphPass(trim_kernels, exact=True))
CLEAN_UP = (GraphPass(drop_dead_code, exact=True),)


def improve(*, sketch: GraphPass | None = None, extra: Sequence[GraphPass] = ()) -> tuple[GraphPass, ...]:
    """What makes a normalized graph faster or smaller, for inference.

    Args:
        sketch: the pass that replaces dense layers, batch norms folded and kernels trimmed before; None for
            a model that is sketched: folded into a factor, a batch norm saves nothing that Inductor does not
            save.
        extra: the user's own; they see module calls, sketched layers among them, none fused or merged yet.
    """
    return (
        *((*BEFORE_SKETCHING, sketch) if sketch is not None else ()),
        *extra,
        GraphPass(fuse_epilogue, exact=True),  # activation, gate, residual: in the order of the operator
        GraphPass(fuse_gating, exact=True),
        GraphPass(fuse_residual, exact=True),
        GraphPass(merge_shared_inputs, exact=True),  # last: it takes layers apart
    )
