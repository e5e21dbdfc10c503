"""Cuts of graphs small enough to check by hand, and of random ones against trying all."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from flow_graphs import is_prefix, random_flow

from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph, Value, Work
from panther_compile.partition.stages.cut import CutNetwork


def diamond(left=10, right=20, skip=5):
    """a -> (b, c) -> d, with a skip from a to d as part of the same value."""
    work = {name: Work(1.0) for name in "abcd"}
    values = (
        Value("x", SOURCE, ("a",), 3),
        Value("a", "a", ("b", "c", "d"), skip),
        Value("b", "b", ("d",), left),
        Value("c", "c", ("d",), right),
        Value("d", "d", (SINK,), 1),
    )
    return CutNetwork(FlowGraph(work, values))


def rows(network, names):
    return np.array([vertex in names for vertex in network.vertices])


def cut_bytes(network, prefix):
    forward, backward = network.crossing_bytes(prefix[None])
    return forward[0] + backward[0]


@pytest.mark.parametrize(
    ("inside", "size"),
    [("", 3), ("a", 5), ("ab", 15), ("ac", 25), ("abc", 35), ("abcd", 1)],
)
def test_a_value_counts_once_however_many_receive_it(inside, size):
    network = diamond()
    assert cut_bytes(network, rows(network, inside)) == size


def test_only_what_holds_its_needs_is_a_prefix():
    network = diamond()
    assert is_prefix(network, rows(network, "ab"))
    assert not is_prefix(network, rows(network, "bd"))
    assert len(network.all_prefixes(100)) == 6
    assert network.all_prefixes(5) is None


def test_minimum_cut_by_hand():
    network = diamond()
    low, high = rows(network, "a"), rows(network, "abc")
    assert network.minimum_cut(low, high).tolist() == rows(network, "a").tolist()
    # A second of work is worth more than all bytes: take everything that may be taken.
    assert network.minimum_cut(low, high, Fraction(1)).tolist() == high.tolist()
    # And a negative one: leave out whatever may be left.
    assert network.minimum_cut(network.empty, high, Fraction(-1)).tolist() == network.empty.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_minimum_cut_is_the_least_of_all(seed):
    network = CutNetwork(random_flow(seed, 7))
    every = network.all_prefixes(1000)
    for multiplier in (Fraction(0), Fraction(1, 40000), Fraction(1, 5000), Fraction(-1, 20000)):

        def objective(prefix, multiplier=multiplier, network=network):
            return cut_bytes(network, prefix) - float(multiplier) * float(network._work[prefix].sum())

        found = network.minimum_cut(network.empty, network.full, multiplier)
        assert is_prefix(network, found)
        assert objective(found) == pytest.approx(min(map(objective, every)))
        assert found.sum() == max(p.sum() for p in every if objective(p) <= objective(found) + 1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_sweep_is_nested_and_on_the_hull(seed):
    network = CutNetwork(random_flow(seed, 10))
    cuts = network.sweep(network.empty, network.full, limit=50)
    for smaller, larger in itertools.pairwise(cuts):
        assert (smaller <= larger).all()
    points = [(float(network._work[cut].sum()), cut_bytes(network, cut)) for cut in cuts]
    for prefix in network.all_prefixes(5000):
        work, size = float(network._work[prefix].sum()), cut_bytes(network, prefix)
        for (w0, b0), (w1, b1) in itertools.pairwise(points):
            if w0 <= work <= w1 and w1 > w0:
                assert size >= b0 + (b1 - b0) * (work - w0) / (w1 - w0) - 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_what_is_certain_holds_for_every_prefix(seed):
    network = CutNetwork(random_flow(seed, 8))
    total = network.seconds.sum()
    low, high = network.certain(0.4 * total, 0.7 * total)
    for prefix in network.all_prefixes(5000):
        if 0.4 * total <= network.seconds[prefix].sum() <= 0.7 * total:
            assert (low <= prefix).all()
            assert (prefix <= high).all()


@pytest.mark.parametrize("seed", range(10))
def test_orders_and_neighbours_are_prefixes(seed):
    network = CutNetwork(random_flow(seed, 9))
    for order in (None, network.late_order()):
        prefixes = network.order_prefixes(order)
        assert prefixes.shape == (10, 9)
        assert all(is_prefix(network, one) for one in prefixes)
        assert all(is_prefix(network, one) for one in network.neighbours(prefixes[4], 100))
