"""What a model's result is: logits, whose rows are compared by their divergence, or something else.

A result that names its logits is taken at its word, but for maps of a choice a pixel, as convolutions make:
their last dimension is a width, and their rows no choices; and but for those that a loss of the inputs alone
is beside, as the pixels that masked autoencoders paint. Another tensor of it is taken for logits if a
linear layer makes it that is as wide as the vocabulary of an embedding, as a configuration's labels or as the
model's num_classes, which those of timm have; if its rows are log-probabilities; or if its rows, as logits,
would be sure of choices that differ from row to row, which those of a trained classifier are, and features
are not, as the caches or the loss beside logits in a tuple. What is uncertain is taken for features.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from panther_compile.config import Logits, logits_of
from panther_compile.errors import ConfigError
from panther_compile.models.batches import Call, kept_positions, run_dense
from panther_compile.models.outputs import LOGITS, is_finite, is_transformed, named_tensors
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import copy_sharing

NAMED = "it names them"
_CALLS = 4
_ROWS = 1024
_SURE = 0.4  # of the information that choices among so many, or that so many rows, can give
_STEEP = 30.0  # deviation of a row beyond which it holds no logits
_NEAR = 1e-3


_Place = tuple[int, ...]
_Made = tuple[Tensor, str | None]
"""Rows of a result and the name of the linear layer that made them, if one was seen to."""


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What a result was taken for.

    Attributes:
        output: "logits"; the keys of those tensors that are logits; "features"; or "auto", for which tensors
            called "logits" are logits and others are not.
        why: in words.
        head: name of the linear layer that makes the logits; None if none was seen to.
    """

    output: str | frozenset[str]
    why: str
    head: str | None = None

    @property
    def logits(self) -> Logits:
        """Tensors of results that are logits."""
        return logits_of(self.output)

    @property
    def has_logits(self) -> bool:
        """Whether any tensor is."""
        return self.output not in ("auto", "features") or self.why == NAMED


def recognize_output(model: nn.Module, calls: Sequence[Call]) -> OutputKind:
    """Run the dense model on some calls and look at what it gives.

    Args:
        model: runs in eval mode in a copy that shares its parameters; is not changed.
        calls: of it.

    Raises:
        ConfigTypeError: the model cannot be copied.
        DataError: the model raises on a call.
    """
    quiet, calls = copy_sharing(model, {}), calls[:_CALLS]
    seen: dict[str, list[_Made]] = {}
    most = 0
    for call in calls:
        found, by, channels, loss = _run(quiet, call)
        named = next((tensor for name, tensor in found if name in LOGITS), None)
        if named is not None:
            head = by.get(_place(named))
            if head is None and _is_map(named, channels):
                what = "they are maps of a choice a pixel" if named.dim() > 3 else "they are maps"
                return OutputKind("features", f"its logits have shape {tuple(named.shape)}, {what}")
            if loss and not _has_targets(call):
                return OutputKind("features", "its logits stand for the inputs, which its loss is of")
            return OutputKind("auto", NAMED, head)
        most, kept = max(most, len(found)), kept_positions(quiet, call)
        for name, tensor in found:
            if tensor.dim() > 1:
                rows = kept_rows(tensor.float(), kept)
                some = rows[:: math.ceil(len(rows) * len(found) / _ROWS) or 1].clone()
                seen.setdefault(name, []).append((some, by.get(_place(tensor))))
    # More than one a call are under one key, as caches of layers.
    judged = {name: _judged(model, made) for name, made in seen.items() if len(made) == len(calls)}
    if most == len(judged) == 1:
        return next(iter(judged.values()))
    keys = [name for name, kind in judged.items() if kind.output == "logits"]
    if keys:
        why = "; ".join(f"{name}, as {judged[name].why}" for name in keys)
        return OutputKind(frozenset(keys), why, judged[keys[0]].head)
    what = f"{most} tensors, none of them seen to be" if most > 1 else "not made of rows, as are"
    return OutputKind("auto", f"the result is {what} logits")


def check_output(model: nn.Module, calls: Sequence[Call], output: str | frozenset[str]) -> None:
    """Check that results of the dense model have the logits that they are said to have.

    Args:
        model: see `recognize_output`.
        calls: of it.
        output: see `SketchConfig`; where it is "auto" or "features" nothing is checked.

    Raises:
        ConfigError: there is no tensor under one of the keys, or one that is said to be logits is a map of a
            choice a pixel.
        ConfigTypeError, DataError: see `recognize_output`.
    """
    if output in ("auto", "features"):
        return
    quiet = copy_sharing(model, {})
    results = [_run(quiet, call) for call in calls[: 1 if output == "logits" else _CALLS]]
    keys = {name for found, *_ in results for name, _ in found}
    if missing := sorted(output - keys) if isinstance(output, frozenset) else []:
        held = f"has tensors under {str(sorted(keys))[1:-1]}" if keys else "holds no floating tensor"
        raise ConfigError(f"output: nothing is under {missing}, the result of {type(model).__name__} {held}")
    for found, by, channels, _ in results:
        for name, tensor in found:
            is_said = output == "logits" or name in output
            if is_said and by.get(_place(tensor)) is None and _is_map(tensor, channels):
                what = f"{name or 'the result'} of {type(model).__name__} has shape {tuple(tensor.shape)}"
                raise ConfigError(
                    f"output: {what} and is a map that a convolution makes, but logits are compared along "
                    "the last dimension, which is a width here; wanted output='features'"
                )


def _judged(model: nn.Module, made: Sequence[_Made]) -> OutputKind:
    """What is under one key of the results was taken for."""
    makers = {maker for _, maker in made}
    head = next(iter(makers)) if len(makers) == 1 else None
    if len({one.shape[-1] for one, _ in made}) != 1:
        return OutputKind("auto", "the width of the result varies")
    rows = torch.cat([one for one, _ in made])
    width = rows.shape[-1]
    if not len(rows):
        return OutputKind("auto", "all of it is padding")
    if width < 2 or not is_finite(rows):
        return OutputKind("auto", "the result has one column" if width < 2 else "the result is not finite")
    if float(rows.logsumexp(-1).abs().max()) < _NEAR:
        return OutputKind("logits", "its rows are log-probabilities", head)
    if float(rows.min()) >= 0.0 and float((rows.sum(-1) - 1.0).abs().max()) < _NEAR:
        return OutputKind("auto", "its rows are probabilities")
    if head is not None:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == width:
                return OutputKind("logits", f"{head} is as wide as the vocabulary of {name}", head)
        config: Any = getattr(model, "config", None)
        for option in ("vocab_size", "num_labels"):
            if getattr(config, option, None) == width:
                return OutputKind("logits", f"{head} is as wide as config.{option}", head)
        if getattr(model, "num_classes", None) == width:
            return OutputKind("logits", f"{head} is as wide as the model's num_classes", head)
    sure, told = _sureness(rows)
    deviation = float((rows - rows.mean(-1, keepdim=True)).square().mean().sqrt())
    said = f"its rows, as logits, would be {sure:.0%} sure of one of {width}, and tell {told:.0%} of a choice"
    if head is not None and min(sure, told) >= _SURE and deviation <= _STEEP:
        return OutputKind("logits", f"{head} makes it, and {said}", head)
    return OutputKind("auto", said if head is not None else "no linear layer makes it")


def _sureness(rows: Tensor) -> tuple[float, float]:
    """How sure rows of logits are, and how much they tell of each other's choices apart.

    The first is 1 - H / log C, with H the entropy of a row and C its width; the second the information of a
    row's number about the choice, over the most that can be, log min(C, rows).
    """
    chances = rows.log_softmax(-1)
    mean = chances.logsumexp(0) - math.log(len(rows))
    entropy = -float((chances.exp() * chances).sum(-1).mean())
    information = -float((mean.exp() * mean).sum()) - entropy
    most = math.log(min(rows.shape[-1], max(2, len(rows))))
    return 1 - entropy / math.log(rows.shape[-1]), information / most


def _run(
    model: nn.Module, call: Call
) -> tuple[list[tuple[str, Tensor]], dict[_Place, str], dict[_Place, int], bool]:
    """The floating tensors of the result; linear layers, and channels of convolutions, by what they gave.

    And whether a loss is in the result.
    """
    by: dict[_Place, str] = {}
    channels: dict[_Place, int] = {}
    held: list[Tensor] = []  # so that no address is used again

    def hook(name: str) -> Any:
        def see(layer: nn.Module, __: object, out: Any) -> None:
            if isinstance(out, Tensor) and not is_transformed(out):
                held.append(out)
                if isinstance(layer, _ConvNd):
                    channels[_place(out)] = layer.out_channels
                else:
                    by[_place(out)] = name

        return see

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | _ConvNd)
    ]
    try:
        with torch.no_grad():
            result = run_dense(model, call)
            found = list(named_tensors(result))
    finally:
        for handle in handles:
            handle.remove()
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return found, by, channels, isinstance(loss, Tensor)


def _has_targets(call: Call) -> bool:
    """Whether a call may have targets in it, which are integers, or said to be labels, of whatever type."""
    integers = any(not one.is_floating_point() and one.dtype != torch.bool for one in call.tensors)
    return integers or any("label" in name or "target" in name for name in call.kwargs)


def _is_map(tensor: Tensor, channels: Mapping[_Place, int]) -> bool:
    """Whether the last dimension is a width, not the channels that a convolution gave."""
    made = channels.get(_place(tensor))
    if tensor.dim() > 3:
        return tensor.shape[1] in channels.values()
    return made is not None and made != tensor.shape[-1]


def _place(tensor: Tensor) -> _Place:
    """Equal for two tensors that hold the same numbers in the same place, whatever their shape."""
    return tensor.data_ptr(), tensor.numel()
