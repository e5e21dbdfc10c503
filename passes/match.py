"""Checks that every sketching pass shares: is this module really the plain layer it looks like?"""

from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils import parametrize

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_SIZES: dict[type[nn.Module], tuple[int, ...]] = {
    nn.Linear: (1, 1),
    nn.Conv2d: (1, 1, 1),
    nn.Embedding: (1, 1),
    nn.MultiheadAttention: (1, 1),
}


def why_not_plain(
    module: nn.Module,
    base: type[nn.Module],
    *,
    tensors: frozenset[str],
    children: frozenset[str] = frozenset(),
    methods: tuple[str, ...] = ("forward",),
) -> str | None:
    """Why a module does not compute just what its base class computes, or None if it does.

    Args:
        module: of type `base` or a subclass.
        base: `nn.Linear`, `nn.Conv2d`, ...
        tensors: names of the parameters and buffers that the base class has.
        children: names of the submodules that the base class has.
        methods: those that define what the base class computes.
    """
    if parametrize.is_parametrized(module):
        return "parametrized (torch.nn.utils.parametrize); remove the parametrizations first"
    for method in methods:
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
        reason = _why_not_tensor(name, tensor)
        if reason is not None:
            return reason
    added = _added_by_subclass(type(module), base) or _added_to_instance(module, base)
    return f"carries more than {base.__name__} does: {', '.join(added)}" if added else None


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module computes what `nn.Linear` does, from its own weight and bias."""
    if not isinstance(module, nn.Linear):
        return False
    return why_not_plain(module, nn.Linear, tensors=frozenset({"weight", "bias"})) is None


def _added_by_subclass(kind: type[nn.Module], base: type[nn.Module]) -> list[str]:
    """Public names that a subclass adds, which callers may use and the stand-in would lack."""
    names = (name for cls in kind.__mro__[: kind.__mro__.index(base)] for name in vars(cls))
    return sorted({name for name in names if not name.startswith("_") and not hasattr(base, name)})


def _added_to_instance(module: nn.Module, base: type[nn.Module]) -> list[str]:
    """Public attributes that somebody set on the instance."""
    if base not in _SIZES:
        return []
    added = set(vars(module)) - _plain_attributes(base)  # type: ignore[arg-type]
    return sorted(name for name in added if not name.startswith("_"))


@cache
def _plain_attributes(base: type[nn.Module]) -> frozenset[str]:
    """What an instance has from its constructor."""
    # Not on the meta device, where the normal numbers of an embedding cost an import of torch._dynamo.
    with torch.random.fork_rng(devices=[]):
        return frozenset(vars(base(*_SIZES[base], device="cpu")))


def _why_not_tensor(name: str, tensor: Tensor) -> str | None:
    if type(tensor) not in (nn.Parameter, Tensor):
        return f"its {name} is a {type(tensor).__name__}, not a plain tensor (quantized or sharded)"
    if tensor.dtype not in _FLOATS:
        return f"its {name} is {tensor.dtype}, wanted float64, float32, bfloat16 or float16"
    return None
