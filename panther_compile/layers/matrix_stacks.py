"""Matrices that a module holds as one 3-D parameter, as linear layers, one of each, and the way back."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from panther_compile.layers.linear import SketchedLinear


def parts_of_stack(stack: nn.Parameter, biases: nn.Parameter | None, *, transposed: bool) -> list[nn.Linear]:
    """A linear layer for each matrix, whose parameters are views of those given.

    Args:
        stack: (n, O, I), or (n, I, O) where `transposed`.
        biases: (n, O) or None.
        transposed: see `stack`.
    """
    found: list[nn.Linear] = []
    for place, weight in enumerate(stack.detach()):
        weight = weight.t() if transposed else weight
        outputs, inputs = weight.shape
        linear = nn.Linear(inputs, outputs, bias=biases is not None, device="meta")
        linear.weight = nn.Parameter(weight, stack.requires_grad)
        if biases is not None:
            linear.bias = nn.Parameter(biases.detach()[place], biases.requires_grad)
        found.append(linear)
    return found


def stack_of_parts(
    parts: Sequence[nn.Module], *, transposed: bool
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The 3-D parameter, and the biases if there are any, of parts with the factors multiplied out."""
    plain: list[Any] = [part.to_dense() if isinstance(part, SketchedLinear) else part for part in parts]
    weights = [one.weight.detach().t() if transposed else one.weight.detach() for one in plain]
    stack = nn.Parameter(torch.stack(weights), any(one.weight.requires_grad for one in plain))
    if plain[0].bias is None:
        return stack, None
    biases = torch.stack([one.bias.detach() for one in plain])
    return stack, nn.Parameter(biases, any(one.bias.requires_grad for one in plain))


def is_stack(tensor: Tensor | None, dim: int = 3) -> TypeGuard[Tensor]:
    """Whether a parameter holds several matrices: 3-D, none of its sizes one; of 2 dimensions it is one."""
    if tensor is None or isinstance(tensor, UninitializedTensorMixin):
        return False
    return tensor.dim() == dim and min(tensor.shape) > 1
