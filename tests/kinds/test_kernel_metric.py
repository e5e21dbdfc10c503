"""The metric of data for kernels: changes of basis that are taken back, and what ranks are said to keep."""

from functools import partial

import pytest
import smooth_images
import torch
from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import conv_candidates, factorize_conv2d, multiply_out
from panther_compile.factorization.moments import RIDGE
from panther_compile.kinds.fit_conv2d import fit_conv2d_to
from panther_compile.kinds.kernel_metric import KernelSums
from panther_compile.kinds.registry import kind_of
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice

SCHEMES = ["channel", "spatial", "tucker2", "basis"]


smooth = partial(smooth_images.smooth, size=14, window=(5, 2))  # along the height most


def metric_of(conv, *, gradient=None):
    sums = KernelSums(conv)
    sums.add(smooth(8, conv.in_channels, 1))
    return sums.moments(RIDGE).metric(gradient)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kernel", [(3, 4), (5, 1), (1, 5)])
def test_factors_of_full_rank_are_taken_back_exactly(scheme, groups, kernel):
    if scheme == "spatial" and kernel[1] == 1:
        pytest.skip("a kernel of one column has no spatial scheme")
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 12, kernel, padding=1, groups=groups)
    root = torch.randn(12, 12, dtype=torch.float64)
    metric = metric_of(conv, gradient=root @ root.T)
    weight = conv.weight.detach().double()
    largest = next(one for one in conv_candidates(weight, groups) if one.scheme == scheme)
    ranks = largest.ranks(largest.max_rank)
    found = factorize_conv2d(
        metric.whiten(weight).contiguous(),
        groups,
        scheme,
        ranks if scheme == "tucker2" else ranks[0],
        generator=torch.Generator(),
    )
    again = multiply_out(metric.take_back(scheme, found.kernels), groups, scheme)
    torch.testing.assert_close(again, weight, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_energies_tell_what_the_output_loses(scheme):
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, (5, 4), padding=2, bias=False)
    x = smooth(16, 16, 1)
    sums = KernelSums(conv)
    sums.add(x)
    kept = sums.energies(None, sums.moments(RIDGE))[scheme]
    candidate = next(one for one in conv_candidates(conv.weight.detach(), 1) if one.scheme == scheme)
    rank = candidate.largest_rank(conv.weight.numel() // 3)
    choice = Choice(scheme, rank, candidate.ranks(rank), 0, None)
    _, error = fit_conv2d_to(conv, "conv", choice, SketchConfig(), [Arrival(0, x, x)], None)
    said = float((1.0 - kept[rank - 1]).clamp_min(0.0).sqrt())
    assert len(kept) == candidate.max_rank
    assert said == pytest.approx(error, rel=0.4)
    assert abs(said - error) < 0.5 * abs(candidate.error(rank) - error)  # nearer than the weight alone tells


@pytest.mark.parametrize("padding_mode", ["zeros", "replicate"])
def test_moments_are_about_the_mean_of_each_tap(padding_mode):
    """In a map of four pixels the outer taps of a kernel of three read padding once in four times."""
    torch.manual_seed(0)
    conv = nn.Conv1d(5, 8, 3, padding=1, padding_mode=padding_mode)
    x = torch.randn(64, 5, 4) + torch.linspace(1, 3, 5)[:, None]
    sums = kind_of(conv).view(conv).input_sums()
    for part in x.split(16):
        sums.add(part)
    found = sums.moments(0.0)
    beside = (x[..., :1], x[..., -1:]) if padding_mode == "replicate" else 2 * (torch.zeros(64, 5, 1),)
    padded = torch.cat((beside[0], x, beside[1]), -1)
    patches = padded.unfold(-1, 3, 1).transpose(1, 2).flatten(0, 1).double()  # (n, I, taps)
    about = patches - patches.mean(0)
    channels, taps = (torch.einsum(how, about, about) for how in ("nit,njt->ij", "nit,niu->tu"))
    torch.testing.assert_close(found.mean.flatten(1), patches.mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.channels, channels / (3 * len(patches)), rtol=1e-4, atol=1e-5)
    shares = taps / taps.diagonal().mean()
    torch.testing.assert_close(found.above.view(3, 3), shares, rtol=1e-4, atol=1e-5)


def test_zeros_and_single_images_have_a_metric():
    conv = nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular")
    for x in (torch.zeros(2, 6, 7, 7), torch.randn(6, 7, 7)):
        sums = KernelSums(conv)
        sums.add(x)
        assert all(kept.isfinite().all() for kept in sums.energies(None, sums.moments(RIDGE)).values())


def test_a_line_is_a_plane_of_one_column():
    torch.manual_seed(0)
    line, plane = nn.Conv1d(6, 8, 5, padding=2), nn.Conv2d(6, 8, (5, 1), padding=(2, 0))
    with torch.no_grad():
        plane.weight.copy_(line.weight.unsqueeze(-1))
    x = smooth(4, 6, 2)[..., :1]
    found = []
    for conv, given in ((line, x.squeeze(-1)), (plane, x)):
        sums = kind_of(conv).view(conv).input_sums()
        sums.add(given)
        found.append(sums.energies(None, sums.moments(RIDGE)))
    assert found[0].keys() == found[1].keys() == {"channel", "tucker2", "basis"}
    for scheme, kept in found[0].items():
        torch.testing.assert_close(kept, found[1][scheme])


@pytest.mark.parametrize("build", [partial(nn.Conv2d, 12, 24, 3, padding=1), partial(nn.Conv1d, 12, 24, 5)])
def test_a_cut_is_as_far_off_as_energies_tell(build):
    torch.manual_seed(0)
    conv = build(bias=False)
    x = smooth(16, 12, 1) if isinstance(conv, nn.Conv2d) else smooth(16, 12, 1).flatten(2)
    view = kind_of(conv).view(conv)
    sums = view.input_sums()
    sums.add(x)
    unit = kind_of(conv).unit("conv", conv, energies=False)
    for candidate in unit.candidates:
        rank = candidate.largest_rank(conv.weight.numel() // 3)
        choice = Choice(candidate.scheme, rank, candidate.ranks(rank), 0, None)
        layer = view.cut("conv", choice, SketchConfig(), sums.moments(RIDGE), None)
        error = float((layer(x) - conv(x)).detach().norm() / conv(x).detach().norm())
        kept = sums.energies(None, sums.moments(RIDGE))[candidate.scheme]
        assert error == pytest.approx(float((1.0 - kept[rank - 1]).clamp_min(0.0).sqrt()), rel=0.4)
