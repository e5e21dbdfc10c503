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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from panther_compile.partition.graph.observe import storage

aten: Any = torch.ops.aten

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
    policy = _Policy(is_narrowing)
    forward, again = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
    return forward, _Recomputation(policy, again)


class _Policy:
    """What to keep of one forward: what is chosen, and what is written into it in place.

    A kept result is given back as it is in the end: with what was written into it, which is not run again.
    That is wrong for an operation that read it before and is run again, and where what was written is random:
    the unit is then computed again as a whole.

    Args:
        chooses: whether to keep the result of an operation, of its arguments.
    """

    def __init__(self, chooses: Callable[[Any, Sequence[Any], Mapping[str, Any]], bool]) -> None:
        self.holds = True
        self.asked_again = 0
        self._chooses = chooses
        self._kept = set[int]()
        self._read = set[int]()
        self._decided: list[bool] = []

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if ctx.is_recompute:  # torch before 2.13 asks again
            keeps = self._decided[self.asked_again]
            self.asked_again += 1
        else:
            keeps = self._decide(op, args, kwargs, ctx.op_output)
            self._decided.append(keeps)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _decide(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        if not self.holds:
            return False
        written = written_storages(op, args, kwargs)
        if written & self._kept:
            again = written & self._read or not written <= self._kept or not op._schema.returns
            if again or torch.Tag.nondeterministic_seeded in op.tags:
                self.holds = False
            return self.holds
        given, made = storages((args, kwargs)), storages(result)
        keeps = self._chooses(op, args, kwargs)
        if keeps:
            self._kept |= made
        elif not made <= given:  # a view reads nothing
            self._read |= given & self._kept
        return keeps


class _Recomputation:
    """The context of a recomputation, in which kept results are given back where the policy holds."""

    def __init__(self, policy: _Policy, again: AbstractContextManager[Any]) -> None:
        self._policy, self._again = policy, again

    def __enter__(self) -> None:
        self._policy.asked_again = 0
        self._entered = self._again if self._policy.holds else nullcontext()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


def storages(tree: Any) -> set[int]:
    """Of all tensors in a tree."""
    found = (one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor))
    return {storage(one) for one in found if one.layout is torch.strided}


def written_storages(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Of what an operation writes in place; torch's own collectives do not say so."""
    if op.namespace == "c10d":
        return storages((args, kwargs))
    if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return set()
    arguments = op._schema.arguments
    named = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
    targets = (one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write)
    return storages([named.get(name) for name in targets])


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
