"""Two streams that are computed by turns: every cut of the graph's order crosses both, a minimum cut one."""

import pytest
import torch
from torch import nn

from panther_compile.partition import Hardware, Link, partition_model
from panther_compile.partition.options import PlanOptions
from panther_compile.partition.records import Mesh
from panther_compile.partition.stages.ends import linear_cuts

WIDTHS, STRIDES = (3, 16, 16, 32, 32, 64, 64), (1, 1, 2, 1, 2, 1)
LINK = Link(1e9, 0.0)
HARDWARE = Hardware("slow links", 1e11, 1e11, 10**11, LINK, LINK, launch_seconds=0.0)


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.ModuleList(
                nn.Conv2d(inner, outer, 3, stride=stride, padding=1)
                for inner, outer, stride in zip(WIDTHS, WIDTHS[1:], STRIDES, strict=False)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(2 * WIDTHS[-1], 10)

    def forward(self, x, y):
        for left, right in zip(self.first, self.second, strict=True):
            x, y = torch.relu(left(x)), torch.relu(right(y))
        return self.head(torch.cat((x.mean((2, 3)), y.mean((2, 3))), 1))


def test_cuts_win_where_the_order_of_the_graph_is_no_guide():
    x = torch.randn(4, 3, 64, 64)
    part = partition_model(TwoStreams(), (x, x.clone()), mesh={"pp": 2}, hardware=HARDWARE)
    orders = [linear_cuts(part.flow, part.request, late=late) for late in (False, True)]
    assert part.exact
    assert min(order.seconds for order in orders) > 1.08 * part.bottleneck_seconds
    assert min(order.cut_bytes for order in orders) > 4 * part.cut_bytes
    # One stream is a stage.
    held = [{name.split(".")[0] for name in stage.parameters} - {"head"} for stage in part.stages]
    assert sorted(map(sorted, held)) == [["first"], ["second"]]


@pytest.mark.parametrize("per_device", [2, 4])
def test_microbatches_in_flight_are_those_of_the_whole_schedule(per_device):
    """Counted in a few groups of microbatches, as later ones hold no more."""
    for pp, microbatches in ((2, 16), (4, 64)):
        options = PlanOptions(
            hardware=HARDWARE,
            memory_bytes=10**9,
            microbatches=microbatches,
            schedule="interleaved",
            stages_per_device=per_device,
        )
        strategy = next(options.strategies(Mesh(pp=pp), 10**6))
        held = [0] * (pp * per_device)
        peak = list(held)
        for order in options.orders(Mesh(pp=pp), strategy):
            for action in order:
                held[action.stage] += 1 if action.kind == "F" else -1
                peak[action.stage] = max(peak[action.stage], held[action.stage])
        assert options.pipeline(Mesh(pp=pp), strategy).in_flight == tuple(peak)
