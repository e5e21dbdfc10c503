"""The problem of which shards to choose, for a model on a device, and what a plan for it costs."""

from panther_compile.partition import Hardware, Link
from panther_compile.partition.graph.capture import capture, example_arguments
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graph.observe import fold_shapes, observe
from panther_compile.partition.shards.collectives import place_collectives
from panther_compile.partition.shards.problem import Ring, build_problem


def device(flops=1e12, memory=1e12, link=1e11, latency=0.0, launch=0.0):
    links = Link(link, latency), Link(link, latency)
    return Hardware("device", flops, memory, 10**12, *links, launch_seconds=launch)


def read(model, inputs):
    """The graph of a model and what is known of its nodes."""
    captured = capture(model, *example_arguments(inputs))
    notes = observe(captured)
    fold_shapes(captured, notes)
    return captured, notes


def problem_of(graph, hardware, tp=2, **options):
    return build_problem(*graph, Costs(hardware), Ring(tp, hardware.link(0, 1)), **options)


def price(problem, plan):
    """Seconds of a microbatch, from the work of each node and the collectives that will run."""
    shared = set(plan.steps) | plan.absorbed
    graph = problem.graph_module.graph
    work = sum(
        (problem.costs.divided_work if node.name in shared else problem.costs.replicated_work)[node].seconds
        for node in graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    )
    placed = place_collectives(problem, plan)
    return work + sum(problem.ring.seconds(one.collective.kind, one.collective.bytes) for one in placed)
