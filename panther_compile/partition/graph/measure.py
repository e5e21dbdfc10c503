"""Seconds of each node of a graph on the device the model is on, forward and backward, node by node.

A node runs on leaves, so that its backward is its own and nothing is kept for another's. The graph also runs
as a whole, without a stopwatch. What each node then seems to take too long, as autograd's engine starts for
each, is the same for all: it is taken off, so that all nodes together take as long as the whole.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from panther_compile.models.stopwatch import seconds_of
from panther_compile.partition.graph.capture import Captured

_FEWEST_RUNS, _MOST_RUNS, _SECONDS = 3, 20, 5.0


@dataclass(frozen=True)
class Measured:
    """Seconds by the name of the node.

    Attributes:
        forward: of every node that is a call.
        backward: of those through which gradients flow; None where nobody looked.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float] | None = None


def measure_nodes(
    captured: Captured,
    *,
    repeats: int | None = None,
    training: bool = True,
) -> Measured:
    """The best of several runs of each node; the model, its gradients and the inputs stay as they are.

    There must be memory for the forward and backward of the whole graph.

    Args:
        captured: the model.
        repeats: runs; as many as five seconds of processor time allow, from 3 to 20, if None.
        training: measure the backward too.
    """
    inputs = captured.example
    device = inputs[0].device if inputs else torch.device("cpu")
    module = captured.graph_module
    whole: list[tuple[float, float]] = []
    runs: list[_Stopwatch] = []
    with torch.random.fork_rng(), buffers_kept(module), torch.set_grad_enabled(training):
        fewest, most = (_FEWEST_RUNS, _MOST_RUNS) if repeats is None else (repeats, repeats)
        deadline = time.process_time() + _SECONDS
        while len(runs) < fewest or (len(runs) < most and time.process_time() < deadline):
            whole.append(run_whole(module, [_own(one) for one in inputs], device)[:2])
            runs.append(_Stopwatch(module, device))
            runs[-1].run(*map(_own, inputs))
    forward, backward = (min(column) for column in zip(*whole, strict=True))
    return Measured(
        _level([run.forward for run in runs], forward),
        _level([run.backward for run in runs], backward) if training else None,
    )


class NodeByNode(fx.Interpreter):
    """Runs a graph once; every tensor that needs a gradient is a leaf to the node that takes it."""

    def forward_of(self, node: fx.Node, call: Callable[[], object]) -> None:
        """Run the forward of a node."""
        call()

    def backward_of(self, node: fx.Node, call: Callable[[], object]) -> None:
        """Run the backward of a node."""
        call()

    def run_node(self, n: fx.Node) -> Any:
        """Run the forward and the backward of one node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = getattr(self, n.op)
        if not n.op.startswith("call"):
            return run(n.target, args, kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if needs_gradient(leaf)]
        is_written = bool(leaves) and _writes(n)  # a leaf may not be written: let it be a copy
        fresh = [_copy_leaves((args, kwargs)) if is_written else (args, kwargs)]
        if n.op == "call_module":
            leaves += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
        results: list[Any] = []

        def forward() -> None:
            """May be called again, by a stopwatch: what was written then is copied anew."""
            own = fresh.pop() if fresh else _copy_leaves((args, kwargs))
            results.append(run(n.target, *own))

        self.forward_of(n, forward)
        made = [one for one in pytree.tree_leaves(results[-1]) if needs_gradient(one) and one.grad_fn]
        if made and torch.is_grad_enabled():
            ones = [torch.ones_like(one) for one in made]
            # The graph is kept as a stopwatch may run this again.
            self.backward_of(
                n, lambda: torch.autograd.grad(made, leaves, ones, retain_graph=True, allow_unused=True)
            )
        return pytree.tree_map(_as_leaf, results[-1])


class _Stopwatch(NodeByNode):
    """Times each node."""

    def __init__(self, graph_module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(graph_module)
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        self._device = device

    def forward_of(self, node: fx.Node, call: Callable[[], object]) -> None:
        """Time the forward of a node."""
        self.forward[node.name] = seconds_of(call, self._device)

    def backward_of(self, node: fx.Node, call: Callable[[], object]) -> None:
        """Time the backward of a node."""
        self.backward[node.name] = seconds_of(call, self._device)


def run_whole(
    module: torch.nn.Module, inputs: Sequence[Tensor], device: torch.device
) -> tuple[float, float, Sequence[Tensor]]:
    """Seconds of one forward and one backward of a module of tensors, and what it returned.

    Args:
        module: of a graph; gradients are found, and not kept.
        inputs: of it, leaves.
        device: they are on.
    """
    results: list[Sequence[Tensor]] = []
    forward = seconds_of(lambda: results.append(module(*inputs)), device)
    made = [one for one in results[0] if needs_gradient(one) and one.grad_fn]
    if not made:
        return forward, 0.0, results[0]
    leaves = [one for one in (*inputs, *module.parameters()) if one.requires_grad]
    ones = [torch.ones_like(one) for one in made]
    backward = seconds_of(
        lambda: torch.autograd.grad(made, leaves, ones, retain_graph=True, allow_unused=True), device
    )
    return forward, backward, results[0]


def _level(runs: Sequence[Mapping[str, float]], total: float) -> dict[str, float]:
    """The best of each node, less what the stopwatch takes for each: so much that the total is right."""
    best = {name: min(run[name] for run in runs) for name in runs[0]}
    summed = sum(best.values())
    if summed <= total:
        return {name: seconds * total / summed for name, seconds in best.items()} if summed else best
    overhead, rest = 0.0, summed
    for number, seconds in enumerate(sorted(best.values())):
        overhead = (rest - total) / (len(best) - number)
        if overhead <= seconds:
            break
        rest -= seconds
    return {name: max(0.0, seconds - overhead) for name, seconds in best.items()}


@contextmanager
def buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Put back what the runs write, as the statistics of batch norms."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in before:
                buffer.copy_(kept)


def needs_gradient(value: object) -> bool:
    """Whether it is a tensor that a gradient is wanted of."""
    return isinstance(value, Tensor) and value.requires_grad


def _writes(node: fx.Node) -> bool:
    """Whether an operation writes one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema.is_mutable if schema is not None else str(node.target).endswith("_")


def _copy_leaves(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if needs_gradient(leaf) else leaf, tree)


def _own(value: Tensor) -> Tensor:
    """A leaf to be written into, as models that normalize their input in place do."""
    return value.detach().clone().requires_grad_(value.requires_grad)


def _as_leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
