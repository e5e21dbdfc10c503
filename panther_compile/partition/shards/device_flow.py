"""The flow graph of one device of a stage: sharded work is divided, and collectives take time."""

from dataclasses import replace

from panther_compile.partition.graph.flow import FlowGraph, Work
from panther_compile.partition.graph.flow_graph import add_work
from panther_compile.partition.shards.collectives import Placed
from panther_compile.partition.shards.problem import Problem
from panther_compile.partition.shards.sharding_plan import ShardingPlan


def per_device_flow(problem: Problem, plan: ShardingPlan, flow: FlowGraph, placed: list[Placed]) -> FlowGraph:
    """The flow graph of one device: sharded work is divided, and collectives take time."""
    nodes = {node.name: node for node in problem.graph_module.graph.nodes}
    spent: dict[str, Work] = {}
    for one in placed:
        seconds = problem.ring.seconds(one.collective.kind, one.collective.bytes)
        is_forward = one.collective.phase == "forward"
        work = Work(seconds * is_forward, seconds * (not is_forward))
        spent[one.node.name] = add_work(spent.get(one.node.name, Work()), work)
    work_of = {}
    for vertex, names in flow.members.items():
        total = Work()
        for name in names:
            divided = name in plan.steps or name in plan.absorbed
            own = (problem.costs.divided_work if divided else problem.costs.replicated_work)[nodes[name]]
            total = add_work(add_work(total, own), spent.get(name, Work()))
        work_of[vertex] = total
    holdings = tuple(
        replace(
            held,
            bytes=held.bytes // plan.tp,
            trained_bytes=held.trained_bytes // plan.tp,
            gradient_bytes=held.gradient_bytes // plan.tp,
        )
        if held.name in plan.parameters
        else held
        for held in flow.holdings
    )
    values = tuple(
        replace(value, kept_bytes=value.bytes // plan.tp) if plan.shard_of(nodes[value.name]) else value
        for value in flow.values
    )
    return replace(flow, work=work_of, values=values, holdings=holdings)
