"""The tensors of a model's result, whatever it is made of, and how far two results are apart."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from panther_compile.config import Logits
from panther_compile.errors import DataError
from panther_compile.models.rows import kept_rows

LOGITS = frozenset({"logits", "prediction_logits"})  # of one choice a row, by the names of transformers
BOXES = frozenset({"pred_boxes"})  # that detectors give beside logits, by the names of transformers
_LOSS = "loss"
_AT_ONCE = 1 << 22  # numbers of a result that are compared together
_SQUARED = 1e-12, 1e18  # sizes whose squares, and those of small changes, float32 holds


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of what a function is given or gives, as torch walks it."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def named_tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every floating tensor of a result with the key it is under, depth first; of a complex one its parts.

    Mappings (a Hugging Face `ModelOutput` is one), sequences and dataclasses are walked; caches and other
    objects are not, nor the loss of labels that came with the data, if there is something else beside it.
    What is in place n of a sequence without a name is under the key "[n]". Empty, sparse and nested tensors,
    and those that a transform of `torch.func` holds, are passed over.
    """
    return ((key, one) for key, one in all_named_tensors(output) if one.numel())


def all_named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The same with those that are empty, as the boxes of a picture in which nothing is found."""
    if isinstance(output, Tensor):
        if is_transformed(output):
            return
        if is_dense(output) and output.is_complex():
            yield name, torch.view_as_real(output.resolve_conj()).flatten(max(0, output.dim() - 1))
        elif is_dense(output) and output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        found = [one for key, value in output.items() for one in all_named_tensors(value, str(key))]
        yield from [(key, one) for key, one in found if key != _LOSS or one.dim()] or found
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from all_named_tensors(dict(zip(output._fields, output, strict=True)), name)
    elif isinstance(output, list | tuple):
        for place, value in enumerate(output):
            yield from all_named_tensors(value, name or f"[{place}]")
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from all_named_tensors(getattr(output, field.name), field.name)


def by_place(
    wanted: Iterable[tuple[str, Tensor]], found: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of two results in the same place; one that a result lacks is empty.

    Args:
        wanted: what `all_named_tensors` gives of the dense model's, whose names are taken.
        found: of the sketched one's.
    """
    for (name, one), (_, other) in zip_longest(wanted, found, fillvalue=("", torch.empty(0))):
        yield name, one, other


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has its numbers in rows: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite, which their sum tells 5 to 40 times as soon as a mask."""
    tensor = tensor.detach()
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())  # a sum may overflow


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transform as `torch.func.vmap` is at work on a tensor, whose numbers cannot be read then."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def check_dense(tensor: Tensor, what: str) -> None:
    """Raise DataError if a tensor is sparse or nested; `what` names it in the error."""
    if not is_dense(tensor):
        kind = "nested" if tensor.is_nested else "sparse"
        raise DataError(f"{what} is a {kind} tensor, wanted a dense one")


def distance(dense: Any, sketched: Any, kept: Tensor | None, *, logits: Logits = None) -> float:
    """How far a sketched model's result is from the dense one's: 0 is equal.

    Of logits the Kullback-Leibler divergence in nats a row, of other tensors the squared distance over the
    squared size, 1 if they are of another shape; summed over the tensors of the result. Where the dense
    model gives NaN or Inf nothing is compared.

    Args:
        dense: result of the dense model.
        sketched: of the sketched one.
        kept: see `kept_rows`.
        logits: whether the tensors are logits, see `Logits`.
    """
    total = 0.0
    for name, wanted, found in by_place(all_named_tensors(dense), all_named_tensors(sketched)):
        if wanted.numel() == found.numel() == 0:
            continue
        if wanted.shape != found.shape:  # as long as the model says it is, as speech may be
            total += 1.0
            continue
        rows = kept_rows(wanted, kept), kept_rows(found, kept)
        total += _divergence(*rows) if are_logits(name, logits) else _relative(*rows)
    return total


def are_logits(name: str, logits: Logits) -> bool:
    """Whether a tensor of a result holds logits, by its key or whatever that is."""
    return logits if isinstance(logits, bool) else name in (LOGITS if logits is None else logits)


def _divergence(wanted: Tensor, found: Tensor) -> float:
    """The mean divergence of rows."""
    parts = log_chances(wanted, found)
    total = sum(float(F.kl_div(guess, target, log_target=True, reduction="sum")) for target, guess in parts)
    return total / max(1, len(wanted))


def log_chances(wanted: Tensor, found: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logarithms of the chances that rows of logits give, float32, of both models.

    Some rows at once: those of a large vocabulary are larger than all else.
    """
    few, lowest = max(1, _AT_ONCE // wanted.shape[-1]), torch.finfo(torch.float32).min
    for one, other in zip(wanted.split(few), found.split(few), strict=True):
        target, guess = shown(one, other, lowest)
        yield target.log_softmax(-1), guess.log_softmax(-1)


def _relative(wanted: Tensor, found: Tensor) -> float:
    """The squared distance of rows over their squared size."""
    wanted, found = shown(wanted, found, 0.0)
    size = float(torch.linalg.vector_norm(wanted))
    if not _SQUARED[0] < size < _SQUARED[1]:
        wanted, found = wanted.double(), found.double()
        size = float(torch.linalg.vector_norm(wanted)) or 1.0
    return (float(torch.linalg.vector_norm(found - wanted)) / size) ** 2


def shown(wanted: Tensor, found: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Both in float32, filled where the first is not finite, as logits of tokens that are not to be are."""
    if is_finite(wanted):
        return wanted.float(), found.float()
    hidden = ~wanted.isfinite()
    return wanted.float().masked_fill(hidden, fill), found.float().masked_fill(hidden, fill)
