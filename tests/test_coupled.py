"""Links as units of a plan."""

import itertools

import pytest
import torch

from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.planning.coupled import SCHEME, Coupling, CouplingCandidate, CouplingLosses, join, split
from panther_compile.planning.plan import plan_units
from panther_compile.planning.ways import Allocation
from panther_compile.records import Unit

INPUTS, WIDTH, OUTPUTS = 12, 32, 10
LINK = Coupling(("up",), "down", 1, 1, WIDTH, padded=False)
SHAPES = ((WIDTH, INPUTS), (OUTPUTS, WIDTH))


def losses(coupling=LINK, *, steep=1.0, narrow=1.0) -> CouplingLosses:
    kept = torch.tensor([32, 24, 16, 8])
    narrowed = narrow * torch.tensor([0.0, 1.0, 3.0, 8.0], dtype=torch.float64)
    ranks = torch.arange(13, dtype=torch.float64)
    tails = steep * (12 - ranks).clamp_min(0).square() / 12
    members = tails.repeat(4, 2, 1)
    members[:, 0, 12:], members[:, 1, 10:] = torch.inf, torch.inf
    members[3, :, 8:] = torch.inf
    return CouplingLosses(coupling, kept, narrowed, members, 40.0)


def candidate(**options) -> CouplingCandidate:
    return CouplingCandidate(losses(), SHAPES, bias=True, slow=True, **options)


def test_ways_are_those_that_no_other_beats():
    ways = candidate().ways
    assert len(ways) > 10
    for one, other in itertools.pairwise(ways):
        assert one.numbers < other.numbers
        assert one.loss > other.loss


def test_no_way_on_the_grid_lies_below_the_line_between_two():
    made = candidate()
    table = losses()
    ways = made.ways
    for place, kept in enumerate(table.kept.tolist()):
        if kept == WIDTH:
            continue
        for first, second in itertools.product([None, *range(1, 8)], repeat=2):
            loss = float(table.narrowed[place])
            loss += sum(
                float(table.members[place, m, r]) for m, r in ((0, first), (1, second)) if r is not None
            )
            numbers = made._numbers(0, kept, first) + made._numbers(1, kept, second)
            below = [way for way in ways if way.numbers <= numbers]
            above = [way for way in ways if way.numbers >= numbers]
            if below and above and below[-1] is not above[0]:
                low, high = below[-1], above[0]
                share = (numbers - low.numbers) / (high.numbers - low.numbers)
                assert loss >= low.loss + share * (high.loss - low.loss) - 0.6
            elif below and above:
                assert loss >= below[-1].loss - 1e-9


def test_numbers_are_those_of_the_layers():
    for way in candidate().ways:
        up, down = way.ranks
        assert up is None or way.kept + INPUTS - up > 0
        first = way.kept * INPUTS if up is None else up * (way.kept + INPUTS - up)
        second = way.kept * OUTPUTS if down is None else down * (way.kept + OUTPUTS - down)
        places = 2 * way.kept if way.kept < WIDTH else 0  # which features each of the two keeps
        assert way.numbers == first + way.kept + second + places


def test_all_features_are_kept_only_by_factorized_layers():
    assert all(None not in way.ranks for way in candidate().ways if way.kept == WIDTH)


def test_slow_and_step():
    assert all(
        way.ranks == (None, None) for way in CouplingCandidate(losses(), SHAPES, bias=True, slow=None).ways
    )
    assert all((rank or 4) % 4 == 0 for way in candidate(step=4).ways for rank in way.ranks)


def test_widths_are_multiples_of_the_step_too():
    assert {way.kept for way in candidate(step=4).ways} > {24, 16}
    assert {way.kept for way in candidate(step=16).ways} == {16}


def test_heads_are_narrowed_and_not_factorized():
    coupling = Coupling(("v",), "o", 4, 2, 8, padded=True)
    table = CouplingLosses(
        coupling,
        torch.arange(8, 0, -1),
        torch.arange(8, dtype=torch.float64),
        torch.full((8, 2, 3), torch.inf, dtype=torch.float64),
        9.0,
    )
    made = CouplingCandidate(table, ((16, 12), (12, 32)), bias=False, slow=True)
    assert {way.ranks for way in made.ways} == {(None, None)}
    assert {(way.kept, way.numbers) for way in made.ways} == {
        (k, k * 2 * 12 + k * 4 * 12) for k in range(1, 8)
    }


def units():
    spectrum = torch.ones(10, dtype=torch.float64)
    return [
        (
            Unit(
                name,
                shape,
                shape[0] * (shape[1] + 1),
                shape[0],
                (LinearCandidate(*shape, "pivoted", singular_values=spectrum),),
                None,
            ),
            "Linear",
        )
        for name, shape in (("up", SHAPES[0]), ("down", SHAPES[1]), ("other", (10, 10)))
    ]


@pytest.mark.parametrize("allocation", ["energy", "uniform", "sensitivity"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8])
def test_a_plan_with_a_link_keeps_the_budget_and_adds_up(ratio, allocation):
    pool = units()
    joined = join(pool, [losses()], step=None, slow=True)
    assert [kind for _, kind in joined] == ["Linear", SCHEME]
    assert sum(unit.dense_numbers for unit, _ in joined) == sum(unit.dense_numbers for unit, _ in pool)
    damage = {LINK.name: 40.0, "other": 5.0} if allocation == "sensitivity" else {}
    lines = plan_units(joined, ratio, None, True, Allocation(allocation, damage))
    parts = list(split(lines, joined, pool))
    assert {line.name for line in parts} == {"up", "down", "other"}
    assert sum(line.stored_numbers for line in parts) == sum(line.stored_numbers for line in lines)
    assert sum(line.stored_numbers for line in parts) <= ratio * sum(line.dense_numbers for line in parts)
    chosen = {line.name: line.choice for line in parts}
    up, down = chosen["up"], chosen["down"]
    assert up.link == down.link
    if up.link:
        assert up.ranks[0] == down.ranks[0] == up.rank
        assert up.scheme == down.scheme == SCHEME
    else:
        assert up.scheme == down.scheme == "pivoted"


def test_a_link_that_is_not_wholly_there_is_left_apart():
    pool = units()[:1]
    assert join(pool, [losses()], step=None, slow=True) == pool
