"""Bytes that the devices of a mesh send in one step, by what for and over which links.

    pipeline   activations to the next stage and gradients back, each microbatch, by each device of a stage
    shards     collectives between the devices of a stage, each microbatch
    replicas   gradients, once a step
    tied       gradients of parameters that several stages hold, once a step

Collectives are rings: each of n members hands (n - 1) / n of a tensor to the next to gather it, twice that to
sum it. A message counts once, for the link it crosses: inside a node (NVLink) or between nodes (the network).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from panther_compile.partition.graph.hardware import Hardware
from panther_compile.partition.records import Collective, Mesh, SharedParameter, Stage

PURPOSES = ("pipeline", "shards", "replicas", "tied")


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
) -> tuple[Traffic, ...]:
    """One line for each purpose.

    Args:
        mesh: of the devices.
        hardware: tells which devices share a node.
        microbatches: of a step, through each replica.
        stages: with the bytes of one microbatch on one device.
        shared: parameters that several stages hold.
        collectives: between the devices of a stage, for one microbatch.
    """
    inside, between = dict.fromkeys(PURPOSES, 0.0), dict.fromkeys(PURPOSES, 0.0)
    for purpose, first, second, size in (
        *_along_the_pipeline(mesh, microbatches, stages),
        *_between_shards(mesh, microbatches, stages, collectives),
        *_between_replicas(mesh, stages),
        *_of_tied_parameters(mesh, shared),
    ):
        (inside if hardware.same_node(first, second) else between)[purpose] += size
    return tuple(Traffic(purpose, inside[purpose], between[purpose]) for purpose in PURPOSES)


def _along_the_pipeline(mesh: Mesh, microbatches: int, stages: Sequence[Stage]) -> Iterator[_Message]:
    for stage, after in pairwise(stages):
        if stage.device == after.device:
            continue
        size = microbatches * (stage.sent_bytes + after.gradient_sent_bytes)
        for dp, tp in product(range(mesh.dp), range(mesh.tp)):
            yield "pipeline", mesh.rank(dp, stage.device, tp), mesh.rank(dp, after.device, tp), size


def _between_shards(
    mesh: Mesh, microbatches: int, stages: Sequence[Stage], collectives: Sequence[Collective]
) -> Iterator[_Message]:
    sent = [0.0] * mesh.pp
    for one in collectives:
        whole = one.bytes * microbatches * (2 if one.kind == "all_reduce" else 1)
        sent[stages[one.stage].device] += whole * (mesh.tp - 1) / mesh.tp
    for dp, pp in product(range(mesh.dp), range(mesh.pp)):
        ranks = [mesh.rank(dp, pp, tp) for tp in range(mesh.tp)]
        yield from _ring("shards", ranks, sent[pp])


def _between_replicas(mesh: Mesh, stages: Sequence[Stage]) -> Iterator[_Message]:
    for stage, tp in product(stages, range(mesh.tp)):
        ranks = [mesh.rank(dp, stage.device, tp) for dp in range(mesh.dp)]
        yield from _ring("replicas", ranks, 2 * stage.gradient_bytes * (mesh.dp - 1) / mesh.dp)


def _of_tied_parameters(mesh: Mesh, shared: Sequence[SharedParameter]) -> Iterator[_Message]:
    for parameter, dp, tp in product(shared, range(mesh.dp), range(mesh.tp)):
        places = sorted({stage % mesh.pp for stage in parameter.stages})
        ranks = [mesh.rank(dp, place, tp) for place in places]
        yield from _ring("tied", ranks, 2 * parameter.gradient_bytes * (len(ranks) - 1) / len(ranks))


def _ring(purpose: str, ranks: Sequence[int], sent: float) -> Iterator[_Message]:
    """Each member of a ring sends so much to the next."""
    if len(ranks) > 1:
        for first, second in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            yield purpose, first, second, sent
