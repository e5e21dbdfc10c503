"""Functional calls of a graph that a kind of layer computes become module calls; exact.

Before:
    %fc_weight : get_attr[target=fc.weight]
    %fc_bias : get_attr[target=fc.bias]
    %linear : call_function[target=torch._C._nn.linear](args = (%x, %fc_weight, %fc_bias))
After:
    %fc : call_module[target=fc](args = (%x,))          fc: Linear, with the same parameters

Also `aten.linear` and `aten.conv2d`, as `torch.export` writes them, `aten.matmul` by a transposed weight,
as of code that writes `x @ layer.weight.T`, and `aten.mm` and `aten.addmm`, which `run_decompositions`
makes of these; a graph of Dynamo goes through
`lift_parameters` first. So every later pass knows one form. The module takes the place of the
parameters' owner where that holds nothing else, so their names stay; else it is a new submodule of the
owner, and a parameter that nothing else uses moves into it. A weight that is computed, not a parameter of
the graph, is left alone; the computed bias of a linear layer (BEiT has one) is added behind the module,
which may round otherwise.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from panther_compile.kinds.match import why_not_plain
from panther_compile.kinds.registry import find_functional
from panther_compile.names import attribute, dotted, free_name, owner_of
from panther_compile.passes.runner import PassResult

_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("matmul", "mm", "addmm"))
_TRANSPOSED = (  # the operator and its arguments behind the matrix
    *((getattr(torch.ops.aten, name).default,) for name in ("t", "mT", "numpy_T")),
    *((torch.ops.aten.permute.default, dims) for dims in ([1, 0], [-1, 0], [1, -2], [-1, -2])),
    *((torch.ops.aten.transpose.int, *dims) for dims in ((0, 1), (1, 0), (-1, -2), (-2, -1))),
)


def lift_functional(graph_module: fx.GraphModule) -> PassResult:
    """Rewrite the graph in place; counts the calls that were lifted."""
    made: dict[tuple[str, str], str] = {}
    count = 0
    for node in list(graph_module.graph.nodes):
        call = liftable_call(node)
        if call is None:
            continue
        layer = _layer(graph_module, call)
        if layer is None:
            continue
        weight_name = str(call["weight"].target)
        key = (weight_name, repr(layer) + str(call.get("bias")))
        if key not in made:
            made[key] = _place(graph_module, weight_name, call.get("bias"), layer)
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_module(made[key], (call["input"],))
            new.meta = dict(node.meta)
            if call["added"] is not None:
                added = graph_module.graph.call_method("type_as", (call["added"], new))  # as autocast does
                new = graph_module.graph.call_function(torch.add, (new, added))
                new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph_module.graph.erase_node(node)
        view = call.get("view")
        if view is not None and not view.users:
            graph_module.graph.erase_node(view)
        count += 1
    if count:
        _drop_unused_parameters(graph_module)
        graph_module.graph.lint()
        graph_module.recompile()
    return PassResult(graph_module, count)


def arguments_by_name(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a functional layer, and which "function" it is; None for any other node.

    Of a product by a transposed weight, "view" is the node that transposes it.
    """
    function = find_functional(node.target) if node.op == "call_function" else None
    if function is None:
        return _product_by_transpose(node)
    call = dict(zip(function.arguments, node.args, strict=False)) | dict(node.kwargs)
    return call | {"function": function}


def _product_by_transpose(node: fx.Node) -> dict[str, Any] | None:
    """The same of x Wᵀ or b + x Wᵀ in the operators of aten; a computed b is not of a linear layer."""
    if node.op != "call_function" or node.target not in _PRODUCTS or node.kwargs:
        return None
    *bias, x, view = node.args
    added = bias[0] if bias else None
    if not isinstance(view, fx.Node) or (isinstance(added, fx.Node) and added.op != "get_attr"):
        return None
    if view.op != "call_function" or (view.target, *view.args[1:]) not in _TRANSPOSED:
        return None
    function = find_functional(torch.ops.aten.linear.default)
    return {"input": x, "weight": view.args[0], "bias": added, "view": view, "function": function}


def liftable_call(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a functional layer that can be lifted; None for any other node.

    A bias that is computed is "added", not the layer's.
    """
    call = arguments_by_name(node)
    if call is None:
        return None
    weight, bias = call["weight"], call.get("bias")
    call["added"] = None
    if call["function"].bias_may_be_computed and isinstance(bias, fx.Node) and bias.op != "get_attr":
        call["added"], call["bias"] = bias, None
        bias = None
    known = isinstance(weight, fx.Node) and weight.op == "get_attr"
    known = known and (bias is None or (isinstance(bias, fx.Node) and bias.op == "get_attr"))
    options = call["function"].arguments[3:]
    constant = not any(isinstance(value, fx.Node) for key, value in call.items() if key in options)
    return call if known and constant else None


def _layer(graph_module: fx.GraphModule, call: Mapping[str, Any]) -> nn.Module | None:
    """The module that computes the call, with the graph's own parameters; None if they are not parameters."""
    weight = _attribute(graph_module, call["weight"])
    bias = _attribute(graph_module, call.get("bias"))
    if not isinstance(weight, nn.Parameter) or not isinstance(bias, nn.Parameter | None):
        return None
    if "view" in call and (weight.dim() != 2 or (bias is not None and bias.dim() != 1)):
        return None
    options = {key: call[key] for key in call["function"].arguments[3:] if key in call}
    layer: nn.Module | None = call["function"].build(weight, bias is not None, options)
    if layer is None:
        return None
    layer.weight = weight
    layer.register_parameter("bias", bias)
    return layer.train(graph_module.training)


def _place(graph_module: fx.GraphModule, weight_name: str, bias: fx.Node | None, layer: nn.Module) -> str:
    """Put the layer into the module tree and return its name."""
    owner_name, _, leaf = weight_name.rpartition(".")
    owner = graph_module.get_submodule(owner_name)
    held = set(dict(owner.named_parameters()) | dict(owner.named_buffers()))
    needed = {"weight"} | ({"bias"} if bias is not None else set())
    own_bias = bias is None or str(bias.target) == f"{owner_name}.bias"
    if leaf == "weight" and own_bias and _computes_the_same(owner, layer):
        return owner_name
    bare = type(owner) is nn.Module and not list(owner.children())
    if owner_name and leaf == "weight" and own_bias and bare and held == needed:
        graph_module.set_submodule(owner_name, layer)
        return owner_name
    name = free_name(owner, f"{leaf}_{type(layer).__name__.lower()}")
    owner.add_module(name, layer)
    return dotted(owner_name, name)


def _computes_the_same(owner: nn.Module, layer: nn.Module) -> bool:
    """Whether the owner of a layer's parameters is already such a layer, with nothing of its own about it."""
    if type(owner) is not type(layer) or repr(owner) != repr(layer):
        return False
    added = {name for name in vars(owner) if not name.startswith("_")} - set(vars(layer))
    return not added and why_not_plain(owner, type(layer), tensors=frozenset({"weight", "bias"})) is None


def _drop_unused_parameters(graph_module: fx.GraphModule) -> None:
    """Drop reads that nothing uses any more, and the parameters that only they read."""
    reads = [node for node in graph_module.graph.nodes if node.op == "get_attr"]
    for node in reads:
        if not node.users:
            graph_module.graph.erase_node(node)
    still_read = {str(node.target) for node in reads if node.users}
    for node in reads:
        owner, leaf = owner_of(graph_module, str(node.target))
        plain = type(owner) is nn.Module or isinstance(owner, fx.GraphModule)
        if str(node.target) not in still_read and plain and leaf in owner._parameters:
            delattr(owner, leaf)


def _attribute(graph_module: fx.GraphModule, node: fx.Node | None) -> Any:
    if node is None:
        return None
    return attribute(graph_module, str(node.target))
