"""What `partition_model` gives back: the stages, what they are predicted to do, and their modules."""

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from torch import fx

from panther_compile.partition import plot
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.graph.hardware import Hardware
from panther_compile.partition.records import Collective, Mesh, ShardedLayer, SharedParameter, Stage
from panther_compile.partition.replicas import StateSharding
from panther_compile.partition.shards.describe import Sharding
from panther_compile.partition.stages.chains import StageRequest
from panther_compile.partition.stages.ends import lower_bound
from panther_compile.partition.stages.schedule import Timeline, peak_bytes
from panther_compile.partition.stages.split import StagedModel, split
from panther_compile.partition.traffic import Traffic, count_traffic
from panther_compile.reporting.tables import render_table

# The number of a layer in a name, as in blocks.3.mlp; alike layers share one line.
_NUMBER = re.compile(r"(\.)\d+(?=\.)")


@dataclass(frozen=True)
class Partition:
    """A model cut into pipeline stages, and what a training step is predicted to take.

    Attributes:
        model: class of the model.
        mesh: devices.
        hardware: the devices; the slowest of `places`, where there are such.
        schedule: "gpipe", "1f1b" or "interleaved".
        recompute: activation checkpointing, "none", "selective", "full" or a budget.
        data_parallel: how the replicas share states.
        microbatches: their number in a step, through each replica.
        stages: along the model; device d of the pp axis holds stages d, pp + d, ...
        shared: parameters that several stages hold.
        timeline: one step, simulated.
        exact: whether no better stages exist under the predicted costs.
        candidates: cuts that were compared.
        places: the hardware of each place along the pipeline, where it differs.
        context: what devices that divide a sequence (cp) send one another, for one microbatch.
        left_out: meshes that cannot run the model or the global batch, and why, where devices were divided.
    """

    model: str
    mesh: Mesh
    hardware: Hardware
    schedule: str
    recompute: str | float
    data_parallel: StateSharding
    microbatches: int
    stages: tuple[Stage, ...]
    shared: tuple[SharedParameter, ...]
    timeline: Timeline = field(repr=False)
    exact: bool
    candidates: int
    flow: FlowGraph = field(repr=False)
    request: StageRequest = field(repr=False)
    captured: Captured = field(repr=False)
    constants: tuple[fx.Node, ...] = field(repr=False)
    persistent: frozenset[str] = field(repr=False)
    sharding: Sharding | None = field(default=None, repr=False)
    places: tuple[Hardware, ...] = ()
    context: tuple[Collective, ...] = ()
    left_out: tuple[tuple[Mesh, str], ...] = ()

    @property
    def route(self) -> str:
        """How the model's graph was read."""
        return self.captured.route

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters of the model that its graph does not read, and no stage holds."""
        return self.captured.unused

    @property
    def shards(self) -> tuple[ShardedLayer, ...]:
        """Layers whose parameters are divided over the tp axis."""
        return self.sharding.shards if self.sharding is not None else ()

    @property
    def whole(self) -> tuple[tuple[str, str], ...]:
        """Layers that every device of the tp axis has all of, and why."""
        return self.sharding.whole if self.sharding is not None else ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Between the devices of the tp axis, for one microbatch."""
        return self.sharding.collectives if self.sharding is not None else ()

    @property
    def sequence(self) -> tuple[str, ...]:
        """Graph nodes whose results lie on the tp axis in shards of the sequence."""
        return self.sharding.sequence if self.sharding is not None else ()

    @property
    def step_seconds(self) -> float:
        """Predicted time of a training step, the reduction of gradients included."""
        return self.timeline.seconds

    @property
    def microbatches_per_second(self) -> float:
        """Predicted, over all replicas."""
        return self.mesh.dp * self.microbatches / self.step_seconds

    @property
    def bubble(self) -> float:
        """Share of the time in which the pipeline's devices wait."""
        return self.timeline.bubble

    @property
    def bottleneck_seconds(self) -> float:
        """Seconds of the slowest stage, for one microbatch."""
        return max(stage.seconds for stage in self.stages)

    @property
    def cut_bytes(self) -> int:
        """Sent across all cuts for one microbatch, forward and backward."""
        return sum(stage.sent_bytes + stage.gradient_sent_bytes for stage in self.stages)

    @property
    def device_memory_bytes(self) -> int:
        """Bytes of the fullest device, which holds one stage or, interleaved, several."""
        return max(self.held_bytes)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of each device along the pipeline; of several stages, when they hold most together."""
        held = [0] * self.mesh.pp
        for stage in self.stages:
            held[stage.device] += stage.memory_bytes
        if len(self.stages) > self.mesh.pp:
            sizes = [stage.memory.activations // stage.in_flight for stage in self.stages]
            peaks = peak_bytes(self.schedule, self.mesh.pp, self.microbatches, sizes)
            for stage in self.stages:
                held[stage.device] -= stage.memory.activations
            held = [rest + peak for rest, peak in zip(held, peaks, strict=True)]
        return tuple(held)

    @property
    def has_idle_optimizers(self) -> bool:
        """Whether some devices along the pipeline hold no parameter, and others do."""
        holding = {stage.device for stage in self.stages if stage.parameters}
        return 0 < len(holding) < self.mesh.pp

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """What all devices together send in a step, by purpose, inside nodes and between them."""
        sizes = {held.name: held.bytes for held in self.flow.holdings}
        return count_traffic(
            self.mesh,
            self.hardware,
            self.microbatches,
            self.stages,
            self.shared,
            self.collectives,
            self.data_parallel,
            [sum(sizes[name] for name in stage.parameters) for stage in self.stages],
            self.context,
        )

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each graph node that belongs to one."""
        return {name: stage.index for stage in self.stages for name in stage.nodes}

    def lower_bound_seconds(self) -> float:
        """What the slowest stage takes at least, however the model is cut."""
        return lower_bound(self.flow, self.request, self.bottleneck_seconds)

    def split(self) -> StagedModel:
        """One module a stage, with the model's own tensors; run one after the other they are the model."""
        crossing = [tuple(spec.name for spec in stage.outputs) for stage in self.stages[:-1]]
        return split(self.captured, self.stage_of, crossing, self.constants, self.persistent)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the stages' memory and time and the schedule as a Gantt picture (needs matplotlib)."""
        plot.draw(self.title, self.stages, self.timeline, path)

    @property
    def title(self) -> str:
        """One line: what was cut for what."""
        return (
            f"{self.model}: pipeline of {len(self.stages)} on {self.mesh} ({self.mesh.devices} x "
            f"{self.hardware.name}), {self.schedule}, {self.microbatches} microbatches"
        )

    def to_json(self) -> str:
        """The records as JSON: what is above, without graphs and the timeline's slots."""
        record: dict[str, Any] = {
            "model": self.model,
            "route": self.route,
            "mesh": dataclasses.asdict(self.mesh),
            "hardware": dataclasses.asdict(self.hardware),
            "places": [dataclasses.asdict(place) for place in self.places],
            "schedule": self.schedule,
            "recompute": self.recompute,
            "data_parallel": dataclasses.asdict(self.data_parallel),
            "microbatches": self.microbatches,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "bottleneck_seconds": self.bottleneck_seconds,
            "cut_bytes": self.cut_bytes,
            "traffic": [dataclasses.asdict(traffic) for traffic in self.traffic],
            "exact": self.exact,
            "stages": [_stage_record(stage) for stage in self.stages],
            "shared": [dataclasses.asdict(shared) for shared in self.shared],
            "unused": self.unused,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
            "whole": [{"name": name, "reason": reason} for name, reason in self.whole],
            "sequence": self.sequence,
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "context": [dataclasses.asdict(collective) for collective in self.context],
        }
        return json.dumps(record, indent=2)

    def __str__(self) -> str:
        """A table: one line for each stage, then the step."""
        columns = tuple(
            (heading, "right")
            for heading in (
                *("stage", "device", "nodes", "parameters MB", "forward ms", "backward ms"),
                *("transfer ms", "total ms", "sent MB", "in flight", "memory MB"),
            )
        )
        rows = [
            (
                str(stage.index),
                self._told_device(stage.device),
                str(len(stage.nodes)),
                f"{stage.parameter_bytes / 1e6:,.2f}",
                f"{stage.forward_seconds * 1e3:.3f}",
                f"{stage.backward_seconds * 1e3:.3f}",
                f"{(stage.receive_seconds + stage.send_seconds) * 1e3:.3f}",
                f"{stage.seconds * 1e3:.3f}",
                f"{stage.sent_bytes / 1e6:,.3f}",
                str(stage.in_flight),
                f"{stage.memory_bytes / 1e6:,.1f}",
            )
            for stage in self.stages
        ]
        footer = [
            f"step {self.step_seconds * 1e3:.3f} ms predicted, bubble {self.bubble:.1%}, "
            f"{self.cut_bytes / 1e6:,.3f} MB across the cuts for each microbatch",
            f"graph: {self.route}; "
            + ("optimal" if self.exact else f"best of {self.candidates} cuts")
            + " under the predicted costs",
        ]
        if self.mesh.replicas > 1 or self.recompute != "none":
            footer.append(f"states: {self.data_parallel}; activation checkpointing: {self.recompute}")
        if self.mesh.devices > 1:
            footer.append(self._told_traffic())
        if self.context:
            footer.append(self._told_context())
        if self.sharding is not None:
            footer.extend(self._told_shards(self.sharding))
        for shared in self.shared:
            footer.append(
                f"{shared.name} is held by stages {', '.join(map(str, shared.stages))}: its gradient "
                f"({shared.gradient_bytes / 1e6:,.3f} MB) is summed over them once a step"
            )
        if self.left_out:
            mesh, reason = self.left_out[0]
            footer.append(f"{len(self.left_out)} meshes are left out, as {mesh}: {reason}")
        if self.unused:
            footer.append(f"not used by the graph, in no stage: {', '.join(self.unused)}")
        return render_table(self.title, columns, rows, footer)

    def _told_device(self, device: int) -> str:
        return f"{device} {self.places[device].name}" if self.places else str(device)

    def _told_traffic(self) -> str:
        amounts = []
        for where, name in (("inside nodes", "intra_node_bytes"), ("between nodes", "inter_node_bytes")):
            sizes = {one.purpose: getattr(one, name) for one in self.traffic}
            parts = ", ".join(f"{purpose} {size / 1e9:,.3f}" for purpose, size in sizes.items() if size)
            amounts.append(f"{sum(sizes.values()) / 1e9:,.3f} GB {where}{f' ({parts})' if parts else ''}")
        return f"sent in a step by all devices: {'; '.join(amounts)}"

    def _told_context(self) -> str:
        gathers = [one for one in self.context if one.phase == "forward"]
        sent = sum(one.bytes for one in self.context) / 1e6
        return (
            f"sequences are divided over {self.mesh.cp} devices: {len(gathers)} attentions gather keys "
            f"and values, and scatter their gradients, {sent:,.3f} MB for each microbatch"
        )

    def _told_shards(self, sharding: Sharding) -> Iterator[str]:
        layers = sum(shard.kind != "sequence" for shard in sharding.shards)
        yield (
            f"each stage is of {self.mesh.tp} devices, which divide {layers} layers; "
            "seconds and bytes are of one of them"
        )
        alike: dict[str, list[str]] = {}
        for shard in sharding.shards:
            axes = ", ".join(
                f"{name} {'whole' if dim is None else f'axis {dim}'}"
                for name, dim in shard.parameters.items()
            )
            moved = ", ".join(
                f"{one.phase} {one.kind} {one.bytes / 1e6:,.3f} MB" for one in shard.collectives
            )
            line = f"{shard.name}: {shard.kind} ({axes}){': ' if moved else ''}{moved}"
            alike.setdefault(_NUMBER.sub(r"\1*", line), []).append(line)
        for name, reason in sharding.whole:
            line = f"{name}: whole, {reason}"
            alike.setdefault(_NUMBER.sub(r"\1*", line), []).append(line)
        for pattern, lines in alike.items():
            yield f"  {lines[0]}" if len(lines) == 1 else f"  {len(lines)} x {pattern}"
        if sharding.sequence:
            yield f"  {len(sharding.sequence)} operations give shards of the sequence"
        if sharding.plan.gap:
            yield f"  up to {sharding.plan.gap:.1%} of a microbatch's time may be left in other shards"


def _stage_record(stage: Stage) -> dict[str, Any]:
    sums = {"seconds": stage.seconds, "memory_bytes": stage.memory_bytes}
    return dataclasses.asdict(stage) | sums
