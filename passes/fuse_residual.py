"""A sketched linear layer and the sum of its output with a residual become one kernel; exact, up to rounding.

Before:
    %fc : call_module[target=fc](args = (%x,))
    %add : call_function[target=operator.add](args = (%x, %fc))
After:
    %fc_down_weight : get_attr[target=fc.down.weight]
    %fc_up_weight : get_attr[target=fc.up.weight]
    %fc_up_bias : get_attr[target=fc.up.bias]
    %sketched_linear : call_function[target=sketched_linear]
        (args = (%x, %fc_down_weight, %fc_up_weight, %fc_up_bias), kwargs = {start: 0, residual: %x})

Also behind an activation or a gate, which `fuse_epilogue` and `fuse_gating` have put into the operator.
Both operands must be known to have the type and the shape of the sum: a residual stream of float32 that a
layer of half precision is added to stays outside. Only on CUDA, for the reason given in fuse_epilogue.py.
"""

import operator

import torch
from torch import fx

from panther_compile.passes.runner import PassResult
from panther_compile.passes.sketched_calls import pairs_of, put_operator

_SUMS = (operator.add, torch.add, torch.ops.aten.add.Tensor)


def fuse_residual(graph_module: fx.GraphModule) -> PassResult:
    """Rewrite the graph in place; counts the sums that became part of a layer.

    Args:
        graph_module: with calls of sketched layers, after `fuse_gating`.
    """
    count = 0
    for total, layer, other in pairs_of(graph_module, _SUMS):
        put_operator(graph_module, layer, total, residual=other)
        count += 1
    return PassResult(graph_module, count)
