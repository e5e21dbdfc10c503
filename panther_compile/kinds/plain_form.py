"""Layers that make their weight anew in each call from parameters alone, and the plain layers they stand for.

    weight norm, spectral norm, orthogonal weights    torch.nn.utils.parametrizations, and the hooks of old
    weight standardization, equalized learning rates  a subclass whose own forward makes the weight

Each is taken off, in this order, from a stand-in that holds the weight as it comes out in eval mode; the
module itself is left as it is. Masks of pruning and fake quantization are not taken off: a sketch would lose
what they are for.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from panther_compile.kinds.match import added_by_subclass, identities, read_forward
from panther_compile.models.surroundings import eval_mode

_CALLS = {nn.Linear: F.linear, nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_BASES = (*_CALLS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_GEOMETRY = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_PURE = frozenset(
    """
    add sub mul div truediv pow neg abs sign square sqrt rsqrt reciprocal exp log sigmoid tanh softplus clamp
    mean sum var std var_mean std_mean norm vector_norm amax amin batch_norm layer_norm group_norm
    instance_norm normalize reshape reshape_as view view_as flatten unflatten transpose t permute unsqueeze
    squeeze expand expand_as contiguous type_as to float getitem size
    """.split()  # noqa: SIM905
)
_READS = ("T", "mT", "shape", "dtype", "ndim")


def plain_form(module: nn.Module) -> nn.Module:
    """The layer of torch's own class that computes what the module computes in eval mode.

    Args:
        module: any.

    Returns:
        The module itself if it is such a layer, or is not known to compute what one does. Else a new layer,
        which shares those tensors that are used as they are.
    """
    base = next((cls for cls in type(module).__mro__ if cls in _BASES), None)
    if base is None or (type(module) is base and not module._forward_pre_hooks):
        return module
    return _without_own_forward(_without_hooks(_without_parametrizations(module)), base)


def _without_parametrizations(module: nn.Module) -> nn.Module:
    if not parametrize.is_parametrized(module):
        return module
    lists = dict(module.parametrizations.named_children())  # type: ignore[union-attr]
    known = (_WeightNorm, _SpectralNorm, _Orthogonal)
    if not all(isinstance(step, known) for steps in lists.values() for step in steps.children()):
        return module
    with eval_mode(module), torch.no_grad():
        tensors = {name: getattr(module, name) for name in lists}
    children = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    return _stand_in(module, type(module).__mro__[1], module._parameters | tensors, children)


def _without_hooks(module: nn.Module) -> nn.Module:
    hooks = list(module._forward_pre_hooks.values())
    hook = hooks[0] if len(hooks) == 1 else None
    if not isinstance(hook, WeightNorm | SpectralNorm) or hook.name != "weight":
        return module
    used = {"weight_g", "weight_v", "weight_orig", "weight_u"}
    with torch.no_grad():
        if isinstance(hook, WeightNorm):
            weight = hook.compute_weight(module)
        else:
            weight = hook.compute_weight(module, do_power_iteration=False)
    kept = {name: one for name, one in module._parameters.items() if name not in used}
    plain = _stand_in(module, type(module), {"weight": weight} | kept, module._modules)
    plain._buffers = {name: one for name, one in module._buffers.items() if name not in used}
    plain._forward_pre_hooks = type(module._forward_pre_hooks)()
    return plain


def _without_own_forward(module: nn.Module, base: type[nn.Module]) -> nn.Module:
    """A layer of the base class, where the own forward is one call of it on a weight that it makes."""
    cls = type(module)
    methods = ("forward", "_conv_forward")
    own = any(getattr(cls, name, None) is not getattr(base, name, None) for name in methods)
    if not own or base not in _CALLS or set(methods) & set(vars(module)) or added_by_subclass(cls, base):
        return module
    in_training, graph = (read_forward(module, training=training) for training in (True, False))
    if in_training is None or graph is None or str(in_training) != str(graph):
        return module
    tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    unread = set(tensors) - {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    idle = identities(module)
    made = None if unread else _made_in(module, graph, base, idle)
    if made is None:
        return module
    plain = _stand_in(module, base, made, {k: v for k, v in module._modules.items() if k not in idle})
    plain._buffers = {}
    usual = vars(base(*(1,) * (2 if base is nn.Linear else 3), device="meta"))
    for name, held in list(vars(plain).items()):
        if name not in usual:
            del vars(plain)[name]  # a setting of the forward that is taken off
        elif isinstance(usual[name], tuple):
            vars(plain)[name] = tuple(held)
    return plain


def _made_in(
    module: nn.Module, graph: fx.Graph, base: type[nn.Module], idle: frozenset[str]
) -> dict[str, Tensor | None] | None:
    """The weight and bias that a forward gives its one call; None if there is anything else to it."""
    x = next(iter(graph.nodes))
    last = _before(graph.output_node().args[0], idle)
    if not isinstance(last, fx.Node) or last.op != "call_function" or last.target is not _CALLS[base]:
        return None
    options = () if base is nn.Linear else tuple(_GEOMETRY)
    call = dict(zip(("input", "weight", "bias", *options), last.args, strict=False)) | dict(last.kwargs)
    weight, bias = call["weight"], call.get("bias")
    if _before(call["input"], idle) is not x or getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    if any(_spread(call.get(name, _GEOMETRY[name])) != _spread(getattr(module, name)) for name in options):
        return None
    if not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node | None):
        return None
    behind = _behind((weight, bias))
    if not all(_is_pure(node) for node in behind):
        return None
    fixed, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in behind:
            copies[node] = fixed.node_copy(node, copies.__getitem__)
    fixed.output((copies[weight], None if bias is None else copies[bias]))
    with eval_mode(module), torch.no_grad():  # a norm may note what it has seen
        tensors = fx.GraphModule(module, fixed)()
    return dict(zip(("weight", "bias"), tensors, strict=True))


def _before(node: Any, idle: frozenset[str]) -> Any:
    """What reaches a node through submodules that give back what they are given."""
    while isinstance(node, fx.Node) and node.op == "call_module" and node.target in idle:
        node = node.args[0]
    return node


def _spread(value: Any) -> Any:
    """A geometry that is alike along all axes as one number."""
    alike = isinstance(value, list | tuple) and len(set(value)) == 1
    return value[0] if alike else tuple(value) if isinstance(value, list) else value


def _behind(nodes: Iterable[fx.Node | None]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _is_pure(node: fx.Node) -> bool:
    """Whether a node reads a tensor of the module, or gives the same for the same and writes nothing."""
    if node.op == "get_attr":
        return "." not in str(node.target)
    if node.op == "call_method":
        return node.target in _PURE
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _READS
    home = (getattr(node.target, "__module__", None) or "torch").split(".")[0]  # torch's built-ins say none
    return home in ("torch", "_operator") and getattr(node.target, "__name__", "") in _PURE


def _stand_in(
    module: nn.Module,
    cls: type[nn.Module],
    parameters: Mapping[str, Tensor | None],
    children: Mapping[str, nn.Module | None],
) -> nn.Module:
    """A module of a class that holds what another does, but for its parameters and submodules."""
    trained = any(parameter.requires_grad for parameter in module.parameters())
    plain: nn.Module = cls.__new__(cls)
    plain.__dict__.update(vars(module))
    plain._parameters = {
        name: one if one is None or isinstance(one, nn.Parameter) else nn.Parameter(one.detach(), trained)
        for name, one in parameters.items()
    }
    plain._modules = dict(children)
    for name in parameters:
        vars(plain).pop(name, None)  # a weight that a hook set
    return plain
