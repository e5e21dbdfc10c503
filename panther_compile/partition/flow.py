"""The graph that is cut: seconds on its vertices, bytes on its edges. No torch in here.

A vertex is one operation of the model, or several that must stay together. What one vertex hands others is
a `Value`; several consumers across a cut receive it once, so bytes are counted by value and not by edge.
`SOURCE` makes the model's inputs and `SINK` takes its outputs: they stand before the first stage and after
the last, as devices hand on what they do not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx

SOURCE, SINK = "(inputs)", "(outputs)"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on its way from one vertex to others.

    Attributes:
        name: of the graph node that makes it.
        producer: vertex, or SOURCE.
        consumers: vertices, and SINK for an output of the model.
        bytes: of one microbatch, sent forward.
        gradient_bytes: sent backward; 0 where no gradient flows.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter or buffer: a stage that uses it holds it, once.

    Attributes:
        name: the user's.
        bytes: of the tensor itself.
        trained_bytes: of its gradient and its optimizer states.
        gradient_bytes: of its gradient alone; what stages that share it must reduce.
        vertices: that use it.
    """

    name: str
    bytes: int
    trained_bytes: int
    gradient_bytes: int
    vertices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What a vertex costs, for one microbatch.

    Attributes:
        forward_seconds: of its operations.
        backward_seconds: recomputation not included.
        saved_bytes: kept from the forward for the backward.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class FlowGraph:
    """Work, values and holdings of a model.

    Attributes:
        work: of every vertex, in an order that respects the edges.
        values: what the vertices hand one another.
        holdings: parameters and buffers.
        members: graph nodes of each vertex, in their order.
        graph: the same as a networkx graph: `work` on nodes, `bytes` and `values` on edges.
    """

    work: Mapping[str, Work]
    values: tuple[Value, ...]
    holdings: tuple[Holding, ...] = ()
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    graph: nx.DiGraph = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        graph = nx.DiGraph()
        graph.add_node(SOURCE, work=Work())
        graph.add_nodes_from((vertex, {"work": work}) for vertex, work in self.work.items())
        graph.add_node(SINK, work=Work())
        for value in self.values:
            for consumer in value.consumers:
                edge = graph.get_edge_data(value.producer, consumer, {"bytes": 0, "values": ()})
                graph.add_edge(
                    value.producer,
                    consumer,
                    bytes=edge["bytes"] + value.bytes,
                    values=(*edge["values"], value.name),
                )
        object.__setattr__(self, "graph", graph)
