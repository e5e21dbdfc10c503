"""One factor for parts with inputs of their own: the best by numpy's way, and what is fitted beside it."""

import pytest
import torch

from panther_compile.calibration.shared_parts import best_of_parts
from panther_compile.factorization.fit_matrix import FittedPair, fit_beside
from panther_compile.factorization.moments import MomentSums
from panther_compile.factorization.pivot import from_pivoted

PARTS = 3


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def positive(size):
    root = normal(2 * size, size)
    return root.T @ root / size + torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("known", [True, False])
def test_the_best_output_factor_where_errors_weigh_alike(known):
    torch.manual_seed(0)
    weights, rows = (
        [normal(20, 8) for _ in range(PARTS)],
        [normal(200, 8) @ normal(8, 8) for _ in range(PARTS)],
    )
    metric = positive(20) if known else torch.eye(20, dtype=torch.float64)
    scales = [0.5, 1.0, 3.0] if known else [1.0] * PARTS
    total = sum(s * w @ (x.T @ x / len(x)) @ w.T for s, w, x in zip(scales, weights, rows, strict=True))
    metric = metric / metric.diagonal().mean()
    given = [s * metric for s in scales] if known else [None] * PARTS
    values, left, right = best_of_parts(weights, given, total, "pair")
    root = torch.linalg.cholesky(metric)
    outputs = [(s / len(x)) ** 0.5 * root.T @ w @ x.T for s, w, x in zip(scales, weights, rows, strict=True)]
    torch.testing.assert_close(values, torch.linalg.svdvals(torch.cat(outputs, 1)))
    for rank in (5, 20):
        lost = 0.0
        for s, w, x, own in zip(scales, weights, rows, right.split(8, 1), strict=True):
            lost += float((s / len(x)) * (root.T @ (w - left[:, :rank] @ own[:rank]) @ x.T).square().sum())
        assert lost == pytest.approx(float(values[rank:].square().sum()), rel=1e-6, abs=1e-9)


def test_the_best_input_factor_where_inputs_are_alike():
    torch.manual_seed(0)
    weights, covariance = [normal(8, 20) for _ in range(PARTS)], positive(20)
    metrics = [positive(8) for _ in range(PARTS)]
    values, left, right = best_of_parts(weights, metrics, covariance, "pivoted")
    inside = torch.linalg.cholesky(covariance)
    roots = [torch.linalg.cholesky(one) for one in metrics]
    whole = torch.cat([k.T @ w @ inside for k, w in zip(roots, weights, strict=True)])
    torch.testing.assert_close(values, torch.linalg.svdvals(whole))
    lost = sum(
        float((k.T @ (w - own[:, :6] @ right[:6]) @ inside).square().sum())
        for k, w, own in zip(roots, weights, left.split(8), strict=True)
    )
    assert lost == pytest.approx(float(values[6:].square().sum()), rel=1e-6)


@pytest.mark.parametrize("scheme", ["pair", "pivoted"])
@pytest.mark.parametrize("biases", [True, False])
def test_the_rest_is_the_best_beside_a_factor(scheme, biases):
    """Against least squares on the rows themselves."""
    torch.manual_seed(0)
    weight, bias, rank = normal(12, 9), normal(12) if biases else None, 4
    x = normal(3000, 9) @ normal(9, 9) + 1.0
    z = x + 0.1 * torch.randn_like(x)
    sums = MomentSums(9, x.device)
    sums.add(x, z)
    moments, metric = sums.moments(centred=biases, ridge=0.0), positive(12)
    start = None if scheme == "pair" else 0
    given = FittedPair(normal(12, rank), normal(rank, 9 - (rank if start == 0 else 0)), start, None, 0.0)
    found = fit_beside(weight, bias, moments, metric, given)
    left, right = found.left, found.right
    if start == 0:
        left, right = from_pivoted(left, right, 0)
        torch.testing.assert_close(found.right, given.right)
    else:
        torch.testing.assert_close(left, given.left)
    centre = (x.mean(0), z.mean(0)) if biases else (0.0, 0.0)
    wanted, root = (x - centre[0]) @ weight.T, torch.linalg.cholesky(metric)
    z_own = z - centre[1]
    if start == 0:
        best = z_own @ right.T @ torch.linalg.lstsq(z_own @ right.T, wanted).solution
    else:
        whole = torch.linalg.lstsq(z_own, wanted).solution  # (I, O)
        best = z_own @ torch.linalg.lstsq(root.T @ left, root.T @ whole.T).solution.T @ left.T
    least = ((wanted - best) @ root).square().sum()
    lost = ((wanted - z_own @ right.T @ left.T) @ root).square().sum()
    assert float(least) * 0.999 < float(lost) < 1.001 * float(least)
    if biases:
        torch.testing.assert_close(
            found.bias, bias + weight @ x.mean(0) - left @ (right @ z.mean(0)), rtol=1e-3, atol=1e-3
        )
