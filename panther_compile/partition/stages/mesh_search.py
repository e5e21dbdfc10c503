"""Meshes for a number of devices, and what each is expected to do before any is cut. No torch in here.

The expectation takes the model for a line of vertices on which work, memory and saved activations are spread
alike. With H bytes of parameters, gradients and states, S of activations and k_i microbatches in flight, a
device of M bytes has room for a share

    x_i  <=  M / (H + k_i S)

of the model in stage i. The shares are made equal where there is room, and each cut goes where the work
that it moves to another stage and the transfer together take the least time, within a quarter of a stage.
What comes of it orders the meshes, and nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.graph.hardware import Hardware, Link
from panther_compile.partition.records import Mesh
from panther_compile.partition.replicas import ReplicaLinks, StateSharding, count_replica_seconds
from panther_compile.partition.stages.cut import CutNetwork

_SIZES_OF_TP = (1, 2, 4, 8)
_WINDOW = 0.25  # of a stage, to either side of where a cut is expected

Floats = NDArray[np.float64]


def find_meshes(devices: int, hardware: Hardware, contexts: Sequence[int] = (1,)) -> Iterator[Mesh]:
    """Every way to divide devices into dp x pp x cp x tp, where tp stays within a node.

    Args:
        devices: to divide.
        hardware: of the cluster.
        contexts: sizes of cp.
    """
    for cp, tp in product(contexts, _SIZES_OF_TP):
        if devices % (cp * tp) == 0 and hardware.devices_per_node % tp == 0:
            rest = devices // (cp * tp)
            for pp in range(1, rest + 1):
                if rest % pp == 0:
                    yield Mesh(dp=rest // pp, pp=pp, tp=tp, cp=cp)


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """What a mesh makes of the stages.

    Attributes:
        links: between each stage and the next.
        in_flight: microbatches that each stage holds at once.
        memory_bytes: that a stage may take.
        spare_bytes: that each may take beyond that; see `StageRequest`.
        microbatches: of a step, through each replica.
        devices: along the pipeline.
        replicas: of the model, each with its own samples.
        sharding: how replicas share states.
        replica_links: between them.
    """

    links: tuple[Link, ...]
    in_flight: tuple[int, ...]
    memory_bytes: int
    spare_bytes: tuple[int, ...]
    microbatches: int
    devices: int
    replicas: int
    sharding: StateSharding
    replica_links: ReplicaLinks


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a mesh is expected to do.

    Attributes:
        per_second: microbatches, over all replicas.
        room: for so many models of this kind; below 1 it is not expected to fit.
        hopeless: it cannot fit, however it is cut.
        device_bytes: that the fullest device is expected to take.
    """

    per_second: float
    room: float
    hopeless: bool
    device_bytes: float


class Outline:
    """The ends that stages of a model may have in its own order."""

    def __init__(self, flow: FlowGraph) -> None:
        network = CutNetwork(flow)
        self._forward_bytes, self._backward_bytes = network.crossing_bytes(
            network.order_prefixes(), nested=True
        )

    def expect(self, flow: FlowGraph, pipeline: PipelineShape, whole_bytes: int, units: int) -> Expectation:
        """What to expect of a mesh.

        Args:
            flow: the graph with the work and holdings of one device; its values are those of the outline.
            pipeline: of the mesh.
            whole_bytes: that a device holds for a while of units that are computed again, or gathered.
            units: in the whole model.
        """
        (held, parameters, gradients), saved = flow.held, flow.total.saved_bytes
        memory = pipeline.memory_bytes - whole_bytes * pipeline.devices // len(pipeline.in_flight)
        room = np.maximum(0, memory + np.array(pipeline.spare_bytes or (0,)))
        most = room / np.maximum(1.0, held + np.array(pipeline.in_flight) * saved)
        hopeless = (held + saved) / len(most) > room.max()
        work = [np.array(flow.seconds_at(place)) for place in range(max(1, len(flow.paces)))]
        speeds = 1 / np.maximum([work[stage % len(work)].sum() for stage in range(len(most))], 1e-30)
        shares = _level(most, speeds) if most.sum() >= 1 else speeds / speeds.sum()
        seconds = self._slowest(work, shares, pipeline.links)
        turns = pipeline.microbatches * len(most) // pipeline.devices + pipeline.devices - 1
        extra = count_replica_seconds(
            pipeline.sharding,
            pipeline.replica_links,
            parameter_bytes=parameters / pipeline.devices,
            gradient_bytes=gradients / pipeline.devices,
            forward_seconds=flow.total.forward_seconds / pipeline.devices,
            backward_seconds=flow.total.backward_seconds / pipeline.devices,
            units=units // pipeline.devices,
        )
        seconds += (extra.forward + extra.backward) * pipeline.devices / len(most)
        step = turns * seconds + extra.tail
        per_second = pipeline.replicas * pipeline.microbatches / step
        taken = whole_bytes + (held + max(pipeline.in_flight) * saved) / pipeline.devices
        return Expectation(per_second, float(most.sum()), hopeless, taken)

    def _slowest(self, seconds: Sequence[Floats], shares: Floats, links: Sequence[Link]) -> float:
        """Seconds of the slowest stage for one microbatch; given are those of vertices, by place."""
        done = np.stack([np.concatenate(((0.0,), np.cumsum(one))) for one in seconds])
        work = done[0]
        window, ends, transfers = _WINDOW * shares.min() * work[-1], [0], []
        for place, link in zip(np.cumsum(shares)[:-1] * work[-1], links, strict=True):
            first, last = np.searchsorted(work, (place - window, place + window))
            first = max(int(first), ends[-1])
            near = slice(first, max(int(last), first + 1))
            taken = link.seconds_of_each(self._forward_bytes[near])
            taken += link.seconds_of_each(self._backward_bytes[near])
            least = int((taken + np.abs(work[near] - place)).argmin())
            ends.append(first + least)
            transfers.append(float(taken[least]))
        ends.append(len(work) - 1)
        at_ends = np.array([0.0, *transfers, 0.0])
        stages = np.arange(len(shares)) % len(done)
        own = done[stages, ends[1:]] - done[stages, ends[:-1]]
        return float((own + at_ends[:-1] + at_ends[1:]).max())


def _level(most: Floats, speeds: Floats) -> Floats:
    """Shares that sum to 1, each at most so much, the largest over its speed as small as can be."""
    order = np.argsort(most / speeds)
    rising = (most / speeds)[order]
    below = np.concatenate(([0.0], np.cumsum(most[order])[:-1]))
    levels = (1 - below) / np.cumsum(speeds[order][::-1])[::-1]
    level = next(
        (level for level, cap in zip(levels.tolist(), rising.tolist(), strict=True) if level <= cap),
        rising[-1],
    )
    return np.minimum(most, level * speeds)
