"""The loss that peers with gradients minimise, and the distance of a compressed model's outputs.

Their papers have labels. Token models that give a row of classes for each place have them in the data: the
next token. Elsewhere targets are drawn from the model itself, as in `calibration.fisher`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.calibration import call, main_output, told

TEMPERATURE = 0.6  # of the divergence, in LEMS


def is_language_model(batch: Any, output: Tensor) -> bool:
    """Whether a batch is token ids (B, T), and the output (B, T, V)."""
    is_tokens = isinstance(batch, Tensor) and batch.dim() == 2 and not batch.is_floating_point()
    return is_tokens and output.dim() == 3 and output.shape[:2] == batch.shape


def loss_of(model: nn.Module, batch: Any, outputs: str, generator: torch.Generator) -> Tensor:
    """The summed negative log-likelihood of the targets of a batch; see the module's docstring."""
    output = main_output(call(model, batch))
    if outputs != "classes":
        return told(batch, output * torch.randn(output.shape, generator=generator)).sum()
    if is_language_model(batch, output):
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    logits = output.flatten(0, -2)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    return F.cross_entropy(logits, drawn[:, 0], reduction="sum")


@torch.no_grad()
def references(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """The outputs of the dense model."""
    return [main_output(call(model, batch)) for batch in batches]


@torch.no_grad()
def distance(model: nn.Module, batches: list[Any], dense: list[Tensor], outputs: str) -> float:
    """The mean divergence of classes at `TEMPERATURE`, or the relative squared error of values."""
    found, count = 0.0, 0.0
    for batch, wanted in zip(batches, dense, strict=True):
        given = main_output(call(model, batch))
        if outputs == "classes":
            given, wanted = (one.flatten(0, -2) / TEMPERATURE for one in (given, wanted))
            found += float(F.kl_div(given.log_softmax(-1), wanted.softmax(-1), reduction="sum"))
            count += len(wanted)
        else:
            found += float(told(batch, given - wanted).square().sum())
            count += float(told(batch, wanted).square().sum())
    return found / count
