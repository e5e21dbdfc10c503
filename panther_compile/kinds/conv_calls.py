"""The plain convolution, of one to three axes, that a functional call or an ONNX node computes."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from panther_compile.kinds.base import Functional


def functional(dense_type: type[nn.Module], axes: int, targets: tuple[Callable[..., Any], ...]) -> Functional:
    """Calls that compute what a layer of a type with so many axes does."""
    arguments = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return Functional(targets, arguments, partial(_of_call, dense_type, axes))


def _of_call(
    dense_type: type[nn.Module], axes: int, weight: Tensor, has_bias: bool, options: Mapping[str, Any]
) -> nn.Module | None:
    if weight.dim() != 2 + axes:
        return None
    groups = options.get("groups", 1)
    given = {key: each(options[key], axes) for key in ("stride", "padding", "dilation") if key in options}
    size = weight.shape[1] * groups, len(weight), tuple(weight.shape[2:])
    return dense_type(*size, groups=groups, bias=has_bias, device="meta", **given)


def each(value: Any, axes: int) -> Any:
    """An option of a call for each axis, where it is given as numbers."""
    return tuple(value) * (axes // len(value)) if isinstance(value, list | tuple) else value


def of_node(
    dense_type: type[nn.Module], single: str, weight: Tensor, attributes: Mapping[str, Any]
) -> nn.Module | str:
    """The layer of a Conv node whose input is padded, or why there is none.

    Args:
        dense_type: of the layer.
        single: what a kernel of one tap is called.
        weight: (O, I / G, *).
        attributes: of the node.
    """
    outputs, inputs, *kernel = weight.shape
    if math.prod(kernel) == 1 and any(attributes.get("pads", ())):
        return f"{single} with padding"
    groups = attributes.get("group", 1)
    stride, dilation = (tuple(attributes.get(name, (1,) * len(kernel))) for name in ("strides", "dilations"))
    size = inputs * groups, outputs, tuple(kernel)
    layer = dense_type(*size, stride, 0, dilation, groups, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
