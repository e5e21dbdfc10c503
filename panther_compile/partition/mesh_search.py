"""Meshes for a number of devices, and what each is expected to do before any is cut. No torch in here.

The expectation takes the model for a line of vertices on which work, memory and saved activations are spread
alike. With H bytes of parameters, gradients and states, S of activations and k_i microbatches in flight, a
device of M bytes has room for a share

    x_i  <=  M / (H + k_i S)

of the model in stage i. The shares are made equal where there is room, and each cut goes where the fewest
bytes cross within a quarter of a stage from there. What comes of it orders the meshes, and nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from panther_compile.partition.cut import CutNetwork
from panther_compile.partition.flow import FlowGraph
from panther_compile.partition.hardware import Hardware, Link
from panther_compile.partition.records import Mesh
from panther_compile.partition.stages import vertex_seconds

_SIZES_OF_TP = (1, 2, 4, 8)
_WINDOW = 0.25  # of a stage, to either side of where a cut is expected

Floats = NDArray[np.float64]


def find_meshes(devices: int, hardware: Hardware) -> Iterator[Mesh]:
    """Every way to divide devices into dp x pp x tp, where tp stays within a node."""
    for tp in _SIZES_OF_TP:
        if devices % tp == 0 and hardware.devices_per_node % tp == 0:
            for pp in range(1, devices // tp + 1):
                if devices // tp % pp == 0:
                    yield Mesh(dp=devices // tp // pp, pp=pp, tp=tp)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a mesh makes of the stages.

    Attributes:
        links: between each stage and the next.
        in_flight: microbatches that each stage holds at once.
        memory_bytes: that a stage may take.
        microbatches: of a step, through each replica.
        replicas: of the model.
        replica_link: between them.
        devices: along the pipeline.
    """

    links: tuple[Link, ...]
    in_flight: tuple[int, ...]
    memory_bytes: int
    microbatches: int
    replicas: int
    replica_link: Link
    devices: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a mesh is expected to do.

    Attributes:
        per_second: microbatches, over all replicas.
        room: for so many models of this kind; below 1 it is not expected to fit.
        hopeless: it cannot fit, however it is cut.
    """

    per_second: float
    room: float
    hopeless: bool


class Outline:
    """A flow graph as a line."""

    def __init__(self, flow: FlowGraph, *, recompute: bool = False) -> None:
        self._recompute = recompute
        network = CutNetwork(flow)
        self._forward_bytes, self._backward_bytes = network.crossing_bytes(
            network.order_prefixes(), nested=True
        )

    def expect(self, flow: FlowGraph, setting: Setting) -> Expectation:
        """What to expect of a mesh.

        Args:
            flow: the graph with the work and holdings of one device; its values are those of the outline.
            setting: of the mesh.
        """
        held = sum(holding.bytes + holding.trained_bytes for holding in flow.holdings)
        saved = sum(work.saved_bytes for work in flow.work.values())
        counts = np.ones(len(setting.in_flight)) if self._recompute else np.array(setting.in_flight)
        most = setting.memory_bytes / np.maximum(1.0, held + counts * saved)
        hopeless = (held + saved) / len(most) > setting.memory_bytes
        shares = _level(most) if most.sum() >= 1 else np.full(len(most), 1 / len(most))
        seconds = self._slowest(flow, shares, setting.links)
        turns = setting.microbatches * len(most) // setting.devices + setting.devices - 1
        gradients = sum(holding.gradient_bytes for holding in flow.holdings) / setting.devices
        replicas = setting.replicas
        tail = 2 * (replicas - 1) * setting.replica_link.seconds(gradients / replicas)
        per_second = replicas * setting.microbatches / (turns * seconds + tail)
        return Expectation(per_second, float(most.sum()), hopeless)

    def _slowest(self, flow: FlowGraph, shares: Floats, links: Sequence[Link]) -> float:
        """Seconds of the slowest stage for one microbatch."""
        work = np.concatenate(([0.0], np.cumsum(vertex_seconds(flow, recompute=self._recompute))))
        crossing = self._forward_bytes + self._backward_bytes
        window, ends = _WINDOW * shares.min() * work[-1], [0]
        for place in np.cumsum(shares)[:-1] * work[-1]:
            first, last = np.searchsorted(work, (place - window, place + window))
            first = max(int(first), ends[-1])
            ends.append(first + int(crossing[first : max(int(last), first + 1)].argmin()))
        ends.append(len(work) - 1)
        transfers = [
            link.seconds(self._forward_bytes[end]) + link.seconds(self._backward_bytes[end])
            for link, end in zip(links, ends[1:-1], strict=True)
        ]
        at_ends = np.array([0.0, *transfers, 0.0])
        return float((np.diff(work[ends]) + at_ends[:-1] + at_ends[1:]).max())


def _level(most: Floats) -> Floats:
    """Shares that sum to 1, each at most so much, the largest as small as can be."""
    rising = np.sort(most)
    below = np.concatenate(([0.0], np.cumsum(rising)[:-1]))
    levels = (1 - below) / np.arange(len(most), 0, -1)
    level = next(
        (level for level, cap in zip(levels.tolist(), rising.tolist(), strict=True) if level <= cap),
        rising[-1],
    )
    return np.minimum(most, level)
