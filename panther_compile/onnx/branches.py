"""Values in the branches of If nodes, handed out to the graph around them so that they can be seen.

The other branch hands out an array without entries: where it is taken, nothing is seen.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from panther_compile.onnx.patterns import is_onnx

_FLOAT = ir.TensorType(ir.DataType.FLOAT)


def graph_of(value: ir.Value) -> object:
    """The graph that makes a value, or has it as an input or an initializer."""
    producer = value.producer()
    return value.graph if producer is None else producer.graph


def seen_graphs(model: ir.Model) -> list[ir.Graph]:
    """The graph of a model, and the branches whose values can be handed out to it."""
    return [model.graph, *(branch for branch, _ in _branches(model.graph))]


def handing_out(model: ir.Model, values: Sequence[ir.Value]) -> tuple[ir.Model, list[ir.Value]]:
    """A model whose graph has some values, and these in it, by the names that they have.

    Args:
        model: is left as it is; given back itself if its graph has all of them.
        values: of the graphs that can be seen; those of branches are float32, and have names of their own.
    """
    if all(graph_of(value) is model.graph for value in values):
        return model, list(values)
    copy = model.clone()
    own = {value.name: value for value in (*copy.graph.inputs, *copy.graph.initializers.values())}
    own |= {value.name: value for node in copy.graph.all_nodes() for value in node.outputs}
    owners = dict(_branches(copy.graph))
    found = [own[value.name] for value in values]
    return copy, [_handed_out(value, owners) for value in found]


def _branches(graph: ir.Graph) -> Iterator[tuple[ir.Graph, ir.Node]]:
    """Each branch of If nodes, and of those in them, and the node that it is of."""
    for node in graph:
        if is_onnx(node, "If"):
            for attribute in node.attributes.values():
                branch = attribute.as_graph()
                yield branch, node
                yield from _branches(branch)


def _handed_out(value: ir.Value, owners: dict[ir.Graph, ir.Node]) -> ir.Value:
    """A value of the outermost graph that is the one given, which then has another name."""
    name, level = value.name, 0
    while (branch := graph_of(value)) in owners:
        assert isinstance(branch, ir.Graph)
        value.name = f"{name}/inner_{level}"
        node = owners[branch]
        for attribute in node.attributes.values():
            one = attribute.as_graph()
            one.outputs.append(value if one is branch else _nothing(one, f"{name}/nothing_{level}"))
        node.resize_outputs(len(node.outputs) + 1)
        value, level = node.outputs[-1], level + 1
        value.name, value.type = name, _FLOAT
    return value


def _nothing(graph: ir.Graph, name: str) -> ir.Value:
    """An array without entries, made in a graph."""
    empty = ir.tensor(np.zeros(0, np.float32))
    made = ir.node("Constant", [], {"value": empty}, name=name)
    graph.append(made)
    made.outputs[0].name, made.outputs[0].type = name, _FLOAT
    return made.outputs[0]
