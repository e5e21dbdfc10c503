"""Nodes of a graph that do more than return their result."""

import torch
from torch import fx

from panther_compile.passes.batchnorm_calls import read_batchnorm

_PURE_HOMES = ("torch", "torch.nn.functional", "torch._C._nn", "_operator", "math", "builtins")
_WRITING_OPERATORS = frozenset(
    {"setitem", "delitem"}
    | {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}
    | {f"i{name}" for name in ("and", "or", "xor", "lshift", "rshift", "concat")}
)


def acts(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node writes, draws random numbers, asserts, or is the user's own and may do so."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        home = type(module).__module__
        ours = home.startswith(("torch.nn.modules.", "panther_compile."))
        return node.is_impure() or module.training or not ours
    if node.op == "call_function":
        return node.is_impure() or _function_acts(node)
    return node.is_impure()


def _function_acts(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name, home = getattr(node.target, "__name__", "_"), getattr(node.target, "__module__", None)
    if "_VariableFunctions" in str(getattr(node.target, "__self__", "")) or "built-in" in repr(node.target):
        home = home or "torch"
    norm = read_batchnorm(node)
    trains = norm is not None and norm["training"] is not False
    writes = name.endswith("_") or (home == "_operator" and name in _WRITING_OPERATORS)
    inplace = any(node.kwargs.get(key) not in (None, False) for key in ("out", "inplace"))
    return writes or trains or inplace or home not in _PURE_HOMES
