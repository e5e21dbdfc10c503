"""What selective activation checkpointing keeps: the one rule of what is planned and of what runs.

A result is kept that is narrower than what it is computed from: of a product with more inputs than outputs,
and of attention, whose scores of all positions are never kept. What a number of a product costs is the length
of the sum behind it. Of a sketched layer y = U z with z = V x, or x1 + C x2, that is I for the r numbers of
z, and r for the O numbers of y. Keeping z saves the product that costs, in r numbers a token: y is computed
again from it. Of a transformer's dense layers it is the second one of an MLP that narrows.

What draws random numbers is never kept: it would not draw them again, and whatever draws after it would be
given others in the recomputation than in the forward. So attention is kept where it drops out nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from panther_compile.models.outputs import tensors_in

aten: Any = torch.ops.aten

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_ATTENTION = ("aten::_scaled_dot_product_", "aten::scaled_dot_product_")


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
    return is_attention(op) and is_same_again(op, args, kwargs or {})


def is_attention(op: Any) -> bool:
    """Whether an operation is fused attention."""
    return bool(op._schema.name.startswith(_ATTENTION))


def is_same_again(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws no random numbers and asks no other device."""
    if is_attention(op):
        return not named(op, args, kwargs).get("dropout_p")
    return torch.Tag.nondeterministic_seeded not in op.tags and op.namespace not in _COLLECTIVES


def written_storages(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The storages that an operation writes in place; the schemas of torch's collectives do not name them."""
    if op.namespace == "c10d":
        return storages((args, kwargs))
    if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return set()
    given = named(op, args, kwargs)
    targets = (one for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    return storages([given.get(one.name) for one in targets])


def named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operation is given, by the names of its schema; what it is not given is not in it."""
    return {**dict(zip((one.name for one in op._schema.arguments), args, strict=False)), **kwargs}


def storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage()._cdata


def storages(tree: Any) -> set[int]:
    """The storages of all tensors in a tree but the sparse ones."""
    return {storage(one) for one in tensors_in(tree) if one.layout is torch.strided}
