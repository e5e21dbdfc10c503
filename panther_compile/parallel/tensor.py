"""Shards of a stage over the tp axis: plain local parameters, and collectives where the plan has them.

The graph of a stage is written anew for one rank. Where a tensor lies otherwise than an operation needs it, a
function of `shard_functions` stands between them.

Before, a column layer, a row layer and a sum:

    x ──► linear(w1, b1) ──► gelu ──► linear_1(w2, b2) ──► add(., x)
After, with w1, b1 and w2 cut to what this rank has:
    x ──► sum_gradients ──► linear(w1, b1) ──► gelu ──► linear_1(w2) ──► sum_shards ──► + b2 ──► add(., x)

Nothing in the result is a DTensor: DDP and `fully_shard` take it as any module. All ranks of a group must
draw the same random numbers (`share_random_state`): whole tensors are dropped out alike on each, and shards
each by its part of the mask of the whole.
"""

from itertools import islice
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

from panther_compile.errors import MeshError
from panther_compile.names import attribute, is_persistent, leave_out_of_state
from panther_compile.parallel.shard_functions import (
    embed_vocabulary,
    gather_shards,
    join_gradients,
    pivoted_columns,
    pivoted_rows,
    scatter_gradients,
    scatter_shards,
    sum_gradients,
    sum_shards,
    take_shard,
)
from panther_compile.partition.result import Partition
from panther_compile.partition.shards.layers import COLUMN, VOCABULARY, ShardableLayer, local_pivots
from panther_compile.partition.shards.placements import Placement, Replicate, Shard
from panther_compile.partition.shards.problem import tensor_key
from panther_compile.partition.shards.rules import (
    argument,
    aten,
    has_shape,
    local_arguments,
    shape,
)
from panther_compile.partition.shards.sharding_plan import SEQUENCE, SHARDED, ShardingPlan, Step


def shard_stage(
    stage: fx.GraphModule, part: Partition, stage_index: int, tp: dist.ProcessGroup | DeviceMesh
) -> fx.GraphModule:
    """A stage as this rank of a tensor-parallel group runs it.

    Args:
        stage: of `part.split()`, with whole parameters; left as it is. What is not sharded is shared with it.
        part: the plan.
        stage_index: of the stage.
        tp: the ranks that share the stage, as a group or a mesh of one axis.

    Returns:
        A module of the same inputs and outputs, whole tensors the same on every rank, whose parameters have
        the user's names and hold this rank's shards. Their gradients are those of the shards; gradients of
        whole parameters are the same on every rank.

    Raises:
        MeshError: the group is not of the plan's size, or the stage is not the plan's.
    """
    group = tp.get_group() if isinstance(tp, DeviceMesh) else tp
    if group.size() != part.mesh.tp:
        raise MeshError(f"the tp group is of {group.size()} ranks, and the partition of {part.mesh.tp}")
    wanted = [spec.name for spec in part.stages[stage_index].inputs]
    found = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
    if found != wanted:
        raise MeshError(f"stage {stage_index} takes {wanted}, and the module given takes {found}")
    if part.sharding is None:
        return stage
    return _Rewriter(stage, part, stage_index, group).module()


def parameter_layouts(part: Partition) -> dict[str, Shard | None]:
    """How each parameter of the stages lies on the tp axis; None if every rank has all of it."""
    stored = part.sharding.plan.parameters if part.sharding is not None else {}
    return {name: stored.get(name) for stage in part.stages for name in stage.parameters}


def tensor_placements(part: Partition) -> dict[str, dtensor.Placement]:
    """The placement of each parameter as a DTensor over the tp axis, for `DTensor.from_local`."""

    def placement(layout: Shard | None) -> dtensor.Placement:
        if layout is None:
            return dtensor.Replicate()
        return (
            dtensor.Shard(layout.dim)
            if layout.blocks == 1
            else _StridedShard(layout.dim, split_factor=layout.blocks)
        )

    return {name: placement(layout) for name, layout in parameter_layouts(part).items()}


def join_shards(tensor: Tensor, layout: Shard, tp: dist.ProcessGroup) -> Tensor:
    """The whole of a tensor that the ranks of a group have shards of; every rank must call this."""
    shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(tp.size())]
    dist.all_gather(shards, tensor.contiguous(), group=tp)
    return layout.full(shards)


def share_random_state(device: torch.device, tp: dist.ProcessGroup) -> None:
    """Let the ranks of a group go on with the random numbers of the first, on the CPU and on a device."""

    def same(state: Tensor) -> Tensor:
        carried = state.to(device)
        dist.broadcast(carried, group=tp, group_src=0)
        return carried.cpu()

    torch.set_rng_state(same(torch.get_rng_state()))
    if device.type != "cpu":
        module = torch.get_device_module(device.type)
        module.set_rng_state(same(module.get_rng_state(device)), device)


class _Rewriter:
    """Writes the graph of one stage for one rank."""

    def __init__(self, stage: fx.GraphModule, part: Partition, index: int, group: dist.ProcessGroup) -> None:
        assert part.sharding is not None
        self._stage, self._index = stage, index
        self._plan: ShardingPlan = part.sharding.plan
        self._own = frozenset(part.stages[index].nodes)
        self._tp, self._rank, self._group = group.size(), group.rank(), group.group_name
        self._graph = fx.Graph()
        self._made: dict[tuple[str, Placement], fx.Node] = {}
        self._tensors: dict[str, Any] = {}
        metas = {node.name: node.meta for node in part.captured.graph_module.graph.nodes}
        for node in stage.graph.nodes:
            if node.op == "placeholder":
                node.meta["tensor"] = metas[node.name]["tensor"]

    def module(self) -> fx.GraphModule:
        """The stage of this rank."""
        inputs = [node for node in self._stage.graph.nodes if node.op == "placeholder"]
        for node in inputs:  # first: a result of this graph may not have the name of an input
            self._made[tensor_key(node), Replicate.PLAIN] = self._graph.node_copy(node)
        self._join()
        for node in self._stage.graph.nodes:
            if node in inputs:
                continue
            step = self._plan.steps.get(node.name) if node.name in self._own else None
            if node.name in self._own and node.name in self._plan.absorbed:
                continue
            before = len(self._graph.nodes)
            if step is None:
                if node.op == "get_attr" and (tensor_key(node), Replicate.PLAIN) in self._made:
                    continue
                made = self._graph.node_copy(node, lambda operand: self._get(operand, Replicate.PLAIN))
                self._read(node)
            elif step.kind in (SHARDED, SEQUENCE):
                made = self._sharded(node, step)
            else:
                made = self._layer(node, step)
            self._made[tensor_key(node), self._lies(node) or Replicate.PLAIN] = made
            for new in islice(reversed(self._graph.nodes), len(self._graph.nodes) - before):
                new.meta["custom"] = node.meta.get("custom", {})  # of the user's own checkpoint calls
        self._graph.lint()
        module = fx.GraphModule(self._tensors, self._graph, class_name=f"Stage{self._index}")
        module.training = self._stage.training
        for name, _ in module.named_buffers():
            if not is_persistent(self._stage, name):
                leave_out_of_state(module, name)
        return module

    def _join(self) -> None:
        """Read the parameters that are used on a sequence: the gradients of all come in one message."""
        joined: dict[torch.dtype, dict[str, fx.Node]] = {}
        for node in self._stage.graph.nodes:
            step = self._plan.steps.get(node.name) if node.name in self._own else None
            if step is None:
                continue
            for operand in node.all_input_nodes:
                if step.needs.get(operand.name) is Replicate.BUCKETED_GRADIENT:
                    dtype = attribute(self._stage, str(operand.target)).dtype
                    joined.setdefault(dtype, {})[tensor_key(operand)] = operand
        for reads in joined.values():
            for key, node in reads.items():
                self._read(node)
                self._made[key, self._lies(node) or Replicate.PLAIN] = self._graph.node_copy(node)
            wholes = tuple(self._get(node, Replicate.PLAIN) for node in reads.values())
            results = self._graph.call_function(join_gradients, (wholes, self._group))
            for place, key in enumerate(reads):
                self._made[key, Replicate.BUCKETED_GRADIENT] = self._graph.call_function(
                    getitem, (results, place)
                )

    def _lies(self, node: fx.Node) -> Shard | None:
        return self._plan.shard_of(node) if node.op == "get_attr" or node.name in self._own else None

    def _read(self, node: fx.Node) -> None:
        """Hold what a node reads: this rank's shard of a parameter, or the tensor or module itself."""
        name = str(node.target)
        if node.op == "call_module":
            self._tensors[name] = self._stage.get_submodule(name)
        if node.op != "get_attr" or name in self._tensors:
            return
        tensor = attribute(self._stage, name)
        layout = self._plan.parameters.get(name)
        if layout is not None:
            own = layout.local(tensor.detach(), self._tp, self._rank)
            tensor = nn.Parameter(own, requires_grad=tensor.requires_grad)
        self._tensors[name] = tensor

    def _get(self, node: fx.Node, state: Placement) -> fx.Node:
        """A tensor in a state; it is brought there once."""
        key, lies = tensor_key(node), self._lies(node)
        if not has_shape(node):
            return self._made[key, lies or Replicate.PLAIN]
        if (key, state) in self._made:
            return self._made[key, state]
        place = (self._tp, self._rank, self._group)
        if lies is not None and (key, Replicate.PLAIN) not in self._made:
            arguments = (self._made[key, lies], lies.dim, lies.blocks, *place)
            self._made[key, Replicate.PLAIN] = self._graph.call_function(gather_shards, arguments)
        whole = self._made[key, Replicate.PLAIN]
        if state is Replicate.PARTIAL_GRADIENT and lies is not None and self._plan.lies_on_sequence(node):
            layout = lies.dim, lies.blocks, self._tp, self._group
            own = self._made[key, lies]
            self._made[key, state] = self._graph.call_function(scatter_gradients, (whole, own, *layout))
        elif state is Replicate.PARTIAL_GRADIENT:
            self._made[key, state] = self._graph.call_function(sum_gradients, (whole, self._group))
        elif isinstance(state, Shard):
            arguments = (whole, state.dim, state.blocks, *place)
            self._made[key, state] = self._graph.call_function(take_shard, arguments)
        return self._made[key, state]

    def _sharded(self, node: fx.Node, step: Step) -> fx.Node:
        """An operation on shards."""
        assert step.out is not None
        arguments = local_arguments(node, step.out, self._tp)
        args, kwargs = fx.node.map_arg(
            (arguments, node.kwargs), lambda operand: self._get(operand, step.needs[operand.name])
        )
        if node.target is aten.dropout.default and argument(node, 1, "p") > 0:
            # This rank takes its part of the mask of the whole: other parts are dropped otherwise.
            ones = self._graph.call_function(aten.new_ones.default, (args[0], shape(node)))
            mask = self._graph.call_function(node.target, (ones, *args[1:]), kwargs)
            place = (step.out.dim, step.out.blocks, self._tp, self._rank, self._group)
            args, kwargs = (args[0], self._graph.call_function(take_shard, (mask, *place))), {}
            return self._graph.create_node(node.op, aten.mul.Tensor, args, kwargs, node.name)
        return self._graph.create_node(node.op, node.target, args, kwargs, node.name)

    def _layer(self, node: fx.Node, step: Step) -> fx.Node:
        """A layer by columns, rows or vocabulary."""
        layer = step.layer
        assert layer is not None
        # The graph of the stage is a copy of the one that was labelled, with the same names.
        reads = {one.name: one for member in self._members(layer) for one in member.all_input_nodes}
        x = self._get(reads[layer.x.name], step.needs[layer.x.name])
        weight = self._get(reads[layer.weight.name], step.needs[layer.weight.name])
        bias = None
        if layer.bias is not None:
            bias = self._get(reads[layer.bias.name], step.needs[layer.bias.name])
        if step.kind == COLUMN:
            return self._column(node, layer, x, weight, bias)
        if step.kind == VOCABULARY:
            rows = shape(layer.weight)[0] // self._tp
            padding = layer.node.args[2] if len(layer.node.args) > 2 else -1
            term = self._graph.call_function(embed_vocabulary, (x, weight, rows * self._rank, padding))
        elif layer.form == "pivoted":
            near, far, columns, offset = local_pivots(layer.pivots, shape(layer.x)[-1], self._tp, self._rank)
            bounds = [(one.start, one.stop) for one in (near, far, columns)]
            term = self._graph.call_function(pivoted_rows, (x, weight, *bounds, offset))
        else:
            term = self._product(layer, x, weight)
        if step.out is None:
            summed = self._graph.call_function(sum_shards, (term, self._group))
        else:
            place = (step.out.dim, step.out.blocks, self._tp, self._group)
            summed = self._graph.call_function(scatter_shards, (term, *place))
        return summed if bias is None else self._graph.call_function(aten.add.Tensor, (summed, bias))

    def _column(
        self, node: fx.Node, layer: ShardableLayer, x: fx.Node, weight: fx.Node, bias: fx.Node | None
    ) -> fx.Node:
        if layer.form == "pivoted":
            (start, stop), size = layer.pivots, shape(layer.x)[-1]
            others = (stop, size) if start == 0 else (0, start)
            first = start + (stop - start) // self._tp * self._rank
            return self._graph.call_function(pivoted_columns, (x, weight, first, others))
        if bias is None:
            return self._product(layer, x, weight)
        args = (x, weight, bias) if node.target is aten.linear.default else (bias, x, weight)
        return self._graph.call_function(node.target, args)  # type: ignore[arg-type]

    def _product(self, layer: ShardableLayer, x: fx.Node, weight: fx.Node) -> fx.Node:
        """The product of both, without a bias."""
        target = aten.matmul.default if layer.out_dim == 1 else aten.linear.default
        return self._graph.call_function(target, (x, weight))

    def _members(self, layer: ShardableLayer) -> list[fx.Node]:
        names = {member.name for member in layer.members}
        return [node for node in self._stage.graph.nodes if node.name in names]
