"""Choices between two labels, and moves among three, against every assignment there is."""

import itertools
import random

import pytest

from panther_compile.partition.shards.elimination import eliminate
from panther_compile.partition.shards.energy import Energy, negate
from panther_compile.partition.shards.expansion import Labels


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


def random_labels(seed, variables=6):
    """A tree or a graph whose neighbours pay for having different labels, as those of a Potts model do."""
    draw = random.Random(seed)
    labels = Labels()
    for _ in range(variables):
        labels.variable(*("abc" if draw.random() < 0.8 else "ab"))
    for variable, options in enumerate(labels.options):
        for label in options:
            labels.pay(draw.randint(0, 20), (variable, label, True))
    for first, second in itertools.combinations(range(variables), 2):
        if draw.random() < 0.5:
            cost = draw.randint(1, 12)
            for label in "abc":
                labels.pay(cost, (first, label, True), (second, label, False))
    leaders = [(number, "c", True) for number in draw.sample(range(variables), 3)]
    labels.pay(draw.randint(1, 10), labels.follower(leaders))
    labels.forbid((0, "a", True), (1, "b", True))
    return labels


def expand(labels):
    """The costs after moves of each label in turn, from the first labels on."""
    found, costs = labels.complete(labels.first()), []
    for label in "cabcab":
        offers = [
            {number: label}
            for number, options in enumerate(labels.options)
            if label in options and found[number] != label
        ]
        found, minimum = labels.move(found, offers, 32)
        assert labels.allows(found)
        assert minimum.cost == labels.cost(found)
        costs.append(minimum.cost)
    return costs


def least_labels(labels):
    every = (labels.complete(names) for names in itertools.product(*labels.options))
    return min(labels.cost(names) for names in every if labels.allows(names))


@pytest.mark.parametrize("seed", range(30))
def test_moves_among_three_labels_only_go_down(seed):
    """Potts energies: what no move betters costs at most twice the least (Boykov et al. 2001)."""
    labels = random_labels(seed)
    costs, least = expand(labels), least_labels(labels)
    assert costs == sorted(costs, reverse=True)
    assert least <= costs[-1] <= 2 * least


def test_moves_mostly_find_the_least():
    reached = 0
    for seed in range(30):
        labels = random_labels(seed)
        reached += expand(labels)[-1] == least_labels(labels)
    assert reached >= 25


@pytest.mark.parametrize("seed", range(30))
def test_elimination_finds_the_least(seed):
    labels = random_labels(seed)
    found = eliminate(labels)
    assert labels.allows(found)
    assert found == labels.complete(found)
    assert labels.cost(found) == least_labels(labels)


def test_elimination_takes_no_wide_graphs():
    """A clique of n needs a table of all n; a chain needs tables of two, however long it is."""
    clique, chain = Labels(), Labels()
    for labels in (clique, chain):
        for number in range(12):
            labels.pay(number, (labels.variable("a", "b", "c"), "a", True))
    for first, second in itertools.combinations(range(12), 2):
        clique.pay(1, (first, "a", True), (second, "b", False))
        if second == first + 1:
            chain.pay(1, (first, "a", True), (second, "a", False))
    assert eliminate(clique, 3**12) is None
    assert eliminate(clique, 2 * 3**12) is not None
    assert eliminate(chain, 12 * 3**2) is not None


def test_variables_of_one_offer_change_together():
    labels = Labels()
    first, second = labels.variable("a", "b"), labels.variable("a", "b")
    labels.pay(5, (first, "a", True))
    labels.pay(9, (second, "b", True))
    apart, _ = labels.move(["a", "a"], [{first: "b"}, {second: "b"}], 1)
    together, _ = labels.move(["a", "a"], [{first: "b", second: "b"}], 1)
    assert apart == ["b", "a"]
    assert together == ["a", "a"]


def test_what_is_paid_either_way_needs_no_clause_of_two():
    """Paying for x and y, and for x and not y, is paying for x: one cut is enough."""
    energy = Energy()
    x, y, z = (energy.choice() for _ in range(3))
    energy.pay(4, x, y)
    energy.pay(4, x, negate(y))
    energy.pay(3, y, negate(z))
    energy.pay(3, negate(y), z)
    energy.pay(5, negate(x), z)
    found = energy.minimize()
    assert found.submodular
    assert found.cost == found.bound == least(energy) == 0
