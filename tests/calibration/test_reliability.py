"""Changes that inputs tell and changes that they do not, from few rows and from many."""

from dataclasses import replace

import torch

from panther_compile.factorization.fit_matrix import fit_matrix_to
from panther_compile.factorization.moments import MomentSums
from panther_compile.factorization.reliability import PROBES, combinations, reliable_part

INPUTS, OUTPUTS = 24, 16


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found_of(change, z):
    some = combinations(change.T)
    parts = zip(change.chunk(2), z.chunk(2), strict=True)
    halves = [(some @ c.T @ x / len(x), x.T @ x / len(x)) for c, x in parts]
    return reliable_part(change.T @ z / len(z), z.T @ z / len(z), halves)


def test_what_inputs_tell_is_found():
    matrix, z = drawn(OUTPUTS, INPUTS, seed=0), drawn(400, INPUTS, seed=1)
    torch.testing.assert_close(found_of(z @ matrix.T, z), matrix, rtol=0, atol=1e-4)


def test_chance_is_not():
    z, noise = drawn(60, INPUTS, seed=1), drawn(60, OUTPUTS, seed=2)
    plain = (noise.T @ z) @ torch.linalg.inv(z.T @ z)
    assert found_of(noise, z).norm() < 0.2 * plain.norm()


def test_few_combinations_of_many_outputs_tell_the_same(monkeypatch):
    many = 3 * PROBES
    matrix, z, noise = drawn(many, INPUTS, seed=0), drawn(100, INPUTS, seed=1), drawn(100, many, seed=2)
    change = z @ matrix.T / 4 + noise
    probed = found_of(change, z)
    monkeypatch.setattr(f"{reliable_part.__module__}.PROBES", many)
    exact = found_of(change, z)
    share = float(probed.norm() / exact.norm())
    torch.testing.assert_close(probed, share * exact)  # the same ridge
    assert 0.97 < share < 1.03
    assert share != 1.0


def test_a_fit_to_few_rows_is_closer_on_others():
    """What reaches the sketched model is the dense one's input with noise of its own beside it."""
    weight = drawn(OUTPUTS, INPUTS, seed=3).float()

    def rows(count, seed):
        x = drawn(count, INPUTS, seed=seed).float()
        return x, x + 0.5 * drawn(count, INPUTS, seed=seed + 1).float()

    sums = MomentSums(INPUTS, torch.device("cpu"))
    for part in range(4):
        sums.add(*rows(15, 10 + 2 * part))
    moments = sums.moments(centred=False)
    assert len(moments.halves) == 2
    fresh, changed = rows(2000, 40)

    def error(given):
        options = {"pivoted": False, "dtype": torch.float32}
        found = fit_matrix_to(weight, None, given, None, OUTPUTS, **options)
        return float((fresh @ weight.T - changed @ (found.left @ found.right).T.float()).norm())

    best = float((fresh @ weight.T - changed @ weight.T / 1.25).norm())
    assert error(moments) < 1.15 * best
    assert error(replace(moments, halves=())) > 1.2 * best


def test_halves_are_those_of_the_rows():
    x, z = drawn(40, INPUTS, seed=1).float() + 2, drawn(40, INPUTS, seed=2).float()
    s, changed = drawn(40, OUTPUTS, seed=3).float(), drawn(40, OUTPUTS, seed=4).float()
    for centred in (True, False):
        sums = MomentSums(INPUTS, torch.device("cpu"))
        sums.add(x, z, (s, changed))
        for half, place in zip(sums.moments(centred=centred).halves, (slice(20), slice(20, 40)), strict=True):
            rows = [one[place].double() for one in (x, z, s - changed)]
            a, b, d = (one - one.mean(0) * centred for one in rows)
            for found, wanted in ((half.cross, a), (half.covariance, b), (half.change[0], d)):
                torch.testing.assert_close(found, wanted.T @ b / 20, rtol=1e-4, atol=1e-4)


def test_where_nothing_has_changed_there_are_none():
    x, sums = drawn(40, INPUTS, seed=1).float(), MomentSums(INPUTS, torch.device("cpu"))
    sums.add(x, x)
    assert sums.moments(centred=True).halves == ()
