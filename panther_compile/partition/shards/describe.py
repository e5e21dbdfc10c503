"""A sharding plan in records, for the user: which layers are sharded, and why others are not."""

from dataclasses import dataclass

from torch import fx

from panther_compile.partition.records import Collective, ShardedLayer
from panther_compile.partition.shards.collectives import Placed, operand_placements
from panther_compile.partition.shards.layers import uneven_reason
from panther_compile.partition.shards.problem import Problem, tensor_key
from panther_compile.partition.shards.rules import aten
from panther_compile.partition.shards.sharding_plan import SEQUENCE, ShardingPlan

_UNSHARDED_LAYERS = (aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose2d, aten.lstm, aten.gru)


@dataclass(frozen=True)
class Sharding:
    """How the stages of a partition are divided over the tp axis.

    Attributes:
        plan: of the whole graph.
        shards: layers that are divided.
        whole: other layers, and why.
        collectives: of all stages.
        sequence: nodes whose results lie in shards of a sequence.
        sequence_fits: whether any could.
    """

    plan: ShardingPlan
    shards: tuple[ShardedLayer, ...]
    whole: tuple[tuple[str, str], ...]
    collectives: tuple[Collective, ...]
    sequence: tuple[str, ...]
    sequence_fits: bool


def describe_shards(problem: Problem, plan: ShardingPlan, placed: list[Placed]) -> tuple[ShardedLayer, ...]:
    """A record for each layer that is sharded, for other parameters that are, and for those on a sequence."""
    found, named = [], set[str]()
    for node in problem.graph_module.graph.nodes:
        step = plan.steps.get(node.name)
        if step is None:
            continue
        reads = [operand for operand, _ in operand_placements(node, step) if problem.is_parameter(operand)]
        names = [tensor_key(operand) for operand in reads]
        on_sequence = step.kind == SEQUENCE and names
        if step.layer is None and not on_sequence and not any(name in plan.parameters for name in names):
            continue
        name = step.layer.name if step.layer else names[0].removesuffix(".weight")
        named.update(names)
        stored = {one: plan.parameters.get(one) for one in names}
        found.append(
            ShardedLayer(
                name=name,
                kind=step.kind,
                node=node.name,
                parameters={one: shard.dim if shard else None for one, shard in stored.items()},
                blocks=max((shard.blocks for shard in stored.values() if shard), default=1),
                collectives=tuple(one.collective for one in placed if one.node is node),
            )
        )
    return tuple(found)


def explain_whole(problem: Problem, plan: ShardingPlan) -> tuple[tuple[str, str], ...]:
    """Layers that stay whole, and why."""
    found, tp = [], problem.ring.tp
    for node in problem.graph_module.graph.nodes:
        if node in problem.layers and node.name not in plan.steps:
            layer = problem.layers[node]
            uneven = uneven_reason(layer, tp)
            if uneven and " and " not in uneven and layer.form != "embedding":
                uneven += "; the other way costs more than it saves"
            found.append((layer.name, uneven or "its collectives take longer than the work they divide"))
        elif getattr(node.target, "overloadpacket", None) in _UNSHARDED_LAYERS:
            found.append((_layer_name(problem, node), f"{node.target} is not divided"))
        elif node in problem.positions.uneven and node.name not in plan.steps:
            sizes = " and ".join(map(str, problem.positions.uneven[node]))
            found.append((_layer_name(problem, node), f"its axes of {sizes} do not divide by {tp}"))
        elif node.op == "call_module":
            found.append((str(node.target), "a module kept whole shows no operations to divide"))
    return tuple(dict.fromkeys(found))


def _layer_name(problem: Problem, node: fx.Node) -> str:
    """The name of its first parameter, without the last part if this is `weight`."""
    weights = [one for one in node.all_input_nodes if problem.is_parameter(one)]
    return tensor_key(weights[0]).removesuffix(".weight") if weights else node.name
