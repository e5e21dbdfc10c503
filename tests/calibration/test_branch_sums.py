"""Branches from few rows and from many, against what they were made of."""

import torch

from panther_compile.calibration.branch_sums import BranchSums

INPUTS, OUTPUTS, RANK = 24, 16, 4


def low_rank(seed, size=1.0):
    drawn = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*one, generator=drawn) for one in ((OUTPUTS, 2), (2, INPUTS)))
    return size * left @ right


def rows(count, seed=7):
    drawn = torch.Generator().manual_seed(seed)
    powers = torch.logspace(0, -2, INPUTS)
    powers[5] = 100.0  # a decoder's huge input
    return torch.randn(count, INPUTS, generator=drawn) * powers


def branch_of(t, z, lacking, *, centred=False, rank=RANK):
    sums = BranchSums(centred)
    for place in range(0, len(z), 32):
        sums.add(t[place : place + 32], z[place : place + 32])
    return sums.best(None, rank, lacking)


def distance(branch, wanted):
    """Over fresh rows, relative."""
    z = rows(4000, seed=8).double()
    found = z @ (branch.up @ branch.down).T + branch.shift
    return float((found - wanted(z)).norm() / wanted(z).norm())


def test_what_the_weight_lacks_is_found_exactly_from_few_rows():
    lacking, z = low_rank(0).double(), rows(32)
    found = branch_of(z @ lacking.T.float(), z, lacking)
    assert distance(found, lambda fresh: fresh @ lacking.T) < 1e-4


def test_noise_beside_it_is_not_fitted():
    """Changes that the inputs tell nothing of, three times as large as what is lacked."""
    lacking, z = low_rank(0).double(), rows(64)
    clean = z @ lacking.T.float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(3)) * 3 * clean.std()
    found = branch_of(clean + noise, z, lacking, rank=2)
    assert distance(found, lambda fresh: fresh @ lacking.T) < 0.4


def test_what_inputs_tell_beside_it_is_found():
    lacking, beside, z = low_rank(0).double(), low_rank(1).double(), rows(4000)
    both = lacking + beside
    found = branch_of(z @ both.T.float(), z, lacking)
    assert distance(found, lambda fresh: fresh @ both.T) < 0.01


def test_a_branch_that_starts_at_nothing_and_a_bias():
    wanted, z = low_rank(2).double(), rows(4000) + 1.0
    found = branch_of(z @ wanted.T.float() + 0.5, z, None, centred=True)
    assert distance(found, lambda fresh: fresh @ wanted.T + 0.5) < 0.01
