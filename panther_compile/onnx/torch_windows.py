"""ONNX operators over places of images in torch: windows, samples, places and channels."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def window_pads(x: Tensor, kernel: Sequence[int], given: Mapping[str, Any]) -> list[int]:
    """What `F.pad` takes for the padding that a node does before its windows of a size."""
    axes = len(kernel)
    strides, dilations = (given.get(name, [1] * axes) for name in ("strides", "dilations"))
    begins, ends = [0] * axes, [0] * axes
    how = given.get("auto_pad", "NOTSET")
    if how == "NOTSET":
        pads = list(given.get("pads", [0] * 2 * axes))
        begins, ends = pads[:axes], pads[axes:]
    elif how != "VALID":
        for axis, size in enumerate(x.shape[2:]):
            reach = dilations[axis] * (kernel[axis] - 1) + 1
            steps = -(-size // strides[axis]) - 1
            total = max(0, steps * strides[axis] + reach - size)
            begins[axis] = total // 2 if how == "SAME_UPPER" else total - total // 2
            ends[axis] = total - begins[axis]
    return [size for pair in zip(begins[::-1], ends[::-1], strict=True) for size in pair]


def convolved(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a Conv node."""
    x, weight, *bias = inputs
    axes = weight.dim() - 2
    call = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    strides, dilations = (tuple(given.get(name, [1] * axes)) for name in ("strides", "dilations"))
    x = F.pad(x, window_pads(x, weight.shape[2:], given))
    return call(x, weight, bias[0] if bias else None, strides, 0, dilations, given.get("group", 1))


def transposed_convolution(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a ConvTranspose node."""
    x, weight, *bias = inputs
    axes = weight.dim() - 2
    call = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
    strides, dilations = (tuple(given.get(name, [1] * axes)) for name in ("strides", "dilations"))
    whole = call(x, weight, None, strides, 0, 0, given.get("group", 1), dilations)
    found = cropped(whole, x, given)
    return found if not bias or bias[0] is None else found + bias[0].reshape(-1, *[1] * axes)


def cropped(whole: Tensor, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    """What a ConvTranspose node makes of x, of what it makes without padding; it may reach behind that."""
    axes = whole.dim() - 2
    strides, more = (
        given.get(name, [usual] * axes) for name, usual in (("strides", 1), ("output_padding", 0))
    )
    pads, how = list(given.get("pads", [0] * 2 * axes)), given.get("auto_pad", "NOTSET")
    sizes = given.get("output_shape")
    if sizes is None and how.startswith("SAME"):
        sizes = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    around: list[int] = []
    for axis in range(axes):
        begin, end = pads[axis], pads[axes + axis] - more[axis]
        if sizes is not None:
            total = max(0, whole.shape[2 + axis] + more[axis] - sizes[axis])
            begin = total // 2 if how == "SAME_UPPER" else total - total // 2
            end = total - begin - more[axis]
        around = [-begin, -end, *around]
    return F.pad(whole, around)


def max_pooled(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a MaxPool node."""
    (x,), kernel = inputs, list(given["kernel_shape"])
    call = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    strides, dilations = (list(given.get(name, [1] * len(kernel))) for name in ("strides", "dilations"))
    x = F.pad(x, window_pads(x, kernel, given), value=float("-inf"))
    return call(x, kernel, strides, 0, dilations, bool(given.get("ceil_mode", 0)))


def mean_pooled(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of an AveragePool node."""
    (x,), kernel = inputs, list(given["kernel_shape"])
    call: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    strides, ceil = list(given.get("strides", [1] * len(kernel))), bool(given.get("ceil_mode", 0))
    pads = window_pads(x, kernel, given)
    found = call(F.pad(x, pads), kernel, strides, 0, ceil)
    if not any(pads) or given.get("count_include_pad", 0):
        return found
    return found / call(F.pad(torch.ones_like(x[:1, :1]), pads), kernel, strides, 0, ceil)


def depth_to_space(x: Tensor, blocksize: int, mode: str) -> Tensor:
    """Channels (N, C, H, W) as places, (N, C / blocksize^2, H blocksize, W blocksize)."""
    n, c, h, w = x.shape
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    y = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


def space_to_depth(x: Tensor, blocksize: int) -> Tensor:
    """Places as channels, the other way round."""
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


def sampled(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of a GridSample node."""
    x, grid = inputs
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(how := given.get("mode", "linear"), how)
    corners = bool(given.get("align_corners", 0))
    return F.grid_sample(x, grid, mode, given.get("padding_mode", "zeros"), corners)


def normed_across(inputs: list[Any], given: Mapping[str, Any], opset: int) -> Tensor:
    """Y of an LRN node, by the channels beside each."""
    alpha, beta, bias = (
        given.get(name, usual) for name, usual in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    return F.local_response_norm(inputs[0], given["size"], alpha, beta, bias)
