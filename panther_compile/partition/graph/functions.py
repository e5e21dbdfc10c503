"""The user's own `torch.autograd.Function`s, which an exporter would take apart.

It would keep what the forward computes, and autograd would differentiate that: a quantizer that lets
gradients pass, or a reversed gradient, would lose its backward without a word.

    the model       STE.apply(x, 4)
    an exporter     mul = x * 4;  round = mul.round();  ...
    here            a node that calls STE.apply(x, 4)

What is no tensor is part of the node. A call that is given what may hold tensors out of sight (a module, a
function) is taken apart as ever, and named; so is a hook that the model puts on a tensor, which runs in no
graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import function
from torch.utils import _pytree as pytree

_Base: Any = function._SingleLevelFunction
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


class FunctionCalls:
    """The calls of one capture.

    Attributes:
        lost: what the graph does not do of what the model does in its backward, in words.
    """

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.calls: list[_Call] = []

    def put_into(self, graph_module: fx.GraphModule) -> None:
        """Let the nodes that an exporter wrote for the calls call the user's functions."""
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.panther_compile.autograd_function.default:
                tensors, number = node.args
                node.target, node.args = self.calls[number].function(flat=True), tuple(tensors)
        graph_module.recompile()

    def apply(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for a call of a function while its model is read."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, (Tensor, fx.Proxy, *_PLAIN)) for leaf in leaves):
            self.lost.add(f"the backward of {cls.__qualname__}, which is given more than tensors and numbers")
            return _apply(cls, args, kwargs)
        call = _Call(cls, leaves, spec)
        given = [leaf for leaf in leaves if isinstance(leaf, (Tensor, fx.Proxy))]
        proxy = next((one for one in given if isinstance(one, fx.Proxy)), None)
        if proxy is not None:
            return proxy.tracer.create_proxy("call_function", call.function(flat=False), tuple(given), {})
        if not given:
            return _apply(cls, args, kwargs)
        self.calls.append(call)
        return call.result(_autograd_function(given, len(self.calls) - 1))


_under_way: list[FunctionCalls] = []


class _Call:
    """One call: everything but its tensors."""

    def __init__(self, cls: Any, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        self._cls, self._spec = cls, spec
        self._places = [place for place, one in enumerate(leaves) if isinstance(one, (Tensor, fx.Proxy))]
        self._leaves = [None if place in self._places else one for place, one in enumerate(leaves)]
        self._result: tuple[list[Any], pytree.TreeSpec] = [], pytree.tree_structure(())

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What `shapes` saw, of these tensors."""
        leaves, given = self._result[0], iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if one is Tensor else one for one in leaves], self._result[1]
        )

    def shapes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the forms of the call's results, which share no memory with its arguments."""
        args, kwargs = self._arguments([tensor.detach() for tensor in tensors])
        leaves, spec = pytree.tree_flatten(_apply(self._cls, args, kwargs))
        self._result = [Tensor if isinstance(one, Tensor) else one for one in leaves], spec
        return [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            for one in leaves
            if isinstance(one, Tensor)
        ]

    def function(self, *, flat: bool) -> Callable[..., Any]:
        """What a node calls: tensors in; out comes what the user's function gives, or its tensors alone."""

        def call(*tensors: Tensor) -> Any:
            args, kwargs = self._arguments(tensors)
            result = self._cls.apply(*args, **kwargs)
            leaves = pytree.tree_leaves(result) if flat else []
            return tuple(one for one in leaves if isinstance(one, Tensor)) if flat else result

        call.__name__ = call.__qualname__ = self._cls.__name__
        return call

    def _arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return tuple(args), dict(kwargs)


@torch.library.custom_op("panther_compile::autograd_function", mutates_args=())
def _autograd_function(tensors: list[Tensor], number: int) -> list[Tensor]:
    """Stand for a call, the number of which it is given, in the graph of an exporter."""
    return _under_way[-1].calls[number].shapes(tensors)


_autograd_function.register_fake(lambda tensors, number: _under_way[-1].calls[number].shapes(tensors))


@contextmanager
def functions_kept() -> Iterator[FunctionCalls]:
    """Let a model that is read in here call its functions as they are."""
    calls = FunctionCalls()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = not cls.__module__.startswith("torch.")
        return calls.apply(cls, args, kwargs) if own else _apply(cls, args, kwargs)

    register_hook = Tensor.register_hook

    def register(tensor: Tensor, hook: Any) -> Any:
        calls.lost.add(f"the hook {getattr(hook, '__qualname__', type(hook).__name__)} of a tensor")
        return register_hook(tensor, hook)

    _under_way.append(calls)
    _Base.apply = classmethod(apply)
    Tensor.register_hook = register  # type: ignore[assignment,method-assign]
    try:
        yield calls
    finally:
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        del _Base.apply
        _under_way.pop()


def _apply(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as torch does."""
    return super(_Base, cls).apply(*args, **kwargs)
