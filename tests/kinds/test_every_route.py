"""Each kind of layer through every route: what a kind answers is all that the library knows of it."""

import pytest
import torch
from kinds import routes
from kinds.routes import Made
from torch import nn

import panther_compile as pc
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.conv_on_plane import SketchedConv1d, SketchedConv3d
from panther_compile.layers.conv_transpose import (
    SketchedConvTranspose1d,
    SketchedConvTranspose2d,
    SketchedConvTranspose3d,
)


def with_few_filters(conv):
    """A convolution whose kernels are mixtures of the same three, and of a little else."""
    with torch.no_grad():
        taps = conv.weight[0, 0].numel()
        mixed = torch.randn(conv.weight.numel() // taps, 3) @ torch.randn(3, taps)
        mixed += 0.5 * torch.randn_like(mixed)
        conv.weight.copy_(mixed.view_as(conv.weight) / conv.weight[0].numel() ** 0.5)
    return conv


KINDS = {
    "Conv1d of few filters": (
        lambda: Made(
            with_few_filters(nn.Conv1d(12, 24, 16, stride=2, padding=7)),
            with_few_filters(nn.Conv1d(24, 24, 9, dilation=2, padding="same", padding_mode="circular")),
            with_few_filters(nn.Conv1d(24, 16, 8, groups=2, bias=False)),
        ),
        (3, 12, 40),
        (SketchedConv1d,),
        "Conv",
    ),
    "Conv2d of few filters": (
        lambda: Made(
            with_few_filters(nn.Conv2d(12, 24, (4, 5), stride=(2, 1), padding=(1, 2))),
            with_few_filters(nn.Conv2d(24, 24, 3, padding=2, dilation=2, padding_mode="reflect")),
            with_few_filters(nn.Conv2d(24, 16, 4, groups=2, padding="same", bias=False)),
        ),
        (2, 12, 12, 9),
        (SketchedConv2d,),
        "Conv",
    ),
    "Conv3d": (
        lambda: Made(
            nn.Conv3d(12, 24, 3, stride=(1, 2, 1), padding=1),
            nn.Conv3d(24, 24, (1, 3, 3), padding=(0, 2, 1), dilation=(1, 2, 1), padding_mode="replicate"),
            nn.Conv3d(24, 24, (3, 1, 1), groups=2, padding="same", bias=False),
            nn.Conv3d(24, 16, 1, stride=(1, 1, 2)),
        ),
        (2, 12, 4, 8, 6),
        (SketchedConv3d,),
        "Conv",
    ),
    "Conv1d": (
        lambda: Made(
            nn.Conv1d(12, 24, 5, stride=2, padding=2),
            nn.Conv1d(24, 24, 3, dilation=2, padding="same", padding_mode="circular"),
            nn.Conv1d(24, 24, 3, groups=2, padding=1, bias=False),
            nn.Conv1d(24, 16, 1),
        ),
        (3, 12, 40),
        (SketchedConv1d,),
        "Conv",
    ),
    "ConvTranspose1d": (
        lambda: Made(
            nn.ConvTranspose1d(12, 16, 4, stride=2, padding=1),
            nn.ConvTranspose1d(16, 16, 3, stride=3, output_padding=1, dilation=2, groups=2),
            nn.ConvTranspose1d(16, 12, 3, bias=False),
        ),
        (3, 12, 10),
        (SketchedConvTranspose1d,),
        "ConvTranspose",
    ),
    "ConvTranspose2d": (
        lambda: Made(
            nn.ConvTranspose2d(12, 16, (4, 3), stride=2, padding=1),
            nn.ConvTranspose2d(16, 16, 3, stride=(1, 2), output_padding=(0, 1), groups=2),
            nn.ConvTranspose2d(16, 12, 2, dilation=2, bias=False),
        ),
        (2, 12, 5, 6),
        (SketchedConvTranspose2d,),
        "ConvTranspose",
    ),
    "ConvTranspose3d": (
        lambda: Made(
            nn.ConvTranspose3d(12, 16, (2, 4, 3), stride=2, padding=(0, 1, 1)),
            nn.ConvTranspose3d(16, 16, 3, stride=(1, 1, 2), output_padding=(0, 0, 1), groups=2),
            nn.ConvTranspose3d(16, 12, 2, dilation=2, bias=False),
        ),
        (2, 12, 2, 4, 3),
        (SketchedConvTranspose3d,),
        "ConvTranspose",
    ),
}


@pytest.fixture(params=list(KINDS))
def case(request):
    return case_of(request.param)


def usually(*names):
    """In every run these; the others differ in scheme or dimension, which the cheap routes tell apart."""
    cases = [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in KINDS]
    return pytest.mark.parametrize("case", cases, indirect=True)


def case_of(name):
    build, shape, layer_types, op_type = KINDS[name]
    torch.manual_seed(0)
    # Inputs of few directions, as those of trained models are: data then tells more than the weights.
    mixing = torch.randn(shape[1], 3)
    batches = [
        torch.einsum("cr,nr...->nc...", mixing, torch.randn(8, 3, *shape[2:]))
        + 0.05 * torch.randn(8, *shape[1:])
        for _ in range(4)
    ]
    return build, batches[0][: shape[0]], batches, layer_types, op_type


def test_weights_alone_saved_and_skeleton(case, tmp_path):
    build, x, _, layer_types, _ = case
    small = routes.by_weights(build(), x, layer_types)
    routes.saved_and_loaded(small, build(), x, tmp_path / "saved")
    routes.as_skeleton(build, small)


@usually("ConvTranspose2d", "Conv3d")
def test_data_and_healing(case):
    build, x, batches, layer_types, _ = case
    model = build()
    routes.by_data(model, batches, x, layer_types)
    routes.healed(model, batches, x)


def test_latency(case):
    build, x, _, _, _ = case
    routes.by_latency(build(), x)


@usually("Conv2d of few filters")
def test_graphs_and_backend(case):
    build, x, _, layer_types, _ = case
    routes.traced(build(), x, layer_types)
    assert routes.compiled(build(), x, layer_types) > 1e-4  # it was sketched


@usually("ConvTranspose2d", "Conv3d")
def test_onnx(case, tmp_path):
    build, x, _, layer_types, op_type = case
    model = build()
    small = routes.by_weights(model, x, layer_types)
    routes.exported(small, x, tmp_path / "small.onnx")
    routes.onnx_sketched(model, x, tmp_path, op_type)


@usually("Conv1d")
def test_partition(case):
    build, x, _, layer_types, _ = case
    routes.partitioned(routes.by_weights(build(), x, layer_types), x)


@pytest.mark.parametrize("name", ["Conv1d of few filters", "Conv2d of few filters"])
def test_few_filters_are_taken_as_a_basis(name):
    build, shape, _, _ = KINDS[name]
    small = pc.sketchify(build(), 0.6, **routes.OPTIONS)
    schemes = [layer.scheme for layer in routes.sketched_layers(small, KINDS[name][2])]
    assert schemes == ["basis"] * 3
    dense, x = pc.densify(small), torch.randn(shape)
    torch.testing.assert_close(small(x), dense(x))
    seen = []
    for layer in routes.sketched_layers(small, KINDS[name][2]):  # with a hook the factors are called
        layer.down.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(small(x), dense(x))
    assert len(seen) == 3
    exported = torch.export.export(small.eval(), (x,))  # where weights are of another type
    torch.testing.assert_close(exported.module()(x), dense(x))
    assert len(seen) == 6
