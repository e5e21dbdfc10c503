"""The pivoted form against the plain product in float64, and where it is refused."""

import pytest
import torch

from panther_compile.pivot import Pivoted, from_pivoted, pivoted_numbers, to_pivoted

SHAPES = [(12, 20, 5), (20, 12, 11), (7, 9, 1), (1, 6, 1), (64, 64, 32), (9, 10, 9)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Relative rounding that README and docs promise for the form, by dtype.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def factors(out_features, in_features, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(out_features, rank, generator=generator, dtype=torch.float64)
    return left, torch.randn(rank, in_features, generator=generator, dtype=torch.float64)


def needs_gather(rank=4, in_features=12):
    """Factors whose leading and trailing columns are nearly dependent, but not those in the middle."""
    left, right = factors(10, in_features, rank)
    right[:, 1] = right[:, 0] + 1e-13 * right[:, 1]
    right[:, -1] = right[:, -2] + 1e-13 * right[:, -1]
    return left, right


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_is_the_plain_product(shape):
    left, right = factors(*shape)
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    out_features, in_features, rank = shape
    assert pivoted.columns.shape == (out_features, rank)
    assert pivoted.coefficients.shape == (rank, in_features - rank)
    new_left, new_right = from_pivoted(pivoted)
    assert relative(new_left @ new_right, left @ right) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_columns_are_columns_of_the_matrix(shape):
    left, right = factors(*shape)
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    matrix, rank = left @ right, shape[2]
    if pivoted.order is not None:
        matrix = matrix[:, pivoted.order]
    assert relative(pivoted.columns, matrix[:, pivoted.start : pivoted.start + rank]) < 1e-12


def test_prefers_the_leading_slice():
    pivoted = to_pivoted(*factors(10, 12, 4), dtype=torch.float64)
    assert (pivoted.start, pivoted.order) == (0, None)


def test_takes_the_trailing_slice_if_the_leading_one_is_singular():
    left, right = factors(10, 12, 4)
    right[:, 1] = right[:, 0]
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    assert (pivoted.start, pivoted.order) == (8, None)
    new_left, new_right = from_pivoted(pivoted)
    assert relative(new_left @ new_right, left @ right) < 1e-12


def test_gathers_if_neither_slice_will_do():
    left, right = needs_gather()
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    assert pivoted.start == 0
    assert pivoted.order.dtype == torch.int64
    assert pivoted.order.sort().values.tolist() == list(range(12))
    new_left, new_right = from_pivoted(pivoted)
    assert relative(new_left @ new_right, left @ right) < 1e-12


def test_gathered_pivots_keep_the_coefficients_small():
    left, right = factors(10, 200, 20)
    right[:, 1] = right[:, 0] + 1e-13 * right[:, 1]
    right[:, -1] = right[:, -2] + 1e-13 * right[:, -1]
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    assert pivoted.order is not None
    assert float(pivoted.coefficients.abs().max()) < 20


def test_pivots_and_the_others_each_stay_in_order():
    pivoted = to_pivoted(*needs_gather(), dtype=torch.float64)
    pivots, others = pivoted.order[:4].tolist(), pivoted.order[4:].tolist()
    assert pivots == sorted(pivots)
    assert others == sorted(others)


def test_refuses_a_rank_deficient_pair():
    left, right = factors(10, 12, 4)
    right[3] = right[0] + right[1]
    assert to_pivoted(left, right, dtype=torch.float64) is None


def test_refuses_zero_and_nonfinite_factors():
    left, right = factors(10, 12, 4)
    assert to_pivoted(left, torch.zeros_like(right), dtype=torch.float64) is None
    assert to_pivoted(left, right * float("nan"), dtype=torch.float64) is None
    assert to_pivoted(left * float("inf"), right, dtype=torch.float64) is None


def test_refuses_full_width():
    assert to_pivoted(*factors(10, 6, 6), dtype=torch.float64) is None


def test_a_zero_matrix_with_a_sound_right_factor_is_exact():
    left, right = factors(10, 12, 4)
    pivoted = to_pivoted(torch.zeros_like(left), right, dtype=torch.float32)
    assert torch.equal(pivoted.columns, torch.zeros_like(left))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_accepted_rounds_within_the_limit_of_its_dtype(dtype, seed):
    """Rows other than those it was probed with; twice the limit, for they are others."""
    left, right = factors(48, 40, 16, seed)
    if seed % 2:
        right[:, :16] *= 1e-3  # a worse leading slice
    pivoted = to_pivoted(left, right, dtype=dtype)
    if pivoted is None:
        pytest.skip("refused, which is always within the limit")
    x = torch.randn(200, 40, dtype=torch.float64)
    permuted = (x if pivoted.order is None else x[:, pivoted.order]).to(dtype)
    slices = permuted[:, pivoted.start :][:, :16]
    rest = permuted[:, 16:] if pivoted.start == 0 else permuted[:, :-16]
    y = (slices + rest @ pivoted.coefficients.to(dtype).T) @ pivoted.columns.to(dtype).T
    assert relative(y.double(), x @ right.T @ left.T) < 2 * LIMITS[dtype]


@pytest.mark.parametrize(("dtype", "sliced"), [(torch.float64, True), (torch.float32, False)])
def test_conditioning_is_judged_in_the_dtype_of_the_layer(dtype, sliced):
    left, right = factors(30, 30, 10)
    right[:, 0] = right[:, 1] + 1e-6 * right[:, 0]
    right[:, -1] = right[:, -2] + 1e-6 * right[:, -1]
    assert (to_pivoted(left, right, dtype=dtype).order is None) is sliced


def test_half_overflow_is_refused():
    left, right = factors(10, 12, 4)
    assert to_pivoted(1e6 * left, right, dtype=torch.float16) is None


def test_float32_factors_are_worked_on_in_float64():
    left, right = (factor.float() for factor in factors(12, 20, 5))
    pivoted = to_pivoted(left, right, dtype=torch.float32)
    assert pivoted.columns.dtype == pivoted.coefficients.dtype == torch.float64


def test_factors_given_are_untouched():
    left, right = needs_gather()
    copies = left.clone(), right.clone()
    to_pivoted(left, right, dtype=torch.float64)
    assert torch.equal(left, copies[0])
    assert torch.equal(right, copies[1])


@pytest.mark.parametrize("max_numbers", [30, 60, 61, 72, 100])
@pytest.mark.parametrize("gathered", [False, True])
def test_loses_its_last_rows_to_stay_within_max_numbers(max_numbers, gathered):
    left, right = needs_gather() if gathered else factors(10, 12, 4)
    pivoted = to_pivoted(left, right, dtype=torch.float64, max_numbers=max_numbers)
    rank = pivoted.columns.shape[1]
    indexed = pivoted.order is not None
    assert pivoted_numbers(10, 12, rank, gathered=indexed) <= max_numbers
    assert rank == 4 or pivoted_numbers(10, 12, rank + 1, gathered=gathered) > max_numbers
    new_left, new_right = from_pivoted(pivoted)
    assert relative(new_left @ new_right, left[:, :rank] @ right[:rank]) < 1e-9


def test_draws_no_global_random_numbers():
    before = torch.get_rng_state()
    to_pivoted(*needs_gather(), dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("gathered", [False, True])
def test_back_is_exact_and_differentiable(start, gathered):
    columns = torch.randint(-4, 5, (4, 2), dtype=torch.float64).requires_grad_()
    coefficients = torch.randint(-4, 5, (2, 3), dtype=torch.float64).requires_grad_()
    order = torch.tensor([3, 1, 0, 4, 2]) if gathered else None
    left, right = from_pivoted(Pivoted(columns, coefficients, start, order))
    wanted = torch.zeros(2, 5, dtype=torch.float64)
    places = order if gathered else torch.arange(5)
    pivots = list(range(start, start + 2))
    others = [i for i in range(5) if i not in pivots]
    wanted[:, places[pivots]] = torch.eye(2, dtype=torch.float64)
    wanted[:, places[others]] = coefficients.detach()
    assert torch.equal(right, wanted)
    assert left is columns
    right.sum().backward()
    assert torch.equal(coefficients.grad, torch.ones_like(coefficients))


def test_numbers_are_those_of_the_tensors():
    left, right = needs_gather()
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    stored = sum(t.numel() for t in (pivoted.columns, pivoted.coefficients, pivoted.order))
    assert pivoted_numbers(10, 12, 4, gathered=True) == stored
    assert pivoted_numbers(10, 12, 4, gathered=False) == stored - 12
