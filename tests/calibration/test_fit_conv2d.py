"""Convolutions fitted to data: every scheme, grouped, strided, padded."""

import pytest
import torch
from smooth_images import smooth
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import factorize_conv2d
from panther_compile.kinds import fit_conv2d
from panther_compile.kinds.fit_conv2d import fit_conv2d_to
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice

CASES = {
    "plain": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "same": {"padding": "same"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "dilated": {"padding": 2, "dilation": 2},
    "grouped": {"padding": 1, "groups": 2},
    "no bias": {"padding": 1, "bias": False},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scheme", ["channel", "spatial", "tucker2", "basis"])
def test_fit_is_closer_than_the_kernel_alone_tells(scheme, case):
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, 3, **CASES[case])
    rank = (4, 5) if scheme == "tucker2" else 6
    ranks = rank if isinstance(rank, tuple) else (rank,)
    choice = Choice(scheme, 4 if scheme == "tucker2" else 6, ranks, 0, None)
    x = smooth(16, 16, 1)
    z = x + 0.1 * x.std() * torch.randn(x.shape)
    fitted, error = fit_conv2d_to(conv, "conv", choice, SketchConfig(), [Arrival(0, x, z)], None)
    found = factorize_conv2d(
        conv.weight.detach(), conv.groups, scheme, choice.rank, generator=torch.Generator()
    )
    plain = SketchedConv2d.from_kernels(scheme, found.kernels, conv)
    test_x = smooth(16, 16, 2)
    test_z = test_x + 0.1 * test_x.std() * torch.randn(x.shape)
    with torch.no_grad():
        wanted = conv(test_x)
        size = (wanted - wanted.mean((0, 2, 3), keepdim=True)).norm()
        errors = [float((layer(test_z) - wanted).norm() / size) for layer in (fitted, plain)]
    assert errors[0] < (1.02 if case == "grouped" else 1.0) * errors[1]  # groups have no metric
    assert error == pytest.approx(errors[0], rel=0.3)


@pytest.mark.parametrize("scheme", ["basis", "channel"])
def test_of_very_many_features_the_bias_alone_is_fitted(scheme, monkeypatch):
    monkeypatch.setattr(fit_conv2d, "_MOST_FEATURES", 4)
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, 3, padding=1)
    x = smooth(16, 16, 1) + 1.0
    choice = Choice(scheme, 5, (5,), 0, None)
    with torch.no_grad():
        fitted, error = fit_conv2d_to(conv, "conv", choice, SketchConfig(), [Arrival(0, x, x)], None)
        lost = fitted(x) - conv(x)
        power = (conv(x) - conv.bias[:, None, None]).norm()
    assert lost.mean((0, 2, 3)).abs().max() < 1e-5
    assert error == pytest.approx(float(lost.norm() / power), rel=1e-3)


@pytest.mark.parametrize("batches", [1, 40])
def test_batches_of_one_position_each(batches):
    """Halves of all rows are made of whole batches then; a single row tells nothing."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, 3)
    directions = torch.randn(4, 16 * 9)
    xs = (torch.randn(batches, 4) @ directions).reshape(batches, 1, 16, 3, 3)
    arrivals = [Arrival(place, x, x) for place, x in enumerate(xs)]
    layer, error = fit_conv2d_to(
        conv, "conv", Choice("channel", 4, (4,), 0, None), SketchConfig(), arrivals, None
    )
    assert error < 1e-3 or batches == 1
    lost = torch.cat([layer(x) - conv(x) for x in xs]).norm() / torch.cat([conv(x) for x in xs]).norm()
    assert float(lost) < (1e-2 if batches > 1 else 1.0)


def test_inputs_of_other_lengths_stand_for_both():
    conv, choice = nn.Conv2d(16, 24, 3), Choice("channel", 4, (4,), 0, None)
    xs, zs = torch.randn(4, 1, 16, 6, 6), torch.randn(4, 1, 16, 6, 4)
    layers = [
        fit_conv2d_to(
            conv,
            "conv",
            choice,
            SketchConfig(),
            [Arrival(0, x, z) for x, z in zip(own, zs, strict=True)],
            None,
        )[0]
        for own in (xs, zs)
    ]
    assert torch.equal(layers[0](xs[0]), layers[1](xs[0]))


class Times(nn.Module):
    """Gives as many frames as it predicts, as text to speech does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lasts = nn.Linear(32, 32)
        self.frames = nn.Parameter(torch.randn(16, 24), requires_grad=False)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        lasts = self.lasts(x)
        count = 8 + int(1e4 * lasts.abs().sum()) % 16
        return self.conv(self.frames[:, :count] + lasts[:, :16, None])


def test_kernels_that_are_given_other_lengths_in_the_sketched_model():
    data = [torch.randn(8, 32) for _ in range(5)]
    small = pc.sketchify(
        Times(), 0.5, data=data, min_params=0, allow_slower=True, include=["lasts", "conv"], progress=False
    )
    assert {row.name for row in pc.sketch_report(small).sketched} == {"lasts", "conv"}
    assert torch.isfinite(small(data[0])).all()


@pytest.mark.parametrize(("groups", "rank"), [(1, 16), (2, 6)])
def test_outputs_deviate_as_those_of_the_dense_layer(groups, rank):
    """But for those of which little is told; least squares alone has them deviate less."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, 3, padding=1, groups=groups)
    x = smooth(32, 16, 1) + 1.0
    choice = Choice("channel", rank, (rank,), 0, None)
    fitted, _ = fit_conv2d_to(conv, "conv", choice, SketchConfig(), [Arrival(0, x, x)], None)
    with torch.no_grad():
        wanted, given = (layer(x).movedim(1, 0).flatten(1) for layer in (conv, fitted))
    told = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(wanted, given, strict=True)])
    ratio, well = given.std(1) / wanted.std(1), told > 0.9
    assert int(well.sum()) > 8
    assert bool((ratio[well] > told[well]).all())
    torch.testing.assert_close(ratio[well], torch.ones(24)[well], rtol=0, atol=0.03)
    torch.testing.assert_close(given.mean(1), wanted.mean(1), rtol=0, atol=0.02 * float(wanted.std()))
