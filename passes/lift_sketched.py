"""Sketched linear layers that Dynamo took apart become module calls again; exact.

Before:
    %reshape : call_method[target=reshape](args = (%l_x_, -1, 16))
    %split_with_sizes : call_method[target=split_with_sizes](args = (%reshape, (4, 12), -1))
    %first : call_function[target=operator.getitem](args = (%split_with_sizes, 0))
    %second : call_function[target=operator.getitem](args = (%split_with_sizes, 1))
    %t : call_method[target=t](args = (%fc_down_weight,))
    %addmm : call_function[target=torch.addmm](args = (%first, %second, %t))
    %fc_up : call_module[target=fc.up](args = (%addmm,))
    %reshape_1 : call_method[target=reshape](args = (%fc_up, 2, 5, 12))
After:
    %fc : call_module[target=fc](args = (%l_x_,))      fc: SketchedLinear, with the same parameters

That is `reference.pivoted_linear_by_rows`, the pivoted form of a `SketchedLinear` while it is compiled; a
pair is two linear layers, one of the other. So the passes that follow see a model that was sketched before as
they see one that is sketched while it is compiled. Taken for a layer is only what Dynamo noted to stem from
one call of its forward, whose parts nothing else reads; factors with hooks that change something,
adapters or parametrizations leave other nodes, and stay apart.
"""

import operator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import fx, nn

from panther_compile.kinds.match import is_plain_linear
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.names import attribute, free_name
from panther_compile.passes.runner import PassResult
from panther_compile.passes.side_effects import acts


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer that was taken apart: what it reads, its factors, and the node of its result."""

    x: fx.Node
    down: nn.Parameter
    up: str
    start: int | None
    result: fx.Node


def lift_sketched(graph_module: fx.GraphModule) -> PassResult:
    """Rewrite a normalized graph in place; counts the calls that were put together."""
    count = 0
    for node in list(graph_module.graph.nodes):
        call = _call(graph_module, node)
        if call is None:
            continue
        name = _place(graph_module, call)
        with graph_module.graph.inserting_before(call.result):
            new = graph_module.graph.call_module(name, (call.x,))
        new.meta = dict(call.result.meta)
        call.result.replace_all_uses_with(new)
        count += 1
    if count:
        graph_module.graph.eliminate_dead_code(lambda node: acts(graph_module, node))
    return PassResult(graph_module, count)


def _origin(node: fx.Node) -> str | None:
    """The call of a sketched layer in which Dynamo recorded a node; None elsewhere."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    calls = (call for call, (_, kind) in reversed(stack.items()) if _is_sketched(kind))
    return next(calls, None)


def _is_sketched(kind: object) -> bool:
    sketched = isinstance(kind, type) and issubclass(kind, SketchedLinear)
    forwards = (SketchedLinear.forward, SketchedConv1D.forward)
    return sketched and kind.forward in forwards  # type: ignore[attr-defined]


def _call(graph_module: fx.GraphModule, node: fx.Node) -> _Call | None:
    """The sketched call that a node is the `up` product of."""
    up, home = _linear(graph_module, node), _origin(node)
    if up is None or home is None:
        return None
    latent = node.args[0]
    if not isinstance(latent, fx.Node) or _origin(latent) != home or len(latent.users) != 1:
        return None
    return _pair(graph_module, node, latent) or _pivoted(graph_module, node, latent)


def _pair(graph_module: fx.GraphModule, node: fx.Node, latent: fx.Node) -> _Call | None:
    down = _linear(graph_module, latent)
    if down is None or down.bias is not None or not isinstance(x := latent.args[0], fx.Node):
        return None
    return _Call(x, down.weight, str(node.target), None, node)


def _pivoted(graph_module: fx.GraphModule, node: fx.Node, latent: fx.Node) -> _Call | None:
    """The call whose nodes the docstring shows; each but the first and the last has one reader alone."""
    if latent.target is not torch.addmm or len(latent.args) != 3 or latent.kwargs or len(node.users) != 1:
        return None
    pivots, others, turned = latent.args
    if not (_is_item(pivots) and _is_item(others) and _is_method(turned, "t")):
        return None
    halves, weight = pivots.args[0], turned.args[0]
    if others.args[0] is not halves or not _is_method(halves, "split_with_sizes") or len(halves.users) != 2:
        return None
    rows, (result,) = halves.args[0], node.users
    if not (_is_method(rows, "reshape") and _is_method(result, "reshape")):
        return None
    x, parts = rows.args[0], (pivots, others, turned, halves, rows, result)
    down = _parameter(graph_module, weight)
    home = _origin(node)
    if down is None or not isinstance(x, fx.Node) or any(_origin(part) != home for part in parts):
        return None
    if any(len(part.users) != 1 for part in (pivots, others, turned, rows)):
        return None
    return _Call(x, down, str(node.target), 0 if pivots.args[1] == 0 else down.shape[1], result)


def _linear(graph_module: fx.GraphModule, node: fx.Node) -> nn.Linear | None:
    """The dense layer that a node calls, if it computes nothing else."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    layer = graph_module.get_submodule(str(node.target))
    return layer if is_plain_linear(layer) else None


def _is_item(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is operator.getitem


def _is_method(node: object, name: str) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def _parameter(graph_module: fx.GraphModule, node: object) -> nn.Parameter | None:
    """The parameter that a node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = attribute(graph_module, str(node.target))
    return found if isinstance(found, nn.Parameter) else None


def _place(graph_module: fx.GraphModule, call: _Call) -> str:
    """Put the layer where its factors stand, or beside them, and return its name."""
    layer = _layer(graph_module, call)
    owner_name, _, leaf = call.up.rpartition(".")
    owner = graph_module.get_submodule(owner_name)
    if isinstance(owner, SketchedLinear) and _is_same(owner, layer):
        return owner_name
    bare = type(owner) is nn.Module and set(owner._modules) <= {"down", "up"} and not owner._parameters
    if owner_name and leaf == "up" and bare:
        graph_module.set_submodule(owner_name, layer)
        return owner_name
    stem = f"{call.up}_sketched".replace(".", "_")
    for name, child in graph_module.named_children():
        if name.startswith(stem) and _is_same(child, layer):
            return name
    name = free_name(graph_module, stem)
    graph_module.add_module(name, layer)
    return name


def _layer(graph_module: fx.GraphModule, call: _Call) -> SketchedLinear:
    up = graph_module.get_submodule(call.up)
    assert isinstance(up, nn.Linear)
    rank, width = call.down.shape
    layer = SketchedLinear(
        width if call.start is None else rank + width,
        up.out_features,
        rank,
        bias=up.bias is not None,
        form="pair" if call.start is None else "pivoted",
        start=call.start or 0,
        device="meta",
        dtype=call.down.dtype,
    )
    layer.put_marks_beside(call.down)
    layer.down.weight, layer.up = call.down, up
    return layer.train(up.training)


def _is_same(known: object, layer: SketchedLinear) -> bool:
    if not isinstance(known, SketchedLinear) or known.sketch_spec() != layer.sketch_spec():
        return False
    return known.down.weight is layer.down.weight and known.up is layer.up
