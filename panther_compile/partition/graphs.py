"""A model read once, and its flow graph as one device sees it, for any number of devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx, nn

from panther_compile.errors import ConfigError, some_names
from panther_compile.partition.graph.capture import Captured, capture, example_arguments
from panther_compile.partition.graph.context import count_positions, divide_sequence
from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.graph.flow_graph import (
    Costs,
    build_flow_graph,
    find_constants,
    shared_parameters,
)
from panther_compile.partition.graph.fp8 import keep_copies, mark_products
from panther_compile.partition.graph.fused import fuse
from panther_compile.partition.graph.hardware import Context, Hardware
from panther_compile.partition.graph.measure import Measured, measure_nodes
from panther_compile.partition.graph.observe import Observed, fold_shapes, observe, observe_backward
from panther_compile.partition.options import AUTO
from panther_compile.partition.replicas import StateSharding, share_states
from panther_compile.partition.shards.collectives import place_collectives
from panther_compile.partition.shards.device_flow import per_device_flow
from panther_compile.partition.shards.label import find_sharding_plan
from panther_compile.partition.shards.problem import ALL_REDUCE, Prices, Problem, Ring, build_problem
from panther_compile.partition.shards.rules import KnownRules
from panther_compile.partition.shards.sharding_plan import ShardingPlan
from panther_compile.partition.stages.mesh_search import Outline
from panther_compile.partition.stages.units import find_units, recompute_units

# What the memory of the whole model costs when shards are chosen, in times of what all its work and an
# all-reduce of every tensor take: one price after the other where it is short, the last to save all it can.
_PRICES = (Prices(), Prices(1.0, 1.0), Prices(1000.0, 1000.0))
# The first one where sequences are asked for.
_SEQUENCES = Prices(kept=10.0)


_Recomputed = tuple[FlowGraph, int]


@dataclass(frozen=True)
class Graphs:
    """The model, and its flow graph with tied parameters free or kept together; of `read_graphs`.

    Attributes:
        name: of the model, in messages and reports.
        captured: the model.
        notes: of `observe`, fused where asked for; of this device, where devices divide a sequence.
        costs: how seconds and bytes are counted.
        constants: nodes that are no vertices.
        persistent: names in the model's state dict.
        flows: by what is done with tied parameters.
        sequence_parallel: see `partition_model`.
        positions: of a device, where devices divide a sequence.
        divide: where units end in a flow graph; see `find_units`.
    """

    name: str
    captured: Captured
    notes: Mapping[fx.Node, Observed]
    costs: Costs
    constants: tuple[fx.Node, ...]
    persistent: frozenset[str]
    flows: Mapping[str, FlowGraph]
    sequence_parallel: bool | str = "auto"
    positions: int | None = None
    divide: Callable[[FlowGraph], tuple[int, ...]] = find_units
    _known: KnownRules = field(default_factory=KnownRules)
    _per_device_flows: dict[tuple[Ring, Prices], tuple[FlowGraph, ...]] = field(default_factory=dict)
    _in_context: dict[Context, "Graphs"] = field(default_factory=dict)
    _shared: dict[tuple[object, ...], tuple[tuple[FlowGraph, int, int], ...]] = field(default_factory=dict)
    _recomputed: dict[tuple[Ring, Prices, str | float], tuple[tuple[FlowGraph, int], ...]] = field(
        default_factory=dict
    )

    def in_context(self, context: Context) -> "Graphs":
        """The model as one of the devices that divide its sequences sees it; read once.

        Raises:
            MeshError: there is no sequence that can be divided so.
        """
        if context == self.costs.context:
            return self
        if context not in self._in_context:
            self._in_context[context] = reweigh(
                replace(
                    self,
                    notes=divide_sequence(self.captured, self.notes, context.devices),
                    positions=count_positions(self.captured, context.devices) // context.devices,
                ),
                replace(self.costs, context=context),
            )
        return self._in_context[context]

    @cached_property
    def outline(self) -> Outline:
        """The outline of the model, by which meshes are compared before any is cut."""
        return Outline(next(iter(self.flows.values())))

    def prices(self, tp: int) -> tuple[Prices, ...]:
        """Prices of memory when sharding, in the order to be tried."""
        if tp == 1:
            return _PRICES[:1]
        return (_SEQUENCES, *_PRICES[1:]) if self.sequence_parallel is True else _PRICES

    def per_device_flows(self, ring: Ring, prices: Prices) -> tuple[FlowGraph, ...]:
        """The flow graphs as one device of a stage sees them, before the stages are known."""
        if ring.tp == 1:
            return tuple(self.flows.values())
        if (ring, prices) not in self._per_device_flows:
            problem, plan = self.shard(ring, prices)
            placed = place_collectives(problem, plan)
            self._per_device_flows[ring, prices] = tuple(
                per_device_flow(problem, plan, flow, placed) for flow in self.flows.values()
            )
        return self._per_device_flows[ring, prices]

    def shard(
        self, ring: Ring, prices: Prices, stage_of: Mapping[str, int] | None = None
    ) -> tuple[Problem, ShardingPlan]:
        """How the model is sharded over the devices of a stage, before and after the stages are known."""
        flow = next(iter(self.flows.values()))
        seconds = sum(one.seconds for one in flow.work.values())
        seconds += sum(ring.seconds(ALL_REDUCE, one.bytes) for one in flow.values)
        memory = sum(one.saved_bytes for one in flow.work.values())
        memory += sum(one.bytes + one.trained_bytes for one in flow.holdings)
        problem = build_problem(
            self.captured,
            self.notes,
            self.costs,
            ring,
            self.constants,
            stage_of,
            sequence=bool(self.sequence_parallel) and (self.positions or 0) % ring.tp == 0,
            prices=Prices(*(price * seconds / max(memory, 1) for price in (prices.kept, prices.held))),
            known=self._known,
        )
        return problem, find_sharding_plan(problem)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Ends of units in each flow graph."""
        return tuple(map(self.divide, self.flows.values()))

    def recomputed_flows(self, ring: Ring, prices: Prices, kind: str | float) -> tuple[_Recomputed, ...]:
        """The flow graphs of a device with activation checkpointing, and the bytes of the largest unit."""
        key = ring, prices, kind
        if key not in self._recomputed:
            flows = self.per_device_flows(ring, prices)
            self._recomputed[key] = tuple(
                recompute_units(flow, units, kind) for flow, units in zip(flows, self.units, strict=True)
            )
        return self._recomputed[key]

    def shared_flows(
        self, ring: Ring, prices: Prices, kind: str | float, sharding: StateSharding
    ) -> tuple[tuple[FlowGraph, int, int], ...]:
        """The same with what one replica holds, and bytes of units computed again and of units gathered."""
        key = ring, prices, kind, replace(sharding, replicas=1)
        if key not in self._shared:
            found = []
            flows = self.recomputed_flows(ring, prices, kind)
            for (flow, recomputed), units in zip(flows, self.units, strict=True):
                shared, gathered = share_states(flow, sharding, units)
                found.append((shared, recomputed, gathered))
            self._shared[key] = tuple(found)
        return self._shared[key]


def read_graphs(
    model: nn.Module,
    example_inputs: Any,
    boundaries: Sequence[str],
    costs: Costs,
    tied: str = "auto",
    profile: bool | Mapping[str, float] = False,
    sequence_parallel: bool | str = "auto",
) -> Graphs:
    """Read the model and weigh its graph.

    Args:
        model: left as it is.
        example_inputs: of one microbatch.
        boundaries: modules to keep whole.
        costs: how seconds and bytes are counted; what is measured is added to them.
        tied: see `partition_model`.
        profile: likewise.
        sequence_parallel: likewise.

    Raises:
        CaptureError: no graph can be read.
        ConfigError: a profile names what is no node.
    """
    captured = capture(model, *example_arguments(example_inputs), boundaries=boundaries)
    notes: dict[fx.Node, Observed] = observe(captured)
    fold_shapes(captured, notes)
    if costs.hardware.rates and costs.training:
        observe_backward(captured, notes)
    if costs.products == "fp8":
        mark_products(captured, notes, keeps=costs.keeps == "fp8")
    if costs.compiled:
        notes = fuse(captured, notes)
    elif costs.keeps == "fp8":
        notes = keep_copies(notes)
    if profile is True:
        costs = replace(costs, measured=measure_nodes(captured, training=costs.training))
    elif isinstance(profile, Mapping):
        nodes = {node.name for node in captured.graph_module.graph.nodes}
        if unknown := [str(name) for name in profile if name not in nodes]:
            raise ConfigError(f"profile names {some_names(unknown)}; the nodes are {some_names(nodes)}")
        costs = replace(costs, measured=Measured(profile))
    constants = tuple(find_constants(captured, notes))
    persistent = frozenset(model.state_dict(keep_vars=True))
    flows = _weigh(captured, notes, costs, tied)
    return Graphs(
        name=type(model).__name__,
        captured=captured,
        notes=notes,
        costs=costs,
        constants=constants,
        persistent=persistent,
        flows=flows,
        sequence_parallel=sequence_parallel,
    )


def reweigh(graphs: Graphs, costs: Costs) -> Graphs:
    """The same model with other costs, as of other hardware; its graph is not read again."""
    tied = AUTO if len(graphs.flows) > 1 else next(iter(graphs.flows))
    flows = _weigh(graphs.captured, graphs.notes, costs, tied)
    return Graphs(
        name=graphs.name,
        captured=graphs.captured,
        notes=graphs.notes,
        costs=costs,
        constants=graphs.constants,
        persistent=graphs.persistent,
        flows=flows,
        sequence_parallel=graphs.sequence_parallel,
        positions=graphs.positions,
        divide=graphs.divide,
        _known=graphs._known,
    )


def with_paces(graphs: Graphs, places: Sequence[Hardware]) -> Graphs:
    """The same model where each place along a pipeline has hardware of its own.

    Shards are chosen by the costs that there are, for all places alike.
    """
    at = {one: reweigh(graphs, replace(graphs.costs, hardware=one)).flows for one in dict.fromkeys(places)}

    def paces(tied: str, place: Hardware) -> tuple[float, ...]:
        pairs = zip(at[place][tied].work.values(), graphs.flows[tied].work.values(), strict=True)
        return tuple(own.seconds / work.seconds if work.seconds else 1.0 for own, work in pairs)

    flows = {
        tied: replace(flow, paces=tuple(paces(tied, place) for place in places))
        for tied, flow in graphs.flows.items()
    }
    return replace(graphs, flows=flows)


def _weigh(
    captured: Captured, notes: Mapping[fx.Node, Observed], costs: Costs, tied: str
) -> dict[str, FlowGraph]:
    """The flow graph with tied parameters free, and with their users kept together."""
    free = build_flow_graph(captured, notes, costs)
    several = shared_parameters(free)
    flows = {}
    if tied != "together" or not several:
        flows["shared"] = free
    if tied != "shared" and several:
        flows["together"] = build_flow_graph(captured, notes, costs, together=several)
    return flows
