"""Small questions about an ONNX graph: what feeds what."""

import math
from collections.abc import Container, Iterator
from typing import NamedTuple

import onnx_ir as ir

RUNTIME = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

# What stands between an output head and the output itself.
_SHAPES = ("Cast", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_ACTIVATIONS = ("ArgMax", "LogSoftmax", "Relu", "Sigmoid", "Softmax", "Tanh")
_PRODUCTS, _CONVOLUTIONS = ("MatMul", "Gemm"), ("Conv", "ConvTranspose")
_AFTER_HEAD = ("Add", *_SHAPES, *_ACTIVATIONS)


def is_onnx(node: ir.Node, *op_types: str) -> bool:
    """Whether a node is one of the operators of ONNX itself."""
    return node.domain in ("", "ai.onnx") and node.op_type in op_types


def feeds_output(value: ir.Value) -> bool:
    """Whether a value is a graph output, or one but for its bias, shape or activation."""
    if value.is_graph_output():
        return True
    return any(
        node.op_type in _AFTER_HEAD
        and (node.op_type != "Add" or sum(map(_is_constant, node.inputs)) == 1)
        and any(feeds_output(output) for output in node.outputs)
        for node in value.consumers()
    )


def is_read_once(value: ir.Value) -> bool:
    """Whether one node reads a value, once, and it is no output."""
    return not value.is_graph_output() and len(value.uses()) == 1


def fixed_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """What a value always holds; None if a run makes it, or it may be given."""
    return None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)


def put_in_place_of(old: ir.Value, new: ir.Value) -> None:
    """Have all that reads a value read another one, and take the old one away."""
    ir.convenience.replace_all_uses_with(old, new)
    remove_unread(old)


def holds_graph(node: ir.Node) -> bool:
    """Whether a node has branches or a body, which may read any value of the graph around it."""
    kinds = {attribute.type for attribute in node.attributes.values()}
    return bool(kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def remove_unread(value: ir.Value) -> None:
    """Take a value away that nothing reads, with what makes it, and what only that reads."""
    producer = value.producer()
    for output in (value,) if producer is None else producer.outputs:
        if output.consumers() or output.is_graph_output():
            return
    if producer is None:
        held = value.graph.initializers if isinstance(value.graph, ir.Graph) else {}
        held.pop(str(value.name), None)
        return
    if producer.graph is None:
        return  # it is gone already
    read = [given for given in producer.inputs if given is not None]
    producer.graph.remove(producer, safe=True)
    for given in read:
        remove_unread(given)


def factored_weights(model: ir.Model) -> set[ir.Value]:
    """The weights of products that feed straight into a product, narrower between than at both ends.

    That is what a low-rank pair looks like, and the pivoted form: there the input's pivots are added between.
    And those of filters that run on one channel at a time, and of what mixes them; and constants that are
    multiplied by constants.
    """
    found: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        if not is_onnx(node, *_PRODUCTS, "Conv") or (first := _sizes(node)) is None:
            continue
        if node.op_type == "MatMul" and all(_constant(value) is not None for value in node.inputs):
            found.update(source for value in node.inputs if (source := _source(value)) is not None)
        if (mixing := _mixing(node)) is not None:
            found.update(source for part in (node, mixing) if (source := _weight(part)) is not None)
        chain, between, inputs, last = [node], [], first.inputs, first
        while (step := _next_product(chain[-1])) is not None:
            following, pivots, last_sizes = step
            if pivots and len(chain) == 1:
                inputs += last.channels
            between.append(last.channels)
            chain.append(following)
            last = last_sizes
        if between and min(between) < min(inputs, last.outputs):
            found.update(source for part in chain if (source := _weight(part)) is not None)
    return found


def _mixing(node: ir.Node) -> ir.Node | None:
    """The convolution that mixes what filters make of each channel, if this one is such filters."""
    sizes, following = _sizes(node), _next_product(node, any_groups=True)
    if sizes is None or following is None or not is_onnx(node, "Conv"):
        return None
    source = None if node.inputs[0] is None else node.inputs[0].producer()
    filters, mixing = _constant(node.inputs[1]), following[0]
    one_by_one = filters is not None and filters.shape[1] == 1 and node.attributes.get_int("group", 1) == 1
    if not one_by_one or source is None or not is_onnx(source, "Reshape"):
        return None
    return mixing if following[2].inputs % sizes.channels == 0 else None


class _Sizes(NamedTuple):
    """What a product makes one position from, and to: numbers in its window, and channels."""

    inputs: int
    outputs: int
    channels: int


def _next_product(node: ir.Node, *, any_groups: bool = False) -> tuple[ir.Node, bool, _Sizes] | None:
    """The product that alone reads this one's result, whether pivots are added before, and its sizes.

    A convolution of other groups is none, unless any will do.
    """
    groups = node.attributes.get_int("group", 1)
    pivots = is_onnx(node, "Gemm") and len(node.inputs) == 3 and _is_slice(node.inputs[2])
    is_wide = _beside_identity(node.inputs[1]) is not None
    if len(node.inputs) == 3 and node.inputs[2] is not None and not pivots:
        return None  # it has a bias
    value = node.outputs[0]
    while not value.is_graph_output() and len(consumers := value.consumers()) == 1:
        following = consumers[0]
        if is_onnx(following, "Reshape"):
            value = following.outputs[0]
        elif is_onnx(following, "Add") and any(map(_is_slice, following.inputs)):
            pivots, value = True, following.outputs[0]
        elif (
            is_onnx(following, *(_PRODUCTS if node.op_type in _PRODUCTS else _CONVOLUTIONS))
            and (any_groups or following.attributes.get_int("group", 1) == groups)
            and (sizes := _sizes(following)) is not None
        ):
            return following, pivots or is_wide, sizes
        else:
            break
    return None


def _sizes(node: ir.Node) -> _Sizes | None:
    """None for a product without a constant weight of two dimensions, or of a convolution's."""
    index = 1 if _constant(node.inputs[1]) is not None else 0
    tensor = _constant(node.inputs[index])
    if tensor is None:
        return None
    shape = [int(size) for size in tensor.shape]  # type: ignore[arg-type]
    if node.op_type == "Conv" and index == 1 and len(shape) in (3, 4):
        channels, inputs, *kernel = shape
        window = inputs * math.prod(kernel) * node.attributes.get_int("group", 1)
        # A kernel of one row is the second of two that a kernel of rows and columns was divided into.
        return _Sizes(window, channels * (kernel[1] if kernel[0] == 1 and len(kernel) == 2 else 1), channels)
    if node.op_type == "ConvTranspose" and index == 1 and len(shape) in (3, 4):
        inputs, channels, *kernel = shape
        channels *= node.attributes.get_int("group", 1)
        return _Sizes(inputs, channels * math.prod(kernel), channels)
    if node.op_type not in _PRODUCTS or len(shape) != 2:
        return None
    flipped = sum(1 for _ in _transposes(node.inputs[index])) % 2 == 1
    if node.op_type == "Gemm":
        flipped ^= bool(node.attributes.get_int("transB" if index else "transA", 0))
    inputs, outputs = shape[::-1] if flipped == (index == 1) else shape
    return _Sizes(inputs, outputs, outputs)


def _weight(node: ir.Node) -> ir.Value | None:
    """The constant that a product reads as its weight."""
    index = 1 if _constant(node.inputs[1]) is not None else 0
    return _source(node.inputs[index])


def _transposes(value: ir.Value | None) -> Iterator[ir.Node]:
    """The Transpose nodes that a value comes through."""
    while value is not None and (node := value.producer()) is not None and is_onnx(node, "Transpose"):
        yield node
        value = node.inputs[0]


def _source(value: ir.Value | None) -> ir.Value | None:
    """What a weight is the transpose of, or what stands beside an identity in it."""
    for node in _transposes(value):
        value = node.inputs[0]
    return _beside_identity(value) or value


def _beside_identity(value: ir.Value | None) -> ir.Value | None:
    """The constant that a Concat puts an identity beside, as pivoted convolutions that read all have it."""
    node = None if value is None else value.producer()
    if node is None or not is_onnx(node, "Concat") or len(node.inputs) != 2:
        return None
    for one, other in (node.inputs, node.inputs[::-1]):
        shaped = None if one is None else one.producer()
        maker = shaped.inputs[0].producer() if shaped is not None and shaped.inputs[0] is not None else None
        if maker is not None and is_onnx(maker, "EyeLike"):
            return other
    return None


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    source = _source(value)
    return None if source is None else ir.convenience.get_const_tensor(source)


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _is_slice(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return node is not None and is_onnx(node, "Slice", "Split")


def makers_of(value: ir.Value, stop: Container[ir.Value] = ()) -> Iterator[ir.Node]:
    """The nodes that a value is computed by, each once; none behind the values of `stop`."""
    left, seen = [value], set[ir.Node]()
    while left:
        maker = left.pop().producer()
        if maker is not None and maker not in seen:
            seen.add(maker)
            yield maker
            left += [one for one in maker.inputs if one is not None and one not in stop]
