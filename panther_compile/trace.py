"""Read a model's graph where one is to be had, without running or touching the model."""

import copy
from dataclasses import dataclass

import torch
from torch import fx, nn

from panther_compile.layers.base import SketchedLayer
from panther_compile.passes.default import SKETCH_PASSES
from panther_compile.substitute import held_tensors


@dataclass(frozen=True, slots=True)
class Reading:
    """What a graph tells about a model.

    Attributes:
        route: how the layers are found, for the report.
        direct: fully qualified names of parameters that `forward` uses itself, not through their module.
    """

    route: str
    direct: frozenset[str] = frozenset()


class SketchTracer(fx.Tracer):
    """`fx.Tracer` that keeps whole what is sketched or could be, as it keeps the layers of torch.nn."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module is one node."""
        known = isinstance(m, SketchedLayer) or any(one.kind(m) is not None for one in SKETCH_PASSES)
        return known or super().is_leaf_module(m, module_qualified_name)


def read_graph(model: nn.Module) -> Reading:
    """Trace a model with torch.fx if it can be; name the reason if it cannot.

    A copy on the meta device is traced: `forward` runs on proxies, computes nothing, and whatever it
    changes on itself is thrown away.
    """
    if isinstance(model, fx.GraphModule):
        reads = {str(node.target) for node in model.graph.nodes if node.op == "get_attr"}
        return Reading("fx graph", frozenset(reads))
    tracer = SketchTracer()
    if tracer.is_leaf_module(model, ""):
        return Reading("module tree")
    try:
        with torch.random.fork_rng(devices=[]):  # forward may draw numbers that hang on no input
            graph = tracer.trace(_on_meta(model))
    # Tracing runs the model's own code on proxies: it may raise anything, and the route says what.
    except Exception as error:
        message = str(error).strip().splitlines()
        brief = f"{type(error).__name__}: {message[0] if message else ''}"[:120]
        return Reading(f"module tree (torch.fx cannot trace the model: {brief})")
    reads = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return Reading("module tree, read through its fx graph", frozenset(reads))


def clone_structure(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every parameter and buffer with the original."""
    tensors = (*model.parameters(), *model.buffers())
    clone: nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
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
