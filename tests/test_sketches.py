"""Sketch operators against their matrices, their mean, and a Hadamard matrix from SciPy."""

import math

import pytest
import torch
from scipy.linalg import hadamard

from panther_compile.errors import ConfigError
from panther_compile.factorization.sketches import (
    SKETCH_KINDS,
    DenseSketch,
    HadamardSketch,
    SketchOperator,
    make_sketch,
    walsh_hadamard,
)

SIZES = [(1, 1), (2, 1), (7, 3), (16, 16), (37, 10), (64, 5)]


@pytest.fixture(autouse=True)
def _one_thread():
    """On matrices this small threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(
    kind: str,
    rows: int,
    columns: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> SketchOperator:
    return make_sketch(
        kind,
        rows,
        columns,
        generator=torch.Generator().manual_seed(seed),
        device="cpu",
        dtype=dtype,
    )


def matrix_of(operator: SketchOperator) -> torch.Tensor:
    """Omega (rows, columns)."""
    if isinstance(operator, DenseSketch):
        return operator.omega
    held = operator.signs if isinstance(operator, HadamardSketch) else operator.values
    return operator.apply_right(torch.eye(operator.rows).to(held))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", SKETCH_KINDS)
def test_apply_right_equals_product_with_the_matrix(kind: str, rows: int, columns: int) -> None:
    operator = draw(kind, rows, columns)
    omega = matrix_of(operator)
    matrix = torch.randn(11, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    assert (operator.rows, operator.columns) == (rows, columns) == tuple(omega.shape)
    torch.testing.assert_close(operator.apply_right(matrix), matrix @ omega)
    transposed = torch.randn(rows, 11, dtype=torch.float64).mT  # not contiguous
    torch.testing.assert_close(operator.apply_right(transposed), transposed @ omega)


@pytest.mark.parametrize("kind", SKETCH_KINDS)
def test_mean_of_omega_omega_t_is_the_identity(kind: str) -> None:
    rows, columns, draws = 12, 6, 500
    mean = torch.zeros(rows, rows, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        omega = matrix_of(
            make_sketch(kind, rows, columns, generator=generator, device="cpu", dtype=torch.float64)
        )
        mean += omega @ omega.mT / draws
    # An entry of one draw has a standard deviation of at most 1; five of the mean, over 144 entries.
    assert (mean - torch.eye(rows)).abs().max() < 5 / math.sqrt(draws)


def test_gaussian_entries_have_mean_zero_and_unit_variance() -> None:
    entries = matrix_of(draw("gaussian", 400, 100)) * 10
    assert abs(entries.mean().item()) < 0.02
    assert abs(entries.var().item() - 1) < 0.03


def test_sign_entries() -> None:
    omega = matrix_of(draw("sign", 40, 25))
    torch.testing.assert_close(omega.abs(), torch.full_like(omega, 0.2))
    assert 400 < int((omega > 0).sum()) < 600


@pytest.mark.parametrize(("columns", "nonzeros"), [(1, 1), (3, 3), (8, 8), (10, 8)])
def test_sjlt_rows_have_distinct_entries_over_all_columns(columns: int, nonzeros: int) -> None:
    omega = matrix_of(draw("sjlt", 500, columns))
    assert ((omega != 0).sum(1) == nonzeros).all()
    entries = omega[omega != 0].abs()
    torch.testing.assert_close(entries, torch.full_like(entries, nonzeros**-0.5))
    assert (omega != 0).any(0).all()


def test_countsketch_is_sjlt_with_one_entry() -> None:
    omega = matrix_of(draw("countsketch", 100, 10))
    assert ((omega != 0).sum(1) == 1).all()
    assert set(omega.unique().tolist()) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 100])
def test_srht_columns_are_signed_hadamard_columns_without_repeats(rows: int) -> None:
    omega = matrix_of(draw("srht", rows, rows)) * math.sqrt(rows)
    order = 1 << (rows - 1).bit_length()
    reference = torch.from_numpy(hadamard(order)).double()[:rows]
    torch.testing.assert_close(omega.abs(), torch.ones_like(omega))
    # In a product of two columns the row signs cancel, and two Hadamard columns make a third.
    products = {tuple(column.tolist()) for column in reference.mT.round()}
    for column in (omega * omega[:, :1]).mT.round():
        assert tuple(column.tolist()) in products
    if rows >= 16:  # the signs are there: no column is a plain Hadamard column
        assert not any(tuple(column.tolist()) in products for column in omega.mT.round())
    if rows == order:  # every column taken once: orthogonal
        torch.testing.assert_close(omega @ omega.mT, rows * torch.eye(rows, dtype=torch.float64))


@pytest.mark.parametrize("order", [1, 2, 4, 8, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_walsh_hadamard_against_scipy(order: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(5, order, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = matrix.double() @ torch.from_numpy(hadamard(order)).double()
    torch.testing.assert_close(walsh_hadamard(matrix), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SKETCH_KINDS)
def test_dtype_and_seed(kind: str, dtype: torch.dtype) -> None:
    first, again, other = (matrix_of(draw(kind, 30, 8, seed, dtype)) for seed in (3, 3, 4))
    assert first.dtype == dtype
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", SKETCH_KINDS)
def test_global_generator_is_left_alone(kind: str) -> None:
    before = torch.get_rng_state()
    draw(kind, 30, 8)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fourier'.*'gaussian', 'sign', 'srht', 'countsketch', 'sjlt'"):
        draw("fourier", 4, 2)


@pytest.mark.parametrize(("kind", "rows", "columns"), [("gaussian", 0, 1), ("sign", 1, 0), ("srht", 5, 6)])
def test_sizes_out_of_range(kind: str, rows: int, columns: int) -> None:
    with pytest.raises(ConfigError, match=kind):
        draw(kind, rows, columns)
