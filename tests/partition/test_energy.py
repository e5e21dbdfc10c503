"""Yes-or-no choices against every assignment there is."""

import itertools
import random

import pytest

from panther_compile.partition.energy import Energy, negate


def random_energy(seed, choices=8, clauses=16):
    draw = random.Random(seed)
    energy = Energy()
    literals = [energy.choice() for _ in range(choices)]
    for _ in range(clauses):
        some = [(number, draw.random() < 0.5) for number, _ in draw.sample(literals, draw.choice([1, 2]))]
        energy.pay(draw.randint(1, 20), *some)
    if draw.random() < 0.5:
        energy.forbid(*draw.sample(literals, 2))
    return energy


def least(energy):
    return min(energy.cost(values) for values in itertools.product((False, True), repeat=len(energy)))


@pytest.mark.parametrize("seed", range(120))
def test_the_minimum_is_that_of_all_assignments(seed):
    energy = random_energy(seed)
    found = energy.minimize()
    assert found.cost == found.bound == energy.cost(found.values) == least(energy)
    assert found.gap == 0


def test_both_kinds_of_energies_were_drawn():
    kinds = {random_energy(seed).minimize().submodular for seed in range(120)}
    assert kinds == {True, False}


def test_an_early_end_shows_as_a_gap():
    gaps = 0
    for seed in range(12):
        energy = random_energy(seed, choices=10, clauses=60)
        found = energy.minimize(limit=1)
        assert found.bound <= least(energy) <= found.cost
        gaps += found.gap > 0
    assert gaps > 0


def test_choices_that_want_to_differ_are_turned_round():
    energy = Energy()
    first, second = energy.choice(), energy.choice()
    energy.pay(5, first, second)
    energy.pay(5, negate(first), negate(second))
    energy.pay(1, first)
    found = energy.minimize()
    assert found.submodular
    assert found.values == (False, True)
    assert found.cost == 0


def test_a_follower_pays_once():
    energy = Energy()
    leaders = [energy.choice() for _ in range(3)]
    energy.pay(7, energy.follower(leaders))
    for leader in leaders:
        energy.pay(3, negate(leader))
    found = energy.minimize()
    assert found.cost == 7
    assert all(found.values)
