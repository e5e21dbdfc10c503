"""One stopwatch for layers and for nodes of graphs, on a clock that may stand still."""

import time

import torch
from torch import nn

from panther_compile.models.stopwatch import seconds_of
from panther_compile.partition.graph.capture import capture
from panther_compile.partition.graph.measure import measure_nodes


def stand_still(monkeypatch, calls):
    """A clock that gives the time in whole ticks, each of so many readings."""
    readings = iter(range(10**9))

    def clock():
        return float(next(readings) // calls)

    monkeypatch.setattr(time, "thread_time", clock)
    monkeypatch.setattr(time, "perf_counter", clock)


def test_calls_are_made_again_where_the_clock_stood_still(monkeypatch):
    stand_still(monkeypatch, 5)
    made = []
    assert seconds_of(lambda: made.append(1), torch.device("cpu"), calls=3) == 1.0
    assert len(made) == 9


def test_nodes_are_measured_on_a_clock_that_stood_still(monkeypatch):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(3, 4)
    captured = capture(model, (x,), {})
    stand_still(monkeypatch, 3)
    measured = measure_nodes(captured, repeats=2)
    assert all(seconds >= 0 for seconds in measured.forward.values())
    assert sum(measured.forward.values()) > 0
    assert measured.backward is not None
    assert sum(measured.backward.values()) > 0
