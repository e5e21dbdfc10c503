"""Read a model's graph where one is to be had, without touching the model; else, given data, a run of it."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from panther_compile.errors import first_line
from panther_compile.kinds.registry import is_known
from panther_compile.layers.own_weights import holds_own_weights
from panther_compile.models.outputs import tensors_in
from panther_compile.models.source import METADATA, METADATA_CALLS
from panther_compile.models.substitute import held_tensors
from panther_compile.passes.lift_functional import liftable_call

_GRAPH = "fx graph"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a graph tells about a model.

    Attributes:
        route: how the layers are found, for the report.
        direct: fully qualified names of parameters whose values `forward` uses itself, not through their
            module.
        opaque: those of them that go into something else than a functional layer, as a function that torch.fx
            does not look into.
    """

    route: str
    direct: frozenset[str] = frozenset()
    opaque: frozenset[str] = frozenset()

    @property
    def is_of_graph(self) -> bool:
        """Whether the model is a graph itself, and no other would show more of it."""
        return self.route == _GRAPH


class SketchTracer(fx.Tracer):
    """`fx.Tracer` that keeps whole what is sketched or could be, as it keeps the layers of torch.nn."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module is one node."""
        return holds_own_weights(m) or is_known(m) or super().is_leaf_module(m, module_qualified_name)


def read_graph(model: nn.Module) -> Reading:
    """Trace a model with torch.fx if it can be; name the reason if it cannot.

    A copy on the meta device is traced: `forward` runs on proxies, computes nothing, and whatever it
    changes on itself is thrown away.
    """
    if isinstance(model, fx.GraphModule):
        return Reading(_GRAPH, *_reads(model.graph))
    tracer = SketchTracer()
    if tracer.is_leaf_module(model, ""):
        return Reading("module tree")
    try:
        with torch.random.fork_rng(devices=[]):  # forward may draw numbers that depend on no input
            graph = tracer.trace(_on_meta(model))
    # Tracing runs the model's own code on proxies: it may raise anything, and the route says what.
    except Exception as error:
        brief = f"{type(error).__name__}: {first_line(error)}"[:120]
        return Reading(f"module tree (torch.fx cannot trace the model: {brief})")
    return Reading("module tree, read through its fx graph", *_reads(graph))


def _reads(graph: fx.Graph) -> tuple[frozenset[str], frozenset[str]]:
    """What is `direct` and what is `opaque` in a graph, see `Reading`."""
    direct, opaque = set(), set()
    for node in graph.nodes:
        readers = [user for user in node.users if not _asks_metadata(user)] if node.op == "get_attr" else []
        if readers:
            direct.add(str(node.target))
        if any((liftable_call(reader) or {}).get("weight") is not node for reader in readers):
            opaque.add(str(node.target))
    return frozenset(direct), frozenset(opaque)


def _asks_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in METADATA_CALLS
    return node.op == "call_function" and node.target is getattr and node.args[1] in METADATA


def read_run(model: nn.Module, run: Callable[[nn.Module], object]) -> frozenset[str]:
    """Fully qualified names of the parameters that a run uses itself, and never calls the layers of.

    Args:
        model: in eval mode; may be changed, as by any run of it.
        run: calls it.
    """
    called, read = _watched_run(model, run)
    # What a layer that was called holds too, as a tied one does, may have been read there.
    read -= {id(tensor) for module in called for tensor in module._parameters.values()}
    uncalled: set[str] = set()
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not is_known(module):
            continue
        inside.update(module.modules())
        if module not in called:
            named = module.named_parameters(prefix=name)
            uncalled.update(full for full, parameter in named if id(parameter) in read)
    return frozenset(uncalled)


def missed_by_run(model: nn.Module, names: Iterable[str], run: Callable[[nn.Module], object]) -> list[str]:
    """Those of the layers that a run neither calls, nor anything in them, nor reads a parameter of.

    Args:
        model: see `read_run`.
        names: of layers in it.
        run: calls it.
    """
    called, read = _watched_run(model, run)

    def is_missed(layer: nn.Module) -> bool:
        held = {id(parameter) for parameter in layer.parameters()}
        return called.isdisjoint(layer.modules()) and read.isdisjoint(held)

    layers = dict(model.named_modules(remove_duplicate=False))
    return [name for name in names if name in layers and is_missed(layers[name])]


def _watched_run(model: nn.Module, run: Callable[[nn.Module], object]) -> tuple[set[nn.Module], set[int]]:
    """The modules that a run calls, and the ids of the parameters that it makes tensors of."""
    called: set[nn.Module] = set()
    watch = _WatchReads()
    handle = register_module_forward_pre_hook(lambda module, _: called.add(module))
    try:
        with torch.no_grad(), watch:
            run(model)
    finally:
        handle.remove()
    return called, set(watch.read)


class _WatchReads(TorchFunctionMode):
    """Keeps the parameters that tensors are made from; to ask for a shape or a dtype is not to read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function, and note what it was given."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if tensors_in(result):
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, nn.Parameter):
                    self.read[id(one)] = one
        return result


def clone_structure(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every tensor that a module holds with the original."""
    clone: nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in held_tensors(model)})
    return clone


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without data and without hooks, which are the user's code and not part of forward."""
    memo: dict[int, object] = {id(tensor): tensor.detach().to("meta") for tensor in held_tensors(model)}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    clone: nn.Module = copy.deepcopy(model, memo)
    for module in clone.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return clone
