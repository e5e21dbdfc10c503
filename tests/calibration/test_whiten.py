"""The closed forms against what they minimise."""

import pytest
import torch

from panther_compile.factorization.fit_matrix import fit_matrix_to
from panther_compile.factorization.moments import MomentSums
from panther_compile.factorization.whiten import (
    best_low_rank,
    lower_root,
    output_error,
    root_of,
    solve,
    term_sizes,
)


def problem(outputs, inputs, rows=400, seed=0):
    """(W, x, z, G): correlated inputs, z a noisy x, and a weight of errors."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixing = noise(inputs, inputs) / inputs**0.5 * torch.linspace(1, 0.01, inputs, dtype=torch.float64)
    x = noise(rows, inputs) @ mixing
    z = x + 0.1 * x.std() * noise(rows, inputs)
    root = noise(outputs, outputs)
    return noise(outputs, inputs), x, z, root @ root.T / outputs


def moments_of(x, z, centred=False):
    sums = MomentSums(x.shape[1], x.device)
    sums.add(x.float(), z.float())
    return sums.moments(centred=centred)


def loss(weight, new, x, z, metric):
    lost = x @ weight.T - z @ new.T
    return float((lost @ metric * lost).sum())


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(12, 20), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((20, 12), (16, 16)))],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_other_matrix_of_the_rank_is_better(outputs, inputs, weighted):
    weight, x, z, metric = problem(outputs, inputs)
    metric = metric if weighted else torch.eye(outputs, dtype=torch.float64)
    left, right = best_low_rank(weight, moments_of(x, z), metric if weighted else None, 5)
    assert left.shape == (outputs, 5)
    assert right.shape == (5, inputs)
    best = loss(weight, left @ right, x, z, metric)
    # Descend from it, and from elsewhere: neither finds anything better.
    generator = torch.Generator().manual_seed(1)
    for start in (0.0, 0.3):
        a = (left + start * torch.randn(left.shape, generator=generator)).contiguous().requires_grad_()
        b = (right + start * torch.randn(right.shape, generator=generator)).contiguous().requires_grad_()
        optimizer = torch.optim.LBFGS([a, b], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

        def closure(a=a, b=b, optimizer=optimizer):
            optimizer.zero_grad()
            lost = x @ weight.T - z @ (a @ b).T
            total = (lost @ metric * lost).sum()
            total.backward()
            return total

        optimizer.step(closure)
        assert float(closure()) >= best * (1 - 2e-3)


def test_anchored_fit_beats_the_fit_to_dense_inputs():
    weight, x, z, _ = problem(12, 20)
    anchored = best_low_rank(weight, moments_of(x, z), None, 5)
    plain = best_low_rank(weight, moments_of(x, x), None, 5)
    identity = torch.eye(12, dtype=torch.float64)
    losses = [loss(weight, left @ right, x, z, identity) for left, right in (anchored, plain)]
    assert losses[0] < 0.995 * losses[1]


def test_spectrum_is_what_each_rank_keeps():
    weight, x, _, metric = problem(12, 20)
    moments = moments_of(x, x)
    left, right = best_low_rank(weight, moments, metric, 12)
    values = term_sizes(left, right, moments.covariance, metric)
    root = root_of(metric).factor
    whole = torch.linalg.svdvals(root.T @ weight @ root_of(moments.covariance).factor)
    torch.testing.assert_close(values, whole, rtol=1e-6, atol=1e-9)


def test_root_of_a_singular_matrix():
    vector = torch.randn(6, 2, dtype=torch.float64)
    matrix = vector @ vector.T
    root = root_of(matrix)
    torch.testing.assert_close(root.factor @ root.factor.T, matrix, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(root.inverse).all()


@pytest.mark.parametrize("rank", [4, 9])
def test_lower_root_of_a_matrix_of_any_rank(rank):
    rows = torch.randn(rank, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = rows.T @ rows
    root = lower_root(matrix)
    assert torch.equal(root, root.tril())
    torch.testing.assert_close(root @ root.T, matrix, atol=1e-6, rtol=0)


def test_lower_root_of_rounding_alone():
    noise = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-9
    root = lower_root(noise + noise.T)
    assert torch.isfinite(root).all()
    assert bool((root.diagonal() != 0).all())


def test_solve_of_a_matrix_that_cholesky_refuses():
    matrix = torch.diag(torch.tensor([1.0, 1.0, -1e-12], dtype=torch.float64))
    found = solve(matrix, torch.ones(3, 1, dtype=torch.float64))
    torch.testing.assert_close(found[:2], torch.ones(2, 1, dtype=torch.float64))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("outlier", [1.0, 1e3])
def test_pivoted_form_loses_next_to_nothing(outlier):
    weight, x, z, metric = problem(24, 32)
    scale = torch.ones(32, dtype=torch.float64)
    scale[3] = outlier  # a feature that is always large
    weight, x, z = weight / scale, x * scale, z * scale
    moments = moments_of(x, z, centred=True)
    bias = torch.randn(24)
    plain, pivoted = (
        fit_matrix_to(weight, bias, moments, metric, 10, pivoted=form, dtype=torch.float32)
        for form in (False, True)
    )
    assert plain.start is None
    assert pivoted.right.shape == (10, 22)

    def weighted(found):
        new = found.left @ (found.right if found.start is None else rebuilt(found))
        return loss(weight, new, x - moments.mean_x, z - moments.mean_z, metric)

    assert weighted(pivoted) <= 1.02 * weighted(plain)


def rebuilt(found):
    identity = torch.eye(found.left.shape[1], dtype=torch.float64)
    parts = (identity, found.right) if found.start == 0 else (found.right, identity)
    return torch.cat(parts, dim=1)


def test_bias_makes_up_for_the_means():
    weight, x, z, _ = problem(12, 20)
    x, z = x + 3.0, z + 2.5
    moments = moments_of(x, z, centred=True)
    found = fit_matrix_to(weight, torch.zeros(12), moments, None, 5, pivoted=False, dtype=torch.float32)
    lost = x @ weight.T - (z @ (found.left @ found.right).T + found.bias)
    assert float(lost.mean(0).abs().max()) < 1e-3 * float((x @ weight.T).abs().mean())


@pytest.mark.parametrize("pivoted", [False, True])
def test_outputs_deviate_as_those_of_the_dense_layer_where_that_is_asked_for(pivoted):
    """But for those of which little is told; least squares alone has them deviate less."""
    weight, x, z, _ = problem(24, 32)
    moments, bias = moments_of(x, z, centred=True), torch.zeros(24)
    plain, restored = (
        fit_matrix_to(
            weight, bias, moments, None, 10, pivoted=pivoted, dtype=torch.float64, restores=restores
        )
        for restores in (False, True)
    )

    def given(found):
        return z @ (found.left @ (found.right if found.start is None else rebuilt(found))).T

    wanted = x @ weight.T
    told = (given(plain).std(0) / wanted.std(0)).square()
    well = told > 0.85
    assert int(well.sum()) > 6
    assert bool((given(plain).std(0)[well] < 0.99 * wanted.std(0)[well]).any())
    torch.testing.assert_close(given(restored).std(0)[well], wanted.std(0)[well], rtol=0.03, atol=0)
    lost = wanted - given(restored) - restored.bias
    assert float(lost.mean(0).abs().max()) < 1e-3 * float(wanted.abs().mean())


def test_output_error_is_the_error_of_the_rows():
    weight, x, z, metric = problem(12, 20)
    moments = moments_of(x, z)
    left, right = best_low_rank(weight, moments, metric, 5)
    identity = torch.eye(12, dtype=torch.float64)
    wanted = loss(weight, left @ right, x, z, identity) / loss(weight, 0 * weight, x, z, identity)
    found = output_error(weight, left, right, moments)
    assert found == pytest.approx(wanted**0.5, rel=0.15)  # of a sample of the rows
