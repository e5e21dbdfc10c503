"""Images with the spectra of natural ones, and inputs of the colours that a model's batch norms know.

Half of the images are noise of the amplitude spectrum 1 / f, half dead leaves: discs in front of one another
whose radii follow a power law, which have edges and the same spectrum at every scale (Lee, Mumford and Huang
2001). Baradad et al. (2021) found both to be next best to photographs.
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from panther_compile.models.batch_norms import Misfit, batch_norms, gradients_of
from panther_compile.models.batches import Call

_LEAVES = 150
_CHROMA = 0.4  # of the deviation of colours, beside the brightness
_TUNED = 8  # inputs on which colours are matched
_STEPS, _RATE = 40, 0.1
_LOOK, _MOVED = 10, 1e-3  # after so many the misfit has to be less by such a share, or no colour matters
_SMALLEST = 1e-6


def natural_images(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Images (count, channels, size, size), each channel of mean 0 and variance 1 over all of them."""
    half = (count + 1) // 2
    pink, leaves = _pink_images(half, size, generator), _dead_leaves(count - half, size, generator)
    images = normalized(torch.cat([pink, leaves]), (0, 2, 3))
    contrasts = torch.rand(count, 1, 1, 1, generator=generator, dtype=torch.float32) + 0.5
    mixed = images * contrasts
    brightness, chroma = mixed[:, :1], mixed[:, 1:]
    if channels == 1:
        return normalized(brightness, (0, 2, 3))
    turns = torch.randn(channels, chroma.shape[1], generator=generator, dtype=torch.float32)
    colours = torch.einsum("bchw,kc->bkhw", chroma, turns)
    found = brightness + _CHROMA * colours
    order = torch.randperm(count, generator=generator)
    return normalized(found, (0, 2, 3))[order]


def match_batch_norms(
    model: nn.Module, call: Callable[[Tensor], Call], images: Tensor
) -> tuple[Tensor, bool]:
    """Images of the colours and contrasts, or sounds as loud, that fit the statistics of batch norms best.

    Args:
        model: in eval mode.
        call: of images.
        images: `(N, C, H, W)`, or videos `(N, C, frames, H, W)`, or sounds `(N, C, samples)` or
            `(N, samples)`; of mean 0 and variance 1.

    Returns:
        The images, and whether there were batch norms to go by; without they are as given, as they are for a
        model that evens colours or loudness out ahead of its norms.
    """
    norms = batch_norms(model)
    if not norms:
        return images, False
    device = norms[0].running_mean.device  # type: ignore[union-attr]
    some = images[:: max(1, len(images) // _TUNED)][:_TUNED].to(device)
    each = [1] * images.dim()
    if images.dim() > 2:
        each[1] = images.shape[1]
    shift = torch.zeros(each, dtype=torch.float32, device=device, requires_grad=True)
    scale = torch.zeros(each, dtype=torch.float32, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([shift, scale], _RATE)
    misfit, found = Misfit(model, norms), []
    for step in range(_STEPS):
        with torch.enable_grad():
            tuned = (some * scale.exp() + shift).to(images.dtype)
            lost = misfit(call(tuned))
            gradients = gradients_of(model, lost, [shift, scale])
        if gradients is None:
            return images, False
        found.append(float(lost.detach()))
        if step == _LOOK and min(found) > (1.0 - _MOVED) * found[0]:
            return images, True
        shift.grad, scale.grad = gradients
        optimizer.step()
    return images * scale.exp().detach().to(images) + shift.detach().to(images), True


def _pink_images(count: int, size: int, generator: Generator) -> Tensor:
    """(count, 3, size, size)."""
    spectrum = torch.fft.rfft2(torch.randn(count, 3, size, size, generator=generator, dtype=torch.float32))
    rows, columns = (one(size, dtype=torch.float32) for one in (torch.fft.fftfreq, torch.fft.rfftfreq))
    frequency = (rows[:, None].square() + columns.square()).sqrt().clamp_min(1 / size)
    return normalized(torch.fft.irfft2(spectrum / frequency, s=(size, size)), (0, 2, 3))


def _dead_leaves(count: int, size: int, generator: Generator) -> Tensor:
    """(count, 3, size, size): radii of a density that falls as their third power."""
    images = torch.zeros(count, 3, size, size, dtype=torch.float32)
    bare = torch.ones(count, size, size, dtype=torch.bool)
    places = torch.arange(size).float()
    smallest, largest = 1.0, size / 2
    for _ in range(_LEAVES):
        drawn = torch.rand(count, 3, generator=generator, dtype=torch.float32)
        radius = 1 / (drawn[:, 0] * (1 / largest**2 - 1 / smallest**2) + 1 / smallest**2).sqrt()
        near = [(places - size * drawn[:, one, None]).square() for one in (1, 2)]
        inside = bare & (near[0][:, :, None] + near[1][:, None, :] < radius[:, None, None].square())
        colour = torch.randn(count, 3, 1, 1, generator=generator, dtype=torch.float32)
        images = torch.where(inside[:, None], colour, images)
        bare &= ~inside
    return images


def normalized(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The tensor with mean 0 and variance 1 over some of its dimensions."""
    if not tensor.numel():
        return tensor
    centred = tensor - tensor.mean(dims, keepdim=True)
    return centred / centred.square().mean(dims, keepdim=True).sqrt().clamp_min(_SMALLEST)
