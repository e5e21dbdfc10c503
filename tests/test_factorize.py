"""Factors against torch.linalg.svd in float64, over spectra, shapes, dtypes and sketches."""

import math

import pytest
import torch
from torch import Tensor

from panther_compile.errors import ConfigError, RankError, WeightError
from panther_compile.factorization.factorize import (
    LowRankPair,
    choose_method,
    factorize,
    probe_error,
    singular_values,
)
from panther_compile.factorization.sketches import SKETCH_KINDS

SHAPES = [(24, 24), (40, 17), (17, 40), (1, 9), (9, 1), (1, 1)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SPECTRA = ["noise", "i^-0.3", "i^-1", "exponential"]


@pytest.fixture(autouse=True)
def _one_thread():
    """On matrices this small threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def with_spectrum(name: str, rows: int, columns: int) -> Tensor:
    if name == "noise":
        return noise(rows, columns)
    count = min(rows, columns)
    index = torch.arange(1, count + 1, dtype=torch.float64)
    values = {"i^-0.3": index**-0.3, "i^-1": 1 / index, "exponential": (-index / 30).exp()}[name]
    left = torch.linalg.qr(noise(rows, count, seed=1)).Q
    right = torch.linalg.qr(noise(columns, count, seed=2)).Q
    return (left * values) @ right.mT


def relative_error(weight: Tensor, pair: LowRankPair) -> float:
    weight = weight.double()
    return float((weight - pair.left.double() @ pair.right.double()).norm() / weight.norm())


def best_error(weight: Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(weight.double())
    return float(values[rank:].norm() / values.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_full_rank_reproduces_the_weight(method: str, shape: tuple[int, int], dtype: torch.dtype):
    weight = noise(*shape).to(dtype)
    rank = min(shape)
    pair = factorize(weight, rank, method=method, generator=seeded())

    exact = method == "svd" or dtype == torch.float64
    assert pair.left.dtype == pair.right.dtype == (torch.float64 if exact else torch.float32)
    assert (pair.left.shape, pair.right.shape) == ((shape[0], rank), (rank, shape[1]))
    assert relative_error(weight, pair) < 20 * torch.finfo(pair.left.dtype).eps
    assert pair.error < 20 * torch.finfo(pair.left.dtype).eps
    if dtype != torch.float64:  # rounded to its own dtype, the weight itself comes back
        torch.testing.assert_close((pair.left @ pair.right).to(dtype), weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_svd_is_the_best_pair_and_says_its_error(spectrum: str, shape: tuple[int, int]):
    weight = with_spectrum(spectrum, *shape)
    for rank in {1, (min(shape) + 1) // 2}:
        pair = factorize(weight, rank, method="svd", generator=seeded())
        assert pair.method == "svd"
        best = best_error(weight, rank)
        assert relative_error(weight, pair) == pytest.approx(best, rel=1e-7, abs=1e-14)
        assert pair.error == pytest.approx(best, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("method", ["svd", "randomized"])
@pytest.mark.parametrize("shape", [(40, 17), (17, 40)])
def test_factors_are_balanced(method: str, shape: tuple[int, int]):
    weight = with_spectrum("i^-1", *shape) * 7
    pair = factorize(weight, 6, method=method, generator=seeded(), power_iterations=20)
    roots = torch.linalg.svdvals(weight)[:6].sqrt()
    torch.testing.assert_close(pair.left.norm(dim=0), roots)
    torch.testing.assert_close(pair.right.norm(dim=1), roots)


@pytest.mark.parametrize("sketch", SKETCH_KINDS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("shape", "rank"), [((256, 256), 12), ((256, 256), 128), ((128, 320), 32)])
def test_randomized_is_within_two_percent(shape: tuple[int, int], rank: int, spectrum: str, sketch: str):
    weight = with_spectrum(spectrum, *shape)
    pair = factorize(weight, rank, method="randomized", sketch=sketch, generator=seeded(3))
    error = relative_error(weight, pair)
    assert pair.method == "randomized"
    assert error <= 1.02 * best_error(weight, rank)
    assert pair.error == pytest.approx(error, rel=0.3)


def test_power_iterations_and_oversampling_are_used():
    weight = with_spectrum("i^-0.3", 200, 200)

    def error(**options: int) -> float:
        return relative_error(
            weight, factorize(weight, 40, method="randomized", generator=seeded(), **options)
        )

    plain = error(power_iterations=0, oversampling=0)
    assert error(power_iterations=0, oversampling=40) < 0.97 * plain
    assert error(power_iterations=2, oversampling=0) < 0.9 * plain


@pytest.mark.parametrize("method", ["svd", "randomized"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rank_deficient_weight(method: str, dtype: torch.dtype):
    weight = torch.zeros(30, 20, dtype=dtype)
    weight[:3, :5] = noise(3, 5).to(dtype)  # rank 3, exact in every dtype
    for rank in (3, 10, 20):
        pair = factorize(weight, rank, method=method, generator=seeded())
        assert pair.left.isfinite().all()
        assert pair.right.isfinite().all()
        assert relative_error(weight, pair) < 20 * torch.finfo(pair.left.dtype).eps
        assert pair.error < 1e-6


@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_zero_weight(method: str):
    pair = factorize(torch.zeros(8, 5), 3, method=method, generator=seeded())
    assert pair.error == 0
    assert not (pair.left @ pair.right).any()
    assert pair.left.isfinite().all()
    assert pair.right.isfinite().all()


@pytest.mark.parametrize("method", ["svd", "randomized"])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1e-30, torch.float32), (1e30, torch.float32), (1e-200, torch.float64), (1e200, torch.float64)],
)
def test_squares_neither_vanish_nor_overflow(method: str, size: float, dtype: torch.dtype):
    weight = (noise(20, 12) * size).to(dtype)
    pair = factorize(weight, 6, method=method, generator=seeded(), power_iterations=20)
    unit = weight.double() / size
    best = best_error(unit, 6)
    product = (pair.left.double() / size**0.5) @ (pair.right.double() / size**0.5)
    assert float((unit - product).norm() / unit.norm()) == pytest.approx(best, rel=1e-3)
    assert pair.error == pytest.approx(best, rel=0.5)
    torch.testing.assert_close(singular_values(weight) / size, torch.linalg.svdvals(unit))


@pytest.mark.parametrize("sketch", SKETCH_KINDS)
@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_same_seed_same_bits_and_nothing_else_changes(method: str, sketch: str):
    weight = noise(30, 20)
    copy, state = weight.clone(), torch.get_rng_state()
    first, again = (factorize(weight, 4, method=method, sketch=sketch, generator=seeded(5)) for _ in range(2))
    assert torch.equal(first.left, again.left)
    assert torch.equal(first.right, again.right)
    assert first.error == again.error
    assert torch.equal(weight, copy)
    assert torch.equal(state, torch.get_rng_state())


def test_parameter_gives_plain_tensors():
    pair = factorize(torch.nn.Parameter(noise(6, 4)), 2, generator=seeded())
    assert not pair.left.requires_grad
    assert not pair.right.requires_grad


@pytest.mark.parametrize("shape", [(7, 7), (12, 5), (5, 12), (3, 8, 6), (2, 3, 4, 9), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_values(shape: tuple[int, ...], dtype: torch.dtype):
    weight = noise(*shape).to(dtype)
    values = singular_values(weight)
    assert values.dtype == torch.float64
    torch.testing.assert_close(values, torch.linalg.svdvals(weight.double()), atol=1e-7, rtol=1e-7)


def test_singular_values_of_a_deficient_matrix_are_never_negative_or_nan():
    values = singular_values(noise(10, 2) @ noise(2, 10))
    assert (values >= 0).all()
    assert (values[2:] < 1e-6 * values[0]).all()


def test_probe_error_is_unbiased_and_reads_all_rows():
    weight = noise(1500, 20)
    pair = factorize(weight, 8, method="svd", generator=seeded())
    generator = seeded()
    squares = [
        probe_error(weight, pair.left, pair.right, generator=generator, probes=4) ** 2 for _ in range(200)
    ]
    assert sum(squares) / len(squares) == pytest.approx(relative_error(weight, pair) ** 2, rel=0.03)


def test_probe_error_of_a_zero_weight():
    zero, pair = torch.zeros(4, 3), (torch.ones(4, 1), torch.ones(1, 3))
    assert probe_error(zero, *pair, generator=seeded()) == math.inf
    assert probe_error(zero, zero[:, :1], zero[:1], generator=seeded()) == 0


def test_auto_takes_the_method_it_announces():
    weight = noise(600, 600)
    for rank, method in ((10, "randomized"), (500, "svd")):
        assert choose_method(600, 600, rank) == method
        assert factorize(weight, rank, generator=seeded()).method == method


@pytest.mark.parametrize("shape", [(64, 64), (1024, 1024), (4096, 1024), (1024, 4096), (8192, 600)])
def test_choice_turns_to_svd_once_as_the_rank_grows(shape: tuple[int, int]):
    choices = [choose_method(*shape, rank) for rank in range(1, min(shape) + 1)]
    assert choices == choose_both_ways(shape)
    assert choices == sorted(choices)  # "randomized" < "svd"
    assert choices[len(choices) // 2 :] == ["svd"] * len(choices[len(choices) // 2 :])


def choose_both_ways(shape: tuple[int, int]) -> list[str]:
    return [choose_method(*reversed(shape), rank) for rank in range(1, min(shape) + 1)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype):
    weight = noise(4, 5)
    weight[2, 3] = value
    with pytest.raises(WeightError, match="1 NaN or Inf"):
        factorize(weight.to(dtype), 2, generator=seeded())
    with pytest.raises(WeightError, match="1 NaN or Inf"):
        singular_values(weight.to(dtype))


def test_float8_weight():
    weight = noise(6, 5).to(torch.float8_e4m3fn)
    assert relative_error(weight, factorize(weight, 5, generator=seeded())) < 1e-14


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.empty(3, 4, device="meta"), "meta"),
        (torch.ones(3, 4, dtype=torch.int64), "int64"),
        (torch.ones(3, 4, dtype=torch.complex64), "complex64"),
        (torch.ones(3), "matrix"),
        (torch.ones(2, 3, 4), "matrix"),
        (torch.ones(0, 4), "entry"),
    ],
)
def test_unfit_weights(weight: Tensor, message: str):
    with pytest.raises(WeightError, match=message):
        factorize(weight, 1, generator=seeded())


@pytest.mark.parametrize(
    ("method", "rank", "allowed"),
    [("auto", 0, "1..4"), ("svd", 5, "1..4"), ("randomized", -1, "1..4")],
)
def test_rank_out_of_range(method: str, rank: int, allowed: str):
    with pytest.raises(RankError, match=rf"rank={rank} .*\(4, 6\).* wanted {allowed}"):
        factorize(noise(4, 6), rank, method=method, generator=seeded())


@pytest.mark.parametrize(
    "options",
    [{"method": "qr"}, {"sketch": "fourier"}, {"oversampling": -1}, {"power_iterations": -1}],
)
def test_unknown_options(options: dict[str, str | int]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        factorize(noise(4, 6), 2, generator=seeded(), **options)
