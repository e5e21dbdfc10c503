"""Matrices that a module holds as one 3-D parameter, as linear layers, one of each, and the way back."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from panther_compile.layers.base import copy_into
from panther_compile.layers.linear import SketchedLinear


def part_name(stack: str, place: int) -> str:
    """What the linear layer of one matrix is called."""
    return f"{stack.removesuffix('_proj')}_{place}"


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


def copied_part(part: nn.Module) -> nn.Module:
    """A dense part with parameters of its own; others as they are."""
    if type(part) is not nn.Linear:
        return part
    new = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None, device="meta")
    new.to_empty(device=part.weight.device).to(part.weight.dtype)
    for mine, theirs in zip(new.parameters(), part.parameters(), strict=True):
        copy_into(mine, theirs)
        mine.requires_grad_(theirs.requires_grad)
    return new


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


def copy_without(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """A module of the same class and attributes, with copies of all tensors and parts, but without some."""
    gone = set(names)
    new = type(module).__new__(type(module))
    new.__dict__.update({name: held for name, held in module.__dict__.items() if name not in gone})
    for held in ("_parameters", "_buffers", "_modules"):
        mine = {name: one for name, one in vars(module)[held].items() if name not in gone}
        new.__dict__[held] = copy.deepcopy(mine)
    return new


def is_stack(tensor: Tensor | None) -> bool:
    """Whether a parameter holds several matrices: 3-D, none of its sizes one."""
    if tensor is None or isinstance(tensor, UninitializedTensorMixin):
        return False
    return tensor.dim() == 3 and min(tensor.shape) > 1
