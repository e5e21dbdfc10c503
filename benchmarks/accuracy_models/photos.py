"""Patches of the two photographs that come with scikit-learn."""

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor

HELD_OUT_SHARE = 1 / 3


def photographs() -> list[Tensor]:
    """(3, H, W) in [0, 1]."""
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in load_sample_images().images]


def patches(size: int, count: int, *, held_out: bool, seed: int = 0) -> Tensor:
    """(count, 3, size, size), from the left two thirds of each photograph or from the right third."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    images = photographs()
    for place in range(count):
        image = images[place % len(images)]
        border = int(image.shape[2] * (1 - HELD_OUT_SHARE))
        first, last = (border, image.shape[2]) if held_out else (0, border)
        left = int(torch.randint(first, last - size, (), generator=generator))
        top = int(torch.randint(0, image.shape[1] - size, (), generator=generator))
        found.append(image[:, top : top + size, left : left + size])
    return torch.stack(found)


def grey_patches(size: int, count: int) -> Tensor:
    """(count, 1, size, size)."""
    return patches(size, count, held_out=False).mean(1, keepdim=True)
