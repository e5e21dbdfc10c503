"""Whether a subclass of a convolution uses its weight and bias in calls of torch's convolution alone.

    return super().forward(F.pad(x, self.left))
    return self._conv_forward(self.pad(x), self.weight, self.bias)
    return F.conv2d(same(x), self.weight, self.bias, self.stride)
    return conv2d_same(x, self.weight, self.bias, self.stride)    a function that does one of these
    return super()._conv_forward(x, weight.to(x.dtype), bias)     a `_conv_forward` that casts them

So do the convolutions of video autoencoders, which pad in time on one side and keep frames for the next
chunk, those of streaming speech encoders, TensorFlow's in timm, and OpenAI's Whisper. The text of the
forward is read, and of functions that it hands the weight to; nothing is run.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from panther_compile.kinds.match import calls_alone
from panther_compile.models.source import is_question, is_self, own_functions, parse_function

_BASES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CALLS = ("conv1d", "conv2d", "conv3d")
_WEIGHTS = ("weight", "bias")


def convolution_called(module: nn.Module) -> Any:
    """The class of torch whose convolution a subclass's own forward calls; None if it is no such subclass.

    Args:
        module: any.
    """
    cls: Any = type(module)
    base = next((one for one in cls.__mro__ if one in _BASES), None)
    if base is None or "_conv_forward" in vars(module) or not _has_its_sizes(module):
        return None
    own = [name for name in ("forward", "_conv_forward") if getattr(cls, name) is not getattr(base, name)]
    if own == ["_conv_forward"]:
        return base if calls_alone(module, getattr(F, _CALLS[_BASES.index(base)])) else None
    if own != ["forward"]:
        return None
    return base if _only_calls(cls, base, module._parameters.get("bias") is not None) else None


def _has_its_sizes(module: Any) -> bool:
    """Whether the attributes of a convolution are those of its weight, as torch's constructor leaves them."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedTensorMixin) or weight.dim() < 3:
        return False
    axes, groups = weight.dim() - 2, module.groups
    sizes = (module.out_channels, module.in_channels, module.kernel_size)
    pairs = (module.kernel_size, module.stride, module.dilation)
    return (
        isinstance(groups, int)
        and all(isinstance(one, tuple) and len(one) == axes for one in pairs)
        and sizes == (weight.shape[0], weight.shape[1] * groups, tuple(weight.shape[2:]))
        and all(size % groups == 0 for size in sizes[:2])
    )


@cache
def _only_calls(cls: Any, base: Any, has_bias: bool) -> bool:
    functions = own_functions(cls, base)
    if functions is None:
        return False
    calls, known = 0, set[ast.AST]()
    for node in ast.walk(functions[0]):
        handed, text = _handed_on(node, cls.forward)
        known.update(handed)
        functions += text
    for function in functions:
        for node in ast.walk(function):
            used = _used_by_call(node, has_bias)
            calls += used is not None
            known.update(used or (), _asked(node))
    nodes = [node for function in functions for node in ast.walk(function)]
    return calls > 0 and all(node in known for node in nodes if _is_weight(node) or _is_super(node))


def _handed_on(node: ast.AST, forward: Any) -> tuple[list[ast.AST], list[ast.FunctionDef]]:
    """What of the weight and the bias a call in a forward hands to a function, and that function's text.

    In the text they are called what they are in the forward, "self.weight" and "self.bias".
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return [], []
    code, name = forward.__code__, node.func.id
    is_local = name in (*code.co_varnames, *code.co_freevars, *code.co_cellvars)
    function = None if is_local else forward.__globals__.get(name)
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return [], []
    try:
        text = parse_function(function).body[0]
    except (OSError, TypeError, SyntaxError):
        return [], []
    starred = any(isinstance(one, ast.Starred) for one in node.args)
    if not isinstance(text, ast.FunctionDef) or starred or any(is_self(one) for one in ast.walk(text)):
        return [], []
    names = [one.arg for one in (*text.args.posonlyargs, *text.args.args)]
    given = dict(zip(names, node.args, strict=False)) | {one.arg: one.value for one in node.keywords}
    handed = {name: value for name, value in given.items() if _is_weight(value)}
    return list(handed.values()), [_Handed(handed).visit(text)]


class _Handed(ast.NodeTransformer):
    """Names of a function's arguments become what is handed to it."""

    def __init__(self, handed: Mapping[Any, ast.AST]) -> None:
        self.handed = handed

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """An attribute of the module, read or written as the name is."""
        value: Any = self.handed.get(node.id)
        return node if value is None else ast.Attribute(value.value, value.attr, node.ctx)


def _used_by_call(node: ast.AST, has_bias: bool) -> tuple[ast.AST, ...] | None:
    """What of the weight, the bias and `super` a call of torch's convolution uses; None if it is none."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    method, args = node.func, node.args
    if any(isinstance(one, ast.Starred) for one in args[:3]) or any(one.arg is None for one in node.keywords):
        return None
    if method.attr == "forward" and isinstance(method.value, ast.Call) and _is_super(method.value.func):
        return (method.value.func,) if len(args) == 1 and not node.keywords else None
    is_own = method.attr == "_conv_forward" and is_self(method.value)
    if not is_own and (method.attr not in _CALLS or is_self(method.value)):
        return None
    named = {one.arg: one.value for one in node.keywords}
    given = dict(zip(("input", *_WEIGHTS), args, strict=False)) | named
    held = {name: given.get(name) for name in _WEIGHTS}
    if not _reads(held["weight"], "weight") or (has_bias and not _reads(held["bias"], "bias")):
        return None
    return tuple(one for one in held.values() if one is not None)


def _asked(node: ast.AST) -> Iterator[ast.AST]:
    """What is only asked for its type."""
    if isinstance(node, ast.Attribute) and is_question(node) and _reads(node.value, "weight"):
        yield node.value


def _reads(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Attribute) and is_self(node.value) and node.attr == name


def _is_weight(node: ast.AST) -> bool:
    return any(_reads(node, name) for name in _WEIGHTS)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "super"
