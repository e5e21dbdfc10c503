"""The stages become modules that own their parameters under the user's names; exact.

Before, one graph, cut between `relu` and `fc2`:

    x ──► fc1 ──► relu ──► fc2 ──► add ──► out          x also goes to add
After, two:
    stage 0:  x ──► fc1 ──► relu                        holds fc1.weight, fc1.bias
              returns (x, relu)                         x is handed on
    stage 1:  (x, relu) ──► fc2 ──► add ──► out         holds fc2.weight, fc2.bias

The tensors are the model's own: training the stages trains the model. (`torch.fx.passes.split_module`
leaves every parameter in the parent and passes it as an argument.)
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from panther_compile.names import attribute, leave_out_of_state
from panther_compile.partition.graph.capture import CallForm, Captured

aten: Any = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


class StagedModel(nn.Module):
    """The stages one after the other in one process, called as the model is.

    Attributes:
        stages: one graph module each; tensors in, a tuple of tensors out.
    """

    def __init__(self, stages: Sequence[fx.GraphModule], form: CallForm) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._form = form

    def flatten_inputs(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """What the first stage takes, from a call as the user writes it."""
        return self._form.flatten(args, kwargs)

    def unflatten_outputs(self, outputs: Sequence[Tensor]) -> Any:
        """The model's result, from what the last stage returns."""
        return self._form.unflatten(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every stage."""
        values: Sequence[Tensor] = self.flatten_inputs(*args, **kwargs)
        for stage in self.stages:
            values = stage(*values)
        return self.unflatten_outputs(values)


def crossing_names(captured: Captured, stage_of: Mapping[str, int], stages: int) -> list[tuple[str, ...]]:
    """Nodes whose tensors cross the cut behind each stage but the last, in the order of the graph.

    Args:
        captured: the model.
        stage_of: stage of each node that belongs to one, by name.
        stages: number of stages.
    """
    crossing: list[tuple[str, ...]] = []
    for cut in range(1, stages):
        names = []
        for node in captured.graph_module.graph.nodes:
            made = -1 if node.op == "placeholder" else stage_of.get(node.name)
            if made is None or made >= cut:
                continue
            used = (stages - 1 if user.op == "output" else stage_of[user.name] for user in node.users)
            if max(used, default=-1) >= cut:
                names.append(node.name)
        crossing.append(tuple(names))
    return crossing


def split(
    captured: Captured,
    stage_of: Mapping[str, int],
    crossing: Sequence[Sequence[str]],
    constants: Collection[fx.Node],
    persistent: Collection[str],
) -> StagedModel:
    """Make the modules.

    Args:
        captured: the model.
        stage_of: stage of each node that belongs to one, by name.
        crossing: of `crossing_names`.
        constants: nodes that every stage computes that uses them.
        persistent: names of the tensors in the model's state dict.
    """
    stages = len(crossing) + 1
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    inputs = [name for name, node in nodes.items() if node.op == "placeholder"]
    made = []
    for stage in range(stages):
        own = [node for name, node in nodes.items() if stage_of.get(name) == stage]
        received = crossing[stage - 1] if stage else inputs
        returned = [nodes[name] for name in crossing[stage]] if stage < stages - 1 else None
        made.append(
            _stage_module(captured, own, [nodes[name] for name in received], returned, constants, stage)
        )
    for module in made:
        _mark_buffers(module, persistent)
    return StagedModel(made, captured.form)


def _stage_module(
    captured: Captured,
    own: Sequence[fx.Node],
    received: Sequence[fx.Node],
    returned: Sequence[fx.Node] | None,
    constants: Collection[fx.Node],
    stage: int,
) -> fx.GraphModule:
    """One stage; `returned` is None for the last, which returns what the model does."""
    source = captured.graph_module
    output = next(node for node in reversed(source.graph.nodes) if node.op == "output")
    ends = list(output.all_input_nodes) if returned is None else list(returned)
    needed = _with_constants([*own, *ends], own, constants)
    graph, copies, tensors = copied_part(source, received, needed)
    for copy in copies.values():
        if copy.target in _VIEWS:  # recorded for strides, which differ in a stage and in a shard
            copy.target = aten.reshape.default
    if returned is None:
        graph.output(tuple(copies[node] for node in output.args[0]))
    else:
        # What is sent arrives contiguous, so it leaves so: one process sees what several would.
        for node in returned:
            if node not in received:
                copies[node] = graph.call_method("contiguous", (copies[node],))
        graph.output(tuple(copies[node] for node in returned))
    graph.lint()
    module = fx.GraphModule(tensors, graph, class_name=f"Stage{stage}")
    module.training = source.training
    return module


def copied_part(
    source: fx.GraphModule, given: Iterable[fx.Node], needed: Collection[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], dict[str, Any]]:
    """A part of a graph as one of its own, which has no output yet.

    Args:
        source: the whole one.
        given: nodes whose results are the part's inputs.
        needed: the other nodes of the part, those that it reads included.

    Returns:
        The graph, the copy of each node, and what the graph reads and calls by name.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    held: dict[str, Any] = {}
    for node in source.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                held[str(node.target)] = attribute(source, str(node.target))
    return graph, copies, held


def _with_constants(
    wanted: Sequence[fx.Node], own: Sequence[fx.Node], constants: Collection[fx.Node]
) -> set[fx.Node]:
    """The stage's own nodes, and the reads and constants that they or its results depend on."""
    found, queue = set(own), list(wanted)
    while queue:
        node = queue.pop()
        for other in (node, *(node.all_input_nodes if node in found else ())):
            if other not in found and (other.op == "get_attr" or other in constants):
                found.add(other)
                queue.append(other)
    return found


def _mark_buffers(module: fx.GraphModule, persistent: Collection[str]) -> None:
    """Keep out of the state dict what the model keeps out of its own."""
    for name, _ in list(module.named_buffers()):
        if name not in persistent:
            leave_out_of_state(module, name)
