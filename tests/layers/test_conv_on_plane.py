"""SketchedConv1d and 3d against the dense convolution of the weight that their factors stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc
from panther_compile.errors import LayerError

CONVS = {
    "1d": (nn.Conv1d(6, 8, 5, stride=2, padding=2, dilation=2, groups=2), (2, 6, 20)),
    "1d, circular": (nn.Conv1d(6, 8, 3, padding="same", padding_mode="circular"), (2, 6, 9)),
    "3d": (nn.Conv3d(6, 8, (3, 2, 3), stride=(1, 2, 1), padding=(1, 0, 1)), (2, 6, 4, 6, 5)),
    "3d, groups": (nn.Conv3d(6, 8, 3, padding=2, dilation=(1, 2, 1), groups=2, bias=False), (2, 6, 3, 5, 4)),
    "3d, replicate": (nn.Conv3d(6, 8, 3, padding=1, padding_mode="replicate"), (2, 6, 3, 4, 5)),
    "3d, same": (nn.Conv3d(6, 8, (3, 1, 4), padding="same", dilation=(2, 1, 1)), (2, 6, 4, 3, 5)),
}


def geometry(conv):
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    return {name: getattr(conv, name) for name in (*names, "padding_mode")} | {"bias": conv.bias is not None}


def dense_result(layer, conv, x):
    """What the dense layer makes of x by the sketched one's weight."""
    state = {"weight": layer.weight + 0} | ({} if layer.bias is None else {"bias": layer.bias})
    return torch.func.functional_call(conv, state, (x,))


@pytest.mark.parametrize("scheme", ["channel", "spatial", "tucker2", "basis"])
@pytest.mark.parametrize("name", CONVS)
def test_each_scheme(name, scheme):
    conv, shape = CONVS[name]
    layer_type = pc.SketchedConv1d if len(shape) == 3 else pc.SketchedConv3d
    if scheme == layer_type.without:
        with pytest.raises(LayerError, match=scheme):
            layer_type(**geometry(conv), rank=2, scheme=scheme)
        return
    layer = layer_type(**geometry(conv), rank=2, scheme=scheme)
    x = torch.randn(shape)
    for given in (x, x[0]):
        torch.testing.assert_close(layer(given), dense_result(layer, conv, given))
    torch.testing.assert_close(layer.to_dense()(x), layer(x))
    again = layer_type(**layer.sketch_spec())
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    layer.weight.sum().backward()
    assert all(factor.weight.grad is not None for factor in layer.children())


@pytest.mark.parametrize("start", [0, 2])
def test_pivoted(start):
    conv = nn.Conv3d(6, 8, 1, stride=(1, 2, 2), padding=(0, 1, 0))
    layer = pc.SketchedConv3d(**geometry(conv), rank=4, scheme="pivoted", start=start)
    x = torch.randn(2, 6, 3, 4, 5)
    torch.testing.assert_close(layer(x), dense_result(layer, conv, x))
    assert layer(x[0]).shape == conv(x[0]).shape


def test_time_first():
    """The (2+1)D form: along the depth, then within frames."""
    layer = pc.SketchedConv3d(6, 8, (3, 5, 4), 7, scheme="spatial", stride=(2, 1, 3), padding=(1, 2, 0))
    assert (layer.down.kernel_size, layer.down.stride, layer.down.padding) == (
        (3, 1, 1),
        (2, 1, 1),
        (1, 0, 0),
    )
    assert (layer.up.kernel_size, layer.up.stride, layer.up.padding) == ((1, 5, 4), (1, 1, 3), (0, 2, 0))
    x = torch.randn(1, 6, 5, 6, 7)
    wanted = F.conv3d(x, layer.weight + 0, layer.bias, (2, 1, 3), (1, 2, 0))
    torch.testing.assert_close(layer(x), wanted)


def test_a_model_of_videos_is_compared_without_data():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv3d(32, 32, 3, stride=2), nn.AdaptiveAvgPool3d(1)
    ).eval()
    small = pc.sketchify(model, 0.9, min_params=0, allow_slower=True)
    assert "made-up inputs (videos at random)" in str(pc.sketch_report(small)).splitlines()[0]
