"""The graph that is cut: seconds on its vertices, bytes on its edges. No torch in here.

A vertex is one operation of the model, or several that must stay together. What one vertex hands others is
a `Value`; several consumers across a cut receive it once, so bytes are counted by value and not by edge.
`SOURCE` makes the model's inputs and `SINK` takes its outputs: they stand before the first stage and after
the last, as devices hand on what they do not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

SOURCE, SINK = "(inputs)", "(outputs)"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on its way from one vertex to others.

    Attributes:
        name: the graph node that makes it.
        producer: vertex, or SOURCE.
        consumers: vertices, and SINK for an output of the model.
        bytes: bytes of one microbatch, sent forward.
        gradient_bytes: sent backward; 0 where no gradient flows.
        kept_bytes: bytes on one device, where it lies there in shards between being sent; None if all of it.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    bytes: int
    gradient_bytes: int = 0
    kept_bytes: int | None = None

    @property
    def local_bytes(self) -> int:
        """What one device keeps of it."""
        return self.bytes if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter or buffer: a stage that uses it holds it, once.

    Attributes:
        name: the user's.
        bytes: bytes of the tensor itself.
        trained_bytes: bytes of its gradient and its optimizer states.
        gradient_bytes: bytes of its gradient alone; what stages that share it must reduce.
        vertices: vertices that use it.
        resident_bytes: bytes of all this that a replica holds, where replicas share it; None for all.
    """

    name: str
    bytes: int
    trained_bytes: int
    gradient_bytes: int
    vertices: tuple[str, ...]
    resident_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """What a device holds of all this."""
        return self.bytes + self.trained_bytes if self.resident_bytes is None else self.resident_bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What an operation gives, which activation checkpointing within a budget may keep.

    Attributes:
        seconds: time that the operation takes.
        bytes: bytes of its result.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a vertex costs, for one microbatch.

    Attributes:
        forward_seconds: time of its operations.
        backward_seconds: recomputation not included.
        saved_bytes: kept from the forward for the backward.
        selective_bytes: bytes of results that selective checkpointing keeps.
        selective_seconds: time of the forward that it runs again.
        loss_bytes: the part of what is saved that the loss of the model keeps, which is not computed again.
        results: those of its operations that can be kept.
        gathered_bytes: bytes from devices that divide a sequence, and gradients of it, there while it runs.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_bytes: int = 0
    selective_bytes: int = 0
    selective_seconds: float = 0.0
    loss_bytes: int = 0
    results: tuple[Result, ...] = ()
    gathered_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class FlowGraph:
    """Work, values and holdings of a model.

    Attributes:
        work: what every vertex does, in an order that respects the edges.
        values: what the vertices hand one another.
        holdings: parameters and buffers.
        members: graph nodes of each vertex, in their order.
        checkpoints: numbers of vertices from the front behind which a unit ends that is computed again; None
            without activation checkpointing.
        paces: where the devices of a pipeline differ, for each place along it the seconds of every vertex
            over those of its work.
    """

    work: Mapping[str, Work]
    values: tuple[Value, ...]
    holdings: tuple[Holding, ...] = ()
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoints: tuple[int, ...] | None = None
    paces: tuple[tuple[float, ...], ...] = ()

    def with_holdings(self, holdings: tuple[Holding, ...]) -> "FlowGraph":
        """The same with other holdings; what its work alone says is not counted again."""
        other = replace(self, holdings=holdings)
        vars(other).update({name: getattr(self, name) for name in ("total", "gathered_bytes", "_seconds")})
        return other

    def seconds_at(self, stage: int) -> list[float]:
        """Forward and backward of every vertex on the device of a stage."""
        if not self.paces:
            return self._seconds
        return [work.seconds for work in self.work_at(stage).values()]

    def work_at(self, stage: int) -> Mapping[str, Work]:
        """The work of every vertex on the device of a stage."""
        if not self.paces:
            return self.work
        paces = self.paces[stage % len(self.paces)]
        return {
            vertex: replace(
                work,
                forward_seconds=pace * work.forward_seconds,
                backward_seconds=pace * work.backward_seconds,
            )
            for (vertex, work), pace in zip(self.work.items(), paces, strict=True)
        }

    def speed_at(self, stage: int) -> float:
        """How many times as fast as its work says a vertex is on the device of a stage, at the most."""
        return 1 / min(self.paces[stage % len(self.paces)]) if self.paces else 1.0

    @cached_property
    def _seconds(self) -> list[float]:
        """Forward and backward of every vertex."""
        return [work.seconds for work in self.work.values()]

    @cached_property
    def least_seconds(self) -> list[float]:
        """Forward and backward of every vertex on the device that is fastest at it."""
        least = map(min, zip(*self.paces, strict=True)) if self.paces else [1.0] * len(self.work)
        return [pace * work.seconds for pace, work in zip(least, self.work.values(), strict=True)]

    @cached_property
    def total(self) -> Work:
        """The work of all vertices."""
        return Work(
            sum(work.forward_seconds for work in self.work.values()),
            sum(work.backward_seconds for work in self.work.values()),
            sum(work.saved_bytes for work in self.work.values()),
            loss_bytes=sum(work.loss_bytes for work in self.work.values()),
        )

    @cached_property
    def gathered_bytes(self) -> int:
        """The most that a vertex gathers while it runs."""
        return max((work.gathered_bytes for work in self.work.values()), default=0)

    @cached_property
    def held(self) -> tuple[int, int, int]:
        """Bytes that a device holds of all holdings, and of trained ones and their gradients."""
        trained = [holding for holding in self.holdings if holding.gradient_bytes]
        return (
            sum(holding.memory_bytes for holding in self.holdings),
            sum(holding.bytes for holding in trained),
            sum(holding.gradient_bytes for holding in trained),
        )

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The same as a networkx graph: `work` on nodes, `bytes` and `values` on edges."""
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
        return graph
