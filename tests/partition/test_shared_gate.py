"""A bare parameter that several operations read, as a gate or a LayerScale, under tensor parallelism."""

import torch
from torch import nn

from panther_compile.partition import Hardware, Link, partition_model

SLOW = Hardware("slow", 1e10, 1e12, 10**9, Link(1e10, 0), Link(1e10, 0), launch_seconds=0)


class Gated(nn.Module):
    """A gate over the hidden features, read on both sides of the activation."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.gate = nn.Parameter(torch.rand(256))

    def forward(self, x):
        hidden = torch.relu(self.up(x) * self.gate)
        return self.down(hidden + self.gate)


def test_a_gate_that_two_operations_read_is_stored_in_shards():
    part = partition_model(Gated(), torch.randn(512, 64), mesh={"tp": 2}, hardware=SLOW)
    kinds = {layer.name: layer.kind for layer in part.shards}
    assert kinds["up"] == "column"
    assert kinds["down"] == "row"
    stored = {name: axis for layer in part.shards for name, axis in layer.parameters.items()}
    assert stored["gate"] == 0
    assert torch.allclose(part.split()(x := torch.randn(512, 64)), part.captured.graph_module(x)[0])
