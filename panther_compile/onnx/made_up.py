"""Images made up for an ONNX model without data, with the spectra of natural ones, as for one in torch."""

from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from panther_compile.errors import DataError
from panther_compile.models.natural import natural_images
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.verify import numpy_dtype

JUDGED = 2
"""The last batches, which outputs are compared on and nothing is fitted to."""

_BATCHES, _BATCH = 14, 8
_SIZES = ((224, 224), (48, 320), (32, 320), (64, 64), (32, 32), (8, 8))  # squares, and lines of text


def made_up_images(dense: ObservedModel, seed: int) -> list[Feed] | None:
    """Batches of images of mean 0 and variance 1, of the first size that the model runs on.

    Args:
        dense: shows its own outputs.
        seed: of what is drawn.

    Returns:
        The batches; None for a model that takes anything but images alone, (N, 1 or 3, H, W) of floats.
    """
    if len(dense.inputs) != 1:
        return None
    wanted, dtype = dense.inputs[0], numpy_dtype(dense.inputs[0])
    if dtype is None or not np.issubdtype(dtype, np.floating):
        return None
    if len(wanted.shape) != 4 or wanted.shape[1] not in (1, 3):
        return None
    free = [_BATCH, wanted.shape[1]]
    for size in dict.fromkeys(_filled(wanted.shape[2:], list(size)) for size in _SIZES):
        batch, channels, height, width = (*_filled(wanted.shape[:2], free), *size)
        if _runs(dense, {wanted.name: np.zeros((batch, channels, height, width), dtype)}):
            generator = torch.Generator().manual_seed(seed)
            shown = _images(_BATCHES * batch, channels, height, width, generator).numpy().astype(dtype)
            return [{wanted.name: one} for one in np.split(shown, _BATCHES)]
    return None


def _images(count: int, channels: int, height: int, width: int, generator: Generator) -> Tensor:
    """Natural images cut into as many of a size (count, channels, height, width) as they hold."""
    side = max(height, width)
    down, across = side // height, side // width
    images = natural_images(-(-count // (down * across)), channels, side, generator)
    cut = images[:, :, : down * height, : across * width].unflatten(3, (across, width))
    cut = cut.unflatten(2, (down, height)).permute(2, 4, 0, 1, 3, 5)
    return cut.flatten(0, 2)[:count]


def _filled(given: Any, free: list[int]) -> tuple[int, ...]:
    """Sizes that a file fixes, others where it leaves them free."""
    return tuple(one if isinstance(one, int) else size for one, size in zip(given, free, strict=True))


def _runs(dense: ObservedModel, feed: Feed) -> bool:
    try:
        return bool(list(dense.run([feed], dense.outputs)))
    except DataError:
        return False
