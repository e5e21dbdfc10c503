"""Parameters that no gradient of an output reaches."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.partition.graph.reached import unreached_parameters


class Branches(nn.Module):
    """What is written in place takes the gradient of what is written."""

    def __init__(self):
        super().__init__()
        self.trunk, self.ahead, self.behind, self.written, self.frozen = (nn.Linear(8, 8) for _ in range(5))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = self.frozen(self.trunk(x))
        kept = torch.zeros_like(y)
        kept.add_(self.written(x))
        with torch.no_grad():
            z = self.behind(y)
        return y + self.ahead(y).detach() + z + kept


@pytest.mark.parametrize("boundaries", [(), ("ahead", "trunk")])
def test_what_is_detached_is_not_reached(boundaries):
    part = pc.partition_model(
        Branches(), torch.randn(4, 8), mesh={"pp": 1}, hardware="cpu", boundaries=boundaries
    )
    reached = {"ahead.weight", "ahead.bias", "behind.weight", "behind.bias"}
    if boundaries:  # torch.fx sees no torch.no_grad
        reached -= {"behind.weight", "behind.bias"}
    assert unreached_parameters(part.captured) == reached
