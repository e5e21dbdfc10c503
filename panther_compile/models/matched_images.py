"""Images whose statistics in a model are those that its batch norms keep, by gradients on the pixels.

A batch norm keeps the mean and the deviation of each channel of its input in training. Images that give the
same ones in every norm reach its layers much as training images did (ZeroQ, Cai et al. 2020; DeepInversion,
Yin et al. 2020). Descent starts from images of natural spectra of the right colours: few steps are enough,
and their edges and spectra remain. Each step takes other images together, as the statistics are those of
many images and not of each.
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from panther_compile.models.batch_norms import Misfit, batch_norms, gradients_of
from panther_compile.models.batches import Call
from panther_compile.reporting.progress import ProgressBar

_TOGETHER = 16  # images whose statistics are taken as one
_PASSES, _RATE = 5, 0.1


def matched_images(
    model: nn.Module, call: Callable[[Tensor], Call], images: Tensor, *, seed: int, progress: bool | None
) -> Tensor:
    """Images (N, C, H, W) nearer to the statistics of batch norms; as given if there are none.

    They are as given too where a gradient does not arrive or is not finite.

    Args:
        model: in eval mode; is not changed, nor are its gradients.
        call: of images.
        images: to start from.
        seed: decides which images are taken together.
        progress: whether to show a bar; None shows one on a terminal.
    """
    norms = batch_norms(model)
    if not norms:
        return images
    device = next(model.parameters()).device
    pixels = [one.to(device, torch.float32).clone().requires_grad_() for one in images]
    optimizer = torch.optim.Adam(pixels, _RATE)
    generator = Generator().manual_seed(seed)
    orders = [torch.randperm(len(images), generator=generator).split(_TOGETHER) for _ in range(_PASSES)]
    steps = [step for order in orders for step in order]
    misfit = Misfit(model, norms)
    falls = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps))
    for step in ProgressBar(steps, desc="images", progress=progress):
        some = [pixels[place] for place in step.tolist()]
        with torch.enable_grad():
            shown = torch.stack(some).to(images.dtype)
            gradients = gradients_of(model, misfit(call(shown)), some)
        if gradients is None:
            return images
        for one, gradient in zip(some, gradients, strict=True):
            one.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        falls.step()
    return torch.stack([one.detach() for one in pixels]).to(images)
