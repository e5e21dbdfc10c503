"""Layers that make their weight anew in each call from parameters alone, and the plain layers they stand for.

    weight norm, spectral norm, orthogonal weights    torch.nn.utils.parametrizations, and the hooks of old
    weight standardization, equalized learning rates  a subclass whose own forward makes the weight

Each is taken off, in this order, from a stand-in that holds the weight as it comes out in eval mode; the
module itself is left as it is. Masks, as of pruning, and fake quantization are not taken off: a sketch would
lose what they are for.
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

from panther_compile.errors import CheckpointError
from panther_compile.kinds.match import CALLS, added_by_subclass, identities, read_forward_of_both_modes
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.surroundings import eval_mode

_CALLS = {nn.Linear: F.linear, nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_BASES = (*_CALLS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_GEOMETRY = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_PURE = frozenset(
    """
    add sub mul div truediv pow neg abs square sqrt rsqrt reciprocal exp log sigmoid tanh softplus clamp
    mean sum var std var_mean std_mean norm vector_norm amax amin batch_norm layer_norm group_norm
    instance_norm normalize reshape reshape_as view view_as flatten unflatten transpose t permute unsqueeze
    squeeze expand expand_as contiguous type_as to float getitem size
    """.split()  # noqa: SIM905
)
_READS = ("T", "mT", "shape", "dtype", "ndim")
_ORIGIN = "_panther_made_its_weight"  # on what stands for a layer that made its weight: the class of that


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


def note_origin(old: nn.Module, new: nn.Module) -> nn.Module:
    """The replacement of a layer, on which it notes whether that makes another weight of the one it holds."""
    made = vars(old).get(_ORIGIN) or (type(old).__name__ if _makes_another(old) else "")
    if made:
        vars(new)[_ORIGIN] = made
    return new


def check_origins(model: nn.Module) -> None:
    """Check that the class of a model makes nothing else of the weights that its dense layers hold.

    Raises:
        CheckpointError: a layer that was densified stands for one that makes its weight in each call.
    """
    for name, module in model.named_modules():
        made = vars(module).get(_ORIGIN)
        if made and not isinstance(module, SketchedLayer):
            raise CheckpointError(
                f"{name or 'the model'} was densified, and is a {made} in the model's class, which makes "
                "another weight of the one that it is given in each call: from_pretrained would be wrong, "
                "save the sketch"
            )


def _makes_another(module: nn.Module) -> bool:
    plain = plain_form(module)
    if plain is module:
        return False
    for name in ("weight", "bias"):
        made, held = getattr(plain, name, None), module._parameters.get(name)
        if made is None or made is held:
            continue
        if held is None or held.is_meta or not torch.equal(made, held.to(made.dtype)):
            return True
    return False


def _without_parametrizations(module: nn.Module) -> nn.Module:
    if not parametrize.is_parametrized(module):
        return module
    lists = dict(module.parametrizations.named_children())  # type: ignore[union-attr]
    known = (_WeightNorm, _SpectralNorm, _Orthogonal)
    if not all(isinstance(step, known) for steps in lists.values() for step in steps.children()):
        return module
    parameters = dict(module._parameters)
    try:
        with eval_mode(module), torch.no_grad():
            for name, steps in lists.items():
                parameters[name] = _parameter(getattr(module, name), steps.parameters())
    except RuntimeError:  # of an operator that its dtype or device lacks
        return module
    children = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    return _stand_in(module, type(module).__mro__[1], parameters, children)


def _without_hooks(module: nn.Module) -> nn.Module:
    hooks = list(module._forward_pre_hooks.values())
    hook = hooks[0] if len(hooks) == 1 else None
    if not isinstance(hook, WeightNorm | SpectralNorm) or hook.name != "weight":
        return module
    used = {"weight_g", "weight_v", "weight_orig", "weight_u"}
    with torch.no_grad():
        if isinstance(hook, WeightNorm):
            made = hook.compute_weight(module)
        else:
            made = hook.compute_weight(module, do_power_iteration=False)
    own = module._parameters.items()
    weight = _parameter(made, (one for name, one in own if name in used and one is not None))
    kept = {name: one for name, one in own if name not in used}
    plain = _stand_in(module, type(module), {"weight": weight} | kept, module._modules)
    plain._buffers = {name: one for name, one in module._buffers.items() if name not in used}
    plain._forward_pre_hooks = type(module._forward_pre_hooks)()
    return plain


def _without_own_forward(module: nn.Module, base: type[nn.Module]) -> nn.Module:
    """A layer of the base class, if the own forward is one call of its function on a weight made there."""
    cls = type(module)
    methods = ("forward", "_conv_forward")
    own = any(getattr(cls, name, None) is not getattr(base, name, None) for name in methods)
    if any(getattr(cls, name) is not getattr(base, name) for name in CALLS):
        return module
    if not own or base not in _CALLS or set(methods) & set(vars(module)) or added_by_subclass(cls, base):
        return module
    graph = read_forward_of_both_modes(module)
    if graph is None:
        return module
    idle = identities(module)
    made = _made_in(module, graph, base, idle)
    if made is None or not _is_as_the_weight(made, module):
        return module
    plain = _stand_in(module, base, made, {k: v for k, v in module._modules.items() if k not in idle})
    plain._buffers = {}
    usual = vars(base(*(1,) * (2 if base is nn.Linear else 3), device="meta"))
    for name, held in list(vars(plain).items()):
        if name not in usual:
            del vars(plain)[name]  # a setting of the forward that is taken off
        elif isinstance(usual[name], tuple) and not isinstance(held, str):
            vars(plain)[name] = (held,) * len(usual[name]) if isinstance(held, int) else tuple(held)
    return plain


def _made_in(
    module: nn.Module, graph: fx.Graph, base: type[nn.Module], idle: frozenset[str]
) -> dict[str, nn.Parameter | None] | None:
    """The weight and bias that a forward gives its one call; None if there is anything else to it."""
    last = _before(graph.output_node().args[0], idle)
    call = _arguments(last, module, base)
    x, around = next(iter(graph.nodes)), (last, graph.output_node())
    if call is None or _before(call["input"], idle) is not x:
        return None
    made = {name: call.get(name) for name in ("weight", "bias")}
    behind = {name: _behind(node) for name, node in made.items() if isinstance(node, fx.Node)}
    makers = set().union(*behind.values())
    if not all(_is_maker(node, module) for node in makers):
        return None
    if not all(node is x or node in makers or node in around or _is_idle(node, idle) for node in graph.nodes):
        return None  # it does more than it gives back
    read, tensors = _tensors(module), _run(module, graph, makers, made)
    if tensors is None or set(read) - {str(node.target) for node in makers}:
        return None
    found: dict[str, nn.Parameter | None] = {"bias": None}
    for name, nodes in behind.items():
        held = (read[str(node.target)] for node in nodes if node.op == "get_attr")
        found[name] = _parameter(tensors[name], held)
    return found


def _arguments(node: Any, module: nn.Module, base: type[nn.Module]) -> dict[str, Any] | None:
    """The arguments of a node, by name, if it calls the base class's function, of the module's geometry."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not _CALLS[base]:
        return None
    options = () if base is nn.Linear else tuple(_GEOMETRY)
    call = dict(zip(("input", "weight", "bias", *options), node.args, strict=False)) | dict(node.kwargs)
    alike = (_spread(call.get(name, _GEOMETRY[name])) == _spread(getattr(module, name)) for name in options)
    if getattr(module, "padding_mode", "zeros") != "zeros" or not all(alike):
        return None
    known = isinstance(call["weight"], fx.Node) and isinstance(call.get("bias"), fx.Node | None)
    return call if known else None


def _run(
    module: nn.Module, graph: fx.Graph, makers: set[fx.Node], made: Mapping[str, fx.Node | None]
) -> dict[str, Tensor] | None:
    """What some nodes make, by name; None if they do not run."""
    fixed, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in makers:
            copies[node] = fixed.node_copy(node, copies.__getitem__)
    fixed.output({name: copies[node] for name, node in made.items() if node is not None})
    try:
        with eval_mode(module), torch.no_grad():  # a norm may note what it has seen
            found: dict[str, Tensor] = fx.GraphModule(module, fixed).forward()  # a call prints errors
    except (RuntimeError, TypeError, ValueError, IndexError):  # it does not run, here or anywhere
        return None
    return found


def _is_as_the_weight(made: Mapping[str, nn.Parameter | None], module: nn.Module) -> bool:
    """Whether what is made stands for the module's own weight: no mask, no other shape, no more numbers."""
    weight, own = made["weight"], module._parameters.get("weight")
    assert weight is not None
    if own is None or weight.shape != own.shape:
        return False
    numbers = sum(one.numel() for one in made.values() if one is not None)
    if numbers > sum(one.numel() for one in _tensors(module).values()):
        return False
    masked = not own.is_meta and bool(((weight == 0) & (own != 0)).any())
    return not masked


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers, by name."""
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _parameter(tensor: Tensor, makers: Iterable[Tensor]) -> nn.Parameter:
    """What was made as a parameter, trained if what it was made of is; itself if it is one."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), any(one.requires_grad for one in makers))


def _before(node: Any, idle: frozenset[str]) -> Any:
    """What reaches a node through submodules that give back what they are given."""
    while isinstance(node, fx.Node) and _is_idle(node, idle):
        node = node.args[0]
    return node


def _spread(value: Any) -> Any:
    """A geometry that is alike along all axes as one number."""
    alike = isinstance(value, list | tuple) and len(set(value)) == 1
    return value[0] if alike else tuple(value) if isinstance(value, list) else value


def _behind(node: fx.Node) -> set[fx.Node]:
    """The node and all that it is computed from."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(one.all_input_nodes)
    return found


def _is_idle(node: fx.Node, idle: frozenset[str]) -> bool:
    return node.op == "call_module" and node.target in idle


def _is_maker(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node reads a parameter, or gives the same for the same and writes nothing.

    Buffers are no parameters: a mask is one, which training does not change.
    """
    if node.op == "get_attr":
        return node.target in module._parameters
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
    parameters: Mapping[str, nn.Parameter | None],
    children: Mapping[str, nn.Module | None],
) -> nn.Module:
    """A module of a class that holds what another does, but for its parameters and submodules."""
    plain: nn.Module = object.__new__(cls)
    plain.__dict__.update(vars(module))
    plain._parameters = dict(parameters)
    plain._modules = dict(children)
    for name in parameters:
        vars(plain).pop(name, None)  # a weight that a hook set
    return plain
