"""What nothing reads any more leaves the graph and the module; exact.

Before:
    %fc : call_module[target=fc](args = (%x,))
    %spare : call_module[target=spare](args = (%x,))
    %relu : call_function[target=torch.relu](args = (%fc,))
After:
    %fc : call_module[target=fc](args = (%x,))
    %relu : call_function[target=torch.relu](args = (%fc,))

Calls without a reader go, then the submodules, parameters and buffers that no node names. What acts by
writing stays: see `side_effects`.
"""

from torch import fx

from panther_compile.passes.runner import PassResult
from panther_compile.passes.side_effects import acts


def drop_dead_code(graph_module: fx.GraphModule) -> PassResult:
    """Clean up in place; counts the nodes and the tensors that went."""
    nodes, tensors = len(graph_module.graph.nodes), _count_tensors(graph_module)
    graph_module.graph.eliminate_dead_code(lambda node: acts(graph_module, node))
    graph_module.delete_all_unused_submodules()
    named = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for held in (graph_module._parameters, graph_module._buffers):
        for name in [name for name in held if name not in named]:
            del held[name]
    dropped = nodes - len(graph_module.graph.nodes) + tensors - _count_tensors(graph_module)
    return PassResult(graph_module, dropped)


def _count_tensors(graph_module: fx.GraphModule) -> int:
    return len(list(graph_module.parameters())) + len(list(graph_module.buffers()))
