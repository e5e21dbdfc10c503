"""What the replicas of a model divide among themselves, and what that takes. No torch in here.

Of a stage with P bytes of parameters, G of gradients and S of optimizer states, with float32 master weights
among them where there are any, each of s replicas that share them holds

    ddp     P   + G   + S          all-reduce of G, once a step
    zero1   P   + G   + S/s        reduce-scatter of G and all-gather of P, once a step
    zero2   P   + G/s + S/s        likewise; a unit's gradients are whole until they are scattered
    zero3   P/s + G/s + S/s        reduce-scatter of G once a step, and all-gather of P, unit by unit, in each
                                   forward and again in each backward; two units are whole at a time

(Rajbhandari et al., SC 2020), where a step has one microbatch. Several add up gradients before these are
scattered, so that each replica holds all of G. Torch's pipelines free what a forward has gathered, and keep
what a backward has: with zero3 a stage is whole at its peak, and gathered once more than there are
microbatches. With fewer sharers than replicas (hybrid) the shards of gradients are summed
over the groups that share. Master weights are what zero3 stores: its parameters are whole in the units alone.
Devices that divide a sequence (cp) hold the same parameters and sum their gradients: they count as replicas.
Where a device computes and sends at once, what is sent hides behind the backward, or unit by unit behind
computing, but for the first unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from panther_compile.partition.graph.flow import FlowGraph, Holding
from panther_compile.partition.graph.hardware import NO_LINK, Context, Hardware, Link
from panther_compile.partition.records import Mesh

DATA_PARALLEL = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class StateSharding:
    """How replicas share states.

    Attributes:
        kind: of DATA_PARALLEL.
        replicas: of the model, and devices of each that divide a sequence.
        sharers: replicas that divide one set of states; 1 of "ddp".
        master_weights: whether float32 copies of the parameters are among the states.
        accumulates: whether a step has several microbatches.
        pipelined: whether replicas are pipelines.
    """

    kind: str = "ddp"
    replicas: int = 1
    sharers: int = 1
    master_weights: bool = False
    accumulates: bool = False
    pipelined: bool = False

    def __str__(self) -> str:
        if self.replicas == 1:
            return "one replica"
        groups = f", {self.sharers} share" if 1 < self.sharers < self.replicas else ""
        return f"{self.kind} over {self.replicas} replicas{groups}"


@dataclass(frozen=True, slots=True)
class ReplicaLinks:
    """Links between replicas.

    Attributes:
        sharers: between those that share states.
        groups: between groups of them.
        overlap: whether devices compute while they send.
    """

    sharers: Link
    groups: Link
    overlap: bool


def find_shardings(
    mesh: Mesh, microbatches: int, hardware: Hardware, kind: str, sharers: int | None, *, master_weights: bool
) -> Iterator[StateSharding]:
    """The ways for replicas to share states that are worth comparing.

    Args:
        mesh: of the devices.
        microbatches: of a step, through each replica.
        hardware: of the cluster.
        kind: of DATA_PARALLEL, or "auto" for all.
        sharers: their number; if None all replicas, or those within a node.
        master_weights: see `StateSharding`.
    """
    if mesh.replicas == 1:
        yield StateSharding(master_weights=master_weights)
        return
    inside = mesh.cp * max(1, hardware.devices_per_node // (mesh.pp * mesh.cp * mesh.tp))
    for one in DATA_PARALLEL if kind == "auto" else (kind,):
        sizes = (1,) if one == "ddp" else (mesh.replicas, inside) if sharers is None else (sharers,)
        for size in dict.fromkeys(sizes):
            if mesh.replicas % size == 0 and (size > 1 or one == "ddp"):
                yield StateSharding(one, mesh.replicas, size, master_weights, microbatches > 1, mesh.pp > 1)


def find_replica_links(hardware: Hardware, mesh: Mesh, sharers: int) -> ReplicaLinks:
    """The slowest links over dp and cp, for rings within and between groups of sharers, along cp first."""
    groups = mesh.replicas // sharers
    near = gcd(mesh.cp, sharers)  # sharers along cp; the others are along dp, or cp has several groups
    far = mesh.cp // near
    stride = mesh.pp * mesh.cp * mesh.tp
    return ReplicaLinks(
        sharers=_ring_link(hardware, (mesh.tp, near), (stride, sharers // near)),
        groups=_ring_link(hardware, (mesh.tp * near, far), (stride * (sharers // near), groups // far)),
        overlap=hardware.overlap,
    )


def find_context(hardware: Hardware, mesh: Mesh) -> Context:
    """The devices that divide a sequence, and the slowest link between them."""
    return Context(mesh.cp, _ring_link(hardware, (mesh.tp, mesh.cp)))


def _ring_link(hardware: Hardware, *levels: tuple[int, int]) -> Link:
    """The link of a ring of devices: several in a node share the load of its links to others.

    Args:
        hardware: of the cluster.
        levels: how far apart its members are and how many, nearest first, where rings are of rings.
    """
    levels = tuple((stride, members) for stride, members in levels if members > 1)
    if not levels:
        return NO_LINK
    if hardware.same_node(0, sum(stride * (members - 1) for stride, members in levels)):
        return hardware.intra_node
    inside = 1
    for stride, members in levels:
        here = min(members, max(1, hardware.devices_per_node // stride))
        inside *= here
        if here < members:
            break
    between = hardware.inter_node
    rate = min(hardware.intra_node.bytes_per_second, inside * between.bytes_per_second)
    return Link(rate, between.latency_seconds)


def share_states(flow: FlowGraph, sharding: StateSharding, units: Sequence[int]) -> tuple[FlowGraph, int]:
    """The flow graph with the bytes that one replica holds, and those of units that are whole for a while.

    Args:
        flow: of one device.
        sharding: of its states.
        units: where units end.
    """
    kind, share = sharding.kind, sharding.sharers
    if kind == "ddp" or share == 1:
        return flow, 0
    stored = 1.0
    if kind == "zero3" and not sharding.pipelined:
        stored = 0.0 if sharding.master_weights else 1 / share
    scattered = kind != "zero1" and not sharding.accumulates
    holdings = []
    for held in flow.holdings:
        states = held.trained_bytes - held.gradient_bytes
        gradients = held.gradient_bytes / (share if scattered else 1)
        parameters = held.bytes * (stored if held.gradient_bytes else 1.0)
        resident = round(parameters + gradients + states / share)
        holdings.append(
            Holding(
                held.name,
                held.bytes,
                held.trained_bytes,
                held.gradient_bytes,
                held.vertices,
                resident,
            )
        )
    parameters, gradients = _largest_unit(flow, units)
    whole = gradients if scattered else 0
    if kind == "zero3" and not sharding.pipelined:
        whole += 2 * parameters
    return flow.with_holdings(tuple(holdings)), whole


def _largest_unit(flow: FlowGraph, units: Sequence[int]) -> tuple[int, int]:
    """Most bytes of trained parameters, and of gradients, of a unit; of shared ones in the first."""
    number = {vertex: place for place, vertex in enumerate(flow.work)}
    parameters, gradients = [0] * max(1, len(units)), [0] * max(1, len(units))
    ends = list(pairwise((0, *units)))
    unit_at = [unit for unit, (start, end) in enumerate(ends) for _ in range(start, end)]
    for held in flow.holdings:
        if held.gradient_bytes and held.vertices:
            unit = unit_at[number[held.vertices[0]]] if unit_at else 0
            parameters[unit] += held.bytes
            gradients[unit] += held.gradient_bytes
    return max(parameters), max(gradients)


@dataclass(frozen=True, slots=True)
class ReplicaSeconds:
    """What the replicas' communication adds to a device's time.

    Attributes:
        forward: of each microbatch, for gathering parameters.
        backward: likewise.
        tail: once a step, behind the last backward.
    """

    forward: float = 0.0
    backward: float = 0.0
    tail: float = 0.0


def count_replica_seconds(
    sharding: StateSharding,
    links: ReplicaLinks,
    *,
    parameter_bytes: float,
    gradient_bytes: float,
    forward_seconds: float,
    backward_seconds: float,
    units: int,
) -> ReplicaSeconds:
    """Seconds of one stage.

    Args:
        sharding: of the states.
        links: between replicas.
        parameter_bytes: of the stage, as they are gathered.
        gradient_bytes: of the stage.
        forward_seconds: of one microbatch.
        backward_seconds: likewise.
        units: that are sent one after the other.
    """
    share, groups = sharding.sharers, sharding.replicas // sharding.sharers
    units = max(1, units)
    if sharding.replicas == 1:
        return ReplicaSeconds()
    if sharding.kind == "ddp" or share == 1:
        once = 2 * _scatter_seconds(gradient_bytes, sharding.replicas, links.groups)
        return ReplicaSeconds(tail=_exposed(once, backward_seconds, units, links))
    scatter = _scatter_seconds(gradient_bytes, share, links.sharers)
    scatter += 2 * _scatter_seconds(gradient_bytes / share, groups, links.groups)
    gather = _scatter_seconds(parameter_bytes, share, links.sharers)
    if sharding.kind == "zero3":
        ahead = _exposed(gather, forward_seconds, units, links)
        if sharding.pipelined:  # one forward finds nothing whole
            tail = ahead + _exposed(scatter, max(0.0, backward_seconds - gather), units, links)
            return ReplicaSeconds(backward=_exposed(gather, backward_seconds, units, links), tail=tail)
        return ReplicaSeconds(
            forward=ahead,
            backward=_exposed(gather, backward_seconds, units, links),
            tail=_exposed(scatter, max(0.0, backward_seconds - gather), units, links),
        )
    tail = _exposed(scatter, backward_seconds, units, links)
    return ReplicaSeconds(tail=tail + _exposed(gather, forward_seconds, units, links))


def _scatter_seconds(size: float, members: int, link: Link) -> float:
    """A ring all-gather, or reduce-scatter: each member sends (n - 1) / n of the bytes in n - 1 messages."""
    return (members - 1) * link.seconds(size / members) if members > 1 and size else 0.0


def _exposed(sent: float, computed: float, units: int, links: ReplicaLinks) -> float:
    """Seconds of sending that do not hide behind computing; the first unit's never do."""
    return max(sent - computed, sent / units) if links.overlap else sent
