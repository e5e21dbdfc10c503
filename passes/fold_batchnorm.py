"""A BatchNorm2d in eval mode is folded into the convolution before it; exact, up to rounding.

Before:
    %conv : call_module[target=conv](args = (%x,))
    %norm : call_module[target=norm](args = (%conv,))
After:
    %conv : call_module[target=conv](args = (%x,))

With the scale s = γ / sqrt(σ² + ε) of each channel the kernel becomes s W and the bias s (b - μ) + β. Folded
before it is sketched, a kernel is approximated by the error that the network sees. The norm may also be
`F.batch_norm` or `aten.batch_norm` on parameters of the graph. The convolution must be a plain one, called
once, with no other reader; otherwise both stay.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.names import attribute
from panther_compile.passes.batchnorm_calls import STATISTICS, read_batchnorm
from panther_compile.passes.convolution_calls import is_read, own_convolution
from panther_compile.passes.runner import PassResult


def fold_batchnorm(graph_module: fx.GraphModule) -> PassResult:
    """Rewrite the graph in place; counts the norms that were folded. A copy of each kernel is made."""
    calls = Counter(node.target for node in graph_module.graph.nodes if node.op == "call_module")
    count = 0
    for node in list(graph_module.graph.nodes):
        norm = _read(graph_module, node)
        conv = None if norm is None else norm["input"]
        if norm is None or not _can_fold(graph_module, conv, calls):
            continue
        assert isinstance(conv, fx.Node)
        dense = graph_module.get_submodule(str(conv.target))
        assert isinstance(dense, nn.Conv2d)
        graph_module.set_submodule(str(conv.target), _folded(dense, norm))
        node.replace_all_uses_with(conv)
        graph_module.graph.erase_node(node)
        name = str(node.target)
        if node.op == "call_module" and calls[name] == 1 and not is_read(graph_module, name):
            graph_module.delete_submodule(name)
        count += 1
    if count:
        graph_module.recompile()
    return PassResult(graph_module, count)


def _read(graph_module: fx.GraphModule, node: fx.Node) -> dict[str, Any] | None:
    """The input and eps of an eval-mode norm, and its tensors by name; None for any other node."""
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        if not _is_frozen_norm(module) or len(node.args) != 1:
            return None
        found = {name: getattr(module, name) for name in STATISTICS}
        found |= {"input": node.args[0], "eps": module.eps}
    else:
        call = read_batchnorm(node)
        if call is None or call["training"] is not False:
            return None
        found = {name: _tensor(graph_module, call.get(name)) for name in STATISTICS}
        if any(call.get(name) is not None and found[name] is None for name in STATISTICS):
            return None  # computed in the graph
        found |= {"input": call["input"], "eps": call["eps"]}
    return None if found["running_mean"] is None or found["running_var"] is None else found


def _is_frozen_norm(module: nn.Module) -> bool:
    """Whether this is a plain norm in eval mode."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    plain = type(module) is nn.BatchNorm2d and "forward" not in vars(module) and not any(hooks)
    return plain and not module.training


def _tensor(graph_module: fx.GraphModule, node: Any) -> Tensor | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = attribute(graph_module, str(node.target))
    return value if isinstance(value, Tensor) else None


def _can_fold(graph_module: fx.GraphModule, node: Any, calls: Counter[Any]) -> bool:
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    conv = own_convolution(graph_module, node, calls)
    return conv is not None and not conv.weight.is_meta


@torch.no_grad()
def _folded(conv: nn.Conv2d, norm: dict[str, Any]) -> nn.Conv2d:
    """The convolution with the norm in it; computed in float64."""
    mean, variance = norm["running_mean"].double(), norm["running_var"].double()
    scale = (variance + norm["eps"]).rsqrt()
    if norm["weight"] is not None:
        scale = scale * norm["weight"].double()
    shift = -mean * scale if conv.bias is None else (conv.bias.double() - mean) * scale
    if norm["bias"] is not None:
        shift = shift + norm["bias"].double()
    folded = nn.Conv2d(**SketchedConv2d.geometry(conv), device="meta")
    like = conv.weight
    weight = (like.double() * scale[:, None, None, None]).to(like.dtype)
    folded.weight = nn.Parameter(weight.contiguous(memory_format=_layout(like)), like.requires_grad)
    folded.bias = nn.Parameter(shift.to(like.dtype), like.requires_grad)
    return folded.train(conv.training)


def _layout(weight: Tensor) -> torch.memory_format:
    last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
