"""The tensors of a model's result, whatever it is made of, and how far two results are apart."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS = "logits"


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating tensor of a result with the key it is under, depth first.

    Mappings (a Hugging Face `ModelOutput` is one), sequences and dataclasses are walked; caches and other
    objects are not.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(value, str(key))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from named_tensors(value, name)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from named_tensors(getattr(output, field.name), field.name)


def kept_rows(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """The tensor (..., F) as rows (n, F), without those at padded positions.

    Args:
        tensor: a tensor whose first two dimensions, or the first one that is their product, are the mask's;
            of another shape it is taken whole.
        kept: bool `(batch, length)`, or None.
    """
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    if kept is None or tensor.dim() < 2:
        return rows
    if tensor.dim() == 3 and tensor.shape[:2] == kept.shape:
        return rows[kept.reshape(-1)]
    if tensor.dim() == 3 and tensor.shape[:2] == kept.T.shape:  # (length, batch, F)
        return rows[kept.T.reshape(-1)]
    if tensor.dim() == 2 and tensor.shape[0] == kept.numel():
        return rows[kept.reshape(-1)]
    return rows


def distance(dense: Any, sketched: Any, kept: Tensor | None, *, logits: bool | None = None) -> float:
    """How far a sketched model's result is from the dense one's: 0 is equal.

    Of logits the Kullback-Leibler divergence in nats a row, of other tensors the squared distance over the
    squared size; summed over the tensors of the result.

    Args:
        dense: result of the dense model.
        sketched: of the sketched one.
        kept: see `kept_rows`.
        logits: whether the tensors are logits; None: those called "logits" are.
    """
    total = 0.0
    for (name, wanted), (_, found) in zip(named_tensors(dense), named_tensors(sketched), strict=False):
        if wanted.shape != found.shape:
            continue
        wanted_rows, found_rows = kept_rows(wanted.float(), kept), kept_rows(found.float(), kept)
        if name == LOGITS if logits is None else logits:
            total += float(
                F.kl_div(
                    found_rows.log_softmax(-1), wanted_rows.log_softmax(-1), log_target=True, reduction="sum"
                )
            ) / max(1, len(wanted_rows))
        else:
            size = float(torch.linalg.vector_norm(wanted_rows)) or 1.0
            total += (float(torch.linalg.vector_norm(found_rows - wanted_rows)) / size) ** 2
    return total
