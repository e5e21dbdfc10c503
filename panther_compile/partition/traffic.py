"""Bytes that the devices of a mesh send in one step, by what for and over which links.

    pipeline   activations to the next stage and gradients back, each microbatch, by each device of a stage
    shards     collectives between the devices of a stage, each microbatch
    replicas   gradients, once a step; where replicas share states, parameters as often as they are gathered
    tied       gradients of parameters that several stages hold, once a step
    context    where devices divide a sequence, keys and values and their gradients, each microbatch

Collectives are rings: each of n members hands (n - 1) / n of a tensor to the next to gather or to scatter it,
twice that to sum it. A message counts once, for the link it crosses: inside a node (NVLink) or between nodes
(the network). Devices that divide a sequence count as replicas. Of s replicas that share states in each of g
groups, with G bytes of gradients and P of parameters a stage, a replica sends in a step

    ddp           2 (n - 1) / n G, over all n replicas
    others        (s - 1) / s G to scatter gradients, and 2 (g - 1) / g G / s to sum the shards of groups
    zero1, zero2  (s - 1) / s P to gather parameters
    zero3         that for the forward and the backward of each microbatch, 2 m times; in a pipeline m + 1
                  times, as torch's schedules free what a forward gathered, and not what a backward did
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from panther_compile.partition.graph.hardware import Hardware
from panther_compile.partition.records import AXES, Collective, Mesh, SharedParameter, Stage
from panther_compile.partition.replicas import StateSharding

# The last only where devices divide a sequence.
PURPOSES = ("pipeline", "shards", "replicas", "tied", "context")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What all devices together send in a step for one purpose.

    Attributes:
        purpose: of `PURPOSES`.
        intra_node_bytes: over the links inside nodes.
        inter_node_bytes: over the links between nodes.
    """

    purpose: str
    intra_node_bytes: float
    inter_node_bytes: float


# purpose, first rank, second rank, bytes from the one to the other
_Message = tuple[str, int, int, float]


def count_traffic(
    mesh: Mesh,
    hardware: Hardware,
    microbatches: int,
    stages: Sequence[Stage],
    shared: Sequence[SharedParameter] = (),
    collectives: Sequence[Collective] = (),
    sharding: StateSharding | None = None,
    gathered_bytes: Sequence[int] = (),
    context: Sequence[Collective] = (),
) -> tuple[Traffic, ...]:
    """One line for each purpose.

    Args:
        mesh: of the devices.
        hardware: tells which devices share a node.
        microbatches: of a step, through each replica.
        stages: with the bytes of one microbatch on one device.
        shared: parameters that several stages hold.
        collectives: between the devices of a stage, for one microbatch.
        sharding: of states over the replicas, which share nothing if None.
        gathered_bytes: of each stage's parameters, needed where replicas share states.
        context: between devices that divide a sequence, for one microbatch.
    """
    sharing = _Sharing(mesh, microbatches, sharding or StateSharding("ddp", mesh.replicas), gathered_bytes)
    inside, between = dict.fromkeys(PURPOSES, 0.0), dict.fromkeys(PURPOSES, 0.0)
    for purpose, first, second, size in (
        *_along_the_pipeline(mesh, microbatches, stages),
        *_along_axis("shards", "tp", mesh, microbatches, stages, collectives),
        *_along_axis("context", "cp", mesh, microbatches, stages, context),
        *sharing.messages(stages),
        *_of_tied_parameters(mesh, shared),
    ):
        (inside if hardware.same_node(first, second) else between)[purpose] += size
    purposes = PURPOSES if mesh.cp > 1 else PURPOSES[:-1]
    return tuple(Traffic(purpose, inside[purpose], between[purpose]) for purpose in purposes)


def _along_the_pipeline(mesh: Mesh, microbatches: int, stages: Sequence[Stage]) -> Iterator[_Message]:
    for stage, after in pairwise(stages):
        if stage.device == after.device:
            continue
        size = microbatches * (stage.sent_bytes + after.gradient_sent_bytes)
        for dp, tp, cp in product(range(mesh.dp), range(mesh.tp), range(mesh.cp)):
            first, second = (mesh.rank(dp, one.device, tp, cp) for one in (stage, after))
            yield "pipeline", first, second, size


def _along_axis(
    purpose: str,
    axis: str,
    mesh: Mesh,
    microbatches: int,
    stages: Sequence[Stage],
    collectives: Sequence[Collective],
) -> Iterator[_Message]:
    """Collectives of the rings of devices that differ along one axis alone, all but the pipeline's."""
    members = getattr(mesh, axis)
    sent = [0.0] * mesh.pp  # by each member, for each device along the pipeline
    for one in collectives:
        whole = one.bytes * microbatches * (2 if one.kind == "all_reduce" else 1)
        sent[stages[one.stage].device] += whole * (members - 1) / members
    others = [one for one in AXES if one != axis]
    for places in product(*(range(getattr(mesh, one)) for one in others)):
        at = dict(zip(others, places, strict=True))
        ranks = [mesh.rank(**at, **{axis: place}) for place in range(members)]
        yield from _ring(purpose, ranks, sent[at["pp"]])


@dataclass(frozen=True, slots=True)
class _Sharing:
    """What replicas send one another; those that share states are neighbours."""

    mesh: Mesh
    microbatches: int
    sharding: StateSharding
    gathered_bytes: Sequence[int]

    def messages(self, stages: Sequence[Stage]) -> Iterator[_Message]:
        """The messages of all stages."""
        share = self.sharding.sharers
        groups = self.mesh.replicas // share
        places = list(product(range(self.mesh.dp), range(self.mesh.cp)))
        for stage, tp in product(stages, range(self.mesh.tp)):
            ranks = [self.mesh.rank(dp, stage.device, tp, cp) for dp, cp in places]
            once = stage.gradient_bytes
            if share > 1:
                once += self._gathers() * self.gathered_bytes[stage.index]
            for group in range(groups):
                members = ranks[group * share : (group + 1) * share]
                yield from _ring("replicas", members, once * (share - 1) / share)
            for place in range(share):
                summed = 2 * stage.gradient_bytes / share * (groups - 1) / groups
                yield from _ring("replicas", ranks[place::share], summed)

    def _gathers(self) -> int:
        """How often a step gathers the parameters."""
        if self.sharding.kind != "zero3":
            return 1
        return 2 * self.microbatches if self.mesh.pp == 1 else self.microbatches + 1


def _of_tied_parameters(mesh: Mesh, shared: Sequence[SharedParameter]) -> Iterator[_Message]:
    for parameter, dp, tp, cp in product(shared, range(mesh.dp), range(mesh.tp), range(mesh.cp)):
        places = sorted({stage % mesh.pp for stage in parameter.stages})
        ranks = [mesh.rank(dp, place, tp, cp) for place in places]
        yield from _ring("tied", ranks, 2 * parameter.gradient_bytes * (len(ranks) - 1) / len(ranks))


def _ring(purpose: str, ranks: Sequence[int], sent: float) -> Iterator[_Message]:
    """Each member of a ring sends so much to the next."""
    if len(ranks) > 1:
        for first, second in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            yield purpose, first, second, sent
