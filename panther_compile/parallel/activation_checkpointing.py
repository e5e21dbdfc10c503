"""Activations that are not kept for the backward, but computed again, unit by unit.

full         of a unit its inputs are kept, and nothing else
selective    and results that are narrower than what they are computed from, by the rule of
             `partition.graph.narrowing`, which the plan counts with too
0.6          a budget: and results that take long to compute again (`kept_within_budget`), at most that share
             of the bytes that it would keep without checkpointing
"""

from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from panther_compile.factorization import cost
from panther_compile.parallel.kept_results import KeptByKind, contexts_keeping
from panther_compile.parallel.kept_within_budget import KeptWithinBudget
from panther_compile.parallel.writes import viewed, written
from panther_compile.partition.graph.hardware import CPU
from panther_compile.partition.graph.narrowing import is_narrowing


def checkpoint_unit(unit: nn.Module, mode: str | float, device: cost.Device = CPU.device) -> None:
    """Let a module keep its inputs, and compute the rest again in the backward; in place.

    Args:
        unit: that writes nothing it is given.
        mode: "full", "selective" or a budget.
        device: that seconds are estimated for where there is a budget, as of `Hardware`.

    The backward raises a `ParallelError` where what the unit has kept was written in place behind its
    forward, and torch a RuntimeError where what it was given was.
    """
    if mode == "full":
        checkpoint(unit)
    elif mode == "selective":
        checkpoint(unit, context_fn=selective_contexts)
    else:
        checkpoint(unit, context_fn=KeptWithinBudget(unit, float(mode), device).contexts)


def find_written_buffer(graph_module: fx.GraphModule) -> str | None:
    """A buffer that a forward writes, by name, and a second one would write again; None if there is none.

    Args:
        graph_module: of a model, flat.
    """
    buffers = dict(graph_module.named_buffers(remove_duplicate=False))
    bases = (viewed(value) for node in graph_module.graph.nodes for value in written(node))
    names = (str(one.target) for one in bases if one.op == "get_attr")
    return next((name for name in names if name in buffers), None)


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one forward of a unit and of its recomputation, for `torch.utils.checkpoint`."""
    return contexts_keeping(KeptByKind(is_narrowing))
