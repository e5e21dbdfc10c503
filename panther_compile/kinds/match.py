"""Checks that all kinds share: is this module really the plain layer it looks like?"""

import copy
import operator
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils import parametrize

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

CALLS = ("__call__", "_call_impl")
"""Methods of `nn.Module` that call a forward."""


def why_not_plain(
    module: nn.Module,
    base: type[nn.Module],
    *,
    tensors: frozenset[str],
    children: frozenset[str] = frozenset(),
    methods: tuple[str, ...] = ("forward",),
    sizes: tuple[int, ...] | None = None,
) -> str | None:
    """Why a module does not compute just what its base class computes, or None if it does.

    Args:
        module: of type `base` or a subclass.
        base: `nn.Linear`, `nn.Conv2d`, ...
        tensors: names of the parameters and buffers that the base class has.
        children: names of the submodules that the base class has.
        methods: those that define what the base class computes.
        sizes: arguments that the base class can be made with, to know the attributes of its instances; None:
            public attributes set on the instance are no reason.
    """
    if parametrize.is_parametrized(module):
        return "parametrized (torch.nn.utils.parametrize); remove the parametrizations first"
    for method in (*methods, *CALLS):
        if method in module.__dict__ and "_hf_hook" in module.__dict__:
            return (
                "accelerate (device_map=) hooks it; accelerate.hooks.remove_hook_from_submodules(model) first"
            )
        if method in module.__dict__:
            return f"its {method} was replaced on the instance"
        if getattr(type(module), method) is not getattr(base, method):
            return f"{type(module).__name__} overrides {base.__name__}.{method}"
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if any(isinstance(tensor, UninitializedTensorMixin) for tensor in own.values()):
        return "lazy: run one batch through the model first"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "has hooks, which expect the dense layer (pruning and weight_norm use them too)"
    extra = sorted(set(own) - tensors) + sorted(set(dict(module.named_children())) - children)
    if extra:
        return f"holds more than {base.__name__} does: {', '.join(extra)}"
    for name in tensors:
        if name not in own and getattr(module, name, None) is not None:
            return f"its {name} is neither a parameter nor a buffer"
    for name, tensor in own.items():
        reason = why_not_tensor(name, tensor)
        if reason is not None:
            return reason
    added = added_by_subclass(type(module), base) or _added_to_instance(module, base, sizes)
    return f"carries more than {base.__name__} does: {', '.join(added)}" if added else None


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module computes what `nn.Linear` does, from its own weight and bias."""
    if not isinstance(module, nn.Linear):
        return False
    return why_not_plain(module, nn.Linear, tensors=frozenset({"weight", "bias"}), sizes=(1, 1)) is None


def computes_linear(module: nn.Linear) -> bool:
    """Whether a subclass of `nn.Linear` with a forward of its own computes x Wᵀ + b, as FalconLinear does.

    Its forward is read as a graph, in which only products and sums of the input, the weight and the bias may
    stand; the graph is then held against `F.linear` on random numbers. The forward itself is not run.
    """
    cls = type(module)
    if cls.forward is nn.Linear.forward or "forward" in vars(module):
        return False
    graph = read_forward_of_both_modes(module)
    if graph is None:
        return False
    if not all(_is_product_or_sum(node) for node in graph.nodes):
        return False
    # On the CPU, also while a model is made on the meta device.
    drawn: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": "cpu"}
    weight, x = torch.randn(3, 5, **drawn), torch.randn(2, 4, 5, **drawn)
    bias = None if module.bias is None else torch.randn(3, **drawn)
    held = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return _gives(graph, held, x, F.linear(x, weight, bias))


def calls_linear(module: nn.Module) -> bool:
    """Whether the own forward of a class is x Wᵀ + b of its `weight` and `bias`, each as it is or cast to x.

    So do the layers of OpenAI's Whisper, whose weights stay in float32 where it runs in half types, and of
    PyTorch Geometric. The forward is read as a graph: one `F.linear`, casts of the parameters, and nothing
    else. What `computes_linear` takes is none of these.
    """
    cls, weight = type(module), module._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedTensorMixin) or weight.dim() != 2:
        return False
    if cls.__module__.startswith("torch.") or cls.forward is nn.Linear.forward or "forward" in vars(module):
        return False
    return calls_alone(module, F.linear)


def calls_alone(module: nn.Module, function: Any) -> bool:
    """Whether a forward is one call of a function on x and on weight and bias, as they are or cast to x."""
    graph = read_forward_of_both_modes(module)
    if graph is None:
        return False
    x, product = next(iter(graph.nodes)), graph.output_node().args[0]
    dtypes = {node for node in x.users if node.args == (x, "dtype")}

    def parameter(node: Any) -> str | None:
        """The name of the parameter that a node is, or casts."""
        if not isinstance(node, fx.Node):
            return None
        if node.op == "get_attr":
            return str(node.target)
        known = not node.kwargs and len(node.args) == 2
        by = {"to": dtypes, "type_as": {x}}.get(str(node.target)) if known else None
        return parameter(node.args[0]) if by and node.args[1] in by else None

    if not isinstance(product, fx.Node) or product.target is not function:
        return False
    given = dict(zip(("input", "weight", "bias"), product.args, strict=False)) | dict(product.kwargs)
    has_bias = module._parameters.get("bias") is not None
    parameters = [given.get(name) for name in ("weight", "bias")[: 1 + has_bias]]
    known = {x, product, graph.output_node(), *dtypes, *parameters}
    return (
        given["input"] is x
        and [parameter(node) for node in parameters] == ["weight", "bias"][: len(parameters)]
        and all(node in known or node.op == "get_attr" for node in graph.nodes)
    )


class _BufferTracer(fx.Tracer):
    """Buffers too are read as nodes, so that what a forward writes into them is not written."""

    proxy_buffer_attributes = True


def read_forward(module: nn.Module, *, training: bool | None = None) -> fx.Graph | None:
    """The graph of a forward of one input; None if it has none.

    What the forward writes into its module as it is read is written into a copy.

    Args:
        module: whose forward is read.
        training: the mode in which it is read; None for the module's own.
    """
    shadow: nn.Module = object.__new__(type(module))
    held = vars(module).items()
    vars(shadow).update((k, copy.copy(v) if isinstance(v, dict | list | set) else v) for k, v in held)
    shadow.training = module.training if training is None else training
    try:
        graph = _BufferTracer().trace(shadow)
    # Tracing runs the subclass's own code on proxies, which may raise anything: then it is another layer.
    except Exception:
        return None
    return graph if sum(node.op == "placeholder" for node in graph.nodes) == 1 else None


def read_forward_of_both_modes(module: nn.Module) -> fx.Graph | None:
    """The same, of a forward that does the same in training and in eval mode; None if it has no such."""
    in_training, graph = (read_forward(module, training=training) for training in (True, False))
    return graph if str(in_training) == str(graph) else None


def _gives(graph: fx.Graph, held: dict[str, Any], x: Tensor, wanted: Tensor) -> bool:
    """Whether a graph, of the tensors and modules that are held in place of its own, gives what is wanted."""
    try:
        found = fx.GraphModule(held, graph).forward(x)  # a call would print the error too
    except RuntimeError:  # shapes that only the module's own weight has
        return False
    return isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted)


_PRODUCTS_AND_SUMS = frozenset(
    {operator.matmul, torch.matmul, F.linear, operator.add, operator.iadd, torch.add, torch.addmm, torch.t}
)


def _is_product_or_sum(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return node.target in ("weight", "bias")
    if node.op == "call_method":
        return node.target in ("t", "transpose", "matmul", "add", "contiguous")
    turned = node.target is getattr and node.args[1] in ("T", "mT")
    return node.op == "call_function" and (turned or node.target in _PRODUCTS_AND_SUMS)


def identities(module: nn.Module) -> frozenset[str]:
    """The names of the submodules that give back what they are given."""
    return frozenset(name for name, child in module.named_children() if _gives_back(child))


def _gives_back(module: nn.Module) -> bool:
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return False
    if isinstance(module, nn.Identity) or next(module.children(), None) is not None:
        return isinstance(module, nn.Identity)
    graph = read_forward(module)
    nodes = [] if graph is None else list(graph.nodes)
    return [node.op for node in nodes] == ["placeholder", "output"] and nodes[1].args == (nodes[0],)


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter around a layer, of PEFT or loralib, without an import of them.

    Merging it writes to the layer's weight.
    """
    kinds = type(module).__mro__
    return "lora_A" in module._parameters or any(
        kind.__name__ == "BaseTunerLayer" and kind.__module__.startswith("peft.") for kind in kinds
    )


def added_by_subclass(kind: type[nn.Module], base: type[nn.Module]) -> list[str]:
    """Public names that a subclass adds, which callers may use and the replacement would lack.

    A static method is none of them: it says something of the class, and is asked for there.
    """
    own = (vars(cls).items() for cls in kind.__mro__[: kind.__mro__.index(base)])
    names = {name for held in own for name, value in held if not isinstance(value, staticmethod)}
    return sorted(name for name in names if not name.startswith("_") and not hasattr(base, name))


def _added_to_instance(module: nn.Module, base: type[nn.Module], sizes: tuple[int, ...] | None) -> list[str]:
    """Public attributes that somebody set on the instance."""
    if sizes is None:
        return []
    added = set(vars(module)) - _plain_attributes(base, sizes)  # type: ignore[arg-type]
    return sorted(name for name in added if not name.startswith("_"))


@cache
def _plain_attributes(base: type[nn.Module], sizes: tuple[int, ...]) -> frozenset[str]:
    """What an instance has from its constructor."""
    # Not on the meta device, where the normal numbers of an embedding cost an import of torch._dynamo.
    with torch.random.fork_rng(devices=[]):
        return frozenset(vars(base(*sizes, device="cpu")))


def why_not_tensor(name: str, tensor: Tensor) -> str | None:
    """Why a parameter of a name is no plain tensor of fractions, or None if it is one."""
    if type(tensor) not in (nn.Parameter, Tensor):
        return f"its {name} is a {type(tensor).__name__}, not a plain tensor (quantized or sharded)"
    if tensor.dtype not in _FLOATS:
        return f"its {name} is {tensor.dtype}, wanted float64, float32, bfloat16 or float16"
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return f"its {name} has hooks, which expect the dense layer's gradient; remove them first"
    return None
