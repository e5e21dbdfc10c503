"""Windows: what single outputs of a convolution read, in their order, whatever its geometry."""

import pytest
import torch
from torch import nn

from panther_compile.kinds import windows as module
from panther_compile.kinds.windows import pixels, rows_read, windows, windows_in_parts

CONVS = {
    "plain": (nn.Conv2d(6, 8, 3), (2, 6, 9, 7)),
    "strided": (nn.Conv2d(6, 8, (3, 2), stride=(2, 3), padding=(1, 0)), (3, 6, 11, 9)),
    "dilated": (nn.Conv2d(6, 8, 3, padding=2, dilation=(2, 1)), (2, 6, 9, 7)),
    "grouped": (nn.Conv2d(6, 9, 3, padding="same", groups=3), (2, 6, 8, 8)),
    "reflected": (nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (2, 6, 8, 8)),
    "of one tap": (nn.Conv2d(6, 8, 1, stride=2), (2, 6, 7, 8)),
    "of time": (nn.Conv1d(6, 8, 5, stride=2, padding=2, dilation=2), (2, 6, 31)),
    "of volumes": (
        nn.Conv3d(4, 8, (3, 2, 3), stride=(1, 2, 1), padding=1, dilation=(1, 1, 2)),
        (2, 4, 5, 6, 7),
    ),
}


def made_of(conv, found):
    """The outputs (n, O) of the convolution for windows (n, I, *kernel)."""
    axes = len(conv.kernel_size)
    call = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[axes - 1]
    return call(found, conv.weight, conv.bias, groups=conv.groups).flatten(1)


def outputs_of(conv, x):
    """All of its outputs as rows, (N *, O)."""
    return conv(x).movedim(1, -1).reshape(-1, conv.out_channels)


@pytest.mark.parametrize("name", CONVS)
def test_windows_give_the_outputs_in_their_order(name):
    conv, shape = CONVS[name]
    x = torch.randn(shape)
    wanted = outputs_of(conv, x)
    torch.testing.assert_close(made_of(conv, windows(conv, x)), wanted)
    torch.testing.assert_close(made_of(conv, windows(conv, x[0])), wanted[: len(wanted) // len(x)])


@pytest.mark.parametrize("name", CONVS)
def test_few_windows_are_spread_evenly(name):
    conv, shape = CONVS[name]
    x = torch.randn(shape)
    wanted = outputs_of(conv, x)
    chosen = torch.linspace(0, len(wanted) - 1, 7, dtype=torch.float64).long()
    torch.testing.assert_close(made_of(conv, windows(conv, x, 7)), wanted[chosen])


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("layout", ["channels last", "every other", "expanded", "a part"])
def test_inputs_lie_anyhow_in_memory(monkeypatch, name, layout):
    monkeypatch.setattr(module, "_GATHERED", 200)  # a few windows at once
    conv, (count, channels, *places) = CONVS[name]
    x = {
        "channels last": torch.randn(count, *places, channels).movedim(-1, 1),
        "every other": torch.randn(count, 2 * channels, *places)[:, 1::2],
        "expanded": torch.randn(1, channels, *places).expand(count, channels, *places),
        "a part": torch.randn(count + 1, channels, *places)[1:],
    }[layout]
    axes = len(conv.kernel_size)
    assert torch.equal(windows(conv, x), windows(conv, x.contiguous()))
    assert torch.equal(pixels(x, axes, 9), pixels(x.contiguous(), axes, 9))
    torch.testing.assert_close(made_of(conv, windows(conv, x)), outputs_of(conv, x))


def test_parts_are_small_and_together_the_same(monkeypatch):
    conv, shape = CONVS["strided"]
    x = torch.randn(shape)
    whole = windows(conv, x, 20)
    monkeypatch.setattr(module, "_AT_ONCE", 3 * whole[0].numel())
    parts = list(windows_in_parts(conv, x, 20))
    assert [len(one) for one in parts] == [3] * 6 + [2]
    assert torch.equal(torch.cat(parts), whole)


def test_a_kernel_of_one_tap_reads_the_pixels_it_steps_on():
    conv, shape = CONVS["of one tap"]
    x = torch.randn(shape)
    torch.testing.assert_close(rows_read(conv, x), windows(conv, x).flatten(1))


def test_pixels_are_rows():
    x = torch.randn(2, 3, 4, 5)
    rows = x.permute(0, 2, 3, 1).reshape(-1, 3)
    assert torch.equal(pixels(x, 2), rows)
    assert torch.equal(pixels(x[0], 2), rows[:20])
    assert torch.equal(pixels(x, 2, 2), rows[[0, -1]])


def test_large_maps_are_not_copied_tap_by_tap():
    conv = nn.Conv2d(1, 1, 7, padding=3)
    x = torch.randn(1, 1, 4000, 4000)
    assert windows(conv, x).shape == (8192, 1, 7, 7)
