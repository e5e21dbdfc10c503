"""What a rank costs and keeps, against counting and against the singular values."""

import pytest
import torch

from panther_compile.factorization.candidates import LinearCandidate, kept_energies

SHAPES = [(8, 8), (30, 12), (12, 30), (1, 5), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["pair", "pivoted"])
def test_largest_rank_is_that_of_a_linear_search(shape, form):
    candidate = LinearCandidate(*shape, form)
    for numbers in range(shape[0] * shape[1] + shape[1] + 3):
        fits = [r for r in range(1, candidate.max_rank + 1) if candidate.numbers(r) <= numbers]
        assert candidate.largest_rank(numbers) == max(fits, default=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_pair_counts_both_factors(shape):
    candidate = LinearCandidate(*shape, "pair")
    assert candidate.scheme == "pair"
    assert candidate.max_rank == min(shape)
    assert [candidate.numbers(r) for r in (1, 2)] == [sum(shape), 2 * sum(shape)]
    assert candidate.macs(3) == 3 * sum(shape)


def test_pivoted_counts_the_identity_out():
    candidate = LinearCandidate(30, 20, "pivoted")
    assert candidate.numbers(7) == candidate.macs(7) == 30 * 7 + 7 * (20 - 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_pivoted_ends_below_full_rank_where_it_would_store_all(shape):
    candidate = LinearCandidate(*shape, "pivoted", singular_values=torch.ones(min(shape)))
    assert candidate.max_rank == min(shape) - 1
    assert candidate.numbers(candidate.max_rank + 1) == shape[0] * shape[1]


def test_error_is_the_tail_of_the_singular_values():
    values = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    candidate = LinearCandidate(4, 6, "pair", singular_values=values)
    for rank in range(1, 5):
        wanted = float(values[rank:].norm() / values.norm())
        assert candidate.error(rank) == pytest.approx(wanted, abs=1e-8)
    assert candidate.error(4) == 0.0


def test_error_is_that_of_the_best_approximation():
    weight = torch.randn(9, 7, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    candidate = LinearCandidate(9, 7, "pivoted", singular_values=s)
    best = (u[:, :3] * s[:3]) @ vh[:3]
    assert candidate.error(3) == pytest.approx(float((weight - best).norm() / weight.norm()), rel=1e-12)


def test_error_is_unknown_without_a_spectrum():
    candidate = LinearCandidate(9, 7, "pair")
    assert candidate.energies is None
    assert candidate.error(3) is None


def test_energies_rise_to_one():
    energies = kept_energies(torch.tensor([3.0, 2.0, 1.0]))
    assert energies.dtype == torch.float64
    assert energies.tolist() == [9 / 14, 13 / 14, 1.0]


def test_a_zero_matrix_is_kept_by_any_rank():
    assert kept_energies(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert LinearCandidate(3, 3, "pair", singular_values=torch.zeros(3)).error(1) == 0.0


def test_ranks_has_one_entry_for_each_factor_rank():
    assert LinearCandidate(9, 7, "pair").ranks(3) == (3,)
