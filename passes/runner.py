"""What a graph pass is, and how an ordered list of them runs.

A pass takes a graph and gives one back with how many places it changed; what else it needs is bound with
`functools.partial`. Passes edit, the runner does the rest: it lints and recompiles what has changed, times
each pass, and logs it: `TORCH_LOGS="+panther_compile.passes.runner"`, or the logging module, shows that.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from panther_compile.errors import ConfigTypeError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassResult:
    """A graph after a pass, and how many places the pass changed: 0 if it found nothing to do."""

    graph_module: fx.GraphModule
    changed: int


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A pass and its promise.

    Attributes:
        run: the pass; it may edit the graph it is given or make another.
        exact: whether the graph computes the same as before, up to rounding; else it approximates.
    """

    run: Callable[[fx.GraphModule], PassResult]
    exact: bool

    @property
    def name(self) -> str:
        """The name of the function, also below `functools.partial`."""
        function: object = self.run
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__name__", type(function).__name__)


def run_passes(graph_module: fx.GraphModule, passes: Iterable[GraphPass]) -> PassResult:
    """Run the passes in their order; returns the last graph and the number of changes of all.

    Raises:
        ConfigTypeError: a pass returns something else than a `PassResult` that holds a GraphModule.
    """
    changed = 0
    for place, one in enumerate(passes, 1):
        before = _operations(graph_module)
        begin = time.perf_counter()
        result = one.run(graph_module)
        if not isinstance(result, PassResult) or not isinstance(result.graph_module, fx.GraphModule):
            given = result.graph_module if isinstance(result, PassResult) else result
            raise ConfigTypeError(
                f"pass {one.name} returned a {type(given).__name__}, wanted a PassResult with a GraphModule"
            )
        graph_module = result.graph_module
        if result.changed:
            graph_module.graph.lint()
            graph_module.recompile()
        changed += result.changed
        _log.info(
            "pass %d, %s (%s): %d changed in %.1f ms",
            place,
            one.name,
            "exact" if one.exact else "approximate",
            result.changed,
            1e3 * (time.perf_counter() - begin),
        )
        if result.changed and _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s\n%s", _difference(before, _operations(graph_module)), graph_module.graph)
    return PassResult(graph_module, changed)


def _operations(graph_module: fx.GraphModule) -> dict[str, int]:
    """How often each operation stands in the graph; a module counts by its type."""
    if not _log.isEnabledFor(logging.DEBUG):
        return {}
    counts: dict[str, int] = {}
    for node in graph_module.graph.nodes:
        name = str(node.target)
        if node.op == "call_module":
            name = type(graph_module.get_submodule(name)).__name__
        elif node.op in ("placeholder", "get_attr", "output"):
            name = node.op
        counts[name] = counts.get(name, 0) + 1
    return counts


def _difference(before: dict[str, int], after: dict[str, int]) -> str:
    lines = (
        f"  {name}: {before.get(name, 0)} -> {after.get(name, 0)}"
        for name in sorted({*before, *after})
        if before.get(name, 0) != after.get(name, 0)
    )
    return "\n".join(lines)
