"""Long lists of cases, some of which every run takes and the others the slow one."""

import pytest


def thinned(cases, step):
    """The cases for `parametrize`: each but the first of so many is slow."""
    return [
        case if place % step == 0 else pytest.param(case, marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
