"""Images whose channels hang together, and whose neighbours are alike."""

import torch
from torch import nn


def smooth(count, channels, seed, size=10, window=(3, 3)):
    """(count, channels, size, size), each pixel the mean of noise in a window."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (size + reach - 1 for reach in window)
    noise = torch.randn(count, channels, height, width, generator=generator)
    mixing = torch.randn(channels, channels, generator=generator) * torch.linspace(1, 0.05, channels)
    return nn.functional.avg_pool2d(torch.einsum("nchw,cd->ndhw", noise, mixing), window, 1)
