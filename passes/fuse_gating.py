"""A sketched linear layer, its activation and the product with what it gates become one kernel; exact.

Before:
    %up : call_module[target=up](args = (%x,))
    %sketched_linear : call_function[target=sketched_linear]
        (args = (%x, %gate_down_weight, %gate_up_weight, %gate_up_bias),
        kwargs = {start: 0, activation: silu})
    %mul : call_function[target=operator.mul](args = (%sketched_linear, %up))
After:
    %up : call_module[target=up](args = (%x,))
    %sketched_linear_1 : call_function[target=sketched_linear]
        (args = (%x, %gate_down_weight, %gate_up_weight, %gate_up_bias),
        kwargs = {start: 0, activation: silu, multiplier: %up})

That is SiLU(gate(x)) up(x), as in LLaMA, or the same with a GELU; `fuse_epilogue` has put the activation into
the operator before. A layer without an activation is taken too: fc(x) sigmoid(y). Both operands must be
known to have the type and the shape of the product, since the operator broadcasts nothing; in the graphs of
Dynamo and of torch.export they are known. Only on CUDA, for the reason given in fuse_epilogue.py.
"""

import operator

import torch
from torch import fx

from panther_compile.passes.runner import PassResult
from panther_compile.passes.sketched_calls import pairs_of, put_operator

_PRODUCTS = (operator.mul, torch.mul, torch.multiply, torch.ops.aten.mul.Tensor)


def fuse_gating(graph_module: fx.GraphModule) -> PassResult:
    """Rewrite the graph in place; counts the products that became part of a layer.

    Args:
        graph_module: with calls of sketched layers, after `fuse_epilogue`.
    """
    count = 0
    for product, layer, other in pairs_of(graph_module, _PRODUCTS):
        if layer.kwargs.get("multiplier") is None:
            put_operator(graph_module, layer, product, multiplier=other)
            count += 1
    return PassResult(graph_module, count)
