"""Parameters of a model that no backward from its outputs reaches: what only detached tensors depend on."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from panther_compile.partition.graph.capture import Captured


def mark_unreached(captured: Captured, values: Mapping[fx.Node, Any]) -> None:
    """Write into the nodes that read parameters which of these learn, and get no gradient of any output.

    Args:
        captured: the model.
        values: of its nodes, from one run that recorded gradients.
    """
    graph_module = captured.graph_module
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    reached = {id(leaf) for leaf in _leaves(values[node] for node in output.all_input_nodes)}
    for node, value in values.items():
        held: Iterable[tuple[str, Any]] = ()
        if node.op == "get_attr":
            held = [(str(node.target), value)]
        if node.op == "call_module":
            named = graph_module.get_submodule(str(node.target)).named_parameters()
            held = [(f"{node.target}.{name}", parameter) for name, parameter in named]
        node.meta["unreached"] = tuple(
            name
            for name, tensor in held
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in reached
        )


def unreached_parameters(captured: Captured) -> frozenset[str]:
    """Names of the parameters that learn, and that the gradient of no output reaches.

    Args:
        captured: a model that a partition was made of.
    """
    return frozenset(
        name for node in captured.graph_module.graph.nodes for name in node.meta.get("unreached", ())
    )


def _leaves(ends: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors that the gradients of others add up in."""
    waiting = []
    for end in ends:
        if isinstance(end, Tensor) and end.grad_fn is not None:
            waiting.append(end.grad_fn)
        elif isinstance(end, Tensor):
            yield end
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        if hasattr(function, "variable"):
            yield function.variable
        following = {one for one, _ in function.next_functions if one is not None} - seen
        seen |= following
        waiting += following
