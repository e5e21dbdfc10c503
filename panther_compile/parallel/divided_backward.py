"""Groups of parameters whose gradients a divided backward computes later, none in the way of another.

torch.distributed.pipelining divides a backward into that of the inputs and that of the weights. The first
leaves behind groups: parameters, the nodes of the graph where the way to them leaves the way to the inputs,
and the gradients that came by there. The second runs one group after the other and frees what it has run
through. That fails in two cases, whose groups have to run as one:

- Two groups have a node in common. torch joins such groups, but enters the result under one of the nodes.
- A weight is used twice in a chain. What lies between its nodes is run through again, others' nodes too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch.autograd.graph import Node


@dataclass(frozen=True, eq=False)
class _Group:
    """Parameters, by their nodes that accumulate gradients, and the gradients that came by at other nodes."""

    params: frozenset[Node]
    grads: Mapping[Node, Any]

    @cached_property
    def runs_through(self) -> set[Node]:
        """The nodes; where one is behind another on the way to the inputs, all that are behind them too."""
        own = set(self.grads)
        behind: set[Node] = set()
        ahead = list(own) if len(own) > 1 else []
        while ahead:
            for node, _ in ahead.pop().next_functions:
                if node is not None and node not in behind:
                    behind.add(node)
                    ahead.append(node)
        return own | behind if own & behind else own

    def clashes(self, other: Self) -> bool:
        """Whether the two have to run as one."""
        return (
            not self.params.isdisjoint(other.params)
            or not self.runs_through.isdisjoint(other.grads)
            or not other.runs_through.isdisjoint(self.grads)
        )


def joined(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of `stage_backward_input`, those that clash as one, and none that no gradient reached."""
    found = [
        _Group(frozenset(group["params"]), dict(zip(group["intermediates"], group["grads"], strict=True)))
        for group in groups
        if "grads" in group
    ]
    apart = [one for one in found if len(one.grads) == 1]  # torch has one group of each such node
    for new in (one for one in found if len(one.grads) > 1):
        while clashing := [other for other in apart if new.clashes(other)]:
            apart = [other for other in apart if other not in clashing]
            for other in clashing:
                new = _Group(new.params | other.params, {**new.grads, **other.grads})
        apart.append(new)
    return [
        {"params": set(one.params), "intermediates": list(one.grads), "grads": list(one.grads.values())}
        for one in apart
    ]
