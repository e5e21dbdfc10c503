"""Random models: whatever a user builds, the promises hold. `make test-slow` draws 5,000."""

import collections

import hypothesis
import pytest
from fuzz.cases import CASES, Case
from fuzz.holders import Gated, Tied
from fuzz.parts import Conv, Linear
from fuzz.properties import check
from hypothesis import HealthCheck, Phase, given, settings
from thinned import thinned

CHECKED = {
    "deadline": None,
    "database": None,
    "print_blob": False,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate, Phase.shrink],
}
# The smallest models that broke a promise once.
MENDED = {
    "a layer that is called by keyword": Case(parts=(Linear(call="keyword"),), options={"ratio": 0.5}),
    "a branch that the data did not show is given the narrow features of the other": Case(
        parts=(Gated(kind="gate_only_sometimes"),), positive=True, data="tensors", options={"ratio": 0.5}
    ),
    "a branch that the data did not show reads the narrow features": Case(
        parts=(Gated(kind="down_only_sometimes"),), positive=True, data="tensors", options={"ratio": 0.5}
    ),
    "biases of a tied weight that the budget has to hold": Case(
        parts=(Tied(kind="weight"), Tied(kind="weight")),
        width=16,
        options={"ratio": 0.3, "round_rank_to": 2, "min_params": 60, "exclude": ["head"]},
    ),
    "two layers that read what one writes": Case(
        parts=(Conv(out=6, kernel=1), Gated(), Gated()),
        width=6,
        batches=1,
        data="tensors",
        options={"ratio": 0.8},
        seed=47,
    ),
}


def draw(count, seed):
    """Check so many cases of a seed; the smallest that fails is printed."""
    ended = collections.Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=count, **CHECKED)
    @given(CASES)
    def one(case):
        ended[check(case)] += 1

    print(f"seed {seed}")
    one()
    print(dict(ended))
    return ended


@pytest.mark.parametrize("seed", thinned([104, 105], 2))  # their models are small
def test_random_models(seed):
    ended = draw(10, seed=seed)
    assert ended["sketched"] > 5, ended


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(51))
def test_thousands_of_random_models(seed):
    ended = draw(100, seed=seed)
    assert ended["sketched"] > 40, ended


@pytest.mark.parametrize("what", MENDED)
def test_what_broke_once(what):
    check(MENDED[what])
