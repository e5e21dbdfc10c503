"""ONNX operators in torch, those that tensors have gradients through among them.

Each is called with its inputs, None where one is left out, the attributes of the node, and the opset that
they are of. Operators that are not here, or that do something else than ONNX Runtime's, are no harm: a graph
that torch does not run as ONNX Runtime does is not run by it (`as_torch.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.onnx.torch_attention import attention, rotary
from panther_compile.onnx.torch_cells import UnknownOperatorError, gru, lstm, rnn
from panther_compile.onnx.torch_indexed import gathered, gathered_nd, one_hot, scattered, scattered_nd
from panther_compile.onnx.torch_windows import (
    convolved,
    depth_to_space,
    max_pooled,
    mean_pooled,
    normed_across,
    sampled,
    space_to_depth,
    transposed_convolution,
)

Attributes = Mapping[str, Any]
Operator = Callable[[list[Any], Attributes, int], Any]


def widened(tensor: Tensor) -> Tensor:
    """The same numbers in float32, if they are in a half type."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _plain(function: Callable[..., Any], **defaults: Any) -> Operator:
    """An operator that is a function of its inputs, and of attributes that have defaults."""

    def run(inputs: list[Any], given: Attributes, opset: int) -> Any:
        return function(*inputs, **{name: given.get(name, default) for name, default in defaults.items()})

    return run


def _numbers(value: Any) -> list[int]:
    return [int(one) for one in (value.tolist() if isinstance(value, Tensor) else value)]


def _option(inputs: list[Any], place: int, given: Attributes, name: str) -> list[int] | None:
    """Numbers that are an input since some opset, and were an attribute before."""
    if len(inputs) > place and inputs[place] is not None:
        return _numbers(inputs[place].reshape(-1))
    return _numbers(given[name]) if name in given else None


def _divided(a: Tensor, b: Tensor) -> Tensor:
    floats = a.is_floating_point() or b.is_floating_point()
    return a / b if floats else torch.div(a, b, rounding_mode="trunc")


def _clipped(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, *ends = inputs
    least, most = (*ends, None, None)[:2]
    least, most = given.get("min", least), given.get("max", most)
    return x if least is None and most is None else x.clamp(least, most)


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def run(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
        found, *others = inputs
        for one in others:
            found = function(found, one)
        return found

    return run


def _cast(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    dtype = ir.tensor_adapters.to_torch_dtype(ir.DataType(given["to"]))
    return widened(inputs[0].to(dtype))


def _reduced(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
        axes = _option(inputs, 1, given, "axes")
        if not axes and given.get("noop_with_empty_axes", 0):
            return function(inputs[0].unsqueeze(-1), [-1], False)
        dims = axes or list(range(inputs[0].dim()))
        return function(inputs[0], dims, bool(given.get("keepdims", 1)))

    return run


def _extreme(x: Tensor, dims: list[int], keep: bool, *, most: bool) -> Tensor:
    return (x.amax if most else x.amin)(dims, keep)


def _root_of_squares(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dims, keepdim=keep)


def _product(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in dims), reverse=True):
        x = x.prod(axis, keep)
    return x


def _is_infinite(x: Tensor, detect_negative: int, detect_positive: int) -> Tensor:
    return (x.isneginf() & bool(detect_negative)) | (x.isposinf() & bool(detect_positive))


def _softmax(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
        (x,) = inputs
        if opset >= 13:
            return function(x, given.get("axis", -1))
        axis = given.get("axis", 1) % x.dim()
        return function(x.flatten(axis), axis).reshape(x.shape)

    return run


def _shape(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    sizes = list(inputs[0].shape)[given.get("start", 0) : given.get("end", None)]
    return torch.tensor(sizes, dtype=torch.long)


def _reshaped(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, sizes = inputs[0], _numbers(inputs[1])
    if not given.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _unsqueezed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, axes = inputs[0], _option(inputs, 1, given, "axes") or []
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeezed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    axes = _option(inputs, 1, given, "axes")
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(tuple(axes))


def _flattened(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    (x,), axis = inputs, given.get("axis", 1)
    rows = torch.Size(x.shape[: axis if axis >= 0 else x.dim() + axis]).numel()
    return x.reshape(rows, -1)


def _split(inputs: list[Any], given: Attributes, opset: int) -> Sequence[Tensor]:
    x, axis, sizes = inputs[0], given.get("axis", 0), _option(inputs, 1, given, "split")
    if sizes is None:
        sizes = [-(-x.shape[axis] // given["outputs"])] * given["outputs"]
        sizes[-1] = x.shape[axis] - sum(sizes[:-1])
    return x.split(sizes, axis)


def _sliced(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x = inputs[0]
    starts, ends = (_option(inputs, place, given, name) for place, name in ((1, "starts"), (2, "ends")))
    assert starts is not None
    assert ends is not None
    axes = _option(inputs, 3, given, "axes") or list(range(len(starts)))
    steps = _option(inputs, 4, given, "steps") or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        places = range(x.shape[axis])[start:end:step] if end > -(2**62) else range(x.shape[axis])[start::step]
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(places.start, places.stop, step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(places)))
    return x


def _expanded(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, sizes = inputs[0], _numbers(inputs[1])
    return x.expand(torch.broadcast_shapes(x.shape, sizes))


def _padded(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, mode = inputs[0], given.get("mode", "constant")
    pads = _option(inputs, 1, given, "pads" if opset >= 2 else "paddings")
    assert pads is not None
    axes = _option(inputs, 3, given, "axes") or list(range(x.dim()))
    half = len(pads) // 2
    value = inputs[2] if len(inputs) > 2 and inputs[2] is not None else given.get("value", 0.0)
    for axis, before, after in zip(axes, pads[:half], pads[half:], strict=True):
        size = x.shape[axis]
        if mode == "constant" or min(before, after) < 0:
            around = [0, 0] * (x.dim() - 1 - axis % x.dim()) + [before, after]
            x = F.pad(x, around, value=float(value))
        elif before or after:
            places = torch.arange(-before, size + after)
            if mode == "reflect":
                places = places.abs()
                places = torch.where(places >= size, 2 * (size - 1) - places, places)
            elif mode == "wrap":
                places = places % size
            x = x.index_select(axis, places.clamp(0, size - 1))
    return x


def _filled(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    value = given.get("value")
    if value is None:
        return torch.zeros(_numbers(inputs[0]))
    found = widened(torch.from_numpy(value.numpy().copy()).reshape(()))
    return torch.full(_numbers(inputs[0]), found.item(), dtype=found.dtype)


def _identity(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    if given.get("k", 0) or "dtype" in given:
        raise UnknownOperatorError("EyeLike with options is not known here")
    return torch.eye(*inputs[0].shape, dtype=inputs[0].dtype)


def _range(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    start, end, step = (one.item() for one in inputs)
    return torch.arange(start, end, step, dtype=inputs[0].dtype)


def _gemm(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    a, b, *added = inputs
    a, b = a.t() if given.get("transA", 0) else a, b.t() if given.get("transB", 0) else b
    return with_added(a @ b, added[0] if added else None, given)


def with_added(product: Tensor, added: Tensor | None, given: Attributes) -> Tensor:
    """A product as a Gemm node scales it, and what it adds."""
    product = product * given.get("alpha", 1.0)
    return product if added is None else product + given.get("beta", 1.0) * added


def _over_places(x: Tensor) -> list[int]:
    return list(range(2, x.dim()))


def _standardized(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    (x,), axes = inputs, list(given.get("axes", [0, 2, 3]))
    x = x - x.mean(axes, True)
    return x / (x.square().mean(axes, True).sqrt() + 1e-9)


def _batch_normed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, scale, bias, mean, variance = inputs
    return F.batch_norm(x, mean, variance, scale, bias, eps=given.get("epsilon", 1e-5))


def _layer_normed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, scale, *bias = inputs
    axis = given.get("axis", -1) % x.dim()
    sizes = list(x.shape[axis:])
    scale, shift = (None if one is None else one.expand(sizes) for one in (scale, *bias, None)[:2])
    return F.layer_norm(x, sizes, scale, shift, given.get("epsilon", 1e-5))


def _rms_normed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, scale = inputs
    return F.rms_norm(x, list(x.shape[given.get("axis", -1) :]), scale, given.get("epsilon", 1e-5))


def _instance_normed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, scale, bias = inputs
    return F.instance_norm(x, weight=scale, bias=bias, eps=given.get("epsilon", 1e-5))


def _group_normed(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, scale, bias = inputs
    groups = given["num_groups"]
    if len(scale) == groups:  # until opset 20
        scale, bias = (one.repeat_interleave(x.shape[1] // groups) for one in (scale, bias))
    return F.group_norm(x, groups, scale, bias, given.get("epsilon", 1e-5))


def _resized(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, scales, sizes = inputs[0], (*inputs, None, None)[2], (*inputs, None, None, None)[3]
    if sizes is not None and sizes.numel():
        size = _numbers(sizes)[2:]
    else:
        size = [int(n * s) for n, s in zip(x.shape[2:], scales.tolist()[2:], strict=True)]
    mode, how = given.get("mode", "nearest"), given.get("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        exact = how == "half_pixel"
        return F.interpolate(x, size=size, mode="nearest-exact" if exact else "nearest")
    names = {"linear": {3: "linear", 4: "bilinear", 5: "trilinear"}, "cubic": {4: "bicubic"}}
    return F.interpolate(x, size=size, mode=names[mode][x.dim()], align_corners=how == "align_corners")


def _place_of(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
        return function(inputs[0], given.get("axis", 0), bool(given.get("keepdims", 1)))

    return run


def _highest(inputs: list[Any], given: Attributes, opset: int) -> Sequence[Tensor]:
    x, count = inputs
    return x.topk(int(count), given.get("axis", -1), bool(given.get("largest", 1)))


def _triangle(inputs: list[Any], given: Attributes, opset: int) -> Tensor:
    x, *diagonal = inputs
    by = int(diagonal[0]) if diagonal and diagonal[0] is not None else 0
    return x.triu(by) if given.get("upper", 1) else x.tril(by)


_OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "Sqrt": torch.sqrt,
    "Exp": torch.exp,
    "Log": torch.log,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Reciprocal": torch.reciprocal,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Erf": torch.erf,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Relu": F.relu,
    "Selu": F.selu,
    "HardSwish": F.hardswish,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
}
OPERATORS: dict[str, Operator] = {
    **{name: _plain(function) for name, function in _OF_ONE.items()},
    "Add": _plain(torch.add),
    "Sub": _plain(torch.sub),
    "Mul": _plain(torch.mul),
    "Div": _plain(_divided),
    "Pow": _plain(lambda x, by: x.pow(by).to(x.dtype)),
    "Sum": _folded(torch.add),
    "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum),
    "Mean": lambda inputs, given, opset: sum(inputs) / len(inputs),
    "Mod": lambda inputs, given, opset: (torch.fmod if given.get("fmod", 0) else torch.remainder)(*inputs),
    "Where": _plain(torch.where),
    "Equal": _plain(torch.eq),
    "Greater": _plain(torch.gt),
    "GreaterOrEqual": _plain(torch.ge),
    "Less": _plain(torch.lt),
    "LessOrEqual": _plain(torch.le),
    "And": _plain(torch.logical_and),
    "Or": _plain(torch.logical_or),
    "Xor": _plain(torch.logical_xor),
    "Not": _plain(torch.logical_not),
    "BitwiseAnd": _plain(torch.bitwise_and),
    "BitwiseOr": _plain(torch.bitwise_or),
    "BitwiseXor": _plain(torch.bitwise_xor),
    "BitwiseNot": _plain(torch.bitwise_not),
    "IsNaN": _plain(torch.isnan),
    "IsInf": _plain(_is_infinite, detect_negative=1, detect_positive=1),
    "Identity": _plain(lambda x: x),
    "Dropout": lambda inputs, given, opset: inputs[0],
    "Cast": _cast,
    "CastLike": _plain(lambda x, like: x.to(like.dtype)),
    "Clip": _clipped,
    "LeakyRelu": _plain(lambda x, alpha: F.leaky_relu(x, alpha), alpha=0.01),
    "Elu": _plain(lambda x, alpha: F.elu(x, alpha), alpha=1.0),
    "Celu": _plain(lambda x, alpha: F.celu(x, alpha), alpha=1.0),
    "HardSigmoid": _plain(lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1), alpha=0.2, beta=0.5),
    "ThresholdedRelu": _plain(lambda x, alpha: x * (x > alpha), alpha=1.0),
    "Swish": _plain(lambda x, alpha: x * torch.sigmoid(alpha * x), alpha=1.0),
    "PRelu": _plain(lambda x, slope: torch.where(x < 0, slope * x, x)),
    "Gelu": _plain(lambda x, approximate: F.gelu(x, approximate=approximate), approximate="none"),
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "ReduceMean": _reduced(lambda x, dims, keep: x.mean(dims, keep)),
    "ReduceSum": _reduced(lambda x, dims, keep: x.sum(dims, keep)),
    "ReduceMax": _reduced(lambda x, dims, keep: _extreme(x, dims, keep, most=True)),
    "ReduceMin": _reduced(lambda x, dims, keep: _extreme(x, dims, keep, most=False)),
    "ReduceProd": _reduced(_product),
    "ReduceLogSum": _reduced(lambda x, dims, keep: x.sum(dims, keep).log()),
    "ReduceLogSumExp": _reduced(torch.logsumexp),
    "ReduceL1": _reduced(lambda x, dims, keep: x.abs().sum(dims, keep)),
    "ReduceL2": _reduced(_root_of_squares),
    "ReduceSumSquare": _reduced(lambda x, dims, keep: x.square().sum(dims, keep)),
    "ArgMax": _place_of(torch.argmax),
    "ArgMin": _place_of(torch.argmin),
    "TopK": _highest,
    "CumSum": _plain(lambda x, axis: x.cumsum(int(axis))),
    "Shape": _shape,
    "Size": _plain(lambda x: torch.tensor(x.numel())),
    "Reshape": _reshaped,
    "Transpose": lambda inputs, given, opset: inputs[0].permute(
        list(given.get("perm", range(inputs[0].dim())[::-1]))
    ),
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Flatten": _flattened,
    "Concat": lambda inputs, given, opset: torch.cat(inputs, given["axis"]),
    "Split": _split,
    "Slice": _sliced,
    "Gather": gathered,
    "GatherND": gathered_nd,
    "ScatterElements": scattered,
    "ScatterND": scattered_nd,
    "OneHot": one_hot,
    "NonZero": _plain(lambda x: x.nonzero().t()),
    "GatherElements": lambda inputs, given, opset: inputs[0].gather(given.get("axis", 0), inputs[1]),
    "Expand": _expanded,
    "Tile": _plain(lambda x, times: x.repeat(_numbers(times))),
    "Pad": _padded,
    "ConstantOfShape": _filled,
    "EyeLike": _identity,
    "Range": _range,
    "Trilu": _triangle,
    "DepthToSpace": _plain(depth_to_space, blocksize=1, mode="DCR"),
    "SpaceToDepth": _plain(space_to_depth, blocksize=1),
    "Einsum": lambda inputs, given, opset: torch.einsum(given["equation"], *inputs),
    "MatMul": _plain(torch.matmul),
    "Gemm": _gemm,
    "Conv": convolved,
    "ConvTranspose": transposed_convolution,
    "MaxPool": max_pooled,
    "AveragePool": mean_pooled,
    "GlobalAveragePool": _plain(lambda x: x.mean(_over_places(x), True)),
    "GlobalMaxPool": _plain(lambda x: x.amax(_over_places(x), True)),
    "GridSample": sampled,
    "LRN": normed_across,
    "LpNormalization": _plain(lambda x, p, axis: F.normalize(x, p, axis), p=2, axis=-1),
    "MeanVarianceNormalization": _standardized,
    "BatchNormalization": _batch_normed,
    "LayerNormalization": _layer_normed,
    "RMSNormalization": _rms_normed,
    "SimplifiedLayerNormalization": _rms_normed,  # of ONNX Runtime, which puts it here
    "InstanceNormalization": _instance_normed,
    "GroupNormalization": _group_normed,
    "Resize": _resized,
    "Attention": attention,
    "RotaryEmbedding": rotary,
    "RNN": rnn,
    "LSTM": lstm,
    "GRU": gru,
}
