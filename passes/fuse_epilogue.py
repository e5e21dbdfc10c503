"""A sketched linear layer and the activation behind it become one kernel; exact, up to rounding.

Before:
    %fc : call_module[target=fc](args = (%x,))
    %gelu : call_function[target=torch._C._nn.gelu](args = (%fc,))
After:
    %fc_down_weight : get_attr[target=fc.down.weight]
    %fc_up_weight : get_attr[target=fc.up.weight]
    %fc_up_bias : get_attr[target=fc.up.bias]
    %sketched_linear : call_function[target=sketched_linear]
        (args = (%x, %fc_down_weight, %fc_up_weight, %fc_up_bias), kwargs = {start: 0, activation: gelu})

The operation is `panther_compile::sketched_linear`. It fuses the bias, ReLU, SiLU and both forms of GELU; a
residual or a gate stays a node of its own. Only on CUDA: on a CPU the operation is plain PyTorch that
Inductor cannot see into, and there is little to gain. On 768 -> 3072 -> 768 with GELU and residual, ratio
0.5, batch 1, 32 and 1024, where Inductor fuses what can be fused, the layers take 0.83, 2.78 and 52.6 ms,
against 0.82, 2.72 and 53.3 ms in eager mode (one core of an AMD EPYC, float32, torch 2.13).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from panther_compile.layers.linear import SketchedLinear
from panther_compile.ops.linear import sketched_linear
from panther_compile.passes.match import why_not_plain
from panther_compile.passes.runner import PassResult

_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.silu: "silu",
    F.gelu: "gelu",
    torch.ops.aten.relu.default: "relu",
    torch.ops.aten.silu.default: "silu",
    torch.ops.aten.gelu.default: "gelu",
}
_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}
_TENSORS = frozenset({"weight", "bias"})


def fuse_epilogue(graph_module: fx.GraphModule, *, device_type: str = "cuda") -> PassResult:
    """Rewrite the graph in place; counts the layers fused with their activation.

    Args:
        graph_module: with module calls of sketched layers.
        device_type: layers on other devices are left alone.
    """
    count = 0
    for node in list(graph_module.graph.nodes):
        layer = _layer(graph_module, node, device_type)
        if layer is None or len(node.users) != 1:
            continue
        (user,) = node.users
        activation = _activation(graph_module, user, node)
        if activation is None:
            continue
        with graph_module.graph.inserting_before(node):
            names = ["down.weight", "up.weight", *(["up.bias"] if layer.bias is not None else [])]
            factors = [graph_module.graph.get_attr(f"{node.target}.{name}") for name in names]
            start = layer.start if layer.form == "pivoted" else None
            fused = graph_module.graph.call_function(
                sketched_linear, (node.args[0], *factors), {"start": start, "activation": activation}
            )
        fused.meta = dict(user.meta)
        user.replace_all_uses_with(fused)
        graph_module.graph.erase_node(user)
        graph_module.graph.erase_node(node)
        count += 1
    return PassResult(graph_module, count)


def _layer(graph_module: fx.GraphModule, node: fx.Node, device_type: str) -> SketchedLinear | None:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    layer = graph_module.get_submodule(str(node.target))
    if not isinstance(layer, SketchedLinear) or layer.up.weight.device.type != device_type:
        return None
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None
    plain = [why_not_plain(part, nn.Linear, tensors=_TENSORS) is None for part in (layer.down, layer.up)]
    return layer if all(plain) else None


def _activation(graph_module: fx.GraphModule, node: fx.Node, source: fx.Node) -> str | None:
    """The operation's name for an activation of `source` alone; None for any other node."""
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        name = _MODULES.get(type(module))
        approximate = getattr(module, "approximate", "none")
    elif node.op == "call_function" and not set(node.kwargs) - {"approximate", "inplace"}:
        name = _FUNCTIONS.get(node.target)
        approximate = node.kwargs.get("approximate", "none")
    else:
        return None
    if name is None or node.args[:1] != (source,) or any(value is not False for value in node.args[1:]):
        return None
    return "gelu_tanh" if name == "gelu" and approximate == "tanh" else name
