"""Weights that nodes make of constants in each run, as weight norm does, become constants of an ONNX graph.

Before:
    norm = ReduceL2(v);  unit = Div(v, norm);  weight = Mul(g, unit);  y = Conv(x, weight, b)
After:
    y = Conv(x, weight, b)      weight: a constant

So do weights that are cut out of constants or put together of them, as the three of a Split. Products of
constants, gathered rows, casts and what dequantizes are left as they are: those are weights of fewer numbers
or bytes than the constant would have.

An Identity of a constant, by which torch's exporter gives several layers one weight, is read past.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from panther_compile.kinds.registry import onnx_operators
from panther_compile.onnx.files import WEIGHTS_APART
from panther_compile.onnx.patterns import is_onnx, put_in_place_of

_MAKERS = (
    *("Abs", "Add", "Clip", "Div", "Exp", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Sigmoid"),
    *("Sign", "Softplus", "Sqrt", "Sub", "Sum", "Tanh"),
    *("LpNormalization", "BatchNormalization", "InstanceNormalization", "LayerNormalization"),
    *("Concat", "Reshape", "Slice", "Split"),
    *("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"),
)
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NORMED = 14  # the opset from which on the reference normalizes by the statistics given
_AS_THEY_ARE = ("Constant", "Flatten", "Identity", "Squeeze", "Transpose", "Unsqueeze")


def read_past_identities(model: ir.Model) -> None:
    """Have what reads an Identity of an initializer read the initializer, where those are no inputs."""
    if model.ir_version < WEIGHTS_APART:
        return
    for node in list(model.graph.all_nodes()):
        given = node.inputs[0] if is_onnx(node, "Identity") else None
        if given is None or given.producer() is not None or given.const_value is None:
            continue
        if not given.is_graph_input() and not node.outputs[0].is_graph_output():
            put_in_place_of(node.outputs[0], given)


def fold_made_weights(model: ir.Model) -> int:
    """Fold them in place, in subgraphs too; counts them. Files in which weights are inputs have none."""
    if model.ir_version < WEIGHTS_APART:
        return 0
    products = [node for node in model.graph.all_nodes() if is_onnx(node, *onnx_operators())]
    values = dict.fromkeys(value for node in products for value in _operands(node))
    left = [value for value in values if not _fold((value,), model)]
    parts = defaultdict[ir.Value, list[ir.Value]](list)  # of one constant, which all of them free
    for value in left:
        chain = _chain(value, model)
        if chain is not None:
            parts[_largest(chain)].append(value)
    together = [one for one in parts.values() if len(one) > 1 and _fold(one, model)]
    return len(values) - len(left) + sum(map(len, together))


def _operands(node: ir.Node) -> Iterator[ir.Value]:
    """What may be the weight of a node."""
    for index in (1,) if node.op_type in onnx_operators(flat=False) else (0, 1):
        value = node.inputs[index]
        if value is not None:
            yield value


def _chain(value: ir.Value, model: ir.Model) -> list[ir.Node] | None:
    """The nodes that make a value of constants, in their order; None if it is none to be folded."""
    opset = model.opset_imports.get("", 0)
    found: dict[ir.Node, None] = {}

    def reach(one: ir.Value | None) -> bool:
        node = None if one is None else one.producer()
        if one is None or node in found:
            return True
        if node is None:
            return one.const_value is not None and not one.is_graph_input()
        known = is_onnx(node, *_MAKERS, *_AS_THEY_ARE) and node.graph is value.graph
        known = known and (node.op_type != "BatchNormalization" or opset >= _NORMED)
        if not known or any(output.is_graph_output() for output in node.outputs):
            return False
        if not all(reach(given) for given in node.inputs):
            return False
        found[node] = None
        return True

    return list(found) if reach(value) and any(is_onnx(node, *_MAKERS) for node in found) else None


def _largest(chain: Sequence[ir.Node]) -> ir.Value:
    """The largest constant that the nodes read."""
    given = [one for node in chain for one in (*node.inputs, *node.outputs) if one is not None]
    tensors = {one: ir.convenience.get_const_tensor(one) for one in given}
    return max(tensors, key=lambda one: -1 if (held := tensors[one]) is None else held.size)


def _fold(values: Sequence[ir.Value], model: ir.Model) -> bool:
    """Put constants in the place of what makes them, unless they hold more numbers than all that does."""
    chains = [_chain(value, model) for value in values]
    found = [one for one in chains if one is not None]
    if len(found) < len(values) or not all(isinstance(value.graph, ir.Graph) for value in values):
        return False
    chain = list(dict.fromkeys(node for one in found for node in one))
    constants = {
        str(given.name): given
        for node in chain
        for given in node.inputs
        if given is not None and given.producer() is None
    }
    held = {name: one.const_value for name, one in constants.items() if one.const_value is not None}
    gone = _unread_without(values, chain)
    freed = [held[name].size for name, one in constants.items() if gone.issuperset(one.consumers())]
    written = [ir.convenience.get_const_tensor(node.outputs[0]) for node in gone if not node.inputs]
    most = sum(freed) + sum(one.size for one in written if one is not None)
    if not most:
        return False
    tensors = [_made(str(value.name), one, held, model) for value, one in zip(values, found, strict=True)]
    if sum(tensor.size for tensor in tensors) > most:
        return False
    for value, tensor in zip(values, tensors, strict=True):
        graph, kind = value.graph, ir.TensorType(tensor.dtype)
        assert isinstance(graph, ir.Graph)
        made = ir.Value(name=value.name, shape=tensor.shape, type=kind, const_value=tensor)
        put_in_place_of(value, made)
        graph.register_initializer(made)
    return True


def _unread_without(values: Sequence[ir.Value], chain: Sequence[ir.Node]) -> set[ir.Node]:
    """The nodes that nothing reads once some values are constants."""
    gone: set[ir.Node] = set()
    for node in reversed(chain):
        others = [output for output in node.outputs if output not in values]
        if all(gone.issuperset(output.consumers()) for output in others):
            gone.add(node)
    return gone


def _made(
    name: str, chain: list[ir.Node], constants: Mapping[str, ir.TensorProtocol], model: ir.Model
) -> ir.Tensor[np.ndarray]:
    """What the nodes make of the constants."""
    read = {str(one.name) for node in chain for one in node.inputs if one is not None}
    constants = {one: held for one, held in constants.items() if one in read}
    given = [helper.make_tensor_value_info(one, int(held.dtype), None) for one, held in constants.items()]
    wanted = helper.make_tensor_value_info(name, onnx.TensorProto.UNDEFINED, None)
    graph = helper.make_graph([ir.to_proto(node) for node in chain], "made", given, [wanted])
    imports = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    part = helper.make_model(graph, ir_version=model.ir_version, opset_imports=imports)
    halves = {held.numpy().dtype for held in constants.values() if held.dtype in _HALVES}
    feeds = {one: _wide(held) for one, held in constants.items()}  # as kernels add up half types
    array = np.asarray(ReferenceEvaluator(part).run(None, feeds)[0])
    return ir.Tensor(array.astype(halves.pop()) if halves and array.dtype == np.float32 else array, name=name)


def _wide(tensor: ir.TensorProtocol) -> np.ndarray:
    return tensor.numpy().astype(np.float32) if tensor.dtype in _HALVES else tensor.numpy()
