"""A graph pass of one's own: x * sigmoid(x), written by hand in a model, becomes one SiLU.

    python examples/custom_pass.py [--quick]

The pass runs on a traced graph, and inside `torch.compile(model, backend="panther")`.
"""

import argparse
import operator
import time

import torch
from torch import Tensor, fx, nn

from panther_compile.passes.runner import GraphPass, PassResult, run_passes

_SIGMOIDS = ("sigmoid", torch.sigmoid, nn.functional.sigmoid)
_PRODUCTS = ("mul", torch.mul, operator.mul)


def use_silu(graph_module: fx.GraphModule) -> PassResult:
    """Replace products of a value and its own sigmoid.

    Before:
        %sigmoid : call_function[target=torch.sigmoid](args = (%x,))
        %mul : call_function[target=operator.mul](args = (%x, %sigmoid))
    After:
        %silu : call_function[target=torch.nn.functional.silu](args = (%x,))
    """
    count = 0
    for node in list(graph_module.graph.nodes):
        if node.target not in _PRODUCTS or len(node.args) != 2:
            continue
        for x, gate in (node.args, node.args[::-1]):
            if isinstance(gate, fx.Node) and gate.target in _SIGMOIDS and gate.args == (x,):
                with graph_module.graph.inserting_before(node):
                    silu = graph_module.graph.call_function(nn.functional.silu, (x,))
                node.replace_all_uses_with(silu)
                graph_module.graph.erase_node(node)
                count += 1
                break
    graph_module.graph.eliminate_dead_code()
    return PassResult(graph_module, count)


class GatedBlocks(nn.Module):
    """Residual blocks with a hand-written SiLU."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.widen = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same."""
        for widen, narrow in zip(self.widen, self.narrow, strict=True):
            hidden = widen(x)
            x = x + narrow(hidden * torch.sigmoid(hidden))
        return x


@torch.no_grad()
def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, compiled without Inductor")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    model = GatedBlocks(64 if quick else 512, 2).eval()
    x = torch.randn(64, 64 if quick else 512)

    own = GraphPass(use_silu, exact=True)
    result = run_passes(fx.symbolic_trace(model), [own])
    torch.testing.assert_close(result.graph_module(x), model(x))
    print(f"traced graph: {result.changed} products became SiLU\n{result.graph_module.code}")

    options = {"passes": [own], "ratio": 0.5, "inner": "eager" if quick else "inductor"}
    compiled = torch.compile(model, backend="panther", options=options)
    error = torch.linalg.norm(compiled(x) - model(x)) / torch.linalg.norm(model(x))
    print(f"compiled, sketched and rewritten: relative error {error:.3f} (random weights)")
    for name, run in (("dense", model), ("compiled", compiled)):
        best = min(_seconds(run, x) for _ in range(5 if quick else 50))
        print(f"{name}: {best * 1e3:.2f} ms")


def _seconds(run: nn.Module, x: Tensor) -> float:
    begin = time.perf_counter()
    run(x)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
