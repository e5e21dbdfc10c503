"""Calls of sketched linear layers in a graph, as a module or as the operator, and what they can take in."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from panther_compile.factorization import cost
from panther_compile.kernels.factor_set import Factors
from panther_compile.kinds.match import is_plain_linear
from panther_compile.layers.linear import SketchedLinear
from panther_compile.ops.linear import sketched_linear
from panther_compile.ops.linear_dispatch import fuses
from panther_compile.passes.side_effects import acts

Layout = tuple[torch.dtype, tuple[str, ...]]


def layout_of(node: fx.Node) -> Layout | None:
    """Type and sizes of a node's tensor, symbolic sizes by name; None where nobody noted them.

    Dynamo notes them, and so do `torch.export` and `ShapeProp`. Under "layout" stands what this function
    said of a node whose other notes are gone.
    """
    if "layout" in node.meta:
        kept: Layout | None = node.meta["layout"]
        return kept
    for key in ("example_value", "val", "tensor_meta"):
        value: Any = node.meta.get(key)
        if isinstance(value, Tensor | TensorMetadata):
            return value.dtype, tuple(str(size) for size in value.shape)
    return None


def rows_of(node: fx.Node) -> int | None:
    """Leading sizes of a node's tensor, multiplied, where they are noted and do not vary."""
    layout = layout_of(node)
    if layout is None or not all(size.isdigit() for size in layout[1]):
        return None
    return math.prod(int(size) for size in layout[1][:-1])


def sketched_layer(graph_module: fx.GraphModule, node: fx.Node) -> SketchedLinear | None:
    """The layer that a node calls, if a kernel serves it here and the operator computes the same."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    layer = graph_module.get_submodule(str(node.target))
    if not isinstance(layer, SketchedLinear):
        return None
    return layer if is_intact(layer) and _is_served(layer, node) else None


def is_intact(layer: SketchedLinear) -> bool:
    """Whether a layer computes what its class does, from its own factors, and no hook looks on."""
    if type(layer).forward is not SketchedLinear.forward or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return is_plain_linear(layer.down) and is_plain_linear(layer.up)


def _is_served(layer: SketchedLinear, node: fx.Node) -> bool:
    """Whether the operator will run a kernel; what it computes by plain PyTorch, Inductor fuses better."""
    layout, rows = layout_of(node), rows_of(node)
    factors = Factors(
        layer.down.weight, layer.up.weight, layer.bias, layer.start if layer.form == "pivoted" else None
    )
    return fuses(
        factors,
        cost.CUDA.positions if rows is None else rows,
        layer.up.weight.dtype if layout is None else layout[0],
    )


def is_operator(node: fx.Node) -> bool:
    """Whether the node calls the operator."""
    return node.op == "call_function" and node.target is sketched_linear


def put_operator(graph_module: fx.GraphModule, node: fx.Node, user: fx.Node, **epilogue: Any) -> None:
    """Put one call of the operator, with `epilogue`, in the place of a sketched call and of its only user."""
    args, options = node.args, dict(node.kwargs)
    with graph_module.graph.inserting_before(user):
        if node.op == "call_module":
            layer = graph_module.get_submodule(str(node.target))
            assert isinstance(layer, SketchedLinear)
            names = ["down.weight", "up.weight", *(["up.bias"] if layer.bias is not None else [])]
            args += tuple(graph_module.graph.get_attr(f"{node.target}.{name}") for name in names)
            options = {"start": layer.start if layer.form == "pivoted" else None}
        fused = graph_module.graph.call_function(sketched_linear, args, options | epilogue)
    fused.meta = dict(user.meta)
    user.replace_all_uses_with(fused)
    graph_module.graph.erase_node(user)
    graph_module.graph.erase_node(node)


def pairs_of(
    graph_module: fx.GraphModule, functions: tuple[object, ...]
) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Each call of a function of two tensors that a sketched call can take in: call, sketched call, other.

    The sketched call has no other user and no epilogue that comes later; nothing in the graph acts between
    the two, as the sketched call is moved; and both operands are known to be of the result's type and shape.
    Of two sketched calls it is the operator that is taken, which has an activation, else the later one.
    """
    order = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    for user in list(graph_module.graph.nodes):
        if user.op != "call_function" or user.target not in functions or user.kwargs or len(user.args) != 2:
            continue
        operands = [one for one in user.args if isinstance(one, fx.Node)]
        layout = layout_of(user)
        if len(set(operands)) < 2 or layout is None or any(layout_of(one) != layout for one in operands):
            continue
        hosts = [one for one in operands if _can_take_in(graph_module, one, user)]
        if hosts:
            host = max(hosts, key=lambda one: (is_operator(one), order.get(one, 0)))
            (other,) = (one for one in operands if one is not host)
            yield user, host, other


def _can_take_in(graph_module: fx.GraphModule, node: fx.Node, user: fx.Node) -> bool:
    if is_operator(node):
        free = node.kwargs.get("residual") is None
    else:
        free = sketched_layer(graph_module, node) is not None
    return free and len(node.users) == 1 and not acts_between(graph_module, node, user)


def acts_between(graph_module: fx.GraphModule, node: fx.Node, user: fx.Node) -> bool:
    """Whether a node between two may write what the first reads, so that the first cannot be moved."""
    between = node.next
    while between is not user:
        if acts(graph_module, between) and not is_operator(between):
            return True
        between = between.next
    return False
