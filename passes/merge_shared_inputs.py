"""Linear layers that read one input compute their first product together; exact, up to rounding.

Before:
    %q : call_module[target=q](args = (%x,))
    %k : call_module[target=k](args = (%x,))
After:
    %q_merged : call_module[target=q_merged](args = (%x,))
    %split : call_method[target=split](args = (%q_merged, [4, 4], -1))
    %getitem : call_function[target=operator.getitem](args = (%split, 0))
    %getitem_1 : call_function[target=operator.getitem](args = (%split, 1))
    %q_up : call_module[target=q.up](args = (%getitem,))
    %k_up : call_module[target=k.up](args = (%getitem_1,))

That is for sketched layers in the pair form. Dense layers have no `up`. Pivoted layers whose slices start
alike share the input beside the smallest pivot slice, with zeros in `down` where a larger slice reaches
into it, and add their own slice to their part: y = up(x₁ + part).

Layers that share an input factor, as `sketchify(data=)` makes them, have their first product computed once,
anywhere. That of others is made one only on CUDA, where it saves launches, and where `cost.py` predicts
that the zeros and the additions do not cost more; those with one that is called again elsewhere stay apart,
since merged their weight would be held twice. On a CPU one product in place of several saves nothing once
Inductor has compiled it: three layers 768 -> 768 of rank 224 (pivoted) and 192 (pair) took .95 to 1.01 and
1.00 to 1.12 times as long merged, at 1 to 1024 rows (one core of an AMD EPYC, float32, torch 2.13).

For inference: a graph module in training mode is left alone, since the merged `down` is a parameter by
itself.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from panther_compile.factorization import cost
from panther_compile.kinds.match import is_plain_linear
from panther_compile.layers.linear import SketchedLinear
from panther_compile.names import free_name
from panther_compile.passes.runner import PassResult
from panther_compile.passes.side_effects import acts
from panther_compile.passes.sketched_calls import is_intact, rows_of

Layer: TypeAlias = nn.Linear | SketchedLinear


def merge_shared_inputs(graph_module: fx.GraphModule, *, device_type: str = "cuda") -> PassResult:
    """Rewrite the graph in place; counts the layers whose first product is shared now.

    Args:
        graph_module: with module calls of layers.
        device_type: on other devices only those that share a factor are merged.
    """
    if graph_module.training:
        return PassResult(graph_module, 0)
    calls = Counter(node.target for node in graph_module.graph.nodes if node.op == "call_module")
    count = 0
    for group in list(_groups(graph_module)):
        layers = [_layer(graph_module, node) for node in group]
        device = next(layers[0].parameters()).device
        held_twice = any(calls[node.target] > 1 for node in group)
        merges_all = (
            device.type == device_type and not held_twice and _is_worthwhile(layers, rows_of(group[0]))
        )
        for nodes in [group] if merges_all else _with_shared_factor(graph_module, group):
            _merge(graph_module, nodes, [_layer(graph_module, node) for node in nodes])
            count += len(nodes)
    return PassResult(graph_module, count)


def _groups(graph_module: fx.GraphModule) -> Iterator[list[fx.Node]]:
    """Calls of two and more layers that can be merged; nothing in the graph writes between them."""
    groups: dict[object, list[fx.Node]] = defaultdict(list)
    writes = 0
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output") and acts(graph_module, node):
            writes += 1
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        layer = graph_module.get_submodule(str(node.target))
        if isinstance(layer, nn.Linear | SketchedLinear) and _is_mergeable(layer):
            like = layer.weight if isinstance(layer, nn.Linear) else layer.down.weight
            groups[node.args[0], writes, _kind(layer), like.dtype, like.device].append(node)
    yield from (nodes for nodes in groups.values() if len(nodes) > 1)


def _with_shared_factor(graph_module: fx.GraphModule, group: list[fx.Node]) -> list[list[fx.Node]]:
    """Nodes of a group that share their first factor with another one, by factor."""
    shared: dict[int, list[fx.Node]] = defaultdict(list)
    for node in group:
        shared[_first_factor(_layer(graph_module, node))].append(node)
    return [nodes for nodes in shared.values() if len(nodes) > 1]


def _layer(graph_module: fx.GraphModule, node: fx.Node) -> Layer:
    layer = graph_module.get_submodule(str(node.target))
    assert isinstance(layer, nn.Linear | SketchedLinear)
    return layer


def _is_mergeable(layer: Layer) -> bool:
    return is_plain_linear(layer) if isinstance(layer, nn.Linear) else is_intact(layer)


def _kind(layer: Layer) -> str:
    """Layers of one kind can be merged."""
    if isinstance(layer, nn.Linear):
        return "dense" if layer.bias is None else "dense with bias"
    if layer.form == "pair":
        return "pair"
    return "leading" if layer.start == 0 else "trailing"


def _first_rows(layer: Layer) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.rank


def _width(layers: Iterable[Layer]) -> int:
    """Columns of the shared product."""
    layers = list(layers)
    pivots = [layer.rank for layer in layers if isinstance(layer, SketchedLinear) and layer.form == "pivoted"]
    return layers[0].in_features - (min(pivots) if pivots else 0)


def _distinct(layers: list[Layer]) -> list[Layer]:
    """The layers, of those that share an input factor the first."""
    found: dict[int, Layer] = {}
    for layer in layers:
        found.setdefault(_first_factor(layer), layer)
    return list(found.values())


def _first_factor(layer: Layer) -> int:
    """What tells first factors apart."""
    return id(layer if isinstance(layer, nn.Linear) else layer.down.weight)


def _is_worthwhile(layers: list[Layer], rows: int | None) -> bool:
    """Whether one product is predicted to take no longer than several; the `up` products are the same."""
    distinct = _distinct(layers)
    device = cost.device_class(next(layers[0].parameters()).device)
    rows = device.positions if rows is None else rows
    shapes = [(_first_rows(layer), _width([layer])) for layer in layers]
    apart = [stage for shape in shapes for stage in cost.dense_products(shape, 1, (1, 1), rows)]
    total = sum(_first_rows(layer) for layer in distinct)
    together = [*cost.dense_products((total, _width(layers)), 1, (1, 1), rows)]
    if _kind(layers[0]) in ("leading", "trailing"):
        # apart, an addition is part of the product; here all are one kernel that reads two and writes one
        together.append(cost.Product(0.0, 3.0 * rows * total, 0.0))
    return cost.seconds(tuple(together), device) <= cost.seconds(tuple(apart), device)


def _merge(graph_module: fx.GraphModule, nodes: list[fx.Node], layers: list[Layer]) -> None:
    graph, x = graph_module.graph, nodes[0].args[0]
    distinct = _distinct(layers)
    if len(distinct) == 1:
        name = str(nodes[0].target) if isinstance(layers[0], nn.Linear) else f"{nodes[0].target}.down"
    else:
        name = free_name(graph_module, f"{nodes[0].target}_merged".replace(".", "_"))
        graph_module.add_module(name, _merged_linear(distinct))
    kind, width = _kind(layers[0]), _width(distinct)
    inputs = layers[0].in_features
    columns: Any
    with graph.inserting_before(nodes[0]):
        shared = x
        if kind in ("leading", "trailing"):
            rest = slice(inputs - width, None) if kind == "leading" else slice(None, width)
            columns = (..., rest)
            shared = graph.call_function(operator.getitem, (x, columns))
        parts = graph.call_module(name, (shared,))
        if len(distinct) > 1:
            parts = graph.call_method("split", (parts, [_first_rows(layer) for layer in distinct], -1))
    places = {_first_factor(layer): place for place, layer in enumerate(distinct)}
    products: dict[int, fx.Node] = {}
    for node, layer in zip(nodes, layers, strict=True):
        factor = _first_factor(layer)
        with graph.inserting_before(node):
            if factor not in products:
                own = parts
                if len(distinct) > 1:
                    own = graph.call_function(operator.getitem, (parts, places[factor]))
                if isinstance(layer, SketchedLinear) and layer.form == "pivoted":
                    columns = (..., slice(layer.start, layer.start + layer.rank))
                    pivots = graph.call_function(operator.getitem, (x, columns))
                    own = graph.call_function(operator.add, (pivots, own))
                products[factor] = own
            result = products[factor]
            if isinstance(layer, SketchedLinear):
                result = graph.call_module(f"{node.target}.up", (result,))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


@torch.no_grad()
def _merged_linear(layers: list[Layer]) -> nn.Linear:
    """The first factors below one another."""
    width = _width(layers)
    weight = torch.cat([_padded(layer, width) for layer in layers])
    biases: list[Tensor] = [
        layer.bias for layer in layers if isinstance(layer, nn.Linear) and layer.bias is not None
    ]
    merged = nn.Linear(width, weight.shape[0], bias=bool(biases), device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged.eval()


def _padded(layer: Layer, width: int) -> Tensor:
    """The first factor, with zeros for what it does not read of the shared input."""
    if isinstance(layer, nn.Linear):
        return layer.weight
    missing = width - layer.down.in_features
    return F.pad(layer.down.weight, (missing, 0) if layer.start == 0 else (0, missing))
