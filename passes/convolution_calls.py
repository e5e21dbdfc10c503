"""Convolutions in a graph whose kernels a pass may change."""

from collections import Counter
from typing import Any

from torch import fx, nn

from panther_compile.kinds.match import why_not_plain

_TENSORS, _METHODS = frozenset({"weight", "bias"}), ("forward", "_conv_forward")


def own_convolution(graph_module: fx.GraphModule, node: fx.Node, calls: Counter[Any]) -> nn.Conv2d | None:
    """The plain convolution that a node calls, which nothing else calls, holds or reads; None if it is none.

    Args:
        graph_module: that the node is in.
        node: any.
        calls: how often each module is called there.
    """
    if node.op != "call_module" or calls[node.target] != 1 or is_read(graph_module, str(node.target)):
        return None
    module = graph_module.get_submodule(str(node.target))
    shared = sum(other is module for _, other in graph_module.named_modules(remove_duplicate=False)) > 1
    if shared or not isinstance(module, nn.Conv2d):
        return None
    return module if why_not_plain(module, nn.Conv2d, tensors=_TENSORS, methods=_METHODS) is None else None


def is_read(graph_module: fx.GraphModule, name: str) -> bool:
    """Whether the graph reads a tensor of a module itself.

    Args:
        graph_module: that holds the module.
        name: of the module.
    """
    reads = (str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr")
    return any(target.startswith(f"{name}.") for target in reads)
