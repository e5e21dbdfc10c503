"""Factors of kernels, closer in the metric of whole patches."""

import pytest
import torch
from smooth_images import smooth
from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import factorize_conv2d, multiply_out
from panther_compile.kinds.fit_conv2d import fit_conv2d_to
from panther_compile.kinds.kernel_descent import agreement, brought_closer
from panther_compile.kinds.kernel_metric import KernelSums
from panther_compile.kinds.windows import windows
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice

RANKS = {"channel": 5, "spatial": 8, "tucker2": (6, 6), "basis": 3}


def mixed(count, seed):
    """Images (count, 12, 9, 9) whose channels are mixed otherwise at neighbouring pixels."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0))
    latent = torch.randn(count, 4, 11, 9, generator=generator)
    return sum(torch.einsum("ij,njhw->nihw", mixing[i], latent[:, :, i : i + 9]) for i in range(3)) + 0.1


def loss(factors, scheme, weight, covariance):
    off = (multiply_out(tuple(factors), 1, scheme) - weight).flatten(1)
    return float((off @ covariance * off).sum() / (weight.flatten(1) @ covariance * weight.flatten(1)).sum())


@pytest.mark.parametrize("scheme", RANKS)
def test_less_is_lost_in_the_metric(scheme):
    torch.manual_seed(0)
    weight = torch.randn(10, 12, 3, 3, dtype=torch.float64)
    rows = torch.randn(400, 108, dtype=torch.float64) @ torch.randn(108, 108, dtype=torch.float64)
    covariance = rows.T @ rows / 400
    begun = factorize_conv2d(weight, 1, scheme, RANKS[scheme], generator=torch.Generator()).kernels
    found = brought_closer(scheme, begun, weight, (covariance, covariance))
    assert [one.shape for one in found] == [one.shape for one in begun]
    assert loss(found, scheme, weight, covariance) < 0.8 * loss(begun, scheme, weight, covariance)
    if scheme == "channel":  # a matrix of rank 5, of which the best is known
        root = torch.linalg.cholesky(covariance)
        tail = torch.linalg.svdvals(weight.flatten(1) @ root)[5:].square().sum()
        best = float(tail / (weight.flatten(1) @ root).square().sum())
        assert loss(found, scheme, weight, covariance) == pytest.approx(best, rel=0.02)


def test_a_kernel_of_zeros_stays_one():
    weight, moments = torch.zeros(6, 4, 3, 3, dtype=torch.float64), torch.eye(36, dtype=torch.float64)
    begun = factorize_conv2d(weight, 1, "spatial", 3, generator=torch.Generator()).kernels
    found = brought_closer("spatial", begun, weight, (moments, moments))
    assert bool((multiply_out(tuple(found), 1, "spatial") == 0).all())


def test_what_halves_do_not_agree_on_does_not_count():
    torch.manual_seed(0)
    weight = torch.randn(10, 12, 3, 3, dtype=torch.float64)
    begun = factorize_conv2d(weight, 1, "basis", 3, generator=torch.Generator()).kernels
    halves = [rows.T @ rows / 120 for rows in torch.randn(2, 120, 108, dtype=torch.float64)]  # chance alone
    assert agreement(*halves) < 0.1
    assert agreement(halves[0], halves[0]) == pytest.approx(1.0)
    found = brought_closer("basis", begun, weight, halves)
    product, before = (multiply_out(tuple(one), 1, "basis") for one in (found, begun))
    assert float((product - before).norm() / before.norm()) < 0.05


@pytest.mark.parametrize("bias", [True, False])
def test_moments_of_halves_are_those_of_the_patches(bias):
    conv, x = nn.Conv2d(12, 8, 3, padding=1, stride=2, bias=bias), mixed(8, 1)
    sums = KernelSums(conv, whole=True)
    for part in x.split(4):
        sums.add(part)
    moments = sums.moments(0.0)
    first, second = (windows(conv, part).flatten(1).double().chunk(2) for part in x.split(4))
    each = torch.cat((first[0], second[1])), torch.cat((first[1], second[0]))
    for rows, found in zip(each, moments.halves, strict=True):
        rows = rows - rows.mean(0) if bias else rows
        torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4)
    metric = moments.metric(None)
    weight = torch.randn(8, 12, 3, 3, dtype=torch.float64)
    whitened = metric.whiten(weight).flatten(1)
    for half in moments.halves:  # an error counts alike in both bases
        expected = (weight.flatten(1) @ half * weight.flatten(1)).sum()
        torch.testing.assert_close((whitened @ metric.whiten_moments(half) * whitened).sum(), expected)


def test_groups_many_features_and_single_patches_have_none():
    for conv in (nn.Conv2d(12, 12, 3, groups=2), nn.Conv2d(260, 4, 3)):
        sums = KernelSums(conv, whole=True)
        sums.add(torch.randn(4, conv.in_channels, 6, 6))
        assert sums.moments(0.01).halves == ()
    sums = KernelSums(nn.Conv2d(12, 8, 3), whole=True)
    sums.add(torch.randn(1, 12, 3, 3))
    assert sums.moments(0.01).halves == ()
    sums.add(torch.randn(1, 12, 3, 3))
    assert len(sums.moments(0.01).halves) == 2


def errors_of_fits(conv, choice, x, other):
    """On other images: brought closer in whole patches, and not."""
    errors = []
    for whole in (True, False):
        layer, _ = fit_conv2d_to(conv, "conv", choice, SketchConfig(), [Arrival(0, x, x)], None, whole=whole)
        with torch.no_grad():
            errors.append(float((layer(other) - conv(other)).norm()))
    return errors


@pytest.mark.parametrize("scheme", RANKS)
def test_other_images_lose_less_where_parts_do_not_tell_all(scheme):
    torch.manual_seed(0)
    conv = nn.Conv2d(12, 10, 3)
    rank = RANKS[scheme]
    ranks = rank if isinstance(rank, tuple) else (rank,)
    choice = Choice(scheme, max(ranks), ranks, 0, None)
    errors = errors_of_fits(conv, choice, mixed(256, 1), mixed(64, 2))
    assert errors[0] < 0.98 * errors[1]


def test_smooth_images_are_told_by_their_parts():
    """Blurred noise is a product of parts, so that there is nothing beyond them to go by."""
    torch.manual_seed(0)
    choice = Choice("spatial", 8, (8,), 0, None)
    errors = errors_of_fits(nn.Conv2d(12, 10, 3), choice, smooth(64, 12, 1), smooth(64, 12, 2))
    assert errors[0] < 1.03 * errors[1]
