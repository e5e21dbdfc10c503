"""Activations that are not kept for the backward, but computed again, unit by unit.

    full         of a unit its inputs are kept, and nothing else
    selective    and results that are narrower than what they are computed from: of a product with more
                 inputs than outputs, and of attention, whose scores of all positions are never kept

What a number of a product costs is the length of the sum behind it. Of a sketched layer y = U z with z = V x,
or x1 + C x2, that is I for the r numbers of z, and r for the O numbers of y. Keeping z saves the product that
costs, in r numbers a token: y is computed again from it. Of a transformer's dense layers it is the second one
of an MLP that narrows.

What draws random numbers is never kept: it would not draw them again, and whatever draws after it would be
given others in the recomputation than in the forward. So attention is kept where it drops out nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten: Any = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.t.default, aten.reshape.default)
_ATTENTION = "aten::_scaled_dot_product_"


def checkpoint_unit(unit: nn.Module, mode: str) -> None:
    """Let a module keep its inputs, and compute the rest again in the backward; in place.

    Args:
        unit: that writes nothing it is given.
        mode: "full" or "selective".
    """
    if mode == "full":
        checkpoint(unit)
    else:
        checkpoint(unit, context_fn=selective_contexts)


def selective_contexts() -> Any:
    """Contexts of one forward of a unit and of its recomputation, for `torch.utils.checkpoint`."""
    # What is written in place (z += x1) is kept as it is in the end, which is what its readers have seen.
    return create_selective_checkpoint_contexts(_Policy(), allow_cache_entry_mutation=True)


class _Policy:
    """What to keep of one forward; asked for the same operations again in the recomputation."""

    def __init__(self) -> None:
        self._kept_last = {False: False, True: False}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        again = bool(ctx.is_recompute)
        if op not in _VIEWS:
            # An addition into a result that is kept is a part of it.
            keeps = self._kept_last[again] if op is aten.add_.Tensor else is_narrowing(op, args, kwargs)
            self._kept_last[again] = keeps
            if keeps:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def is_narrowing(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a result is narrower than the sums behind it are long, and the same whenever it is computed.

    Args:
        op: of torch, as it is dispatched.
        args: of it.
        kwargs: of it.
    """
    if op in (aten.mm.default, aten.bmm.default):
        return bool(args[1].shape[-1] < args[0].shape[-1])
    if op in (aten.addmm.default, aten.baddbmm.default):
        return bool(args[2].shape[-1] < args[1].shape[-1])
    if op is aten.convolution.default:
        return bool(args[1].shape[0] < args[1].shape[1:].numel())
    return op._schema.name.startswith(_ATTENTION) and not _dropout(op, args, kwargs or {})


def _dropout(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The share that an attention drops out."""
    names = (one.name for one in op._schema.arguments)
    return float({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0))
