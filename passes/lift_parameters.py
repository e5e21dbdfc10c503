"""Weights that a graph of Dynamo takes as inputs become parameters of the graph module; exact.

Before:
    %l_self_modules_fc_parameters_weight_ : placeholder[target=L_self_modules_fc_parameters_weight_]
    %l_self_modules_fc_parameters_bias_ : placeholder[target=L_self_modules_fc_parameters_bias_]
    %l_x_ : placeholder[target=L_x_]
    %linear : call_function[target=torch._C._nn.linear]
        (args = (%l_x_, %l_self_modules_fc_parameters_weight_, %l_self_modules_fc_parameters_bias_))
After:
    %l_x_ : placeholder[target=L_x_]
    %fc_weight : get_attr[target=fc.weight]
    %fc_bias : get_attr[target=fc.bias]
    %linear : call_function[target=torch._C._nn.linear](args = (%l_x_, %fc_weight, %fc_bias))

Then `lift_functional` finds what it finds in a traced graph. Only what linear layers, convolutions and batch
norms alone read is lifted, and each tensor itself, not a copy. `addmm(bias, x, weight)`, as Hugging Face's
Conv1D has it, becomes `linear` on the transposed view of its weight; `addmm(z, x, weight.t())` stays, for
`lift_sketched`. A weight that is read both ways, as a tied autoencoder reads it, stays an input. The graph
module is a new one in eval mode, with fewer inputs; the one given is left as it was.
"""

import re
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

from panther_compile.passes.batchnorm_calls import STATISTICS, read_batchnorm
from panther_compile.passes.lift_functional import arguments_by_name
from panther_compile.passes.runner import PassResult

# L_self_modules_encoder_modules_0_parameters_weight_ -> encoder, 0, weight
_PART = re.compile(r"_(?:modules|parameters|buffers)_(.+?)(?=_(?:modules|parameters|buffers)_|_$)")


def lift_parameters(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> PassResult:
    """A graph module with the weights among its inputs held by itself.

    Args:
        graph_module: a graph of Dynamo.
        example_inputs: one for each placeholder; the weights are taken from here.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, copied)
    last = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    copied[last] = graph.output(output)
    copied[last].meta = dict(last.meta)
    root = nn.Module()
    for name, module in graph_module.named_children():
        root.add_module(name, module)
    for name, tensor in (*graph_module._parameters.items(), *graph_module._buffers.items()):
        setattr(root, name, tensor)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    lifted = 0
    for node, value in zip(liftable(graph_module, example_inputs), example_inputs, strict=True):
        if node is None:
            continue
        assert isinstance(value, Tensor)
        transposed = any(_transposed_weight(user) is node for user in node.users)
        held = nn.Parameter(value.t(), value.requires_grad) if transposed else value
        name = _register(root, str(node.target), held)
        with graph.inserting_before(first):
            read = graph.get_attr(name)
        read.meta = dict(node.meta)
        copied[node].replace_all_uses_with(read)
        graph.erase_node(copied[node])
        for user in list(read.users) if transposed else ():
            bias, x, _ = user.args
            user.target, user.args = F.linear, (x, read, bias)
        lifted += 1
    return PassResult(fx.GraphModule(root, graph).eval(), lifted)


def liftable(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> Iterator[fx.Node | None]:
    """The placeholder of each input if it is lifted, else None."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=True):
        own = isinstance(value, nn.Parameter) or "_buffers_" in str(node.target)
        plain = type(value) in (nn.Parameter, Tensor) and not isinstance(value, FakeTensor)
        # An inference tensor does not tell when it is changed.
        known = own and plain and not value.is_inference()  # type: ignore[attr-defined]
        weight = known and node.users and all(_is_weight_of(node, user) for user in node.users)
        one_way = len({_transposed_weight(user) is node for user in node.users}) == 1
        yield node if weight and one_way else None


def _transposed_weight(node: fx.Node) -> fx.Node | None:
    """The weight (I, O) of `addmm(bias, x, weight)`; None for any other node."""
    if node.op != "call_function" or node.target is not torch.addmm or len(node.args) != 3 or node.kwargs:
        return None
    bias, x, weight = node.args
    apart = isinstance(weight, fx.Node) and weight is not x and weight is not bias
    return weight if apart else None  # type: ignore[return-value]


def _is_weight_of(node: fx.Node, user: fx.Node) -> bool:
    """Whether the user is a layer, and the node its weight, bias or statistics and not its input too."""
    call = arguments_by_name(user)
    if call is not None:
        return call["input"] is not node and node in (call["weight"], call.get("bias"))
    if _transposed_weight(user) is not None:
        return user.args[1] is not node
    if user.op == "call_method" and user.target == "t":  # of a pivoted layer
        return bool(user.users) and all(_transposed_weight(reader) is user for reader in user.users)
    norm = read_batchnorm(user)
    return norm is not None and node in [norm.get(name) for name in STATISTICS] and norm["input"] is not node


def _register(root: nn.Module, target: str, tensor: Tensor) -> str:
    """Hold the tensor under the user's name for it, or the placeholder's if that is unknown or taken."""
    name = ".".join(_PART.findall(target)) or target
    if _is_taken(root, name):
        name = target
    owner_name, _, leaf = name.rpartition(".")
    for part in owner_name.split(".") if owner_name else ():
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)
    return name


def _is_taken(root: nn.Module, name: str) -> bool:
    """Whether something is there, or on the way there something that is no bare module."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            return hasattr(root, part)
        root = root.get_submodule(part)
        if type(root) is not nn.Module:
            return True
    return hasattr(root, leaf)
